"""Plays many participants in one process, with the program's own client: those of rank 0's host
each in a thread, and each other host in one, as its agent.

What no machine of a real cluster would share is shared here, as a few processors play all of them:
batches are made before the start, and a message of rank 0 that all read is taken apart once.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from nccl_doctor.gather import follow, store
from nccl_doctor.gather.agent.batches import (
    answers_key,
    batch_of_answers,
    batch_of_sign_ins,
)
from nccl_doctor.gather.context import Run
from nccl_doctor.gather.ends import seal_of
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.follow import Follower
from nccl_doctor.gather.messages import Order, Roster, is_paged, own_part, page_of, whole
from nccl_doctor.gather.opening import MEETING, opened, prefix_of
from nccl_doctor.gather.run import prepare
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.gather.views import HostReports
from nccl_doctor.launch import identity
from nccl_doctor.model.cluster import AFTER_LOSS, ALONE, Facts, Outcome
from nccl_doctor.model.codec import Node, decode
from nccl_doctor.model.findings import Round
from nccl_doctor.model.options import Options
from nccl_doctor.toolkit.garbage import collected_rarely
from nccl_doctor.toolkit.load_torch import import_torch
from tests.lab.crowd import PORT, Plan, way_to_rank_0
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


class SealedBatch(dict[str, Any]):
    """A message that is ready for the store."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        super().__init__()
        self.data = store.wrap("", value)


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
        super().__init__(run, box, token, evidence, HostReports(None, 0.0, None))
        self._cast, self._rank = cast, rank
        self._groups = cast.groups

    def _take_part_in(self, name: str, round_: Round, number: int) -> Outcome:
        facts = self._cast.facts_for(round_.name, self._rank)
        outcome = self._cast.answers.of(name, round_, self._run.seat, self._rank, facts)
        if outcome is None:
            raise Frozen
        return outcome


class AgentStore:
    """The ranks of one host, and their agent."""

    def __init__(
        self, cast: Cast, box: ControlStore, first: int, tokens: Mapping[int, str]
    ) -> None:
        self._cast, self._box, self._first = cast, box, first
        self._ranks = dict(enumerate(tokens, first))
        """The rank of each seat."""
        self._tokens = tokens
        self._paged = False

    def follow(self, left: Callable[[], float]) -> None:
        """Take part in the run, to its end."""
        told = self._box.get("roster", left())
        self._paged = is_paged(told)
        for seat, rank in self._ranks.items():
            page = page_of("roster", seat) if self._paged else "roster"
            if page not in self._cast.rosters:
                here = decode(Roster, Node("roster", whole(self._box, "roster", told, seat)))
                self._cast.rosters[page] = here
            if not self._cast.rosters[page].admits(seat, self._tokens[rank]):
                raise LookupError(f"rank {rank} is not admitted")
        for number in itertools.count():
            orders = self._orders(f"order/{number}", left())
            if any(order is None for order, _ in orders):
                break
            own = {
                seat: order
                for order, members in orders
                for seat in self._ranks
                if order is not None and seat in members
            }
            if own:
                self._box.put(answers_key(number, self._first), self._batch(own))
        self._box.put(f"bye/{self._first}", True)

    def _orders(self, key: str, patience_s: float) -> list[tuple[Order | None, Set[int]]]:
        """The order on each page of the host's seats, and its members there; None at the end."""
        pages = {page_of(key, seat) if self._paged else key for seat in self._ranks}
        return [self._cast.order(self._box, key, self._box.get(p, patience_s)) for p in pages]

    def _batch(self, orders: Mapping[int, Order]) -> dict[str, Any]:
        """The answers of those that have an order."""
        any_of = next(iter(orders.values()))
        ranks = tuple(self._ranks[seat] for seat in orders)
        made = self._cast.made.get((any_of.check, any_of.round.name, ranks))
        if made is None:
            return batch_of_answers(
                {seat: self._answer(seat, order) for seat, order in orders.items()}
            )
        return {
            **made,
            "answers": dict(zip(map(str, orders), made["answers"].values(), strict=True)),
        }

    def _answer(self, seat: int, order: Order) -> Any:
        rank = self._ranks[seat]
        facts = self._cast.facts_for(order.round.name, rank)
        outcome = self._cast.answers.of(order.check, order.round, seat, rank, facts)
        if outcome is None:
            raise Frozen
        return outcome.to_json()


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
        self._batches = {}
        sign_ins = {}
        for rank in self.ranks:
            self._facts[rank] = together(record.facts(rank))
            sign_ins[rank] = record.sign_in(rank, self._tokens[rank], key)
        self.hosts: list[list[int]] = []
        """The ranks that a thread plays: those of a host, or one that has no agent."""
        speaks = plan.ranks >= Options.agents_from
        for number, of_host in itertools.groupby(self.ranks, lambda rank: rank // plan.per_host):
            here = list(of_host)
            self.hosts += [here] if number and speaks else [[rank] for rank in here]
        for here in self.hosts:
            told = [sign_ins[rank] for rank in here]
            batch = told[0] if len(here) == 1 else batch_of_sign_ins(told)
            self._batches[here[0]] = SealedBatch(batch)
        self.made = {
            made: batch
            for here in self.hosts
            if len(here) > 1
            for made, batch in self._answers_of(here)
        }
        """Check, round and ranks → batch with their answers, by their ranks in place of seats."""
        self.groups = Once()
        self.rosters: dict[str, Roster] = {}
        """Parts of the roster, by their pages."""
        self._orders: dict[int, tuple[Order | None, Set[int], Any]] = {}
        self.ended = 0
        self.frozen: list[int] = []
        self.problems: dict[int, str] = {}
        self._kept: list[Any] = []
        self._base = prepare(options_of(plan), record.launch(0), {}, time.monotonic(), logs=False)

    def _answers_of(
        self, here: Sequence[int]
    ) -> Iterator[tuple[tuple[str, str, tuple[int, ...]], dict[str, Any]]]:
        facts = {rank: self._facts[rank] for rank in here}
        for check, rounds in facts[here[0]].items():
            for name in rounds.keys() - {ALONE}:
                if self.answers.are_recorded(check, name):
                    said = {
                        rank: facts[rank][check][name].to_json()
                        for rank in here
                        if name in facts[rank].get(check, {})
                    }
                    yield (check, name, tuple(said)), batch_of_answers(said)

    def play(self) -> None:
        """Take part in the run, with all of them."""
        base = self._base
        now = time.monotonic()
        config = replace(base.config, started=now, deadline=now + base.options.timeout_s)
        self._base = replace(base, config=config)
        threads = [threading.Thread(target=self._one, args=(ranks,)) for ranks in self.hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def order(self, box: ControlStore, key: str, data: Any) -> tuple[Order | None, Set[int]]:
        """The order of one page, with all groups of it, and its members; read once by all."""
        if id(data) not in self._orders:
            groups = data.get("groups", [])
            large = data.get("shared", {})
            some = {group[0] for group in groups} | {here[0] for here in large.values()}
            brief = {**data, "params": {}}  # they are read once
            parts = [
                own_part(box, key, brief if number else data, seat, self.groups)
                for number, seat in enumerate(some)
            ] or [data]
            every = {tuple(group): group for part in parts for group in part.get("groups", [])}
            order = follow.order_from({**parts[0], "groups": list(every.values())})
            members = set(itertools.chain(*groups, *large.values()))
            told = order if isinstance(order, Order) else None
            self._orders[id(data)] = told, members, data  # with it, so that no other has its id
        return self._orders[id(data)][:2]

    def facts_for(self, round_name: str, rank: int) -> Facts:
        """Recorded facts of a rank for a round; those of before the sign-in are needed rarely."""
        return self._record.facts(rank) if round_name == AFTER_LOSS else self._facts[rank]

    def _one(self, ranks: Sequence[int]) -> None:
        try:
            self._follow(ranks)
            self.ended += len(ranks)
        except Frozen:
            self.frozen += ranks
        except Exception as error:  # what goes wrong for one is a result
            self.problems[ranks[0]] = f"{type(error).__name__}: {error}"

    def _follow(self, ranks: Sequence[int]) -> None:
        runs = [replace(self._base, launch=self._record.launch(rank)) for rank in ranks]
        way = way_to_rank_0(ranks[0] // self._plan.per_host)
        for run in runs:  # each rank has a connection, and reads what the run is called
            store = ControlStore(way, PORT, timeout_s=60.0, prefix=MEETING)
            self._kept.append(store)
            store.crowd = self._plan.ranks
            run_id = opened(store, run.left())
        box = store.beside(prefix_of(run_id), seal_of(None, run_id))
        first = box.add("seats", len(ranks)) - len(ranks)
        for seat, (run, rank) in enumerate(zip(runs, ranks, strict=True), first):
            run.seat = seat
            self._seats.take(seat, rank)
        box.put(f"seat/{first}", self._batches.pop(ranks[0]))
        if len(ranks) == 1:
            Player(runs[0], box, self._tokens[ranks[0]], self, ranks[0]).follow()
        else:
            tokens = {rank: self._tokens[rank] for rank in ranks}
            AgentStore(self, box, first, tokens).follow(runs[0].left)


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
            raise store.StoreLost(str(error).partition("\n")[0]) from error

    def end(self) -> None:
        """Nothing: there is no thread of its own."""


def share_work() -> None:
    """Make batches before the start, and take apart once what all read."""
    wrap, unwrap, read = store.wrap, store.unwrap, follow.order_from
    seen: dict[bytes, Any] = {}
    orders: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def wrapped(key: str, value: Any, *args: Any, **named: Any) -> bytes:
        return value.data if isinstance(value, SealedBatch) else wrap(key, value, *args, **named)

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

    store.wrap = wrapped
    store.unwrap = unwrapped
    follow.order_from = order
    store.Worker = Direct  # type: ignore[misc,assignment]


def main() -> None:
    """Play the ranks from … to …, and write what became of them."""
    path, report, first, end, out = sys.argv[1:]
    plan = Plan.read(path)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as in the program
    import_torch()
    share_work()
    threading.stack_size(_STACK)
    sys.setswitchinterval(_SWITCH_S)
    with collected_rarely():
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
