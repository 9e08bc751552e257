"""Can a trainer form a side group with inference engines, and does training go on beside it?

What it checks
--------------
The weight synchronisation of RLHF jobs, as open-instruct and OpenRLHF have it between the trainer
and its vLLM engines. All ranks but the last form the default group of a training job; the last one
plays the engine and never joins it. Rank 0 serves a store of its own at a free port, and the two
form a side group over it by torch's private helper, as those frameworks do. Then broadcasts and
all-reduces on the side group take turns with the trainers' own, with one of each in flight at the
end. Results are checked exactly. With NCCL this is done twice: the default group unbound, and bound
to a device (`device_id=`), each in processes of its own, under its own deadline. Where a torch that
binds by itself hangs, a third round takes the binding away while the side group is formed.

It runs where the job has such a group (`--groups weight-sync`) or with `--level full`, on two or
more ranks.

Why it matters
--------------
The default group of a job that binds its ranks to devices gives its communicator to every later
group, by a split that all its ranks must join. The engine is in no such group, and the other
trainers are not in the side group: rank 0 waits for them in its first weight synchronisation, for
ever, and the others time out in the next step of training. DeepSpeed binds since 0.17.3.

How to fix
----------
device-id-multi-group-hang: form the default group unbound, before DeepSpeed does
(`torch.distributed.init_process_group` without `device_id`; torch before 2.15). torch 2.15 binds by
itself: export TORCH_DIST_USE_NCCL2=0, or set `bound_device_id` of the default group to None while
the side group is formed. group-init-failed: the error says at which address rank 0's store was
tried; that port is an ephemeral one, so open those between trainers and engines.

When it is wrong
----------------
One rank plays one engine: a group with several engines, or with engines on hosts that are not part
of this run, is not tried. A machine that is so loaded that small collectives take longer than
`--collective-timeout` looks like a hang. Raise that option and see whether the finding stays.
Not validated on hardware: with gloo the rules have met real ranks and real faults; the hang of a
bound default group is known from the source of torch and from reports of those frameworks.

References
----------
https://github.com/allenai/open-instruct/pull/1311
https://github.com/NVIDIA-NeMo/RL/pull/3189
https://github.com/sgl-project/sglang/issues/4096
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.api import (
    DEVICE_ID_HANG,
    GROUP_KINDS,
    Attempt,
    Check,
    Cluster,
    Confidence,
    Context,
    Evidence,
    Exercise,
    Finding,
    Layer,
    Level,
    OutcomeStatus,
    Round,
    Scope,
    Severity,
    Skip,
    attempts_of,
    describe_default,
    form_world,
    judge_groups,
    meet_engine,
    meet_trainer,
    rounds_again,
    side_helper,
)

UNBOUND, BOUND, CLEARED = "unbound", "bound", "cleared"
NOT_ASKED = "not-asked"
_AGAIN = "-again"
_ELEMENTS = (4096,)
_TURNS = 2


class SideGroup(Check):
    """The side group of weight synchronisation, with the default group unbound and bound."""

    name = "side_group"
    layer = Layer.COLLECTIVE
    scope = Scope.RANK
    cost = "seconds"
    kinds = (*GROUP_KINDS, DEVICE_ID_HANG)
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
        """Every variant once, once more what hung for no reason, and the control if it is needed.

        Where the job has no side group, one rank is asked, to say why the check is skipped.
        """
        world = cluster.present
        seats = tuple(rank.seat for rank in world)
        deadline_s = cluster.collective_timeout_s
        if reason := _reason_to_skip(cluster):
            return [Round(NOT_ASKED, (seats[:1],), deadline_s, {"skip": reason})] if seats else []
        params = {
            "one_host": world[0].host.id == world[-1].host.id,
            "engine_addresses": list(world[-1].host.addresses),
        }
        attempts = attempts_of(cluster, self.name)
        variants = [UNBOUND, BOUND] if cluster.backend == "nccl" else [UNBOUND]
        if _hangs(attempts, UNBOUND) and _self_bound(attempts):
            variants.append(CLEARED)
        tried = {name: found for name, found in attempts.items() if name in (UNBOUND, BOUND)}
        rounds = [Round(name, (seats,), deadline_s) for name in variants]
        rounds += rounds_again(tried, deadline_s)
        return [replace(each, params=params) for each in rounds]

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Play a trainer or, as the last of the round, the engine.

        Returns: `role`, `torch`, `deepspeed` (versions); of a trainer `bound_device_id` and
        `backend_class` of its default group; of both ends of the side group `side_class` and
        `store` (ADDRESS:PORT); and as `Exercise.facts`.

        Raises:
            Skip: this job has no side group.
            Untested: this torch has no helper to form one.
        """
        if reason := ctx.params.get("skip"):
            raise Skip(str(reason))
        side_helper()  # or nobody forms any group
        variant = ctx.round.removesuffix(_AGAIN)
        ours, side = _group_names(ctx.round)
        size = len(ctx.group) - 1
        mine: dict[str, tuple[Any, int, int]] = {}
        if ctx.position == size:
            end = meet_trainer(ctx, side)
            facts = {"role": "engine", **end.facts}
            mine[side] = end.membership
            tester = Exercise(ctx.breadcrumb, end.device)
        else:
            device = form_world(ctx, name=ours, bind=variant == BOUND, size=size)
            facts = {"role": "trainer", **describe_default(ctx, device)}
            tester = Exercise(ctx.breadcrumb, device)
            tester.alone(ours, None, ctx.position, size, ())  # as after a first step of training
            if ctx.position == 0:
                end = meet_engine(ctx, side, device, clear=variant == CLEARED)
                facts |= end.facts
                mine[side] = end.membership
            mine[ours] = (None, ctx.position, size)
        for _ in range(_TURNS):
            for name, (group, rank, members) in mine.items():
                tester.alone(name, group, rank, members, _ELEMENTS)
        tester.together(mine)
        return {**facts, **tester.facts()}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Per variant: the culprits; and whether it is the binding to a device that hangs."""
        if not cluster.complete:
            return
        attempts = attempts_of(cluster, self.name)
        seen = set()
        for variant in (UNBOUND, BOUND):
            for finding in judge_groups(_parts_of(attempts, variant)):
                told = _with_binding(finding, attempts, variant)
                if (told.code, told.where) not in seen:  # the same in the variant before
                    seen.add((told.code, told.where))
                    yield told


def _reason_to_skip(cluster: Cluster) -> str:
    """Why this job is not examined for a side group, or the empty string."""
    if cluster.job.groups != "weight-sync" and cluster.level is not Level.FULL:
        return "the job has no side group as far as is said (--groups weight-sync, --level full)"
    if len(cluster.present) < 2:
        return "a trainer and an engine are two ranks, and there is one"
    return ""


def _group_names(round_name: str) -> tuple[str, str]:
    """The trainers' default group and the side group, for messages."""
    return f"trainers ({round_name})", f"side ({round_name})"


def _parts_of(attempts: Mapping[str, Sequence[Attempt]], variant: str) -> dict[str, list[Attempt]]:
    """A variant's rounds, with the groups in them apart: what hangs in one, another waits for."""
    parts = {variant: [part for first in attempts.get(variant, ()) for part in _parts(first)]}
    for again in attempts.get(variant + _AGAIN, ()):
        parts[variant + _AGAIN] = [
            replace(again, members=tuple(m for m in again.members if m.rank.seat in part.seats))
            for part in parts[variant]
        ]
    return parts


def _parts(attempt: Attempt) -> list[Attempt]:
    """The two groups of one round; while it hangs, only the one that rank 0 is stuck in.

    Rank 0 alone is in both: whoever is stuck elsewhere waits for it. Where a member is to blame, or
    raised, they are judged together.
    """
    ours, side = _group_names(attempt.name)
    members = attempt.members
    if len(members) < 2 or attempt.has_culprit or attempt.raised:
        return [replace(attempt, name=f"weight-sync ({attempt.name})")]
    both = {ours: members[:-1], side: (members[0], members[-1])}
    if attempt.stuck:
        crumbs = attempt.stuck[0].outcome.breadcrumbs  # members stand in order of rank
        name = str(crumbs[-1].get("group", "")) if crumbs else ""
        return [Attempt(name, both.get(name, members))]
    return [
        Attempt(name, tuple(_only(member, name) for member in group))
        for name, group in both.items()
    ]


def _only(member: Evidence, group: str) -> Evidence:
    """A member with the wrong results of one group alone."""
    facts = member.outcome.facts
    wrong = [bad for bad in facts.get("wrong", ()) if bad["group"] == group]
    return replace(member, outcome=replace(member.outcome, facts={**facts, "wrong": wrong}))


def _hangs(attempts: Mapping[str, Sequence[Attempt]], variant: str) -> bool:
    """Whether a variant hung while nobody in particular was to blame."""
    return any(attempt.is_unexplained for attempt in attempts.get(variant, ()))


def _is_good(attempts: Mapping[str, Sequence[Attempt]], variant: str) -> bool:
    found = attempts.get(variant, ())
    return bool(found) and all(attempt.is_good for attempt in found)


def _default_groups(
    attempts: Mapping[str, Sequence[Attempt]], variant: str
) -> Iterator[Mapping[str, Any]]:
    """What members say of their default group, in facts or, stuck, as a witness."""
    for attempt in attempts.get(variant, ()):
        for member in attempt.members:
            outcome = member.outcome
            is_ok = outcome.status is OutcomeStatus.OK
            told = outcome.facts if is_ok else outcome.witness.get("default_group")
            if isinstance(told, Mapping):
                yield told


def _self_bound(attempts: Mapping[str, Sequence[Attempt]]) -> str:
    """The device that torch bound a default group to although nobody passed one, or empty."""
    told = (each.get("bound_device_id") for each in _default_groups(attempts, UNBOUND))
    return str(next(filter(None, told), ""))


def _with_binding(
    finding: Finding, attempts: Mapping[str, Sequence[Attempt]], variant: str
) -> Finding:
    """The same finding, with what is known of the default group's binding to a device."""
    itself = _self_bound(attempts) if variant == UNBOUND else ""
    if not itself and variant != BOUND:
        return finding
    said = next(iter(_default_groups(attempts, variant)), {})
    words = finding.message
    if itself:
        words += (
            f"; nobody passed a device_id: torch {said.get('torch', '')} itself bound the default "
            f"group to {itself}"
        )
    evidence = {**finding.evidence, "default_group": dict(said)}
    finding = finding.replaced(message=words, evidence=evidence)
    control = next((name for name in (UNBOUND, CLEARED) if _is_good(attempts, name)), None)
    if not _hangs(attempts, variant) or not finding.kind.by_deadline or control is None:
        return finding
    how = "without device_id" if control == UNBOUND else "with that binding taken away meanwhile"
    sure = Confidence.LIKELY if finding.level is Severity.FAIL else Confidence.POSSIBLE
    return finding.replaced(
        kind=DEVICE_ID_HANG, message=f"{words}; {how} it finishes", confidence=sure
    )
