"""Keys of a configuration that contradict each other, as DeepSpeed decides it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from nccl_doctor.api import Confidence, Severity

from .arithmetic import MICRO, PIPELINE, STEPS, TRAIN
from .table import AUTO, BAD_VALUE, CONFLICT, Problem, Settings, table, whole

_ZERO = "zero_optimization"


def conflict_problems(
    settings: Settings, mesh: Sequence[tuple[str, int]] = ()
) -> Iterator[Problem]:
    """Keys that DeepSpeed refuses, or that have no effect, because of another key."""
    yield from _precision(settings)
    yield from _offload(settings)
    yield from _zero(settings)
    yield from _renamed(settings)
    yield from _optimizer(settings)
    yield from _scheduler(settings)
    yield from _parallel(settings, mesh)


def _refused(message: str, fix: str) -> Problem:
    return Problem(CONFLICT, message, fix)


def _ignored(message: str, fix: str) -> Problem:
    return Problem(CONFLICT, message, fix, Severity.WARN)


def _precision(settings: Settings) -> Iterator[Problem]:
    bf16 = "bf16" if settings.get("bf16") is not None else "bfloat16"
    if settings.is_on("fp16.enabled") and settings.is_on(f"{bf16}.enabled"):
        yield _refused(
            f"fp16 and {bf16} are both enabled",
            f'"fp16": {{"enabled": false}} (or {bf16}, where the GPUs have no bfloat16)',
        )
    for name in ("fp16.fp16_master_weights_and_grads", f"{bf16}.bf16_master_weights_and_grads"):
        if settings.is_on(name) and settings.stage == 0:
            yield _refused(f"{name} needs ZeRO, but its stage is 0", f"remove {name}")
    states = f"{bf16}.bf16_optimizer_states"
    if settings.is_on(states) and not settings.is_on(f"{bf16}.bf16_master_weights_and_grads"):
        yield _refused(
            f"{states} needs bf16_master_weights_and_grads", f"enable it, or remove {states}"
        )


def _offload(settings: Settings) -> Iterator[Problem]:
    stage = settings.stage
    for what in ("param", "optimizer"):
        device, name = settings.offload(what), f"{_ZERO}.offload_{what}"
        if device != "nvme" or stage is None:
            continue
        if stage == 3 and settings.get(f"{name}.nvme_path") is None:
            yield _refused(f"{name} to nvme has no nvme_path", f'add "nvme_path" to {name}')
    if settings.offload("param") and stage in (0, 1, 2):
        yield _ignored(
            f"offload_param has no effect with ZeRO stage {stage}",
            '"stage": 3, or remove offload_param',
        )
    to = settings.offload("optimizer")
    if to and stage == 0:
        yield _ignored(
            "offload_optimizer with ZeRO stage 0: the optimizer runs on the CPU, but the "
            "parameters are on the GPU",
            '"stage": 1 or more, or remove offload_optimizer',
        )
    elif to == "nvme" and stage in (1, 2):
        yield _ignored(
            f"offload_optimizer to nvme needs ZeRO stage 3; with stage {stage} it goes to the CPU",
            '"stage": 3, or "device": "cpu"',
        )
    ratio = settings.get(f"{_ZERO}.offload_optimizer.ratio")
    if isinstance(ratio, (int, float)) and ratio < 1 and stage in (0, 1, 2):
        yield _refused(
            f"offload_optimizer.ratio {ratio} needs ZeRO stage 3, but the stage is {stage}",
            '"stage": 3, or remove "ratio"',
        )


def _zero(settings: Settings) -> Iterator[Problem]:
    stage, zero = settings.stage, settings.get(_ZERO)
    if isinstance(zero, bool):
        yield Problem(
            CONFLICT,
            f'"{_ZERO}": {str(zero).lower()} is the syntax of old versions, read as stage '
            f"{int(zero)}",
            f'"{_ZERO}": {{"stage": {int(zero)}}}',
            Severity.INFO,
        )
    elif zero is not None and zero != AUTO and not isinstance(zero, Mapping):
        yield Problem(BAD_VALUE, f'"{_ZERO}" is not an object', f'"{_ZERO}": {{"stage": 1}}')
    if settings.is_on(f"{_ZERO}.legacy_stage1") and stage:
        yield _refused("legacy_stage1 is refused since DeepSpeed 0.5.9", "remove legacy_stage1")
    norm = settings.get(f"{_ZERO}.compute_grad_norm")
    if norm is False and stage in (0, 3):
        yield _refused(
            f"compute_grad_norm false needs ZeRO stage 1 or 2, but the stage is {stage}",
            "remove compute_grad_norm",
        )
    operation = settings.get("gradient_allreduce_op")
    if isinstance(operation, str) and operation.lower() == "sum":
        for there, name in (
            (stage == 3, "ZeRO stage 3"),
            (settings.get(f"{_ZERO}.zenflow") is not None, "ZenFlow"),
            (settings.is_on("compile.deepcompile"), "DeepCompile"),
        ):
            if there:
                yield _refused(
                    f'gradient_allreduce_op "sum" is refused with {name}',
                    "remove gradient_allreduce_op",
                )


def _renamed(settings: Settings) -> Iterator[Problem]:
    zero = settings.get(_ZERO)
    if not isinstance(zero, Mapping):
        return
    for old, new in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_param", "offload_param"),
        ("stage3_gather_fp16_weights_on_model_save", "gather_16bit_weights_on_model_save"),
    ):
        there = [name for name in (new, f"stage3_{new}") if name in zero]
        if old in zero and zero[old] != AUTO and there:
            yield _refused(
                f"{_ZERO} has both {old} and {there[0]}, which replaced it", f"remove {old}"
            )


def _optimizer(settings: Settings) -> Iterator[Problem]:
    name = settings.get("optimizer.type")
    limit = settings.get("optimizer.params.max_grad_norm")
    if isinstance(limit, (int, float)) and limit > 0:
        yield _ignored(
            "DeepSpeed does not use max_grad_norm as a parameter of an optimizer",
            f'"gradient_clipping": {limit} instead of "max_grad_norm"',
        )
    if not isinstance(name, str) or name == AUTO:
        return
    known = table().optimizers
    names = {*known["deepspeed"], *known["old"]}
    if name.lower() not in names and name not in known["torch"]:
        yield _misnamed("optimizer", name, (*sorted(names), *known["torch"]))
        return
    if name.lower() in known["old"] and settings.reaches(table().known_to):
        yield Problem(
            BAD_VALUE,
            f"optimizer.type {name} was removed from DeepSpeed",
            '"type": "AdamW"',
            confidence=Confidence.LIKELY,
        )
    untested = name if name in known["torch"] else name.lower()
    allowed = settings.get("zero_allow_untested_optimizer")
    if settings.stage and untested in known["untested"] and not allowed:
        yield _refused(
            f"ZeRO accepts the optimizer {name} only with zero_allow_untested_optimizer",
            '"zero_allow_untested_optimizer": true',
        )


def _scheduler(settings: Settings) -> Iterator[Problem]:
    name = settings.get("scheduler.type")
    if not isinstance(name, str) or name == AUTO:
        return
    known = table().schedulers
    names = (*known["deepspeed"], *known["torch"])
    if name not in names:
        yield _misnamed("scheduler", name, names)
    elif settings.get("scheduler.params") is None:
        yield _refused(f"scheduler {name} has no params", 'add "params" to scheduler, if only {}')


def _misnamed(what: str, name: str, names: Sequence[str]) -> Problem:
    by_lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    meant = by_lower[close[0]] if close else ""
    return Problem(
        BAD_VALUE,
        f"{what}.type {name} exists neither in DeepSpeed nor in torch"
        + (f"; did you mean {meant}?" if meant else ""),
        f'"type": "{meant}"' if meant else f'give "{what}" an existing type',
        # A program that passes its own never reads this one.
        confidence=Confidence.LIKELY,
    )


def _parallel(settings: Settings, mesh: Sequence[tuple[str, int]]) -> Iterator[Problem]:
    size = whole(settings.get("tensor_parallel.autotp_size")) or 0
    inner = whole(settings.get("tensor_parallel.tp.tp_size"))
    if size > 1 and inner not in (None, 1, size):
        yield _refused(
            f"tensor_parallel.autotp_size is {size}, but tensor_parallel.tp.tp_size is {inner}",
            "remove tp.tp_size",
        )
    stages = [length for name, length in mesh if name.lower() in PIPELINE]
    stages.append(whole(settings.get("pipeline.stages")) or 1)
    if max(stages) > 1 and settings.stage in (2, 3):
        yield Problem(
            CONFLICT,
            f"DeepSpeed's pipeline of {max(stages)} stages is refused with ZeRO stage "
            f"{settings.stage}",
            f'"{_ZERO}": {{"stage": 1}}',
            Severity.WARN,
            Confidence.LIKELY,
        )
    given = [name for name in (TRAIN, MICRO, STEPS) if settings.get(name) not in (None, AUTO)]
    elastic = settings.is_on("elasticity.enabled") and not settings.reaches(table().known_to)
    if elastic and given and not settings.is_on("elasticity.ignore_non_elastic_batch_info"):
        yield _refused(
            f"elasticity is enabled, but {', '.join(given)} is set as well",
            f'remove {", ".join(given)}, or "ignore_non_elastic_batch_info": true',
        )
