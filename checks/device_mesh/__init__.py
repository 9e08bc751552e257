"""Does every group of the job's device mesh work, and does the mesh fit the ranks and the hosts?

What it checks
--------------
With `--mesh dp=2,sp=2,tp=2` (any names, outermost first): whether the sizes multiply to the number
of ranks, or to fewer, which leaves ranks without a group; how each dimension is placed on the
hosts; and whether every group of every dimension gives exact results. The mesh is built with
`init_device_mesh` over all ranks, in its own processes; first one dimension is used after the
other, then all at once, with a collective in flight on each.

Why it matters
--------------
Sizes that do not multiply to the number of ranks stop the job in `init_device_mesh`. A tensor
parallel dimension exchanges data several times in every layer: across hosts it runs at the speed of
the network. A group that hangs blocks groups of other dimensions, so the rank that prints is rarely
in the group at fault.

How to fix
----------
mesh-does-not-divide: take one of the sizes that the finding names, or start as many ranks as the
mesh needs. mesh-crosses-hosts: order the dimensions so that the tensor parallel one is innermost
and its size divides the ranks of each host. For all other findings look at the named group: its
ranks, then the network between its hosts.

When it is wrong
----------------
The check assumes ranks in row-major order, as `init_device_mesh` places them; a job that numbers
its groups differently (Megatron-LM can) has to give the mesh in that order. A dimension counts as
tensor parallel by its name (tp, tensor, mp, model, …); if there is none, the innermost one is
judged. With a torch that has no `init_device_mesh` (before 2.2), `new_group` makes the groups in
the same order. A machine under heavy load, on which small collectives take longer than
`--collective-timeout`, looks like a hang. Not validated on hardware: the NCCL path has not run on a
GPU yet.

References
----------
https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.device_mesh.init_device_mesh
https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    Level,
    Round,
    Scope,
    Severity,
    Skip,
    Step,
    Untested,
    shell,
)
from nccl_doctor.toolkit.groups.attempts import GROUP_READS, attempt_deadline, attempts_of
from nccl_doctor.toolkit.groups.culprits import judge_groups, rounds_again
from nccl_doctor.toolkit.groups.exercise import Exercise
from nccl_doctor.toolkit.groups.forming import form_world, stay_until_all_have_formed_it
from nccl_doctor.toolkit.groups.kinds import GROUP_KINDS, GROUP_NEEDS
from nccl_doctor.toolkit.mesh import (
    mesh_in_words,
    mesh_size,
    nearest_meshes,
    own_groups,
    ranks_in_words,
)

from .blame import narrow_to_mesh
from .build import build_mesh
from .places import mesh_on_hosts

MESH_DOES_NOT_DIVIDE = Kind(
    "mesh-does-not-divide",
    Layer.GROUP,
    "The sizes of the device mesh do not multiply to the number of ranks",
    "init_device_mesh raises where the mesh needs more ranks than there are, so the job stops "
    "before its first step",
    "take sizes whose product is the number of ranks",
    effects=(Effect.JOB_ONLY,),
)
_SMALLER = MESH_DOES_NOT_DIVIDE.variant(
    title="The device mesh is smaller than the job",
    why="torch allows it: ranks beyond the mesh get no coordinate and no group, and do nothing "
    "unless the job gives them other work.",
)
MESH_CROSSES_HOSTS = Kind(
    "mesh-crosses-hosts",
    Layer.SPEED,
    "A dimension of the device mesh crosses hosts",
    "its collectives run at the speed of the network, not of the links inside a host",
    "make the tensor parallel dimension the innermost one, with a size that divides the ranks of "
    "each host",
    Severity.INFO,
    effects=(Effect.JOB_ONLY,),
)

_MESH, _AT_ONCE = "mesh", "at-once"
_ELEMENTS = (1, 4096)


class DeviceMesh(Check):
    """Every group of the job's mesh: arithmetic, place and collectives."""

    name = "device_mesh"
    layer = Layer.COLLECTIVE
    scope = Scope.RANK
    cost = "seconds"
    kinds = (*GROUP_KINDS, MESH_DOES_NOT_DIVIDE, MESH_CROSSES_HOSTS)
    reads = GROUP_READS
    level = Level.STANDARD
    together = True
    forms_groups = True
    needs = GROUP_NEEDS

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """The rounds: one dimension after the other; if that works, all at once."""
        if not cluster.job.mesh:
            raise Skip("--mesh is not given: the device mesh of the job is unknown")
        deadline_s = attempt_deadline(cluster, 1 + len(cluster.job.mesh))
        world = tuple(rank.seat for rank in cluster.present)
        if not (world and cluster.complete):
            return []
        if mesh_size(cluster.job.mesh) > cluster.world_size or cluster.absent:
            return []
        held = attempts_of(cluster, self.name)
        rounds = [Round(_MESH, (world,), deadline_s)]
        if held.get(_MESH) and all(attempt.is_good for attempt in held[_MESH]):
            rounds.append(Round(_AT_ONCE, (world,), deadline_s))
        rounds += rounds_again(held, deadline_s)
        return [replace(each, params={"mesh": cluster.job.mesh}) for each in rounds]

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Build the mesh over all ranks and use this rank's groups.

        Returns: as `Exercise.facts`; and `mesh`, `built_by` (the call), `groups` (the ranks of this
        rank's group, by dimension).
        """
        # The mesh of the coordinator: ranks that use different meshes would never form its groups.
        mesh = [(name, size) for name, size in ctx.params.get("mesh", ())]
        if mesh_size(mesh) > len(ctx.group):
            raise Untested(f"{mesh_in_words(mesh)} does not fit {len(ctx.group)} ranks")
        device = form_world(ctx)
        mine = own_groups(mesh, ctx.position) if ctx.position < mesh_size(mesh) else []
        built_by, handles = build_mesh(ctx, mesh, device.type)
        groups = {
            group.name: (handle, group.ranks.index(ctx.position), len(group.ranks))
            for group, handle in zip(mine, handles, strict=True)
        }
        tester = Exercise(ctx.breadcrumb, device)
        if ctx.round.startswith(_AT_ONCE):
            tester.together(groups)
        else:
            for name, (handle, rank, size) in groups.items():
                tester.alone(name, handle, rank, size, _ELEMENTS)
        stay_until_all_have_formed_it(ctx)  # a rank outside of the mesh is done at once
        return {
            **tester.facts(),
            "mesh": mesh_in_words(mesh),
            "built_by": built_by,
            "groups": {group.dimension: ranks_in_words(group.ranks) for group in mine},
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on the sizes, then on the hosts of each dimension, then on groups that fail."""
        mesh = cluster.job.mesh
        if not mesh or not _knows_size(cluster):
            return
        if mesh_size(mesh) != cluster.world_size:
            yield _does_not_divide(cluster)
        if (
            mesh_size(mesh) <= cluster.world_size and cluster.complete
        ):  # else culprits cannot be told from victims
            yield from _on_hosts(cluster)
            narrowed = narrow_to_mesh(attempts_of(cluster, self.name), mesh)
            for finding in judge_groups(narrowed):
                evidence = {**finding.evidence, "mesh": mesh_in_words(mesh)}
                yield finding.replaced(evidence=evidence)


def _knows_size(cluster: Cluster) -> bool:
    """True if the expected number of ranks is known: a launch states it, or all ranks signed in."""
    claims = (rank.launch.world_size for rank in cluster.present if rank.launch)
    return cluster.complete or cluster.world_size in claims


def _does_not_divide(cluster: Cluster) -> Finding:
    mesh, world = cluster.job.mesh, cluster.world_size
    near = [mesh_in_words(other) for other in nearest_meshes(mesh, world)]
    needed = mesh_size(mesh)
    left = f": {ranks_in_words(range(needed, world))} in no group" if needed < world else ""
    return Finding(
        _SMALLER if left else MESH_DOES_NOT_DIVIDE,
        f"{mesh_in_words(mesh)} needs {needed} ranks, the job has {world}{left}; "
        f"nearest meshes that fit: {' or '.join(near)}",
        evidence={
            "mesh": mesh_in_words(mesh),
            "needs": needed,
            "world_size": world,
            "nearest": near,
        },
        fix=Fix(
            Step(shell("# --mesh {}", near[0]), note="and the same sizes in the job"),
            alternatives=[f"start {needed} ranks"],
        ),
        severity=Severity.WARN if left else None,
    )


def _on_hosts(cluster: Cluster) -> Iterator[Finding]:
    """One finding for a mesh on several hosts: how each dimension is placed on them."""
    lies = mesh_on_hosts(cluster)
    if lies is None:
        return
    if lies.trouble:
        message, severity = f"{lies.trouble} ({lies.words})", Severity.WARN
    else:
        message, severity = lies.words, Severity.INFO
    yield Finding(
        MESH_CROSSES_HOSTS, message, evidence=lies.figures, fix=lies.fix, severity=severity
    )
