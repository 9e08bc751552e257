"""Do several process groups in one job work, in turn and at the same time?

What it checks
--------------
A default group over all ranks, then further groups by new_group on all ranks in the same order
(every second rank, one rank per host), used in turn and then with one collective in flight on each.
Integer results are checked exactly. It runs in processes of its own, under its own deadline, once
the collectives of all ranks were good.

Why it matters
--------------
Jobs with tensor, pipeline or sequence parallelism, or with a trainer beside inference engines, form
many groups. They can hang although every group by itself is good.

How to fix
----------
Call new_group on every rank of the default group, in the same order, with the same lists, also on
ranks that are not members.

When it is wrong
----------------
A machine that is so loaded that small collectives take longer than `--collective-timeout` looks
like a hang. Raise that option and see whether the finding stays.
Not validated on hardware: the NCCL path has not run on a GPU yet.

References
----------
https://docs.pytorch.org/docs/stable/distributed.html#groups
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    GROUP_KINDS,
    NEW_GROUP,
    Check,
    Cluster,
    Context,
    Exercise,
    Finding,
    Layer,
    Level,
    Round,
    Scope,
    attempts_of,
    form_world,
    judge_groups,
)

_ELEMENTS = (1,)


class Groups(Check):
    """Several groups alive at once."""

    name = "groups"
    layer = Layer.COLLECTIVE
    scope = Scope.RANK
    cost = "seconds"
    kinds = GROUP_KINDS
    level = Level.STANDARD
    together = True
    needs = (
        Layer.NAME,
        Layer.ROUTE,
        Layer.PORT,
        Layer.RANKS,
        Layer.DEVICE,
        Layer.GROUP,
        Layer.COLLECTIVE,
    )

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round of all ranks, with the ranks of every further group."""
        world = tuple(rank.seat for rank in cluster.present)
        hosts = cluster.present_hosts
        firsts = [seat for host in hosts for seat in [cluster.ranks_on(host)[0].seat]]
        groups = {"world": world, "evens": world[::2], "odds": world[1::2]}
        if len(hosts) > 1:
            groups["across-hosts"] = tuple(sorted(firsts, key=world.index))
        places = {
            name: [world.index(seat) for seat in seats] for name, seats in groups.items() if seats
        }
        return [Round("in-turn", (world,), cluster.collective_timeout_s, {"groups": places})]

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Several groups alive at once: built in one order by all, used in turn, then together.

        Returns: as `Exercise.facts`.
        """
        import torch.distributed as dist

        tester = Exercise(ctx.breadcrumb, form_world(ctx))
        mine = {}
        for name, members in ctx.params["groups"].items():
            ctx.breadcrumb(NEW_GROUP, group=name)
            group = dist.new_group(members)
            if ctx.position in members:
                mine[name] = (group, members.index(ctx.position), len(members))
        for _ in range(2):
            for name, (group, rank, size) in mine.items():
                tester.alone(name, group, rank, size, _ELEMENTS)
        tester.together(mine)
        return tester.facts()

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Per round: the culprits, if any can be told from the victims."""
        if cluster.complete:
            yield from judge_groups(attempts_of(cluster, self.name))
