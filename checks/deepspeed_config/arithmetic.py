"""Batch sizes and world size: does train_batch_size = micro × accumulation × ranks hold?

The ranks that count are those with their own data: DeepSpeed divides the world size by what its
mpu, a mesh or sequence_parallel_size takes out of it. Which of these a job uses depends on its
code, not on the configuration; where several answers are possible, each is tried, and only what
fits none of them is a problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

from nccl_doctor.api import Confidence, Severity

from .table import AUTO, BAD_VALUE, BATCH, WORLD, Problem, Settings, whole

TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"

SEQUENCE = ("sp", "seq", "sequence", "sequence_parallel", "ulysses", "cp", "context")
TENSOR = ("tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel")
PIPELINE = ("pp", "pipe", "pipeline", "stage")
DATA = (
    *("dp", "ddp", "data", "data_parallel", "fsdp", "hsdp", "shard", "dp_shard", "replicate"),
    *("dp_replicate", "zero", "ep", "expert", "edp"),
)
"""Names of mesh dimensions. Experts are spread over ranks that have their own data."""


@dataclass(frozen=True)
class Shape:
    """Number of ranks with their own data: the likely number first in `ranks`, then other ones.

    `taken` names what the world size was divided by.
    """

    world: int
    ranks: tuple[int, ...]
    taken: str = ""


def batch_problems(
    settings: Settings, world: int, mesh: Sequence[tuple[str, int]]
) -> Iterator[Problem]:
    """Sizes that do not fit this many ranks and these dimensions of the job's mesh."""
    found = list(_world_problems(settings, world, mesh))
    yield from found
    elastic = settings.is_on("elasticity.enabled")
    if any(each.code == WORLD for each in found) or elastic:
        return
    shape = shape_of(settings, world, mesh)
    if shape is not None:
        yield from _batch(settings, shape)


def shape_of(settings: Settings, world: int, mesh: Sequence[tuple[str, int]]) -> Shape | None:
    """The ranks with their own data; None where the mesh does not divide the world size."""
    sure: list[tuple[str, int]] = []
    maybe: list[tuple[str, int]] = []
    for name, size in mesh:
        lower = name.lower()
        if lower in (*SEQUENCE, *TENSOR, *PIPELINE):
            sure.append((name, size))
        elif lower not in DATA:
            maybe.append((name, size))
    sequence = _size(settings, "sequence_parallel_size")
    if not _sizes(mesh, SEQUENCE):
        (maybe if mesh else sure).append(("sequence_parallel_size", sequence))
    # AutoTP counts all ranks of a tensor-parallel group, unless an mpu takes them out.
    tensor = _size(settings, "tensor_parallel.autotp_size")
    for name in [name for name, _ in sure if tensor > 1 and name.lower() in TENSOR]:
        sure.remove((name, dict(mesh)[name]))
        maybe.append((name, dict(mesh)[name]))
    if not _sizes(mesh, TENSOR):
        maybe.append(("autotp_size", tensor))
    if not _sizes(mesh, PIPELINE):
        maybe.append(("pipeline.stages", _size(settings, "pipeline.stages")))
    sure = [(name, size) for name, size in sure if size > 1]
    maybe = [(name, size) for name, size in maybe if size > 1]
    found = []
    for count in range(len(maybe), -1, -1):
        for more in combinations(maybe, count):
            divisor = prod(size for _, size in (*sure, *more))
            if world % divisor == 0:
                words = ", ".join(f"{name}={size}" for name, size in (*sure, *more))
                found.append((world // divisor, words))
    if not found:
        return None
    return Shape(world, tuple(ranks for ranks, _ in found), found[0][1])


def _size(settings: Settings, path: str) -> int:
    return max(1, whole(settings.get(path)) or 1)


def _sizes(mesh: Sequence[tuple[str, int]], names: Sequence[str]) -> int:
    """Product of the dimensions with these names; 0 where there is none."""
    sizes = [size for name, size in mesh if name.lower() in names]
    return prod(sizes) if sizes else 0


# The world size --------------------------------------------------------------------------------


def _world_problems(
    settings: Settings, world: int, mesh: Sequence[tuple[str, int]]
) -> Iterator[Problem]:
    data = _size(settings, "data_parallel_size")
    sequence = _size(settings, "sequence_parallel_size")
    tensor = _size(settings, "tensor_parallel.autotp_size")
    both = settings.get("data_parallel_size") and settings.get("sequence_parallel_size")
    if both and data * sequence != world:
        other = f', or write "data_parallel_size": {world // sequence}'
        yield Problem(
            WORLD,
            f"data_parallel_size {data} × sequence_parallel_size {sequence} is "
            f"{data * sequence}, but there are {world} ranks",
            f"start {data * sequence} ranks" + ("" if world % sequence else other),
        )
        return
    for name, size in (
        ("sequence_parallel_size", sequence),
        ("tensor_parallel.autotp_size", tensor),
    ):
        if world % size:
            yield Problem(
                WORLD,
                f"{name} {size} does not divide the {world} ranks",
                f"start {_near(world, size)} ranks, or give {name} one of {_divisors(world)}",
            )
    group = _size(settings, "zero_optimization.zero_hpz_partition_size")
    if settings.stage == 3 and world % min(group, world):
        yield Problem(
            WORLD,
            f"zero_hpz_partition_size {group} does not divide the {world} ranks",
            f"give zero_hpz_partition_size one of {_divisors(world)}: the ranks of one host",
        )
    for name, size, names in (
        ("sequence_parallel_size", sequence, SEQUENCE[:5]),
        ("tensor_parallel.autotp_size", tensor, TENSOR),
    ):
        there = _sizes(mesh, names)
        if size > 1 and there and there != size:
            yield Problem(
                WORLD,
                f"{name} is {size}, but --mesh has {there} there",
                "give both the size that the job has",
                confidence=Confidence.LIKELY,
            )


def _near(number: int, step: int) -> str:
    below = number // step * step
    return f"{below} or {below + step}" if below else str(step)


def _divisors(world: int) -> str:
    found = [n for n in range(1, world + 1) if world % n == 0]
    shown = found if len(found) <= 8 else [*found[:7], world]
    return ", ".join(map(str, shown))


# The batch -------------------------------------------------------------------------------------


def _batch(settings: Settings, shape: Shape) -> Iterator[Problem]:
    given = {name: settings.get(name) for name in (TRAIN, MICRO, STEPS)}
    numbers: dict[str, int | None] = {}
    for name, value in given.items():
        numbers[name] = whole(value) if isinstance(value, (int, float)) else None
        if value not in (None, AUTO) and (numbers[name] or 0) <= 0:
            return  # the value itself is wrong: another finding
    train, micro, steps = (numbers[name] for name in (TRAIN, MICRO, STEPS))
    if given[TRAIN] is None and given[MICRO] is None:
        yield Problem(
            BAD_VALUE,
            f"neither {TRAIN} nor {MICRO} is given: DeepSpeed refuses this, unless a framework "
            "sets one of them",
            f'add "{MICRO}": the batch of one rank in one step',
            Severity.WARN,
        )
        return
    open_ended = AUTO in given.values()
    if train is None or any(
        fits(train, micro, steps, ranks, open_ended=open_ended) for ranks in shape.ranks
    ):
        return
    yield _does_not_fit(train, micro, steps, shape)


def fits(
    train: int, micro: int | None, steps: int | None, ranks: int, *, open_ended: bool = False
) -> bool:
    """True if DeepSpeed accepts these for `ranks` ranks; None stands for a value not given.

    `open_ended`: a framework will set what is missing, so it is enough that some number fits.
    """
    if micro is not None and steps is not None:
        return train == micro * steps * ranks
    share = (micro or 1) * (steps or 1) * ranks
    if open_ended:
        return train % share == 0
    # DeepSpeed computes the missing factor, rounding down, and then checks the product.
    factor = train // share
    return factor > 0 and factor * share == train


def _does_not_fit(train: int, micro: int | None, steps: int | None, shape: Shape) -> Problem:
    ranks = shape.ranks[0]
    count = f"{ranks} ranks"
    if shape.taken:
        count = f"{ranks} data-parallel ranks ({shape.world} ranks, {shape.taken})"
    confidence = Confidence.CERTAIN if len(shape.ranks) == 1 else Confidence.LIKELY
    if micro is not None and steps is not None and train % (micro * steps) == 0:
        wanted = train // (micro * steps)
        fix = [f"start {wanted * (shape.world // ranks)} ranks"]
        if train % (micro * ranks) == 0:
            fix.append(f'"{STEPS}": {train // (micro * ranks)}')
        fix.append(f'"{TRAIN}": {micro * steps * ranks}')
        return Problem(
            WORLD,
            f"{TRAIN} {train} = micro batch {micro} × accumulation {steps} × {wanted} ranks, but "
            f"there are {count}",
            ", or ".join(fix),
            confidence=confidence,
        )
    step = (micro or 1) * ranks
    factors = [f"micro batch {micro}"] if micro else []
    factors += [f"accumulation {steps}"] if steps else []
    product = " × ".join([*factors, count])
    return Problem(
        BATCH,
        f"{TRAIN} {train} is not divided evenly by {product}"
        if micro is None or steps is None
        else f"{TRAIN} {train} is not {product} = {micro * steps * ranks}",
        _nearest(train, step, micro, steps, ranks),
        confidence=confidence,
    )


def _nearest(train: int, step: int, micro: int | None, steps: int | None, ranks: int) -> str:
    """The sizes next to `train` that work, each with what belongs to it."""
    if micro is None and steps is not None:
        step *= steps
    below = train // step * step
    sizes = [size for size in (below, below + step) if size > 0]
    if below == train:
        sizes = [train]
    words = []
    for size in sizes:
        rest = f'"{STEPS}": {size // step}' if micro is not None else ""
        rest = rest or f'"{MICRO}": {size // step}'
        words.append(f'"{TRAIN}": {size} with {rest}')
    if micro is not None and steps is not None and train % (micro * ranks):
        words.append(f'"{TRAIN}": {micro * steps * ranks} with "{STEPS}": {steps}')
    return ", or ".join(dict.fromkeys(words))
