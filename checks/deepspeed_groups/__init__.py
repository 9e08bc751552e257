"""Does DeepSpeed bind the default group to a device, and do several groups work on top of it?

What it checks
--------------
`deepspeed.init_distributed` itself, in its own processes: whether it keeps a default group that
torch formed before; whether the group that it forms is bound to a device; and whether further
groups by new_group work beside either, with integer results that are checked exactly. What is seen
on the group is compared with a table of versions of DeepSpeed and torch.

It runs where the job uses DeepSpeed (according to its launcher, its command or
`--deepspeed-config`), or has several groups (`--groups`, `--mesh`) and DeepSpeed is installed, or
with `--level full`. The ranks connect to the store of this run, not to MASTER_ADDR:MASTER_PORT, and
no operator is compiled.

Why it matters
--------------
With NCCL, a default group that is bound to a device makes every later group by a split of its
communicator, which all its ranks must join. Groups by new_group, and those of a device mesh, are
fine: all ranks make them in one order. A side group of rank 0 and processes of another world, as
RLHF trainers form with their inference engines, is not: rank 0 waits for the other ranks forever.
DeepSpeed passes device_id from 0.17.3 on, and torch binds by itself from 2.15 on.

How to fix
----------
device-id-multi-group-hang: the finding gives the fix for these versions. With torch before 2.15,
call torch.distributed.init_process_group without device_id before deepspeed.init_distributed:
DeepSpeed keeps that group. With torch 2.15 that is not enough: set `bound_device_id` of the default
group to None while the side group is formed, or export TORCH_DIST_USE_NCCL2=0 as well. With
DeepSpeed before 0.17.3 and torch before 2.15 nothing needs to be done. deepspeed-missing: install
DeepSpeed there, or activate the environment that the job runs in.

When it is wrong
----------------
A hang that is seen here is a failure. A binding alone is a warning for a job with a side group, and
information for a job with other groups: it shows what the versions do, not what the job's code
does. The code may have formed its group before, or avoid the problem in another way. Check
`side_group` tries whether a side group hangs here; where it formed one beside a bound group, the
finding says so and is no warning. A build of DeepSpeed between two releases may behave like either
one: the finding says so. Where no rank has DeepSpeed, the doctor may run in another environment
than the job: a warning.
Not validated on hardware: DeepSpeed 0.19.8 has met real ranks over gloo, where nothing is bound;
the rows of the table were read in the released sources.

References
----------
deepspeedai/DeepSpeed on GitHub: pull requests 7266 and 7542, issue 8248.
https://github.com/allenai/open-instruct/pull/1311
https://github.com/NVIDIA-NeMo/RL/pull/3189
pytorch/pytorch on GitHub: issue 153960, pull requests 192281 and 192895.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Evidence,
    Finding,
    Fix,
    Kind,
    Layer,
    Level,
    OutcomeStatus,
    Rank,
    Round,
    Scope,
    Severity,
    Skip,
    Step,
    Untested,
    look,
    number_range,
    place_of,
    shell,
)
from nccl_doctor.toolkit.groups.attempts import (
    GROUP_READS,
    NEW_GROUP,
    Attempt,
    attempt_deadline,
    attempts_of,
)
from nccl_doctor.toolkit.groups.culprits import judge_groups, rounds_again
from nccl_doctor.toolkit.groups.exercise import Exercise, ExerciseFacts
from nccl_doctor.toolkit.groups.forming import form_world
from nccl_doctor.toolkit.groups.kinds import DEVICE_ID_HANG, GROUP_KINDS, GROUP_NEEDS
from nccl_doctor.toolkit.groups.side_group import describe_default
from nccl_doctor.toolkit.groups.spans import from_span, to_span
from nccl_doctor.toolkit.versions import USE_NCCL2

from .initialize import IMPORT as IMPORT_DEEPSPEED
from .initialize import accelerator_name, hand_over, import_deepspeed, init_by_deepspeed
from .rules import blame_binding, judge_binding

IMPORT, WRAPS, OWN = "import", "wraps", "own"
DEFAULT = "default"
"""Name of the default group, for messages."""
_AGAIN = "-again"
_IMPORT_S = 60.0
"""A cold import from a network file system."""
_SPARE_S = 5.0
_ELEMENTS = (1,)

DEEPSPEED_MISSING = Kind(
    "deepspeed-missing",
    Layer.GROUP,
    "DeepSpeed cannot be imported",
    "these ranks stop at once, and the others wait for them until the rendezvous times out",
    Fix(
        Step(shell("pip install deepspeed"), persists=True),
        alternatives=["activate the environment that the job runs in"],
    ),
)


class DeepspeedGroups(Check):
    """Groups as DeepSpeed forms and keeps them."""

    name = "deepspeed_groups"
    layer = Layer.COLLECTIVE
    scope = Scope.RANK
    cost = "seconds"
    kinds = (*GROUP_KINDS, DEVICE_ID_HANG, DEEPSPEED_MISSING)
    reads = tuple(sorted((*GROUP_READS, "side_group")))
    level = Level.STANDARD
    together = True
    forms_groups = True
    needs = GROUP_NEEDS

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """The rounds: import DeepSpeed everywhere; if that works, torch's group and DeepSpeed's."""
        if reason := _reason_to_skip(cluster):
            raise Skip(reason)
        world = tuple(rank.seat for rank in cluster.present)
        rounds = [Round(IMPORT, (world,), _IMPORT_S)]
        imports = cluster.evidence(self.name, IMPORT)
        good = [item for item in imports if _has_it(item)]
        statuses = {item.outcome.status for item in imports} - {OutcomeStatus.SKIPPED}
        if not good or statuses != {OutcomeStatus.OK}:
            return rounds
        lacking = [item.rank.rank or 0 for item in imports if not _has_it(item)]
        if lacking and cluster.job.deepspeed:
            return rounds  # a finding of its own
        places = range(len(world))
        params = {
            "groups": {"evens": to_span(places[::2]), "odds": to_span(places[1::2])},
            "lacking": number_range(lacking),
        }
        slowest = max(item.outcome.facts["import_s"] for item in good)
        # Importing in two rounds at once may be slower than the import measured before.
        deadline_s = attempt_deadline(cluster, 1 + len(params["groups"]))
        deadline_s += 3 * slowest + _SPARE_S
        rounds += [Round(name, (world,), deadline_s, params) for name in (WRAPS, OWN)]
        attempts = _groups_of(cluster)
        again = rounds_again(attempts, deadline_s)
        return [*rounds, *(Round(r.name, r.groups, deadline_s, params) for r in again)]

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Import DeepSpeed, and in the later rounds form groups with it.

        Returns: `deepspeed`, `torch` (versions), `accelerator`, `use_nccl2`, `import_s`, or `error`
        where it is not installed; of the later rounds `size`, as `describe_default`, of torch's
        group also as `hand_over`; and as `Exercise.facts`.
        """
        if lacking := ctx.params.get("lacking"):
            raise Untested(f"DeepSpeed is not installed on ranks {lacking}")
        if find_spec("deepspeed") is None:
            if not ctx.job.deepspeed:
                raise Skip("DeepSpeed is not installed")
            return {"error": "not installed"}
        started = time.monotonic()
        deepspeed = import_deepspeed(ctx)
        facts = {"import_s": round(time.monotonic() - started, 2), **_stack(ctx, deepspeed)}
        if ctx.round == IMPORT:
            return facts
        if ctx.round.removesuffix(_AGAIN) == WRAPS:
            device = form_world(ctx)
            facts |= hand_over(ctx, deepspeed, device)
        else:
            device = init_by_deepspeed(ctx, deepspeed)
        facts = {**describe_default(ctx, device), **facts, "size": len(ctx.group)}
        return {**facts, **_exercise(ctx, device)}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on ranks without DeepSpeed, on culprits of each round, on a harmful binding."""
        if not cluster.complete:
            return
        yield from _missing(cluster)
        attempts = _groups_of(cluster)
        seen = set()
        for finding in judge_groups(attempts):
            if (finding.code, finding.where) not in seen:  # the same in the round before
                seen.add((finding.code, finding.where))
                if finding.evidence.get("round") == OWN:
                    finding = blame_binding(
                        finding, attempts.get(OWN, ()), attempts.get(WRAPS, ()), DEFAULT
                    )
                yield finding
        stacks = _stacks(cluster)
        yield from judge_binding(cluster, stacks, attempts.get(OWN, ()), attempts.get(WRAPS, ()))


# --- observing ---


def _stack(ctx: Context, deepspeed: Any) -> dict[str, Any]:
    import torch

    return {
        "deepspeed": str(getattr(deepspeed, "__version__", "unknown")),
        "torch": str(torch.__version__),
        "accelerator": accelerator_name(),
        "use_nccl2": ctx.env.get(USE_NCCL2),
    }


def _exercise(ctx: Context, device: Any) -> ExerciseFacts:
    """Make further groups by new_group, in one order on every rank; use each, then all at once."""
    import torch.distributed as dist

    tester = Exercise(ctx.breadcrumb, device)
    size = len(ctx.group)
    tester.alone(DEFAULT, None, ctx.position, size, _ELEMENTS)
    mine: dict[str, tuple[Any, int, int]] = {DEFAULT: (None, ctx.position, size)}
    for name, span in ctx.params["groups"].items():
        members = from_span(span)
        if not members:
            continue
        ctx.breadcrumb(NEW_GROUP, group=name)
        group = dist.new_group(members)
        if ctx.position in members:
            mine[name] = (group, members.index(ctx.position), len(members))
    for name, (group, rank, many) in mine.items():
        tester.alone(name, group, rank, many, _ELEMENTS)
    tester.together(mine)
    return tester.facts()


# --- judging ---


def _reason_to_skip(cluster: Cluster) -> str:
    job = cluster.job
    if job.deepspeed or job.has_several_groups or cluster.level is Level.FULL:
        return ""
    return "no sign that the job uses DeepSpeed (--deepspeed-config, --level full)"


def _has_it(item: Evidence) -> bool:
    return item.outcome.status is OutcomeStatus.OK and not item.outcome.facts.get("error")


def _groups_of(cluster: Cluster) -> dict[str, list[Attempt]]:
    """The attempts of the rounds in which ranks form groups."""
    found = attempts_of(cluster, DeepspeedGroups.name)
    return {name: attempts for name, attempts in found.items() if name != IMPORT}


def _missing(cluster: Cluster) -> Iterator[Finding]:
    """Findings on ranks that cannot import DeepSpeed, where the job uses it."""
    if not cluster.job.deepspeed:
        return
    lacking: list[Rank] = []
    broken: list[Evidence] = []
    somebody_has_it = False
    for item in cluster.evidence(DeepspeedGroups.name, IMPORT):
        outcome = item.outcome
        if outcome.status is OutcomeStatus.OK:
            somebody_has_it |= _has_it(item)
            lacking += [] if _has_it(item) else [item.rank]
        elif outcome.last_step == IMPORT_DEEPSPEED and outcome.status in (
            OutcomeStatus.RAISED,
            OutcomeStatus.DIED,
        ):
            broken.append(item)
    if lacking:
        launched = any(rank.launch and rank.launch.launcher == "deepspeed" for rank in lacking)
        sure = somebody_has_it or bool(broken) or launched
        yield Finding(
            DEEPSPEED_MISSING,
            "the job uses DeepSpeed, but it is not installed in the environment of these ranks"
            if sure
            else "the job uses DeepSpeed, but no rank has it in the environment of this "
            "examination",
            place_of(lacking),
            severity=Severity.FAIL if sure else Severity.WARN,
            confidence=Confidence.LIKELY if sure else Confidence.POSSIBLE,
        )
    for item in broken:
        outcome = item.outcome
        lines = outcome.reason.split("\n") if outcome.reason else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        end = outcome.signal or f"exit code {outcome.exit_code}"
        how = last[:300] or f"the process died by {end}"
        yield Finding(
            DEEPSPEED_MISSING,
            f"import deepspeed: {how}",
            item.where,
            {"error": outcome.reason[-1500:]},
            fix=Fix(look(shell("python -c 'import deepspeed'"), "has to work there")),
        )


def _stacks(cluster: Cluster) -> dict[int, Mapping[str, Any]]:
    """Seat → versions, of every rank that could import DeepSpeed."""
    items = cluster.evidence(DeepspeedGroups.name, IMPORT)
    return {item.rank.seat: item.outcome.facts for item in items if _has_it(item)}
