"""Do collectives finish, with the right result, on every group that a job would build?

What it checks
--------------
All-reduce, broadcast and barrier on the job's backend, with integer results checked exactly and
several message sizes: over all ranks, over the ranks of each host, and over one rank per host;
then over several groups that live at once, with their collectives interleaved. Every group
attempt runs in processes of its own, under its own deadline.

Why it matters
--------------
A collective has no useful time-out: when one rank dies, freezes or never comes, the others wait
for 10 minutes (NCCL) or 30 minutes (gloo), and the one that finally prints is a victim.

How to fix
----------
collective-hang, group-init-hang: look at the ranks that never came first, then at the network
between the hosts of the group. rank-crashed: the signal and the stack in the evidence say how
it died; SIGKILL is usually the kernel's out-of-memory killer (`dmesg | grep -i oom`).
rank-frozen: state T is a stopped process (`kill -CONT PID`), state D one that waits in the
kernel, mostly for a file system or a driver. collective-wrong-result: take the named rank's
host out of the job and test its GPU and its links.

When it is wrong
----------------
A machine that is so loaded that a small all-reduce takes longer than `--collective-timeout`
looks like a hang. Raise that option and see whether the finding stays.
Not validated on hardware: with gloo every rule has met real ranks and real faults; the NCCL path
has not run on a GPU yet.

References
----------
https://docs.pytorch.org/docs/stable/distributed.html
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Attempt,
    Check,
    Cluster,
    Confidence,
    Context,
    Evidence,
    Exercise,
    Finding,
    Kind,
    Layer,
    Level,
    Outcome,
    OutcomeStatus,
    Round,
    Scope,
    Severity,
    Where,
    attempts_of,
    has_entered,
    number_range,
)

_LONG_WAIT = "the job would wait in its first collective until the process group's time-out"

INIT_FAILED = Kind(
    "group-init-failed",
    Layer.GROUP,
    "A process group cannot be formed",
    "init_process_group or new_group raises on these ranks, so the job stops before its first step",
    "read the error in the evidence; it comes from the backend itself",
)
INIT_HANG = Kind(
    "group-init-hang",
    Layer.GROUP,
    "Forming a process group never ends",
    "some member cannot be reached or never comes; the others wait until the group's time-out",
    "look at the ranks that never entered, then at the network between the hosts of the group",
    by_deadline=True,
)
HANG = Kind(
    "collective-hang",
    Layer.COLLECTIVE,
    "A collective never ends",
    _LONG_WAIT,
    "look at the ranks that never entered, then at the network between the hosts of the group",
    by_deadline=True,
)
FAILED = Kind(
    "collective-failed",
    Layer.COLLECTIVE,
    "A collective raises an error",
    "the same collective in the job would raise as well",
    "read the error in the evidence; it comes from the backend itself",
)
WRONG = Kind(
    "collective-wrong-result",
    Layer.COLLECTIVE,
    "A collective gives a wrong result",
    "the job would train on corrupt gradients without any error",
    "take the named ranks' hosts out of the job; test their GPUs, P2P (ACS, IOMMU) and links",
)
FROZEN = Kind(
    "rank-frozen",
    Layer.COLLECTIVE,
    "A rank stands still during a collective",
    "every other rank of the group waits for it",
    "look at the process: state T is stopped (kill -CONT PID), D waits in the kernel "
    "(file system, driver), else see its stack",
    by_deadline=True,
)
CRASHED = Kind(
    "rank-crashed",
    Layer.COLLECTIVE,
    "A rank dies during a collective",
    "every other rank of the group gets a connection error or waits",
    "SIGKILL: look for the out-of-memory killer in the kernel log (dmesg | grep -i oom); "
    "other signals: see the stack in the evidence",
)

_SIZES = {  # elements of int64
    Level.QUICK: (1,),
    Level.STANDARD: (1, 4096, 262_144),
    Level.FULL: (1, 4096, 262_144, 4_194_304),
}
_VICTIM_WORDS = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "remote process",
    "ncclremoteerror",
    "ncclsystemerror",
)
_MULTI = "multi-group"
_EACH_HOST = "each-host"
_AGAIN = "-again"
_FORMING = ("connect to the store", "init_process_group", "new_group")
_UNSURE = Confidence.POSSIBLE


class Collectives(Check):
    """All-reduce, broadcast and barrier over all kinds of groups."""

    name = "collectives"
    layer = Layer.COLLECTIVE
    scope = Scope.RANK
    cost = "seconds"
    kinds = (INIT_FAILED, INIT_HANG, HANG, FAILED, WRONG, FROZEN, CRASHED)
    level = Level.STANDARD
    together = True
    needs = (Layer.NAME, Layer.ROUTE, Layer.PORT, Layer.RANKS, Layer.DEVICE)

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """World, hosts, across hosts; and, once those were good, several groups at once."""
        deadline_s = cluster.collective_timeout_s
        world = tuple(rank.seat for rank in cluster.present)
        by_host = [
            tuple(rank.seat for rank in cluster.ranks_on(host)) for host in cluster.present_hosts
        ]
        # In order of rank, as torch sorts the members of every group that it builds.
        firsts = tuple(sorted((seats[0] for seats in by_host), key=world.index))
        rounds = [Round("world", (world,), deadline_s)]
        inside = tuple(seats for seats in by_host if len(seats) > 1)
        if len(by_host) > 1 and inside:
            rounds.append(Round(_EACH_HOST, inside, deadline_s))
            rounds.append(Round("across-hosts", (firsts,), deadline_s))
        attempts = attempts_of(cluster, self.name, _EACH_HOST)
        if attempts.get("world") and all(a.is_good for a in attempts["world"]):
            groups = {"world": world, "evens": world[::2], "odds": world[1::2]}
            if len(by_host) > 1:
                groups["across-hosts"] = firsts
            places = {
                name: [world.index(seat) for seat in seats]
                for name, seats in groups.items()
                if seats
            }
            rounds.append(Round(_MULTI, (world,), deadline_s, {"groups": places}))
        # Confirm before blaming: a hang that nobody in particular caused is tried once more.
        for name, found in attempts.items():
            again = tuple(a.seats for a in found if a.is_unexplained)
            if again and not name.endswith(_AGAIN) and name != _MULTI:
                rounds.append(Round(name + _AGAIN, again, deadline_s))
        return rounds

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Build the round's groups, run collectives on them, check every result.

        Returns: `{"steps": [...], "wrong": [{"step", "group", "contributors", "example"}]}`;
        contributors are group ranks.
        """
        import torch
        import torch.distributed as dist

        device = torch.device("cpu")
        if ctx.backend == "nccl":
            device = torch.device("cuda", ctx.launch.local_rank or 0)
            ctx.breadcrumb(f"set device {device}", group=ctx.round)
            torch.cuda.set_device(device)
        assert ctx.peers is not None
        ctx.breadcrumb("connect to the store", group=ctx.round)
        store = ctx.peers.store()
        ctx.breadcrumb("init_process_group", group=ctx.round)
        dist.init_process_group(
            ctx.backend,
            store=store,
            rank=ctx.position,
            world_size=len(ctx.group),
            # Longer than this child may live: the engine's deadline speaks, not gloo's, so that a
            # victim's error never comes before the culprit is seen.
            timeout=datetime.timedelta(seconds=2 * ctx.left() + 60),
        )
        tester = Exercise(ctx.breadcrumb, device)
        if ctx.round != _MULTI:
            tester.alone(ctx.round, None, ctx.position, len(ctx.group), _SIZES[ctx.level])
        else:
            self._interleave(ctx, tester)
        return {"steps": tester.steps, "wrong": tester.wrong}

    @staticmethod
    def _interleave(ctx: Context, tester: Exercise) -> None:
        """Several groups alive at once: built in one order by all, used in turn, then together."""
        import torch.distributed as dist

        mine = {}
        for name, members in ctx.params["groups"].items():
            ctx.breadcrumb("new_group", group=name)
            group = dist.new_group(members)
            if ctx.position in members:
                mine[name] = (group, members.index(ctx.position), len(members))
        for _ in range(2):
            for name, (group, rank, size) in mine.items():
                tester.alone(name, group, rank, size, _SIZES[Level.QUICK])
        tester.together(mine)

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Per round and group: the culprits, if any can be told from the victims."""
        if not cluster.complete:
            return  # without the others' evidence nobody can tell a culprit from a victim
        attempts = attempts_of(cluster, self.name, _EACH_HOST)
        firsts = [a for name, found in attempts.items() if not name.endswith(_AGAIN) for a in found]
        blamed: set[tuple[str, Where]] = set()
        for attempt in firsts:
            for finding in (*_culprits(attempt), *_wrong(attempt)):
                if (finding.code, finding.where) not in blamed:  # in an earlier group already
                    blamed.add((finding.code, finding.where))
                    yield finding
        seconds = {a.seats: a for n, found in attempts.items() if n.endswith(_AGAIN) for a in found}
        open_ = [a for a in firsts if a.is_unexplained or a.is_failed]
        for attempt in open_:
            # A group that contains a smaller one that fails by itself says nothing new.
            if not any(set(other.seats) < set(attempt.seats) for other in open_):
                yield _group_finding(attempt, seconds.get(attempt.seats))


def _culprits(attempt: Attempt) -> Iterator[Finding]:
    """The dead, the stopped, those that never came: all others of the group are victims."""
    for member in attempt.dead:
        how = member.outcome.signal or f"exit code {member.outcome.exit_code}"
        words = f"died by {how} in {_step(member.outcome)} of group {attempt.name}"
        yield Finding(CRASHED, words, member.where, _details(attempt))
    stopped = attempt.stopped
    for member in stopped or attempt.never_came:
        outcome = member.outcome
        words = (
            f"stood still in {_step(outcome)} of group {attempt.name} (process state "
            f"{outcome.state}, kernel wait {outcome.wchan or 'none'})"
        )
        sure = Confidence.CERTAIN if stopped else Confidence.LIKELY
        yield Finding(FROZEN, words, member.where, _details(attempt), confidence=sure)


def _group_finding(attempt: Attempt, again: Attempt | None) -> Finding:
    """A group that fails or hangs while no member is to blame more than the others."""
    if attempt.raised:
        own = [m for m in attempt.raised if not _is_victim(m.outcome)] or attempt.raised
        return Finding(
            INIT_FAILED if own[0].outcome.last_step in _FORMING else FAILED,
            f"{_step(own[0].outcome)} of group {attempt.name}: {_error(own[0].outcome)}",
            _place(own),
            _details(attempt),
            confidence=Confidence.LIKELY if len(own) < len(attempt.members) else _UNSURE,
        )
    flaky = again is not None and again.is_good
    first = attempt.stuck[0].outcome
    words = f"no progress in {_step(first)} of group {attempt.name} within {first.duration_s:.0f} s"
    words += "; it finished when tried again" if flaky else "; all members had entered"
    return Finding(
        INIT_HANG if all(m.outcome.last_step in _FORMING for m in attempt.stuck) else HANG,
        words,
        _place(attempt.members),
        _details(attempt),
        severity=Severity.WARN if flaky else Severity.FAIL,
        confidence=_UNSURE,
    )


def _wrong(attempt: Attempt) -> Iterator[Finding]:
    """One finding for all who saw a wrong result, naming who gave it where that can be told."""
    seen = [(m, bad) for m in attempt.members for bad in m.outcome.facts.get("wrong", ())]
    if not seen:
        return
    # Contributors are group ranks of the round's own group; members stand in order of rank.
    own = {
        giver for _, bad in seen for giver in bad["contributors"] if bad["group"] == attempt.name
    }
    givers = [attempt.members[giver] for giver in sorted(own) if giver < len(attempt.members)]
    first = seen[0][1]
    yield Finding(
        WRONG,
        f"{first['step']} of group {first['group']}: {first['example']}",
        _place(givers or [m for m, _ in seen]),
        {"round": attempt.name, "seen_by": sorted({m.rank.rank or 0 for m, _ in seen})},
        confidence=Confidence.LIKELY if givers else _UNSURE,
    )


def _step(outcome: Outcome) -> str:
    return outcome.last_step or "start"


def _error(outcome: Outcome) -> str:
    lines = [line for line in outcome.reason.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no error text"


def _is_victim(outcome: Outcome) -> bool:
    return any(word in outcome.reason.lower() for word in _VICTIM_WORDS)


def _place(members: Sequence[Evidence]) -> Where:
    where = Where()
    for member in members:
        where |= member.where
    return where


def _details(attempt: Attempt) -> dict[str, Any]:
    """Who entered, who finished, who never came, and what each that did not finish was doing."""
    ranks = {m.rank.rank or 0: m.outcome for m in attempt.members}
    done = [rank for rank, outcome in ranks.items() if outcome.status is OutcomeStatus.OK]
    started = [rank for rank, outcome in ranks.items() if has_entered(outcome)]
    return {
        "round": attempt.name,
        "entered": number_range(sorted({*started, *done})),
        "finished": number_range(done),
        "never_came": number_range(sorted(set(ranks) - set(started) - set(done))),
        "doing": {
            str(rank): {
                "status": outcome.status.value,
                "step": outcome.last_step,
                "state": outcome.state,
                "stack": outcome.stack[:1500],
                "error": _error(outcome) if outcome.reason else "",
            }
            for rank, outcome in ranks.items()
            if outcome.status is not OutcomeStatus.OK
        },
    }
