"""What a participant says in a round: what was recorded, with as many partners as it has here."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nccl_doctor.model.cluster import AFTER_LOSS, ALONE, Facts, Outcome, OutcomeStatus
from nccl_doctor.model.findings import Round
from nccl_doctor.toolkit.peers.schedule import Schedule, schedule_of
from tests.lab.crowd import FREEZES_IN, SEATS, Plan, address_of
from tests.lab.crowd.record import Record

_WITH_PARTNERS = {"firewall": "peers", "links": "sent", "advertised_addresses": "peers"}
"""Checks with a fact for each partner, by the partner's seat, and the name of that table."""
_LOST = {"outcome": "dropped", "duration_s": 3.0}


class Seats:
    """The rank of each seat, as far as all that play know; rank 0 says nothing of itself."""

    def __init__(self, plan: Plan) -> None:
        with (Path(plan.folder) / SEATS).open("r+b") as file:
            self._memory = memoryview(mmap.mmap(file.fileno(), 0)).cast("i")

    def take(self, seat: int, rank: int) -> None:
        """Note who has a seat."""
        self._memory[seat] = rank + 1

    def rank(self, seat: int) -> int:
        """Rank of a seat."""
        return max(0, self._memory[seat] - 1)


class Answers:
    """The answers of all participants of a run. Threads may share one."""

    def __init__(self, plan: Plan, record: Record, seats: Seats) -> None:
        self._plan, self._record, self._seats = plan, record, seats
        self._partners: dict[tuple[str, str, tuple[int, ...]], Mapping[int, list[int]]] = {}
        """By check, round and group."""
        self._finding = threading.Lock()

    def are_recorded(self, check: str, round_name: str) -> bool:
        """Whether all answer in a round as it was recorded, whatever the order says."""
        freezes = self._plan.frozen and (check, round_name) == FREEZES_IN
        return not (freezes or check == "clock" or check in _WITH_PARTNERS)

    def of(self, check: str, round_: Round, seat: int, rank: int, facts: Facts) -> Outcome | None:
        """Outcome of a participant, with its recorded facts; None for one that freezes here."""
        plan = self._plan
        host = rank // plan.per_host
        if (check, round_.name) == FREEZES_IN and plan.frozen:
            if host in plan.frozen:
                return None
            step = {"step": "all_reduce", "at_s": 0.5}
            return Outcome(
                OutcomeStatus.HUNG, breadcrumbs=(step,), duration_s=round_.deadline_s, state="S"
            )
        rounds = facts.get(check, {})
        name = ALONE if round_.name == AFTER_LOSS else round_.name
        outcome = rounds.get(name) or next(
            (each for at, each in rounds.items() if at not in (ALONE, "rules")), None
        )
        if outcome is None:
            return Outcome(OutcomeStatus.OK, duration_s=0.01)
        table = _WITH_PARTNERS.get(check)
        if check != "clock" and not (table and outcome.facts.get(table)):
            return outcome
        group = next((group for group in round_.groups if seat in group), ())
        if table:
            met = self._met(check, round_, group)
            made = {
                str(other): self._entry(check, outcome.facts[table], (seat, other), met)
                for other in met[seat]
            }
            outcome = replace(outcome, facts={**outcome.facts, table: made})
        if check == "clock":
            met = self._met(check, round_, group) if "schedule" in round_.params else None
            own = {} if met is None else {"met": met[seat]}
            outcome = replace(outcome, facts={**outcome.facts, "group": group[0], **own})
        return outcome

    def _entry(
        self,
        check: str,
        recorded: Mapping[str, Any],
        pair: tuple[int, int],
        met: Mapping[int, Sequence[int]],
    ) -> Any:
        """Fact on a partner, `pair[1]`: what was recorded of the only other host."""
        one = next(iter(recorded.values()))
        if check == "links":
            return one
        hosts = [self._seats.rank(seat) // self._plan.per_host for seat in pair]
        calls = [{**call, "address": address_of(hosts[1])} for call in one]
        if check == "firewall" and self._plan.cut in hosts:
            mine, theirs = pair if hosts[0] == self._plan.cut else pair[::-1]
            if theirs == met[mine][0]:
                calls = [{**call, "attempts": [_LOST, _LOST]} for call in calls]
        return calls

    def _met(self, check: str, round_: Round, group: tuple[int, ...]) -> Mapping[int, list[int]]:
        """Partners of each seat of a group; made once for each round, on however many pages its
        order stands.
        """
        key = check, round_.name, group
        with self._finding:  # of hundreds of threads that ask, one finds them
            if key not in self._partners:
                slots = round_.params.get("slots")
                schedule = schedule_of(group, round_.params) or Schedule(tuple(group))
                met: dict[int, list[int]] = {each: [] for each in group}
                for slot in slots or schedule.slots:
                    for a, b in slot:
                        met[a].append(b)
                        met[b].append(a)
                self._partners[key] = met
            return self._partners[key]
