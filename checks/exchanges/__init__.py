"""Do all-gather, reduce-scatter, all-to-all and send/receive finish, with the right result?

What it checks
--------------
One group of all ranks, on the job's backend. In it, one after the other: all-gather,
reduce-scatter, all-to-all, and a ring in which every rank sends to the next one, and then to the
previous one; each with 4 KiB, 64 KiB and 1 MiB (`--level full`: 16 MiB, too) of integers, whose
exact result is known. On a slow link the larger ones are made smaller, so that each takes half a
second at most. The check runs after the all-reduce of all ranks was good (check `collectives`). A
step that the backend of this torch lacks is left out, with the reason in the facts.

Why it matters
--------------
An all-reduce uses some connections only, mostly those between neighbours. Sharded training (FSDP,
ZeRO) uses all-gather and reduce-scatter, experts use all-to-all, pipelines use send/receive: other
algorithms, and connections between all pairs of ranks. A broken path between two of them, or a
fault in one algorithm, stops the job although every all-reduce is good.

How to fix
----------
collective-hang, group-init-hang: look first at the ranks that never arrived, then at the network
between the hosts of the group: with all-to-all, every host sends to every other one, with NCCL on
each of its rails. collective-failed: read the error in the evidence. collective-wrong-result: take
the named rank's host out of the job and test its GPU and its links; `parts` in the evidence says
from which rank to which ranks the wrong data went.

When it is wrong
----------------
A machine under heavy load, on which a small collective takes longer than `--collective-timeout`,
looks like a hang. Raise that option and see whether the finding stays.
Where a step hangs and no rank is seen to be the cause, all ranks are named: smaller groups are not
tried, as `collectives` does. Where wrong data went from one rank to one other only, both are named.
A backend may pass data on through other ranks (NCCL does), or change it where it adds: then the
rank that sent it may be named in place of the one that passed it on.
Where only some ranks have a torch that lacks a step, the others wait for them: a hang.
Not validated on hardware: with gloo every step has met real ranks; the NCCL path has not run on a
GPU yet.

References
----------
https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/p2p.html
https://github.com/NVIDIA/nccl-tests
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nccl_doctor.api import Check, Cluster, Context, Finding, Layer, Level, Round, Scope, Skip
from nccl_doctor.toolkit.groups.attempts import GROUP_READS, attempt_deadline, attempts_of
from nccl_doctor.toolkit.groups.culprits import judge_groups, rounds_again
from nccl_doctor.toolkit.groups.exercise import ExerciseFacts
from nccl_doctor.toolkit.groups.forming import form_world
from nccl_doctor.toolkit.groups.kinds import GROUP_KINDS, GROUP_NEEDS

from .steps import SIZES, Exchange


class ExchangeFacts(ExerciseFacts):
    """`lacking`: step → error of the steps that this backend does not have."""

    lacking: dict[str, str]


class Exchanges(Check):
    """All-gather, reduce-scatter, all-to-all and send/receive over all ranks."""

    name = "exchanges"
    layer = Layer.COLLECTIVE
    scope = Scope.RANK
    cost = "seconds"
    kinds = GROUP_KINDS
    reads = GROUP_READS
    level = Level.STANDARD
    together = True
    forms_groups = True
    needs = GROUP_NEEDS

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """All ranks once; again where that hung without a visible reason."""
        if cluster.world_size < 2:
            raise Skip("there is one rank, and no other to exchange data with")
        seats = tuple(rank.seat for rank in cluster.present)
        if len(seats) < 2:
            return []
        deadline_s = attempt_deadline(cluster)
        again = rounds_again(attempts_of(cluster, self.name), deadline_s)
        return [Round("world", (seats,), deadline_s), *again]

    def observe(self, ctx: Context) -> ExchangeFacts:
        """Form the group, run every step on it, check every result.

        Raises:
            Skip: this backend has none of the steps.
        """
        device = form_world(ctx)
        tester = Exchange(ctx.breadcrumb, device, ctx.round, ctx.position, len(ctx.group))
        tester.run(SIZES[ctx.level])
        if not tester.steps:
            raise Skip("; ".join(tester.lacking.values()))
        return {**tester.facts(), "lacking": tester.lacking}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on the culprits, where they differ from the victims."""
        if cluster.complete:  # else culprits cannot be told from victims
            yield from judge_groups(attempts_of(cluster, self.name))
