"""Do collectives finish, with the right result, on every group that a job would build?

What it checks
    All-reduce, broadcast and barrier on the job's backend, with integer results checked exactly and
    several message sizes: over all ranks, over the ranks of each host, and over one rank per host;
    then over several groups that live at once, with their collectives interleaved. Every group
    attempt runs in processes of its own, under its own deadline.

Why it matters
    A collective has no useful time-out: when one rank dies, freezes or never comes, the others wait
    for 10 minutes (NCCL) or 30 minutes (gloo), and the one that finally prints is a victim.

How to fix
    collective-hang, group-init-hang: look at the ranks that never came first, then at the network
    between the hosts of the group. rank-crashed: the signal and the stack in the evidence say how
    it died; SIGKILL is usually the kernel's out-of-memory killer (`dmesg | grep -i oom`).
    rank-frozen: state T is a stopped process (`kill -CONT PID`), state D one that waits in the
    kernel, mostly for a file system or a driver. collective-wrong-result: take the named rank's
    host out of the job and test its GPU and its links.

When it is wrong
    A machine that is so loaded that a small all-reduce takes longer than `--collective-timeout`
    looks like a hang. Raise that option and see whether the finding stays.

References
    https://docs.pytorch.org/docs/stable/distributed.html
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
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
    Where,
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
)
HANG = Kind(
    "collective-hang",
    Layer.COLLECTIVE,
    "A collective never ends",
    _LONG_WAIT,
    "look at the ranks that never entered, then at the network between the hosts of the group",
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
            rounds.append(Round("each-host", inside, deadline_s))
            rounds.append(Round("across-hosts", (firsts,), deadline_s))
        outcomes = [item.outcome.status for item in cluster.evidence(self.name, "world")]
        if len(outcomes) == len(world) and set(outcomes) == {OutcomeStatus.OK}:
            groups = {"world": world, "evens": world[::2], "odds": world[1::2]}
            if len(by_host) > 1:
                groups["across-hosts"] = firsts
            places = {
                name: [world.index(seat) for seat in seats]
                for name, seats in groups.items()
                if seats
            }
            rounds.append(Round(_MULTI, (world,), deadline_s, {"groups": places}))
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
        rounds: dict[str, list[Evidence]] = {}
        for item in cluster.evidence(self.name):
            rounds.setdefault(item.round, []).append(item)
        for name, evidence in rounds.items():
            for members in _groups(name, evidence):
                yield from _judge_group(cluster, name, members)


def _groups(name: str, evidence: Sequence[Evidence]) -> list[list[Evidence]]:
    """The groups of a round: one per host for `each-host`, else one."""
    if name != "each-host":
        return [list(evidence)]
    hosts: dict[int, list[Evidence]] = {}
    for item in evidence:
        hosts.setdefault(item.host.id, []).append(item)
    return list(hosts.values())


def _judge_group(cluster: Cluster, name: str, members: Sequence[Evidence]) -> Iterator[Finding]:
    """Culprits first: the dead, the frozen, the wrong. Only without any is the group blamed."""
    dead = [m for m in members if m.outcome.status is OutcomeStatus.DIED]
    stuck = [m for m in members if m.outcome.status is OutcomeStatus.HUNG]
    raised = [m for m in members if m.outcome.status is OutcomeStatus.RAISED]
    silent = [m for m in members if m.outcome.status is OutcomeStatus.SILENT]
    frozen = [m for m in stuck if m.outcome.state in ("T", "t", "D")]
    behind = [] if dead or frozen or silent else _behind(stuck)
    for member in dead:
        how = member.outcome.signal or f"exit code {member.outcome.exit_code}"
        yield Finding(
            CRASHED,
            f"died by {how} in {_step(member.outcome)} of group {name}",
            member.where,
            _details(name, members),
        )
    for member in frozen or behind:
        outcome = member.outcome
        state = f"process state {outcome.state}, kernel wait {outcome.wchan or 'none'}"
        yield Finding(
            FROZEN,
            f"stood still in {_step(outcome)} of group {name} ({state})",
            member.where,
            _details(name, members),
            confidence=Confidence.CERTAIN if member in frozen else Confidence.LIKELY,
        )
    yield from _wrong(cluster, name, members)
    if dead or frozen or behind or silent:
        return  # the others are victims
    if raised:
        own = [m for m in raised if not _is_victim(m.outcome)] or raised
        in_group = "init_process_group" in own[0].outcome.last_step
        yield Finding(
            INIT_FAILED if in_group else FAILED,
            f"{_step(own[0].outcome)} of group {name}: {_error(own[0].outcome)}",
            _place(own),
            _details(name, members),
            confidence=Confidence.LIKELY if len(own) < len(members) else Confidence.POSSIBLE,
        )
    elif stuck:
        early = all(m.outcome.last_step in _FORMING for m in stuck)
        yield Finding(
            INIT_HANG if early else HANG,
            f"no progress in {_step(stuck[0].outcome)} of group {name} "
            f"within {stuck[0].outcome.duration_s:.0f} s; all members had entered",
            _place(members),
            _details(name, members),
            confidence=Confidence.POSSIBLE,
        )


_FORMING = ("connect to the store", "init_process_group", "new_group")


def _behind(stuck: Sequence[Evidence]) -> list[Evidence]:
    """Stuck ranks at an earlier step than the others: those the others wait for."""
    steps = {id(m): len(m.outcome.breadcrumbs) for m in stuck}
    last = max(steps.values(), default=0)
    late = [m for m in stuck if steps[id(m)] < last]
    return late if len(late) * 2 <= len(stuck) else []


def _wrong(cluster: Cluster, name: str, members: Sequence[Evidence]) -> Iterator[Finding]:
    """One finding for all who saw a wrong result, naming who gave it where that can be told."""
    seen = [(m, bad) for m in members for bad in m.outcome.facts.get("wrong", ())]
    if not seen:
        return
    in_order = [m for m in cluster.present if any(m is item.rank for item in members)]
    givers = {giver for _, bad in seen for giver in bad["contributors"] if bad["group"] == name}
    places = [Evidence.rank_place(in_order[giver]) for giver in sorted(givers)]
    where = Where()
    for place in places or [m.where for m, _ in seen]:
        where |= place
    first = seen[0][1]
    yield Finding(
        WRONG,
        f"{first['step']} of group {first['group']}: {first['example']}",
        where,
        {"round": name, "seen_by": sorted({m.rank.rank or 0 for m, _ in seen})},
        confidence=Confidence.LIKELY if places else Confidence.POSSIBLE,
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


def _details(name: str, members: Sequence[Evidence]) -> dict[str, Any]:
    """Who entered, who finished, who never came, and what each that did not finish was doing."""
    ranks = {m.rank.rank or 0: m.outcome for m in members}
    done = [rank for rank, outcome in ranks.items() if outcome.status is OutcomeStatus.OK]
    started = [rank for rank, outcome in ranks.items() if len(outcome.breadcrumbs) > 1]
    return {
        "round": name,
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
