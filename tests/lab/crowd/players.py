"""Plays many participants in one process, each in a thread, with the program's own client.

What no machine of a real cluster would share is shared here, as a few processors play all of them:
letters are made before the start, and a message of rank 0 that all read is taken apart once.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nccl_doctor.gather import control_store, follow
from nccl_doctor.gather.control_store import ControlStore
from nccl_doctor.gather.deaths import seal_of
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.follow import Follower
from nccl_doctor.gather.opening import MEETING, opened, prefix_of
from nccl_doctor.gather.partial_reports import PartialReports
from nccl_doctor.gather.participant import import_torch
from nccl_doctor.gather.run import prepare
from nccl_doctor.gather.run_state import Run
from nccl_doctor.launch import identity
from nccl_doctor.model.cluster import AFTER_LOSS, ALONE, Facts, Outcome
from nccl_doctor.model.findings import Round
from tests.lab.crowd import PORT, Plan
from tests.lab.crowd.answers import Answers, Seats
from tests.lab.crowd.head import options_of
from tests.lab.crowd.record import Record
from tests.lab.crowd.tally import bytes_of, cpu_of

_STACK = 256 << 10
_READ_S = 60.0
_SWITCH_S = 0.2
"""With hundreds of threads, those that wait for their turn would else do nothing but look whether
it has come.
"""


class Letter(dict[str, Any]):
    """A message that is ready for the store."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        super().__init__()
        self.data = control_store.wrap("", value)


class Once(dict[str, list[int]]):
    """Large groups that were read, by all of them: who asks while one reads it waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._reads: dict[str, threading.Event] = {}

    def __contains__(self, name: object) -> bool:
        with self._lock:
            if super().__contains__(name) or str(name) not in self._reads:
                self._reads.setdefault(str(name), threading.Event())
                return super().__contains__(name)
        self._reads[str(name)].wait(_READ_S)
        return super().__contains__(name)

    def __setitem__(self, name: str, group: list[int]) -> None:
        super().__setitem__(name, group)
        self._reads[name].set()


class Frozen(Exception):
    """This participant says nothing more."""


class Player(Follower):
    """One participant."""

    def __init__(self, run: Run, box: ControlStore, token: str, cast: Cast, rank: int) -> None:
        evidence = EvidenceLog(run.launch, {}, {})
        super().__init__(run, box, token, evidence, PartialReports(None, 0.0, None))
        self._cast, self._rank = cast, rank
        self._groups = cast.groups

    def _take_part_in(self, name: str, round_: Round, number: int) -> Outcome:
        facts = self._cast.facts_for(round_.name, self._rank)
        outcome = self._cast.answers.of(name, round_, self._run.seat, self._rank, facts)
        if outcome is None:
            raise Frozen
        return outcome


class Cast:
    """All participants of this process."""

    def __init__(self, plan: Plan, ranks: range, report: Path) -> None:
        self._plan = plan
        self.ranks = [rank for rank in ranks if rank and rank // plan.per_host not in plan.silent]
        record = Record(plan, report)
        self.answers = Answers(plan, record, seats := Seats(plan))
        self._seats = seats
        self._record = record
        key = identity.host_key()
        self._tokens = {rank: secrets.token_hex(8) for rank in self.ranks}
        self._facts: dict[int, Facts] = {}
        self._letters = {}
        for rank in self.ranks:
            self._facts[rank] = together(record.facts(rank))
            self._letters[rank] = Letter(record.sign_in(rank, self._tokens[rank], key))
        self.groups = Once()
        self.ended = 0
        self.frozen: list[int] = []
        self.problems: dict[int, str] = {}
        self._kept: list[Any] = []
        self._base = prepare(options_of(plan), record.launch(0), {}, time.monotonic(), logs=False)

    def play(self) -> None:
        """Take part in the run, with all of them."""
        base = self._base
        now = time.monotonic()
        config = replace(base.config, started=now, deadline=now + base.options.timeout_s)
        self._base = replace(base, config=config)
        threads = [threading.Thread(target=self._one, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def facts_for(self, round_name: str, rank: int) -> Facts:
        """Recorded facts of a rank for a round; those of before the sign-in are needed rarely."""
        return self._record.facts(rank) if round_name == AFTER_LOSS else self._facts[rank]

    def _one(self, rank: int) -> None:
        try:
            self._follow(rank)
            self.ended += 1
        except Frozen:
            self.frozen.append(rank)
        except Exception as error:  # what goes wrong for one is a result
            self.problems[rank] = f"{type(error).__name__}: {error}"

    def _follow(self, rank: int) -> None:
        run = replace(self._base, launch=self._record.launch(rank))
        store = ControlStore("127.0.0.1", PORT, timeout_s=60.0, prefix=MEETING)
        self._kept.append(store)
        store.crowd = self._plan.ranks
        run_id = opened(store, run.left())
        box = store.beside(prefix_of(run_id), seal_of(None, run_id))
        run.seat = box.add("seats", 1) - 1
        self._seats.take(run.seat, rank)
        box.put(f"seat/{run.seat}", self._letters.pop(rank))
        Player(run, box, self._tokens[rank], self, rank).follow()


def together(facts: Facts) -> Facts:
    """Facts of the checks that were held in rounds."""
    return {check: rounds for check, rounds in facts.items() if set(rounds) != {ALONE}}


class Direct:
    """In place of a connection's own thread: here each participant has one already."""

    def call(self, function: Any, timeout_s: float, tick: Any = None) -> Any:
        """Result of the function, in this thread."""
        try:
            return function()
        except (RuntimeError, OSError) as error:
            raise control_store.StoreLost(str(error).partition("\n")[0]) from error

    def end(self) -> None:
        """Nothing: there is no thread of its own."""


def share_work() -> None:
    """Make letters before the start, and take apart once what all read."""
    wrap, unwrap, read = control_store.wrap, control_store.unwrap, follow.order_from_json
    seen: dict[bytes, Any] = {}
    orders: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def wrapped(key: str, value: Any, *args: Any, **named: Any) -> bytes:
        return value.data if isinstance(value, Letter) else wrap(key, value, *args, **named)

    def unwrapped(key: str, data: bytes, *args: Any, **named: Any) -> Any:
        if data not in seen:
            seen[data] = unwrap(key, data, *args, **named)
        return seen[data]

    def order(data: Any) -> Any:
        if "finish" in data:
            return read(data)
        key = (data["check"], data["round"], *map(id, data["groups"]))
        if key not in orders:
            orders[key] = (data, read(data))  # with the data, so that no other has its ids
        return orders[key][1]

    control_store.wrap = wrapped
    control_store.unwrap = unwrapped
    follow.order_from_json = order
    control_store._Worker = Direct  # type: ignore[misc,assignment]


def main() -> None:
    """Play the ranks from … to …, and write what became of them."""
    path, report, first, end, out = sys.argv[1:]
    plan = Plan.read(path)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as in the program
    import_torch()
    share_work()
    threading.stack_size(_STACK)
    sys.setswitchinterval(_SWITCH_S)
    cast = Cast(plan, range(int(first), int(end)), Path(report))
    Path(f"{out}.ready").touch()
    plan.wait_for_the_gun()
    before = cpu_of()
    cast.play()
    sent, received = bytes_of(PORT)
    result = {
        "ended": cast.ended,
        "frozen": cast.frozen,
        "problems": cast.problems,
        "sent": sent,
        "received": received,
        "cpu_s": cpu_of() - before,
    }
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
