"""Rules that find the ranks which hold up a job, by its flight-recorder dumps. Pure.

Each rank waits for others, or for nobody: where these ways end is the cause, and every other rank
waits because of it. NCCL tells of each call whether it ended. Gloo does not: its calls are always
"scheduled", and `retired` is said of failed ones too; there only the numbers of the calls count.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from nccl_doctor.autopsy import kinds
from nccl_doctor.autopsy.flight import Collective, Dump, Group
from nccl_doctor.model.findings import Confidence, Finding, Kind, Where, number_range

_PEERS = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_ONE_SIZE = re.compile(
    r"all_?reduce|broadcast|reduce|_?all_?gather(_base)?|_?reduce_scatter(_base)?"
)
"""Operations to which every rank gives as many elements, of one type."""


@dataclass(frozen=True, eq=False)
class _Team:
    """A group of ranks; others of its name have other ranks.

    `calls` are those of each rank by number, without sends; `last` is the number of its last one,
    `open` of the first that did not end: calls of a group end in order, and a dump need not hold
    all. From the number in `differ` on, calls differ, and the ranks there are to blame.
    """

    backend: str
    name: str
    words: str
    members: Sequence[int]
    calls: dict[int, dict[int, list[Collective]]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    open: dict[int, int] = field(default_factory=dict)
    differ: dict[int, Collection[int]] = field(default_factory=dict)

    def blamed(self, number: int) -> Collection[int] | None:
        """The ranks to blame for what happens at this number; None if no call differs."""
        return next((ranks for first, ranks in self.differ.items() if number >= first), None)


_At = tuple[_Team, bool, int]
"""A call: its group, whether it is a send or receive, and its number among the like."""


@dataclass(frozen=True)
class _Halt:
    """A call at which a rank waits for others; for none of them if the call itself stands still."""

    at: _At
    call: Collective
    ranks: Collection[int]
    sure: bool = True
    ended: int = 0
    """Ranks that have ended this call, though this one has not."""


class _AllDumps:
    """All dumps together: the groups, and the calls of NCCL that did not end, by rank."""

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self.groups: dict[int, dict[str, Group]] = defaultdict(dict)
        calls: dict[int, dict[Collective, None]] = defaultdict(dict)  # pickle and JSON: once
        for rank, dump in sorted((d.rank, i) for i, d in enumerate(dumps) if d.rank is not None):
            self.groups[rank].update(dumps[dump].groups)
            calls[rank].update(dict.fromkeys(dumps[dump].entries))
        self.teams: dict[tuple[str, str, Sequence[int]], _Team] = {}
        self.open: dict[int, dict[_At, Collective]] = {}
        sending = set()
        for rank, of_rank in calls.items():
            team_of = {
                names: self._team(rank, *names) for names in {(c.backend, c.group) for c in of_rank}
            }
            placed = [(team_of[call.backend, call.group], call) for call in of_rank]
            self.open[rank] = _open_calls(placed)
            for team, is_p2p, number in self.open[rank]:
                if not is_p2p:
                    team.open[rank] = min(number, team.open.get(rank, number))
            sending |= {team for team, call in placed if call.is_p2p}
            for team, call in placed:
                if not call.is_p2p:
                    team.calls.setdefault(rank, {}).setdefault(call.number, []).append(call)
                    team.last[rank] = max(call.number, team.last.get(rank, 0))
        # NCCL's dumps also tell the number of the last call; with sends in a group, it is theirs.
        for team in {team for team in self.teams.values() if team.backend == "nccl"} - sending:
            for rank in team.members:
                told = self.groups.get(rank, {}).get(team.name, Group()).enqueued
                if told is not None:
                    team.last[rank] = max(told, team.last.get(rank, 0))

    def _team(self, rank: int, backend: str, name: str) -> _Team:
        """Gloo's dumps do not tell who is in a group; in the default group is everybody."""
        group = self.groups[rank].get(name, Group())
        words = group.description if group.description not in ("", "undefined") else f"group {name}"
        everybody = range(max(self.groups) + 1) if words == "default_pg" else ()
        members = group.ranks or tuple(everybody)
        return self.teams.setdefault((backend, name, members), _Team(backend, name, words, members))


def findings_of_dumps(dumps: Sequence[Dump]) -> list[Finding]:
    """The causes that these dumps show; none for a job that did not hang."""
    job = _AllDumps(dumps)
    found = [each for team in job.teams.values() for each in _different_call(job, team)]
    found += _causes(job, _waits(job))
    members = {rank for team in job.teams.values() for rank in team.members}
    absent = number_range([*members - job.groups.keys()])
    also = {"without_dump": absent} if absent else {}
    surer = [each for each in found if each.confidence is not Confidence.POSSIBLE]
    return [each.replaced(evidence={**each.evidence, **also}) for each in surer or found]


def _open_calls(placed: Iterable[tuple[_Team, Collective]]) -> dict[_At, Collective]:
    """The calls of NCCL that did not end, the earliest first.

    Calls of a group, and sends between two ranks, end in their order: if a later one has ended, so
    has this one. Calls that torch puts together keep the state "scheduled"; the entry of the whole,
    of the same number, tells whether they ended.
    """
    streams: dict[object, list[tuple[_At, Collective]]] = defaultdict(list)
    ended = set()
    for team, call in placed:
        peers = _PEERS.match(call.operation) if call.is_p2p else None
        at = (team, call.is_p2p, call.p2p_number if call.is_p2p else call.number)
        stream = streams[team, call.is_p2p, peers and frozenset(peers.groups()[1:])]
        if call.state == "completed":
            ended.add(at)
            stream.clear()
        elif team.backend == "nccl":
            stream.append((at, call))
    still = [pair for stream in streams.values() for pair in stream if pair[0] not in ended]
    found: dict[_At, Collective] = {}
    for at, call in sorted(still, key=lambda pair: pair[1].created_ns):
        found.setdefault(at, call)
    return found


# The rules.


def _different_call(job: _AllDumps, team: _Team) -> Iterator[Finding]:
    """Different calls at one number: the fewest ranks are to blame; in a tie none of them.

    NCCL: only calls that hang are looked at, as one that ended did no harm.
    """
    ranks_at: dict[int, list[int]] = defaultdict(list)
    for rank, numbers in team.calls.items():
        for number in numbers:
            ranks_at[number].append(rank)
    hang = {n for rank in team.calls for of, p2p, n in job.open[rank] if of is team and not p2p}
    for number in sorted(hang if team.backend == "nccl" else ranks_at):
        called: dict[object, list[int]] = defaultdict(list)
        for rank in ranks_at[number]:
            called[_shape(team.calls[rank][number])].append(rank)
        if len(called) < 2:
            continue
        most, next_most, *_ = sorted(called.values(), key=len, reverse=True)
        tie = len(most) == len(next_most)
        ranks = sorted(rank for of in called.values() for rank in of if tie or of is not most)
        team.differ[number] = ranks
        words = [
            f"{_text(team.calls[of[0]][number][0])} by {_count(len(of))}"
            for of in sorted(called.values(), key=len)
        ]
        sure = Confidence.CERTAIN if 2 * len(most) > len(ranks_at[number]) else Confidence.LIKELY
        yield Finding(
            kinds.COLLECTIVE_MISMATCH,
            f"call {number} of {team.words}: {', '.join(words)}",
            Where(ranks=tuple(ranks)),
            {"rule": "mismatch", "group": team.name, "number": number},
            confidence=Confidence.POSSIBLE if tie else sure,
        )
        return


def _waits_of_gloo(team: _Team) -> Iterator[tuple[int, _Halt]]:
    """A rank waits for those of a group that called less in it."""
    for rank, numbers in team.calls.items():
        mine = team.last[rank]
        blamed = team.blamed(mine)
        behind = {of for of, number in team.last.items() if number < mine}
        if blamed is not None:
            behind = set() if rank in blamed else {*blamed}
        if behind:
            first = min(team.last[of] for of in behind) + 1
            call = numbers.get(first, numbers[mine])[0]
            yield rank, _Halt((team, False, call.number), call, behind)


def _wait_of_nccl(job: _AllDumps, at: _At, call: Collective, rank: int) -> _Halt | None:
    """Ranks that did not come to the earliest open call of this one.

    If all came and others have ended it, the rank itself is the cause. If none has, it waits for
    those whose GPU is still at an earlier call; and for ranks that no dump tells of if nothing else
    explains it.
    """
    team, is_p2p, number = at
    if is_p2p:
        peers = _PEERS.match(call.operation)
        known = peers and int(peers[3]) < len(team.members)
        return _Halt(at, call, {team.members[int(peers[3])]}) if peers and known else None
    blamed = team.blamed(number)
    if blamed is not None:
        return None if rank in blamed else _Halt(at, call, blamed)
    absent = {of for of in team.members if team.last.get(of, number) < number}
    if absent:
        return _Halt(at, call, absent)
    ended = sum(number < team.open.get(of, number + 1) for of in team.last)
    unknown = {of for of in team.members if of not in team.last}
    if ended or unknown:
        return _Halt(at, call, () if ended else unknown, sure=False, ended=ended)
    return _Halt(at, call, {of for of in team.members if next(iter(job.open[of]), None) != at})


def _waits(job: _AllDumps) -> dict[int, list[_Halt]]:
    """Calls at which each rank waits."""
    waits: dict[int, list[_Halt]] = {rank: [] for rank in job.open}
    for team in job.teams.values():
        for rank, wait in _waits_of_gloo(team) if team.backend != "nccl" else ():
            waits[rank].append(wait)
    alike: dict[object, _Halt | None] = {}
    for rank, calls in job.open.items():
        for at, call in [*calls.items()][:1]:
            key = (at, call.operation if at[1] else rank in (at[0].blamed(at[2]) or ()))
            if key not in alike:
                alike[key] = _wait_of_nccl(job, at, call, rank)
            waits[rank] += filter(None, [alike[key]])
    return waits


def _causes(job: _AllDumps, waits: Mapping[int, list[_Halt]]) -> Iterator[Finding]:
    """The ends of all ways from rank to rank, and the circles that have none."""
    targets = {
        rank: {of for wait in several for of in wait.ranks} for rank, several in waits.items()
    }
    waiting: dict[int, list[int]] = defaultdict(list)
    for rank, several in targets.items():
        for of in several:
            waiting[of].append(rank)
    led: set[int] = set()

    def lead(ends: Sequence[int]) -> None:
        left = [*ends]
        while left:
            rank = left.pop()
            if rank not in led:
                led.add(rank)
                left += waiting[rank]

    blamed = {of for team in job.teams.values() for ranks in team.differ.values() for of in ranks}
    ends = sorted(rank for rank in {*targets, *waiting} if not targets.get(rank))
    lead(ends)
    yield from _folded(
        found
        for rank in ends
        if rank not in blamed
        for found in [_stands_still(job, rank, waits) or _never_came(job, rank, waits)]
        if found
    )
    for rank in sorted(targets):
        if rank not in led:
            way = [rank]
            while (of := min(targets[way[-1]] - led)) not in way:
                way.append(of)
            circle = way[way.index(of) :]
            yield _circle([wait for rank in circle for wait in waits[rank]], circle)
            lead(circle)


def _stands_still(job: _AllDumps, rank: int, waits: Mapping[int, list[_Halt]]) -> Finding | None:
    """NCCL: all came to a call, and this rank did not end it.

    If others have ended it, the GPU of this one, or its link, is the cause. If nobody has: those
    whose GPU did not begin it, while others did; or nobody knows.
    """
    wait = next((wait for wait in waits.get(rank, ()) if not wait.ranks), None)
    if wait is None:
        return None
    team = wait.at[0]
    begun = [of for of in team.last if job.open[of].get(wait.at, wait.call).state == "started"]
    end, confidence = "none ended it", Confidence.POSSIBLE
    if wait.ended:
        end = f"{_count(wait.ended)} ended it; this one did not"
        confidence = Confidence.CERTAIN
    elif 0 < len(begun) < len(team.last):
        if rank in begun:
            return None
        end = f"{_count(len(begun))} began it; the GPU of this one did not"
        confidence = Confidence.LIKELY
    said = f"all ranks came to {_words(wait)}, and {end}"
    return _finding(kinds.COLLECTIVE_UNFINISHED, said, [rank], wait, confidence)


def _never_came(job: _AllDumps, rank: int, waits: Mapping[int, list[_Halt]]) -> Finding | None:
    """A rank for which others wait, while it waits for none: it did not come to where they are.

    A rank without a dump may just have lost its dump, so it is only possible.
    """
    asking = [wait for several in waits.values() for wait in several if rank in wait.ranks]
    if not asking:
        return None
    counts = Counter(wait.at for wait in asking)
    wait = max(asking, key=lambda wait: (wait.sure, not wait.at[1], counts[wait.at]))
    team, is_p2p, _ = wait.at
    said = f"{_count(len(asking))} cannot go on without it, as in {_words(wait)}"
    confidence = Confidence.LIKELY if is_p2p else Confidence.CERTAIN
    if rank not in job.groups or not wait.sure:
        of = "its dump does not tell of this group" if rank in job.groups else "it has no dump"
        said, confidence = f"{said}; {of}", Confidence.POSSIBLE
    elif not is_p2p:
        said += f"; its own last call there is {team.last[rank]}"
    if rank in job.groups and team.backend == "nccl" and not job.open[rank]:
        said += "; nothing of it goes on in any group: its process stopped or does something else"
    return _finding(kinds.COLLECTIVE_MISSING, said, [rank], wait, confidence)


def _circle(waits: Sequence[_Halt], ranks: Sequence[int]) -> Finding:
    """Each waits in one group for the next, and the last one for the first.

    A send and a receive of two ranks that wait for each other are one transfer that stands still.
    """
    said = ", ".join(sorted({*map(_words, waits)}))
    ways = {found[1] for wait in waits if (found := _PEERS.match(wait.call.operation))}
    confidence = Confidence.POSSIBLE if ways else Confidence.LIKELY
    if len(ranks) == 2 and len(ways) == 2:
        said = f"both came to a transfer, and none ended it: {said}"
        return _finding(kinds.COLLECTIVE_UNFINISHED, said, ranks, waits[0], confidence)
    said = f"each waits for the next one: {said}"
    return _finding(kinds.COLLECTIVE_ORDER, said, ranks, waits[0], confidence)


def _finding(
    kind: Kind, said: str, ranks: Sequence[int], wait: _Halt, confidence: Confidence
) -> Finding:
    rule = kind.code.removeprefix("collective-")
    evidence = {"rule": rule, "group": wait.at[0].name, "number": wait.at[2]}
    if wait.call.frame:
        evidence["called_at"] = wait.call.frame
    return Finding(kind, said, Where(ranks=tuple(sorted(ranks))), evidence, confidence=confidence)


def _folded(found: Iterable[Finding]) -> list[Finding]:
    """Findings that say the same, made one for all their ranks."""
    same: dict[object, Finding] = {}
    for each in found:
        key = (each.code, each.message, each.confidence)
        first = same.setdefault(key, each)
        same[key] = first.replaced(where=first.where | each.where)
    return [*same.values()]


def _shape(calls: Sequence[Collective]) -> object:
    """Properties that must be equal on all ranks; calls put together are not all in a dump."""
    if len(calls) > 1:
        return "several"
    call = calls[0]
    same = (sum(map(prod, call.input_sizes)), call.input_dtypes[:1])
    return (call.operation, *(same if _ONE_SIZE.fullmatch(call.operation) else ()))


def _words(wait: _Halt) -> str:
    return f"{_text(wait.call)} in {wait.at[0].words}"


def _text(call: Collective) -> str:
    """A call as people write it: `all_reduce 6 of 1024×8 Float`."""
    sizes = ", ".join("×".join(map(str, size)) or "1" for size in call.input_sizes[:4])
    name = call.operation.partition(" ")[0]
    of = f" of {sizes} {call.input_dtypes[0]}" if sizes and call.input_dtypes else ""
    return f"{name} {call.p2p_number if call.is_p2p else call.number}{of}"


def _count(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks != 1)}"
