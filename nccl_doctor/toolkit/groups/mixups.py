"""Ranks of one group that run different collectives. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from nccl_doctor.model.cluster import Evidence, Outcome
from nccl_doctor.toolkit.blame import odd_ones_out

_CUT_WORDS = ("op.preamble.length", "received data size doesn't match")
_OWN = re.compile(
    r"Rank \d+ is running (?:inconsistent )?collective: "
    r"(?P<own>CollectiveFingerPrint\(.*?)(?:, but Rank \d+ is running|$)",
    re.DOTALL,
)
_SHAPE = re.compile(r"TensorShape=\[([\d, ]*)\]")
_OPERATION = re.compile(r"OpType=(\w+)")
_INT64_BYTES = 8


def was_cut_off(outcome: Outcome) -> bool:
    """True if gloo ended this process because of a message of unexpected size.

    The process that dies received the message: often it did nothing wrong.
    Source: `Pair::prepareRead` in gloo/transport/tcp/pair.cc.
    """
    said = f"{outcome.log_tail}\n{outcome.reason}".lower()
    return any(word in said for word in _CUT_WORDS)


def own_collective(outcome: Outcome) -> str:
    """The collective of this rank, where torch compared the ranks; else the empty string.

    Source: `CollectiveFingerPrint` in torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp.
    """
    found = _OWN.search(outcome.reason)
    return found["own"].strip() if found else ""


def odd_collectives(members: Sequence[Evidence]) -> dict[int, str]:
    """Members that ran another collective than requested, or else than most compared members.

    Returns: seat → what it ran, in words; empty where no member differs from the others.
    """
    ran = {m.rank.seat: own for m in members if (own := own_collective(m.outcome))}
    strange = {
        m.rank.seat: f"{_brief(ran[m.rank.seat])} where {asked} elements were requested"
        for m in members
        if m.rank.seat in ran
        and (asked := _asked(m.outcome))
        and _elements(ran[m.rank.seat]) not in (None, asked)
    }
    if strange:
        return strange
    odd = odd_ones_out(ran)
    if odd is None or odd.usual is None or 2 * len(odd.places) >= len(ran):
        return {}
    return {seat: f"{_brief(ran[seat])}, the others {_brief(odd.usual)}" for seat in odd.places}


def _asked(outcome: Outcome) -> int:
    last = outcome.breadcrumbs[-1] if outcome.breadcrumbs else {}
    return int(last.get("bytes") or 0) // _INT64_BYTES


def _elements(fingerprint: str) -> int | None:
    shape = _SHAPE.search(fingerprint)
    if shape is None:
        return None
    return math.prod(int(size) for size in shape[1].split(",") if size.strip())


def _brief(fingerprint: str) -> str:
    operation, shape = _OPERATION.search(fingerprint), _SHAPE.search(fingerprint)
    words = (operation[1].lower() if operation else "", f"of shape [{shape[1]}]" if shape else "")
    return " ".join(word for word in words if word) or fingerprint[:80]
