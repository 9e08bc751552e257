"""Rows of the board: how each host of a run stands, as rank 0 knows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from nccl_doctor.gather.board import Row
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.sign_in import SignIn
from nccl_doctor.model.findings import numbered


def rows_of_sign_in(evidence: EvidenceLog, *, named: bool) -> list[Row]:
    """The hosts that have signed in, and who is missing; `named`: by the names of the hosts."""
    names = dict.fromkeys(_name(evidence.who(seat), named) for seat in evidence.seats)
    rows = [Row(name, "here") for name in names]
    missing = evidence.not_here()
    return [*rows, *([Row(missing, "not here yet", late=True)] if missing else [])]


def rows_of_round(evidence: EvidenceLog, answered: Mapping[int, bool], *, named: bool) -> list[Row]:
    """The hosts of a round; `answered` says of each seat whether its answer is there."""
    awaited: dict[str, list[int]] = {}
    for seat, is_there in answered.items():
        who = evidence.who(seat)
        late = awaited.setdefault(_name(who, named), [])
        if not is_there and who is not None and who.launch.rank is not None:
            late.append(who.launch.rank)
    return [
        Row(name, f"{numbered('rank', ranks)} not done yet" if ranks else "done", late=bool(ranks))
        for name, ranks in awaited.items()
    ]


def _name(who: SignIn | None, named: bool) -> str:
    if who is not None and named:
        return who.host_name
    node = None if who is None else who.launch.node_rank
    return "a host" if node is None else f"node {node}"
