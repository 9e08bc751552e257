"""Ends of the ranks of a job, put together from its consoles. Pure."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from nccl_doctor.autopsy.console import LineOrigin, Raised, Stack, Told
from nccl_doctor.autopsy.messages import Message

_MOST_RANKS = 1 << 17
_MOST_KEPT = 64
"""Exceptions of one rank, and messages of one meaning, that are kept: the first ones."""
_SIGNALS = {
    "Killed": -9,
    "Out Of Memory": -9,
    "Segmentation fault": -11,
    "Terminated": -15,
    "Aborted": -6,
    "Hangup": -1,
    "Interrupt": -2,
    "Bus error": -7,
}
_LISTS_ALL_FROM = 950
"""Line of torchrun's api.py that tells its release: 869 in 2.6, 874 in 2.8, 1002 in 2.13 and 2.15.

From 2.13 on its block lists every rank that did not end with 0, also those that it ended itself.
"""
_OF_RANK = re.compile(r"(?:^|[^a-z])rank[_.-]?(?P<rank>\d+)(?!.*\d)", re.IGNORECASE)
_OF_ATTEMPT = re.compile(r"attempt_(?P<attempt>\d+)/(?P<local>\d+)/")


@dataclass(frozen=True)
class Source:
    """One console: its name, and what the name says of it; None for what it does not."""

    name: str
    rank: int | None = None
    local_rank: int | None = None
    attempt: int = 0
    host: str = ""

    @classmethod
    def named(cls, name: str) -> Source:
        """A source by its name: a file of one rank, or of torchrun's --log-dir."""
        if found := _OF_ATTEMPT.search(name):
            return cls(name, local_rank=int(found["local"]), attempt=int(found["attempt"]))
        found = _OF_RANK.search(name.rpartition("/")[2])
        return cls(name, rank=int(found["rank"]) if found else None)


@dataclass(frozen=True)
class Line:
    """Place of a line in the input."""

    source: Source
    number: int

    def __str__(self) -> str:
        return f"{'/'.join(self.source.name.split('/')[-3:])}, line {self.number}"


@dataclass(frozen=True)
class Ended:
    """An exception of a rank, with its place."""

    raised: Raised
    at: Line

    @property
    def is_own(self) -> bool:
        """True if it says nothing of another rank: no collective, no rendezvous, no launcher."""
        return not any(message.other or message.says == "in-use" for message in self._messages)

    def says(self, *names: str) -> bool:
        """True if a message of one of these names is in its text."""
        return any(message.says in names for message in self._messages)

    @cached_property
    def _messages(self) -> list[Message]:  # every rule asks for them
        return self.raised.messages


@dataclass
class RankEnd:
    """End of one rank: None, "" and False where nothing says it.

    `code` is its exit code, negative for a signal; `is_local`: its number is only known as that on
    its host; `out_of_memory`: the scheduler says that it was killed for it. `listed`: name of
    the file in which a launcher lists it among those that failed; `blamed`: as the first one.
    """

    rank: int
    ended: list[Ended] = field(default_factory=list)
    code: int | None = None
    pid: int | None = None
    local_rank: int | None = None
    host: str = ""
    is_local: bool = False
    out_of_memory: bool = False
    listed: str = ""
    blamed: bool = False
    does_not_react: bool = False
    calls: list[tuple[Told, Line]] = field(default_factory=list)
    stacks: list[tuple[Stack, Line]] = field(default_factory=list)
    progress: tuple[Told, Line] | None = None

    @property
    def own(self) -> Ended | None:
        """The first exception that is its own."""
        return next((each for each in self.ended if each.is_own), None)

    def says(self, *names: str) -> bool:
        """True if a message of one of these names is in one of its exceptions."""
        return any(each.says(*names) for each in self.ended)

    @property
    def timed_out(self) -> bool:
        """True if it waited until a time-out, by its exception or by NCCL's watchdog."""
        return bool(self.calls) or self.says("timed-out")

    @property
    def is_victim(self) -> bool:
        """True if it says that it lost another rank, or waited for it."""
        return any(not each.is_own for each in self.ended) or bool(self.calls)


@dataclass
class JobEnd:
    """End of a job, by all of its consoles.

    `loose` are exceptions of ranks that are not known, `launcher` those of launchers. `told` are
    messages by their names, `pids` ranks by their processes, `launched` the names of consoles in
    which a launcher says how ranks ended. `lists_all`: torchrun lists every rank that failed.
    """

    ranks: dict[int, RankEnd] = field(default_factory=dict)
    loose: list[Ended] = field(default_factory=list)
    launcher: list[Ended] = field(default_factory=list)
    told: dict[str, list[tuple[Message, Line]]] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    launched: set[str] = field(default_factory=set)
    lists_all: bool = False

    def rank(self, number: int) -> RankEnd:
        """The end of a rank."""
        return self.ranks.setdefault(number, RankEnd(number))

    def all(self, says: str) -> list[tuple[Message, Line]]:
        """Messages of one meaning, with their places."""
        return self.told.get(says, [])

    @property
    def size(self) -> int:
        """Number of ranks, at least: the highest one in the text, and all below it."""
        told = (int(message.values["others"]) + 1 for message, _ in self.all("size"))
        return min(max([*self.ranks, *(size - 1 for size in told)], default=-1) + 1, _MOST_RANKS)

    @property
    def silent(self) -> list[RankEnd]:
        """Ranks of the job without any exception or error."""
        every = (self.ranks.get(rank) or RankEnd(rank) for rank in range(self.size))
        return [rank for rank in every if not rank.ended and not rank.calls]


def job_of(consoles: Iterable[tuple[Source, Iterable[Stack | Told]]]) -> JobEnd:
    """Put together all that the consoles of a job tell, in the order in which they are given."""
    maker = _JobMaker()
    for source, items in consoles:
        maker.take(source, items)
    return maker.done()


class _JobMaker:
    """Puts a job together. Who is what rank may be said after what it did, so names come last."""

    def __init__(self) -> None:
        self._job = JobEnd()
        self._ended: list[tuple[Source, Ended]] = []
        self._stacks: list[tuple[Source, Stack, Line]] = []
        self._locals: dict[tuple[str, int], set[int]] = defaultdict(set)
        self._block: int | None = None
        self._root = False
        self._spawned = 0
        self._sources: list[Source] = []
        self._by_local: list[tuple[str, int, int, str]] = []
        self._agents = False
        self._seen: dict[str, set[int]] = {}

    def take(self, source: Source, items: Iterable[Stack | Told]) -> None:
        """Take what one console says."""
        self._block, self._root = None, False
        seen = self._seen.setdefault(source.name, set())
        self._sources.append(source)
        if source.rank is not None:
            self._job.rank(source.rank)  # its file is there, even if it says nothing
        spawned: tuple[int, int] | None = None
        for item in items:
            at = Line(source, item.line)
            if isinstance(item, Told) and item.message.says == "spawn-raised":
                spawned = item.line, int(item.message.values["rank"])
            elif spawned is not None and item.line == spawned[0] + 1:
                item = replace(item, origin=replace(item.origin, rank=spawned[1]))
            rank = item.origin.rank
            if rank is not None and rank < _MOST_RANKS:
                seen.add(rank)
                self._job.rank(rank).host = item.origin.host or self._job.rank(rank).host
            if isinstance(item, Told):
                self._told(source, item, at)
            elif not isinstance(item, Raised):
                self._stacks.append((source, item, at))
            elif item.error or item.frames:
                self._ended.append((source, Ended(item, at)))

    def done(self) -> JobEnd:
        """The job, when all consoles were read."""
        job = self._job
        for source, ended in self._ended:
            for message in ended.raised.messages:
                self._launcher_says(source, message)
            if ended.raised.of_launcher or ended.says("launcher", "spawn-ended"):
                job.launcher.append(ended)
                self._job.launched.add(source.name)
        for name, local, code, pid in self._by_local:
            number = self._rank_at(name, local)
            if number is None and not self._locals:  # no block tells the rank: of one host, it is
                number = local
                job.rank(number).is_local = True
            if number is not None:
                self._ends(number, code, pid)
        known = {number: ranks for (_, number), ranks in self._locals.items()}
        if all(ranks == {number} for number, ranks in known.items()):  # the job has one host
            for source in self._sources:
                if source.local_rank is not None:
                    job.rank(source.local_rank)
                    self._locals[source.name, source.local_rank].add(source.local_rank)
        alone = self._of_one_rank()
        for number in alone.values():
            job.rank(number)
        for source, ended in self._ended:
            if ended in job.launcher:
                continue
            rank = self._rank_of(source, ended.raised.origin, alone)
            into = job.loose if rank is None else job.rank(rank).ended
            if len(into) < _MOST_KEPT:
                into.append(ended)
        for source, stack, at in self._stacks:
            number = self._rank_of(source, stack.origin, alone)
            if number is not None and len(job.rank(number).stacks) < _MOST_KEPT:
                job.rank(number).stacks.append((stack, at))
        for says in ("does-not-react", "stopped"):
            for message, at in job.all(says):
                rank = job.pids.get(message.number("pid") or 0, at.source.rank)
                if rank is not None:
                    job.rank(rank).does_not_react = True
        return job

    def _of_one_rank(self) -> dict[str, int]:
        """Names of files that hold the text of one rank each, as plain `python` prints it.

        Where no launcher speaks, and the names end in the numbers from 0 on, these are the ranks,
        unless the text of one of them says another rank.
        """
        names = [name for name in self._seen if name not in self._job.launched]
        known = {name: min(self._seen[name]) for name in names if len(self._seen[name]) == 1}
        numbers = {name: re.findall(r"\d+", name) for name in names}
        last = {name: int(found[-1]) for name, found in numbers.items() if found}
        same = all(last.get(name) == rank for name, rank in known.items())
        if not same or self._job.launched or sorted(last.values()) != [*range(len(names))]:
            return known
        return {name: rank for name, rank in last.items() if len(self._seen[name]) <= 1}

    def _rank_of(self, source: Source, origin: LineOrigin, alone: dict[str, int]) -> int | None:
        if origin.rank is not None and origin.rank < _MOST_RANKS:
            return origin.rank
        if source.rank is not None:
            return source.rank
        if origin.task is not None and not self._agents:
            return min(origin.task, _MOST_RANKS)
        if origin.pid is not None and origin.pid in self._job.pids:
            return self._job.pids[origin.pid]
        local = source.local_rank if source.local_rank is not None else origin.local_rank
        if local is not None:
            return self._rank_at(source.name, local)
        return alone.get(source.name)

    def _rank_at(self, name: str, local: int) -> int | None:
        """Rank with this number on its host, by the text of this file, else by that of all."""
        here = self._locals.get((name, local))
        every = [ranks for (_, number), ranks in self._locals.items() if number == local]
        known = here or set[int]().union(*every)
        return next(iter(known)) if len(known) == 1 else None

    def _launcher_says(self, source: Source, message: Message) -> None:
        """Take what the exception of a launcher says of a rank."""
        values = message.values
        if message.says == "spawn-ended":
            code = int(values["code"]) if "code" in values else -_number_of(values["signal"])
            self._ends(_within(values["rank"]), code)
        elif message.says == "launch-ended":
            self._by_local.append((source.name, int(values["local"]), -int(values["signal"]), ""))

    def _told(self, source: Source, told: Told, at: Line) -> None:
        """Take one message: into its rank's record where it is about a rank."""
        job, message, values = self._job, told.message, told.message.values
        kept = job.told.setdefault(message.says, [])
        if len(kept) < _MOST_KEPT:
            kept.append((message, at))
        match message.says:
            case "root":
                self._root = True
            case "block-rank":
                rank = job.rank(_within(values["rank"]))
                rank.local_rank, rank.listed = int(values["local"]), source.name
                rank.blamed = self._root
                self._locals[source.name, rank.local_rank].add(rank.rank)
                self._block, self._root = rank.rank, False
            case "block-code" if self._block is not None:
                self._ends(self._block, int(values["code"]), values["pid"])
                job.lists_all |= "named" in values
                self._block = None
            case "failed":
                self._agents = True
                local, pid = int(values["local"]), values["pid"]
                self._by_local.append((source.name, local, int(values["code"]), pid))
                job.lists_all |= int(values.get("api", "0")) >= _LISTS_ALL_FROM
                self._job.launched.add(source.name)
            case "terminates":
                self._agents = True
                self._job.launched.add(source.name)
            case "watchdog" | "progress":
                said = values.get("rank") if told.origin.rank is None else str(told.origin.rank)
                if said is not None:
                    self._calls(job.rank(_within(said)), told, at)
            case _:
                self._starter_says(source, message)

    def _starter_says(self, source: Source, message: Message) -> None:
        """Take what deepspeed, srun, mpirun or Ray says of a rank."""
        job, values = self._job, message.values
        match message.says:
            case "spawned":
                self._ends(int(values.get("local", self._spawned)), None, values["pid"])
                self._spawned += 1
            case "task-ended":
                how = values["how"]
                code = _SIGNALS.get(how.partition(" (")[0])
                if found := re.match(r"Exited with exit code (\d+)", how):
                    code = int(found[1])
                for number in numbers_of(values["ranks"]):
                    self._ends(number, code)
                    job.rank(number).out_of_memory |= how.startswith("Out Of Memory")
            case "mpi-ended":
                self._ends(_within(values["rank"]), -int(values["signal"]), values["pid"])
            case "mpich-ended" if "rank" in values:
                signal_or_code = -int(values["signal"]) if "signal" in values else None
                code = signal_or_code or int(values["code"])
                self._ends(_within(values["rank"]), code, values["pid"])
            case "mpi-exited":
                self._ends(_within(values["rank"]), int(values["code"]))
            case "ray-rank":
                self._ends(_within(values["rank"]), None, values["pid"])
            case _:
                return
        self._job.launched.add(source.name)

    def _ends(self, number: int, code: int | None, pid: str = "") -> None:
        """Note how a rank ended; the first end counts, as later ones are those of a restart."""
        rank = self._job.rank(number)
        if rank.code is None:
            rank.code = code
        if pid and rank.pid is None:
            rank.pid = int(pid)
            self._job.pids[rank.pid] = number

    def _calls(self, rank: RankEnd, told: Told, at: Line) -> None:
        if told.message.says == "progress":
            rank.progress = rank.progress or (told, at)
        elif len(rank.calls) < _MOST_KEPT:
            rank.calls.append((told, at))


def numbers_of(text: str) -> Iterator[int]:
    """Numbers of a list with ranges: `0-2,5`."""
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        yield from range(int(first), min(int(last or first) + 1, _MOST_RANKS))


def _number_of(name: str) -> int:
    return int(getattr(signal, name, 0))


def _within(text: str) -> int:
    return min(int(text), _MOST_RANKS)
