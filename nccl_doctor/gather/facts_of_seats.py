"""Facts of the participants of a run: of their hosts, and their own. They grow, round by round."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from nccl_doctor.model.cluster import Facts, Outcome, OutcomeStatus
from nccl_doctor.model.findings import Scope

_Growing = dict[str, Mapping[str, Outcome]]


class _Seat:
    """Facts of one participant. `last` is the last outcome with steps that did not end well, else
    the last.
    """

    __slots__ = ("last", "of_host", "of_rank")

    def __init__(self) -> None:
        self.of_host: dict[str, dict[str, Outcome]] = {}
        self.of_rank: dict[str, dict[str, Outcome]] = {}
        self.last: Outcome | None = None

    def pass_by(self, outcome: Outcome) -> None:
        """Note the steps of the next outcome."""
        good = OutcomeStatus.OK
        if outcome.breadcrumbs and (
            self.last is None or self.last.status is good or outcome.status is not good
        ):
            self.last = outcome


class FactsOfSeats:
    """Facts by seat. What is given out grows with them: there are ten thousand ranks and dozens of
    rounds, and each round would else need all of it anew.
    """

    def __init__(self, scopes: Mapping[str, Scope]) -> None:
        self._scopes = scopes
        self._seats: dict[int, _Seat] = {}
        self._of_hosts: dict[Hashable, _Growing] = {}
        self._seats_of: dict[Hashable, tuple[int, ...]] = {}
        self._host_of: dict[int, Hashable] = {}
        self._changed: set[Hashable] = set()

    def take(self, seat: int, facts: Facts) -> None:
        """Take the facts of a sign-in."""
        for check, rounds in facts.items():
            for name, outcome in rounds.items():
                self.record(seat, check, name, outcome)

    def record(self, seat: int, check: str, round_name: str, outcome: Outcome) -> None:
        """Take one outcome."""
        here = self._seats.setdefault(seat, _Seat())
        of_host = self._scopes.get(check) is Scope.HOST
        (here.of_host if of_host else here.of_rank).setdefault(check, {})[round_name] = outcome
        here.pass_by(outcome)
        if of_host and (host := self._host_of.get(seat)) is not None:
            self._changed.add(host)

    def forget(self, seat: int) -> None:
        """Forget a participant."""
        self._seats.pop(seat, None)

    def of_rank(self, seat: int) -> Facts:
        """Facts of a participant alone, which grow."""
        return self._seats.setdefault(seat, _Seat()).of_rank

    def of_hosts(self, hosts: Mapping[Hashable, Iterable[int]]) -> Mapping[Hashable, Facts]:
        """Facts of each host, which grow with each call of `grow`, by the seats of its ranks: where
        two say something of the same, the later one of them is heard.
        """
        self._of_hosts = {host: {} for host in hosts}
        self._seats_of = {host: tuple(seats) for host, seats in hosts.items()}
        self._host_of = {seat: host for host, seats in self._seats_of.items() for seat in seats}
        self._changed = set(hosts)
        self.grow()
        return self._of_hosts

    def grow(self) -> None:
        """Let the facts of the hosts have what was recorded since."""
        changed, self._changed = self._changed, set()
        for host in changed:
            speaking = [
                self._seats[seat].of_host
                for seat in self._seats_of[host]
                if seat in self._seats and self._seats[seat].of_host
            ]
            self._of_hosts[host].update(speaking[0] if len(speaking) == 1 else _merged(speaking))

    def last_step(self, seat: int) -> str | None:
        """Last step of a participant; None if it announced none."""
        here = self._seats.get(seat)
        return here.last.last_step if here is not None and here.last is not None else None


def _merged(said: Iterable[Mapping[str, Mapping[str, Outcome]]]) -> _Growing:
    merged: dict[str, Any] = {}
    for facts in said:
        for check, rounds in facts.items():
            merged.setdefault(check, {}).update(rounds)
    return merged
