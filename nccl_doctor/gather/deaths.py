"""Participants whose process was killed: its parent knows at once, and tells the coordinator.

Else the coordinator would wait for an answer until a deadline, and then know only that none came.
The records lie in the store of the run: who can write there can also sign in.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nccl_doctor.gather.control_store import ControlStore, StoreTimeout
from nccl_doctor.gather.envelope import OPEN, Seal
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.opening import MEETING, opened, prefix_of
from nccl_doctor.gather.run_state import Key
from nccl_doctor.gather.sign_in import SignIn
from nccl_doctor.launch import identity
from nccl_doctor.model.json_node import Node
from nccl_doctor.model.layout import Address
from nccl_doctor.model.limits import MAX_PID, MAX_RANKS

TELL_S = 4.0
"""Time limit to reach the store: the process that tells it delays the end of another."""
LOOK_S = 0.25
_MOST = 10_000
_NAME = 20


def death_of(pid: int, rank: int | None, signal_name: str) -> dict[str, Any]:
    """Record of the death of a process of this host, as the store has it."""
    return {"pid": pid, "rank": rank, "signal": signal_name, "host": identity.host_key()}


def tell(
    meeting: Address, death: Mapping[str, Any], key: Key | None = None, run_id: str = ""
) -> None:
    """Tell the coordinator that a participant was killed. `run_id` is the run that it signed in
    for; by default the one that is open.

    Raises:
        StoreLost: the store cannot be reached.
        StoreTimeout, BadMessage: the run was not opened by somebody who has the key.
    """
    seal = Seal(key.secret) if key else OPEN
    store = ControlStore(*meeting, timeout_s=TELL_S, prefix=MEETING, seal=seal)
    run_id = run_id or opened(store, TELL_S)
    box = store.beside(prefix_of(run_id), seal_of(key, run_id))
    box.put(f"death/{box.add('deaths', 1) - 1}", dict(death), TELL_S)


def seal_of(key: Key | None, run_id: str) -> Seal:
    """Seal of the messages of a run: with a key of a file, which other runs have too, its name is
    part of it.
    """
    if key is None:
        return OPEN
    return Seal(key.secret, run_id if key.lasts else "")


@dataclass(frozen=True)
class Death:
    """Process that was killed: the key of its host, its id and rank, and the signal."""

    host: str
    pid: int
    rank: int | None
    signal: str

    @classmethod
    def from_json(cls, data: object) -> Death:
        """Inverse of `death_of`; ValueError for what it cannot have made."""
        node = Node("death", data)
        node.number("pid", 0, MAX_PID)
        rank = node.number("rank", 0, MAX_RANKS)
        return cls(node.get("host", str), node.get("pid", int), rank, signal_in(node))


def signal_in(node: Node) -> str:
    """Name of the signal in a message; ValueError for what is none."""
    name = node.get("signal", str)
    if not name.startswith(("SIG", "signal ")) or len(name) > _NAME:
        raise ValueError("no name of a signal")
    return name


class Deaths:
    """Deaths that parents reported; the coordinator looks for news while it waits for others."""

    def __init__(self, box: ControlStore, evidence: EvidenceLog) -> None:
        self._box = box
        self._evidence = evidence
        self._deaths: list[Death] = []
        self._replaced: Counter[tuple[str, int]] = Counter()
        self._read = 0
        self._next = 0.0

    @property
    def ranks(self) -> set[int]:
        """Ranks that were killed."""
        return {death.rank for death in self._deaths if death.rank is not None}

    def of(self, seat: int) -> str | None:
        """Signal that killed a participant, or None."""
        who = self._evidence.who(seat) if self._deaths else None
        if who is None:
            return None
        killed = (who.host_key, who.pid)
        signals = [each.signal for each in self._deaths if (each.host, each.pid) == killed]
        return signals[-1] if len(signals) > self._replaced[killed] else None

    def replaced(self, who: SignIn) -> None:
        """Take a later start of this participant, whose place it has, for another process, even if
        it has the same process id, as in a container that was started again.
        """
        self._replaced[who.host_key, who.pid] += 1

    def look(self) -> bool:
        """Look into the store, some times a second. Returns whether there is news."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOOK_S
        known = self._read
        number = min(self._box.add("deaths", 0), _MOST)
        while self._read < number and self._box.wait([f"death/{self._read}"], 0.0):
            key = f"death/{self._read}"
            self._read += 1
            with contextlib.suppress(ValueError, StoreTimeout):  # it is no record of ours
                self._deaths.append(Death.from_json(self._box.get(key, 0.0)))
        return self._read > known
