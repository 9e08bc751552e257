"""Large made-up clusters: a recorded host under many names, its rounds held as checks plan them.

`recorded/host.json` holds what the first host of a job and any other one saw: a DGX H100 of the
gallery (tests/machines), with names, ports and links of two hosts of the lab (tests/lab). Who calls
whom in a round follows from the schedule that the check gives it, as in a run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from nccl_doctor import registry
from nccl_doctor.api import ALONE, Check, Cluster, Host, Launch, Outcome, OutcomeStatus, Rank, Skip
from nccl_doctor.model.findings import Level, Round, Scope
from nccl_doctor.toolkit.peers.schedule import Slots, plan_schedule, schedule_of
from tests.machines import recorded
from tests.support.exchanges import record as exchanged
from tests.support.peers import DROPPED, OK

_RECORDED = Path(__file__).parent / "recorded" / "host.json"
RANKS = 8
_LEAF = 32
"""Hosts of one leaf switch."""
_NOISE = 0.03
_PORT = 29500


@dataclass(frozen=True)
class Faults:
    """Faults of a cluster; hosts are meant by their node ranks.

    Attributes:
        silent: hosts that never sign in.
        cut: pairs of hosts that do not reach each other.
        slow: pairs of hosts whose link has a tenth of the usual bandwidth.
        deaf: hosts that no connection reaches on a port that the kernel picks.
        odd: hosts whose ranks have a variable that the others have not.
        stuck: hosts with which no group is formed.
    """

    silent: frozenset[int] = frozenset()
    cut: frozenset[frozenset[int]] = frozenset()
    slow: frozenset[frozenset[int]] = frozenset()
    deaf: frozenset[int] = frozenset()
    odd: frozenset[int] = frozenset()
    stuck: frozenset[int] = frozenset()


HEALTHY = Faults()


def name_of(node: int) -> str:
    return f"gpu{node + 1:04d}"


def address_of(node: int) -> str:
    return f"10.20.{(node + 1) >> 8}.{(node + 1) & 255}"


def many_hosts(
    count: int, faults: Faults = HEALTHY, ranks: int = RANKS, level: Level = Level.STANDARD
) -> Cluster:
    """A cluster of so many hosts of eight ranks or fewer, after all rounds that its checks plan."""
    return _Maker(count, faults, ranks, level).cluster


def met(count: int) -> list[tuple[int, int]]:
    """Pairs of nodes that call each other in such a cluster, whatever is wrong."""
    cluster = _Maker(count, HEALTHY, 1, Level.STANDARD, held=()).cluster
    schedule = plan_schedule(cluster, range(count))
    return [meeting for slot in schedule.slots for meeting in slot]


@cache
def checks(level: Level = Level.STANDARD) -> tuple[Check, ...]:
    """The checks of a run of this level."""
    return tuple(each for each in registry.load().checks if each.level.order <= level.order)


_OF_ONE = ("@name@", "@address@", "@mac@", "@node@", "@rank@", "@node_rank@")
"""Marks for what is different on each host or rank."""


@cache
def _seen() -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(_RECORDED.read_text("utf-8"))
    return data


@dataclass
class _Pattern:
    """An outcome as JSON, with marks for what differs between hosts or ranks. What comes out equal
    is one object, as in a report that holds equal facts once.
    """

    data: Any
    text: str = field(init=False)
    shared: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.text = json.dumps(self.data)

    def made(self, marks: Mapping[str, str]) -> Outcome:
        text = self.text
        for mark, word in marks.items() if "@" in text else ():
            text = text.replace(mark, word)
        if "@" in self.text and any(each in self.text for each in _OF_ONE):
            return Outcome.from_json(json.loads(text))
        if text not in self.shared:
            self.shared[text] = Outcome.from_json(json.loads(text))
        return self.shared[text]


@cache
def _of_host(is_first: bool) -> Mapping[str, Mapping[str, _Pattern]]:
    """Check → round → outcome, on the host of rank 0 or any other."""
    seen = _seen()
    return {
        check: _rounds(rounds)
        for check, rounds in (seen["host"] | (seen["first host"] if is_first else {})).items()
    }


@cache
def _of_rank(local: int) -> Mapping[str, Mapping[str, _Pattern]]:
    """Check → round → outcome, of one local rank."""
    made = {name: [_rounds(each) for each in one["seen"]] for name, one in _seen()["ranks"].items()}
    return {name: made[name][one["of"][local]] for name, one in _seen()["ranks"].items()}


def _rounds(rounds: Mapping[str, Any]) -> Mapping[str, _Pattern]:
    return {name: _Pattern(data) for name, data in (rounds or {}).items()}


class _Maker:
    """The cluster while it is made: the tables of facts of its hosts and ranks are filled."""

    def __init__(
        self,
        count: int,
        faults: Faults,
        per_host: int,
        level: Level,
        held: Sequence[Check] | None = None,
    ) -> None:
        self.count, self.faults, self.per_host = count, faults, per_host
        self.chance = random.Random(count)
        self.marks = {
            '"@count@"': str(count),
            '"@per_host@"': str(per_host),
            '"@world@"': str(count * self.per_host),
            "@count@": str(count),
            "@half@": str(count * self.per_host // 2),
            "@last@": str(count * self.per_host - 1),
        }
        hosts = [self._host(node) for node in range(count)]
        ranks = [self._rank(host, local) for host in hosts for local in range(per_host)]
        self.cluster = Cluster(
            world_size=count * self.per_host,
            nnodes=count,
            backend="nccl",
            level=level,
            hosts=tuple(hosts),
            ranks=tuple(ranks),
            run_id="0123456789abcdef",
        )
        for check in checks(level) if held is None else held:
            if check.together:
                self._hold(check)

    def _marks_of(self, node: int, local: int = 0) -> dict[str, str]:
        return {
            "@name@": name_of(node),
            "@address@": address_of(node),
            "@mac@": f"{node >> 8:02x}:{node & 255:02x}",
            "@node@": f"{node:04x}",
            '"@rank@"': str(node * self.per_host + local),
            '"@node_rank@"': str(node),
            **self.marks,
        }

    def _host(self, node: int) -> Host:
        here = node not in self.faults.silent
        marks = self._marks_of(node)
        facts = {
            check: {ALONE: rounds[ALONE].made(marks)}
            for check, rounds in _of_host(node == 0).items()
            if here and ALONE in rounds
        }
        return Host(
            id=node,
            name=name_of(node) if here else None,
            node_rank=node,
            reported=here,
            addresses=(address_of(node),) if here else (),
            key=f"{node:016x}" if here else "",
            facts=facts,
        )

    def _rank(self, host: Host, local: int) -> Rank:
        number = host.id * self.per_host + local
        if not host.reported:
            return Rank(number, number, local, host, reported=False)
        marks = self._marks_of(host.id, local)
        facts = {
            check: {ALONE: self._alone(check, rounds[ALONE].made(marks), host.id)}
            for check, rounds in _of_rank(local).items()
            if ALONE in rounds
        }
        env = {
            "MASTER_ADDR": name_of(0),
            "MASTER_PORT": str(_PORT),
            "RANK": str(number),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self.count * self.per_host),
            "SLURM_TOPOLOGY_ADDR": f"spine.leaf{host.id // _LEAF}.{name_of(host.id)}",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
        }
        return Rank(
            seat=number,
            rank=number,
            local_rank=local,
            host=host,
            reported=True,
            launch=Launch(
                launcher="torchrun",
                rank=number,
                world_size=self.count * self.per_host,
                local_rank=local,
                local_world_size=self.per_host,
                node_rank=host.id,
                nnodes=self.count,
                master_addr=name_of(0),
                master_port=_PORT,
            ),
            env=env,
            device="cuda",
            backend="auto",
            pid=1000 + local,
            signed_in_s=round(self.chance.uniform(0.1, 3.0), 3),
            facts=facts,
        )

    def _alone(self, check: str, outcome: Outcome, node: int) -> Outcome:
        if check != "environment" or node not in self.faults.odd:
            return outcome
        value = {"line": 0, "origin": "environment", "value": "65536"}
        variables = {**outcome.facts["variables"], "NCCL_BUFFSIZE": value}
        return replace(outcome, facts={**outcome.facts, "variables": variables})

    def _hold(self, check: Check) -> None:
        held: set[str] = set()
        while rounds := [each for each in self._planned(check) if each.name not in held]:
            for round_ in rounds:
                held.add(round_.name)
                met = _partners(round_)
                for group in round_.groups:
                    answer = self._of_group(check, group)
                    for seat in group:
                        outcome = answer or self._of_seat(check, round_, group, seat, met)
                        self._record(check, round_, group, seat, outcome)

    def _planned(self, check: Check) -> Sequence[Round]:
        try:
            return tuple(check.plan(replace(self.cluster)))  # which has found nothing yet
        except Skip:
            return ()

    def _record(
        self, check: Check, round_: Round, group: tuple[int, ...], seat: int, outcome: Outcome
    ) -> None:
        rank = self.cluster.ranks[seat]
        facts: Any = rank.host.facts if check.scope is Scope.HOST else rank.facts
        took = round(self.chance.uniform(0.1, 0.3), 4)
        outcome = replace(outcome, group=group[0], duration_s=took)
        facts.setdefault(check.name, {})[round_.name] = outcome

    def _of_group(self, check: Check, group: tuple[int, ...]) -> Outcome | None:
        """One outcome for all members of a group that is blocked, or stuck."""
        if not check.forms_groups:
            return None
        nodes = {seat // self.per_host for seat in group}
        if any(pair <= nodes for pair in self.faults.cut):
            return Outcome(OutcomeStatus.UNTESTED, reason="blocked by peer-blocked")
        if self.faults.deaf & nodes and len(nodes) > 1:
            return Outcome(OutcomeStatus.UNTESTED, reason="blocked by peer-one-way")
        if self.faults.stuck & nodes and len(nodes) > 1:
            crumbs = ({"step": "init_process_group", "at_s": 0.1, "group": "world"},)
            return Outcome(OutcomeStatus.HUNG, breadcrumbs=crumbs, duration_s=20.0)
        return None

    def _of_seat(
        self,
        check: Check,
        round_: Round,
        group: tuple[int, ...],
        seat: int,
        met: Mapping[int, Sequence[int]],
    ) -> Outcome:
        rank = self.cluster.ranks[seat]
        node = rank.host.id
        if check.name == "clock":
            return Outcome(OutcomeStatus.OK, facts=self._clock(group, met.get(seat)))
        if check.name == "rail_reach":
            others = met.get(seat) or [each for each in group if each != seat]
            return Outcome(OutcomeStatus.OK, facts=self._rails_called(rank, others))
        if check.name == "firewall" and "pairs" in round_.params:
            return Outcome(OutcomeStatus.OK, facts=_NO_RULES)
        marks = self._marks_of(node)
        seen = _of_host(node == 0) if check.scope is Scope.HOST else _of_rank(rank.local_rank or 0)
        known = seen.get(check.name, {})
        name = _LIKE.get(check.name, round_.name.removesuffix("-bound"))
        if name not in known:
            return recorded.together(check.name, round_, group, rank)
        outcome = known[name].made(marks)
        if check.name not in _LIKE:
            return outcome
        others = [each // self.per_host for each in met.get(seat, group) if each != seat]
        if check.name == "links":
            table = {str(each * self.per_host): self._sent(node, each) for each in others}
            return replace(outcome, facts={**outcome.facts, "sent": table})
        called = {str(each * self.per_host): [self._called(node, each)] for each in others}
        return replace(outcome, facts={**outcome.facts, "peers": called})

    def _clock(self, group: tuple[int, ...], met: Sequence[int] | None) -> dict[str, Any]:
        begun = 1_795_000_000 + self.chance.uniform(0.0, 0.001)
        exchanges = [[begun + at, begun + at + 0.005, []] for at in (0.0, 0.01)]
        kept = {"c10d": False, "keep_alive": [5.0, 15.0], "synchronized": True}
        partners = {"met": sorted(met)} if met else {}
        return {"group": group[0], **partners, "exchanges": exchanges, **kept}

    def _rails_called(self, rank: Rank, others: Sequence[int]) -> dict[str, Any]:
        rails = rank.host.facts["rails"][ALONE].facts["rails"]
        calls = [
            {"rail": 0, "to": 0, "seat": seat, "attempts": [OK], "port": 50000, "neighbour": None}
            | {"interface": "eno3", "source": address_of(rank.host.id)}
            | {"address": address_of(seat // self.per_host)}
            for seat in others
        ]
        return {"rails": rails, "calls": calls, "not_bound": {}, "cross_nic": 2, "pxn": True}

    def _called(self, node: int, other: int) -> dict[str, Any]:
        shut = frozenset((node, other)) in self.faults.cut or other in self.faults.deaf
        attempts = [dict(DROPPED)] * 2 if shut else [OK]
        made = {"address": address_of(other), "interface": "eno3", "port": 40000 + node % 20000}
        made |= {"roles": ["nccl-bootstrap", "gloo"], "attempts": attempts}
        return {**made, "source": address_of(node)} if shut else made

    def _sent(self, node: int, other: int) -> dict[str, Any]:
        share = 0.1 if frozenset((node, other)) in self.faults.slow else 1.0
        made = exchanged()
        rate = made["rate"] * share * self.chance.uniform(1 - _NOISE, 1 + _NOISE)
        rtt_us = made["rtt_us"] * self.chance.uniform(1 - _NOISE, 1 + _NOISE)
        return {**made, "rate": rate, "rtt_us": rtt_us}


_LIKE = {"firewall": "matrix", "links": "exchange", "advertised_addresses": "calls"}
"""Checks with facts of each partner, and the round whose facts all of their rounds have."""
_NO_RULES = {
    "readable": True,
    "reason": "",
    "managers": [],
    "drops": [],
    "hits": [],
    "ways": [],
}
"""Facts of a host whose firewall stops nothing."""


def _slots(round_: Round) -> Slots:
    """Meetings of a round that gives its members a schedule; none where all meet."""
    if "slots" in round_.params:
        slots: Slots = round_.params["slots"]
        return slots
    schedule = schedule_of(round_.groups[0], round_.params) if round_.groups else None
    return schedule.slots if schedule else []


def _partners(round_: Round) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for slot in _slots(round_):
        for one, other in slot:
            found.setdefault(one, []).append(other)
            found.setdefault(other, []).append(one)
    return found
