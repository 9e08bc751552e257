"""Do collectives finish, with the right result, on every group that a job would build?

What it checks
--------------
All-reduce, broadcast and barrier on the job's backend, with several message sizes (up to 2 MiB,
with `--level full` 32 MiB; on a slow link what takes half a second at most) and integer results
that are checked exactly: over all ranks; with NCCL, which takes other ways there, also over the
ranks of each host and over one rank per host. (Gloo connects every pair of ranks in the group of
all, and smaller groups take the same ways.) Every attempt of a group runs in its own processes,
under its own deadline. Check `groups` tests several groups at once.
Where the group of all ranks hangs or fails and no rank is seen to be the cause, smaller groups find
it: first every host alone, then halves of the hosts side by side, down to the host that works with
no other, to the two that do not work together, or to the rank. docs/isolation.md describes the
method, and what it needs for up to 10,000 hosts.
With NCCL, one rank of each host first forms a group of itself alone (`first`): no network takes
part in it, and it shows how long a communicator takes to start on that host.

Why it matters
--------------
A collective has no useful time-out: when one rank dies, freezes or never arrives, the others wait
for 10 minutes (NCCL) or 30 minutes (gloo), and the rank that finally prints an error is a victim.

How to fix
----------
collective-hang, group-init-hang: look first at the ranks that never arrived, then at the network
between the hosts of the group. rank-crashed: the signal and the stack in the evidence show how it
died; SIGKILL usually comes from the kernel's out-of-memory killer (`dmesg | grep -i oom`).
rank-frozen: state T is a stopped process (`kill -CONT PID`), state D a process that waits in the
kernel, mostly for a file system or a driver. collective-wrong-result: take the named rank's host
out of the job and test its GPU and its links. group-start-slow: keep the JIT cache of the GPU
driver (~/.nv/ComputeCache, or CUDA_CACHE_PATH), install an NCCL that has code for the GPU, turn
persistence mode on.

When it is wrong
----------------
A machine under heavy load, on which a small all-reduce takes longer than `--collective-timeout`,
looks like a hang. Raise that option and see whether the finding stays. With NCCL every attempt
gets extra time. For the GPU driver, which starts again for each process without persistence mode:
as much as the slowest rank needed in `backend_device` and `gpu_work`, at most 60 s; 25 s where
neither ran. For the communicator: 60 s until a group has finished; then as much as the last group
of all ranks (before it: `first`) took, if that was more than 5 s. For each further group of a rank:
twice the time of the group of all ranks, at most `--collective-timeout`. For the number of ranks:
1 s for 200. --timeout limits all of it: where the first communicator takes a minute, a second run
finds the JIT cache filled, or give the run a longer --timeout.
A first communicator that is slow is only information (group-start-slow). That the driver compiled
code for the GPU is concluded from the times: it may also have read libraries from a slow disk.
Isolation accepts a smaller group as good when it finishes. NCCL does not connect every pair of a
group; for a broken link between hosts that are not neighbours it may find only that no smaller
group fails. Confidence `certain` means: each place named fails with others that work.
Not validated on hardware: with gloo every rule has met real ranks and real faults; the NCCL path
has not run on a GPU yet.

References
----------
https://docs.pytorch.org/docs/stable/distributed.html
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
https://github.com/NVIDIA/nccl/issues/1646
https://github.com/NVIDIA/nccl/issues/534
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nccl_doctor.api import Check, Cluster, Context, Finding, Layer, Level, Round, Scope, Setup
from nccl_doctor.toolkit.groups.attempts import (
    FIRST,
    GROUP_READS,
    WORLD,
    Attempt,
    attempt_deadline,
    attempts_of,
)
from nccl_doctor.toolkit.groups.culprits import judge_groups, rounds_again
from nccl_doctor.toolkit.groups.exercise import SIZES, Exercise, ExerciseFacts
from nccl_doctor.toolkit.groups.forming import form_world
from nccl_doctor.toolkit.groups.kinds import GROUP_KINDS

from .first import START_SLOW, first_round, judge_first, without_end
from .isolation import is_isolated, judge_isolation, rounds_of_isolation


class Collectives(Check):
    """All-reduce, broadcast and barrier over all ranks, inside hosts and across them."""

    name = "collectives"
    layer = Layer.COLLECTIVE
    scope = Scope.RANK
    cost = "seconds"
    kinds = (*GROUP_KINDS, START_SLOW)
    reads = tuple(sorted({*GROUP_READS, "gpu_state"} - {name}))
    level = Level.STANDARD
    together = True
    forms_groups = True
    needs = (Layer.NAME, Layer.ROUTE, Layer.PORT, Layer.RANKS, Layer.DEVICE)

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """The rounds: the world, and again what hung without a visible reason; with NCCL before it
        one rank of each host alone, and after it inside hosts and across them. Where the world
        failed without a visible cause: the rounds that isolate it.
        """
        deadline_s = attempt_deadline(cluster)
        attempts = attempts_of(cluster, self.name)
        world = tuple(rank.seat for rank in cluster.present)
        if cluster.backend == "nccl" and len(world) > 1 and not attempts:
            return [first_round(cluster, deadline_s)]
        if without_end(attempts.pop(FIRST, ())):
            return []  # a group of all would wait for these as well
        rounds = [Round(WORLD, (world,), deadline_s)]
        if WORLD not in attempts:
            return rounds
        if is_isolated(cluster, attempts):
            return [*rounds, *rounds_of_isolation(cluster, attempts)]
        if cluster.backend == "nccl":
            rounds += _parts(cluster, world, deadline_s)
        rounds += rounds_again(attempts, deadline_s)
        return rounds

    def observe(self, ctx: Context) -> ExerciseFacts:
        """Form the round's group, run collectives on it, check every result."""
        tester = Exercise(ctx.breadcrumb, form_world(ctx))
        if ctx.round == FIRST:
            tester.reduce(ctx.round, None, ctx.position, len(ctx.group))
        else:
            tester.alone(ctx.round, None, ctx.position, len(ctx.group), SIZES[ctx.level])
        return tester.facts()

    def sections(self, cluster: Cluster) -> Iterator[Setup]:
        """Number of groups that computed what they should."""
        rounds = attempts_of(cluster, self.name)
        groups = [each for name, held in rounds.items() if name != FIRST for each in held]
        good = [len(each.members) for each in groups if _is_exact(each)]
        if good:
            which = "all" if len(good) == len(groups) else f"{len(good)} of {len(groups)}"
            words = f"bit-exact in {which} groups tested, of up to {max(good)} ranks"
            yield Setup("results", words, cluster.hosts[0].id)

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on the culprits of each round and group, where they differ from the victims, and
        on slow starts.
        """
        if not cluster.complete:  # culprits cannot be told from victims
            return
        found = attempts_of(cluster, self.name)
        yield from judge_first(cluster, found.pop(FIRST, ()))
        attempts: Mapping[str, Sequence[Attempt]] = found
        if is_isolated(cluster, attempts):
            attempts, findings = judge_isolation(cluster, attempts)
            yield from findings
        yield from judge_groups(attempts)


def _parts(cluster: Cluster, world: tuple[int, ...], deadline_s: float) -> Iterator[Round]:
    """Rounds of parts of the world, if hosts have several ranks: inside hosts, and across them."""
    by_host = [
        tuple(rank.seat for rank in cluster.ranks_on(host)) for host in cluster.present_hosts
    ]
    inside = tuple(seats for seats in by_host if len(seats) > 1)
    if len(by_host) > 1 and inside:
        yield Round("each-host", inside, deadline_s)
        # In order of rank, as torch sorts the members of every group that it builds.
        of_hosts = {seats[0] for seats in by_host}
        firsts = tuple(seat for seat in world if seat in of_hosts)
        yield Round("across-hosts", (firsts,), deadline_s)


def _is_exact(group: Attempt) -> bool:
    return group.is_good and not any(m.outcome.facts.get("wrong") for m in group.members)
