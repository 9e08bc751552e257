"""Watch for hosts in a round that no longer ask the store for anything: dead, stopped or cut off.

Who takes part asks several times a second whether the round is over (`examine.hold`). On the host
of the store the kernel tells for each connection how long ago something came in. So a host whose
processes are stopped, killed or cut off is known without a message more, and long before the
deadline of a round in which all others wait for it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

from nccl_doctor.gather.control_store import ControlStore
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.examine import below_round
from nccl_doctor.gather.round_peers import say_left
from nccl_doctor.launch import identity
from nccl_doctor.model.check import Check
from nccl_doctor.model.findings import Round
from nccl_doctor.toolkit.net.sock_diag import connections_at

QUIET_S = 10.0
"""Longer than a question is under way on a road that loses a quarter of its segments."""
_LOOK_S = 1.0
_MOST_RANKS = 1024
"""With more, each asks less often, and a look takes tenths of a second."""


class Quiet:
    """The members of a round of whose hosts the store has heard nothing for too long.

    A host that was never heard may have other addresses than it tells, and is not one of them.
    """

    def __init__(self, box: ControlStore, evidence: EvidenceLog, quiet_s: float = QUIET_S) -> None:
        self._box = box
        self._quiet_s = quiet_s
        self._evidence = evidence
        self._is_near = identity.is_this_host(box.host)
        self._heard: dict[str, float] = {}
        self._next = 0.0
        self._round: tuple[Check, Round] | None = None
        self._began = 0.0
        self.seats: frozenset[int] = frozenset()
        """As of the last look; of one that is heard again, the answer is waited for."""

    def begin(self, check: Check, round_: Round) -> None:
        """Watch the members of this round from now on."""
        self._round, self._began, self.seats = (check, round_), time.monotonic(), frozenset()

    def look(self) -> bool:
        """Ask the kernel, at most once a second, and tell the others of their groups, so that
        nobody waits for what the quiet ones would have posted. Returns: whether there are more.
        """
        now = time.monotonic()
        if now < self._next or not self._is_near or len(self._evidence.seats) > _MOST_RANKS:
            return False
        self._next = now + _LOOK_S
        owners, told = self._owners(), connections_at(self._box.port)
        for each in told:
            if host := owners.get(each.remote):
                self._heard[host] = max(self._heard.get(host, 0.0), now - each.silent_s)
        if self._round is None or not told:  # not even our own: the kernel does not answer
            return False
        check, round_ = self._round
        members = (seat for group in round_.groups for seat in group)
        before, self.seats = self.seats, frozenset(s for s in members if self._is_quiet(s, now))
        for group in round_.groups:
            for seat in (self.seats - before) & set(group):
                say_left(self._box, below_round(check, round_, group), seat)
        return not self.seats <= before

    def _is_quiet(self, seat: int, now: float) -> bool:
        who = self._evidence.who(seat)
        if who is None or who.host_key not in self._heard:
            return False
        return now - max(self._heard[who.host_key], self._began) > self._quiet_s

    def _owners(self) -> Mapping[str, str]:
        """Address → the key of the one host that has it, if it is not this one."""
        keys: dict[str, set[str]] = defaultdict(set)
        for seat in self._evidence.seats:
            if who := self._evidence.who(seat):
                for address in who.addresses:
                    keys[address].add(who.host_key)
        own = identity.host_key()
        return {a: key for a, found in keys.items() if len(found) == 1 for key in found - {own}}
