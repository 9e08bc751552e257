"""What a healthy run in the lab saw, as any host of a cluster of any size would have seen it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nccl_doctor.cli.saving import read_report
from nccl_doctor.gather.messages import SignIn
from nccl_doctor.model.cluster import ALONE, Facts, Outcome, facts_to_json
from nccl_doctor.model.codec import Node
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.report import facts_from_json
from tests.lab.crowd import VALUE, VARIABLE, Plan, address_of, name_of

_NAME, _ADDRESS = "@NAME@", "@ADDRESS@"
_NETS = (("192.168.77.0/24", "192.168.64.0/19"),)
_TIMES = re.compile(r'("(?:duration_s|at_s|load)": )(\d+\.\d+)')
_SPREAD = 0.3
_FILES, _BACKLOG = 1 << 20, 65535
"""Limits on open files and on connections that wait, which a host of a large cluster has, and one
of the lab need not have."""


@dataclass(frozen=True)
class Role:
    """Facts of one of four: the first rank of rank 0's host, another one there, and the same two
    of another host. `text` are its facts as JSON, with marks for the host's name and address.
    """

    launch: Launch
    env: Mapping[str, str]
    device: str | None
    backend: str
    text: str


class Record:
    """A recorded run of two hosts with two ranks each, and the cluster to make of it."""

    def __init__(self, plan: Plan, report: Path) -> None:
        self._plan = plan
        cluster = read_report(str(report)).cluster
        self._roles: dict[tuple[bool, bool], Role] = {}
        for rank in cluster.present:
            number, local = rank.host.node_rank or 0, rank.local_rank or 0
            facts = {**rank.facts, **(rank.host.facts if local == 0 else {})}
            assert rank.launch is not None
            text = json.dumps(facts_to_json(facts))
            text = re.sub(rf"\b{name_of(number)}\b", _NAME, text)
            text = re.sub(rf"\b{re.escape(address_of(number))}\b", _ADDRESS, text)
            for old, new in _NETS:
                text = text.replace(old, new)
            self._roles[number == 0, local == 0] = Role(
                rank.launch, rank.env, rank.device, rank.backend, text
            )

    def _role(self, rank: int) -> Role:
        host, local = divmod(rank, self._plan.per_host)
        return self._roles[host == 0, local == 0]

    def launch(self, rank: int) -> Launch:
        """Launch record of a rank."""
        plan = self._plan
        host, local = divmod(rank, plan.per_host)
        return replace(
            self._role(rank).launch,
            rank=rank,
            world_size=plan.ranks,
            local_rank=local,
            local_world_size=plan.per_host,
            node_rank=host,
            nnodes=plan.hosts,
        )

    def env(self, rank: int) -> dict[str, str]:
        """Recorded variables of a rank."""
        plan = self._plan
        host, local = divmod(rank, plan.per_host)
        env = {
            **self._role(rank).env,
            "RANK": str(rank),
            "WORLD_SIZE": str(plan.ranks),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(plan.per_host),
            "NODE_RANK": str(host),
            "NNODES": str(plan.hosts),
        }
        return env | ({VARIABLE: VALUE} if host in plan.odd else {})

    def facts(self, rank: int) -> Facts:
        """All facts of a rank, of its host too if it is the first one there; no two took the same
        time.
        """
        noise = random.Random(rank)
        host = rank // self._plan.per_host
        text = self._role(rank).text
        text = text.replace(_NAME, name_of(host)).replace(_ADDRESS, address_of(host))
        text = _TIMES.sub(
            lambda found: f"{found[1]}{float(found[2]) * (1 + _SPREAD * noise.random()):.4f}", text
        )
        facts = json.loads(text)
        if ALONE in (limits := facts.get("limits", {})):
            limits[ALONE]["facts"] |= {"files": _FILES, "files_hard": _FILES}
        if ALONE in (limits := facts.get("kernel_limits", {})):
            limits[ALONE]["facts"]["somaxconn"] = _BACKLOG
        if host in self._plan.odd:
            entry = {"line": 0, "origin": "environment", "value": VALUE}
            facts["environment"][ALONE]["facts"]["variables"][VARIABLE] = entry
        return facts_from_json(Node(f"rank {rank}", {"facts": facts}))

    def sign_in(self, rank: int, token: str, host_key: str) -> dict[str, Any]:
        """The sign-in of a rank, as it is sent."""
        host, local = divmod(rank, self._plan.per_host)
        role = self._role(rank)
        return SignIn(
            token=token,
            pid=1000 + local,
            launch=self.launch(rank),
            host_name=name_of(host),
            host_key=host_key if host == 0 else f"crowd-{host}",
            addresses=(address_of(host),),
            env=self.env(rank),
            device=role.device,
            backend=role.backend,
            joining={"examined_s": 0.2, "connect_s": 0.01},
            facts=alone(self.facts(rank)),
        ).to_json()


def alone(facts: Facts) -> dict[str, dict[str, Outcome]]:
    """The facts that were observed before the sign-in."""
    return {check: {ALONE: rounds[ALONE]} for check, rounds in facts.items() if ALONE in rounds}
