"""Can a trainer form a side group with inference engines, and does training continue beside it?

What it checks
--------------
The weight synchronisation of RLHF jobs, as open-instruct and OpenRLHF do it between the trainer and
its vLLM engines. All ranks but the last form the default group of a training job; the last one
plays the engine and never joins it. Rank 0 serves its own store at a free port, and the two form a
side group over it with torch's private helper, as those frameworks do. Then broadcasts and
all-reduces on the side group alternate with the trainers' own, with one of each in flight at the
end. Results are checked exactly. With NCCL this is done twice: with the default group unbound, and
bound to a device (`device_id=`), each in new processes with their own deadline. If a torch that
binds by default hangs, a third round removes the binding while the side group is formed.

It runs if the job has such a group (`--groups weight-sync`) or with `--level full`, on two or more
ranks.

Why it matters
--------------
If a job binds its ranks to devices, its default group passes its communicator on to every later
group, by a split that all its ranks must join. The engine is in no such group, and the other
trainers are not in the side group: rank 0 waits for them forever in its first weight
synchronisation, and the others time out in the next training step. DeepSpeed binds since 0.17.3.

How to fix
----------
device-id-multi-group-hang: form the default group unbound, before DeepSpeed does
(`torch.distributed.init_process_group` without `device_id`; torch before 2.15). torch 2.15 binds by
default: export TORCH_DIST_USE_NCCL2=0, or set `bound_device_id` of the default group to None while
the side group is formed. group-init-failed: the error shows the address at which rank 0's store was
tried; that port is an ephemeral one, so open those between trainers and engines.

When it is wrong
----------------
One rank plays one engine: a group with several engines, or with engines on hosts that are not part
of this run, is not tried. A machine that is so loaded that small collectives take longer than
`--collective-timeout` looks like a hang. Raise that option and see whether the finding remains.
Not validated on hardware: with gloo the rules were tested with real ranks and real faults; the hang
of a bound default group is known from the source of torch and from reports of those frameworks.

References
----------
https://github.com/allenai/open-instruct/pull/1311
https://github.com/NVIDIA-NeMo/RL/pull/3189
https://github.com/sgl-project/sglang/issues/4096
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Check, Cluster, Context, Finding, Layer, Level, Round, Scope, Skip
from nccl_doctor.toolkit.groups.attempts import GROUP_READS, attempt_deadline, attempts_of
from nccl_doctor.toolkit.groups.culprits import rounds_again
from nccl_doctor.toolkit.groups.exercise import Exercise, ExerciseFacts
from nccl_doctor.toolkit.groups.forming import form_world
from nccl_doctor.toolkit.groups.kinds import DEVICE_ID_HANG, GROUP_KINDS, GROUP_NEEDS
from nccl_doctor.toolkit.groups.side_group import (
    DefaultGroup,
    Side,
    SideFacts,
    describe_default,
    meet_engine,
    meet_trainer,
    side_helper,
)

from .rules import (
    SIDE_BOUND,
    SIDE_CLEARED,
    SIDE_UNBOUND,
    judge_side_groups,
    needs_control,
    side_group_names,
)

_ELEMENTS = (4096,)
_TURNS = 2


class TrainerFacts(DefaultGroup, ExerciseFacts):
    """Facts that `observe` returns for a trainer; other checks read them."""

    role: str


class FirstTrainerFacts(TrainerFacts, SideFacts):
    """Facts that `observe` returns for rank 0, which is in the side group too."""


class EngineFacts(SideFacts, ExerciseFacts):
    """Facts that `observe` returns for the engine."""

    role: str


class SideGroup(Check):
    """Tests the side group of weight synchronisation, with the default group unbound and bound."""

    name = "side_group"
    layer = Layer.COLLECTIVE
    scope = Scope.RANK
    cost = "seconds"
    kinds = (*GROUP_KINDS, DEVICE_ID_HANG)
    reads = GROUP_READS
    level = Level.STANDARD
    together = True
    forms_groups = True
    needs = GROUP_NEEDS

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """Rounds for every variant; again for unexplained hangs; and the control if needed."""
        if reason := _reason_to_skip(cluster):
            raise Skip(reason)
        world = cluster.present
        if len(world) < 2:
            return []
        seats = tuple(rank.seat for rank in world)
        deadline_s = attempt_deadline(cluster, 2)
        params = {
            "one_host": world[0].host.id == world[-1].host.id,
            "engine_addresses": list(world[-1].host.addresses),
        }
        attempts = attempts_of(cluster, self.name)
        variants = [SIDE_UNBOUND, SIDE_BOUND] if cluster.backend == "nccl" else [SIDE_UNBOUND]
        if needs_control(attempts):
            variants.append(SIDE_CLEARED)
        tried = {
            name: found for name, found in attempts.items() if name in (SIDE_UNBOUND, SIDE_BOUND)
        }
        rounds = [Round(name, (seats,), deadline_s) for name in variants]
        rounds += rounds_again(tried, deadline_s)
        return [replace(each, params=params) for each in rounds]

    def observe(self, ctx: Context) -> TrainerFacts | FirstTrainerFacts | EngineFacts:
        """Play a trainer or, as the last of the round, the engine.

        Raises:
            Skip: this job has no side group.
            Untested: this torch has no helper to form one.
        """
        side_helper()  # fail before any group is formed
        variant = ctx.round.partition("-")[0]  # also for `bound-again`
        ours, side = side_group_names(ctx.round)
        size = len(ctx.group) - 1
        mine: dict[str, tuple[Any, int, int]] = {}
        default: DefaultGroup | None = None
        end: Side | None = None
        if ctx.position == size:
            end = meet_trainer(ctx, side)
            tester = Exercise(ctx.breadcrumb, end.device)
        else:
            device = form_world(ctx, name=ours, bind=variant == SIDE_BOUND, size=size)
            default = describe_default(ctx, device)
            tester = Exercise(ctx.breadcrumb, device)
            tester.alone(ours, None, ctx.position, size, ())  # as after a first step of training
            if ctx.position == 0:
                end = meet_engine(ctx, side, device, clear=variant == SIDE_CLEARED)
        if end is not None:
            mine[side] = end.membership
        if default is not None:
            mine[ours] = (None, ctx.position, size)
        for _ in range(_TURNS):
            for name, (group, rank, members) in mine.items():
                tester.alone(name, group, rank, members, _ELEMENTS)
        tester.together(mine)
        if default is None:
            assert end is not None
            return {"role": "engine", **end.facts, **tester.facts()}
        if end is None:
            return {"role": "trainer", **default, **tester.facts()}
        return {"role": "trainer", **default, **end.facts, **tester.facts()}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on the culprits of each variant, and on whether the binding causes the hang."""
        if cluster.complete:
            yield from judge_side_groups(attempts_of(cluster, self.name))


def _reason_to_skip(cluster: Cluster) -> str:
    """Reason not to test this job for a side group, or the empty string."""
    if cluster.job.groups != "weight-sync" and cluster.level is not Level.FULL:
        return "no side group was requested (--groups weight-sync, --level full)"
    if cluster.world_size < 2:
        return "a side group needs two ranks, a trainer and an engine; there is one"
    return ""
