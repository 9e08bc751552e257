"""Batch sizes and world size of a DeepSpeed configuration, held against DeepSpeed itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.checks.deepspeed_config.arithmetic import MICRO, STEPS, TRAIN, batch_problems, fits
from nccl_doctor.checks.deepspeed_config.table import Problem, Settings
from nccl_doctor.model.findings import Severity
from tests.support.rows import each_row

pytestmark = pytest.mark.xdist_group("torch")


def batch(
    config: dict[str, Any], world: int, mesh: tuple[tuple[str, int], ...] = ()
) -> list[Problem]:
    return list(batch_problems(Settings(config), world, mesh))


def sizes(train: Any = None, micro: Any = None, steps: Any = None, **more: Any) -> dict[str, Any]:
    given = {TRAIN: train, MICRO: micro, STEPS: steps, **more}
    return {name: value for name, value in given.items() if value is not None}


@each_row(
    ("config", "world", "mesh"),
    [
        (sizes(32, 4, 2), 4, ()),
        (sizes(32, 4), 4, ()),
        (sizes(32, None, 2), 4, ()),
        (sizes(32), 4, ()),
        (sizes(None, 4), 7, ()),
        (sizes(None, 4, 2), 7, ()),
        (sizes("auto", "auto", "auto"), 7, ()),
        (sizes(32, "auto", "auto"), 4, ()),
        (sizes("auto", 3, 5), 4, ()),
        (sizes(32, 4, 2), 16, (("dp", 4), ("sp", 2), ("tp", 2))),
        (sizes(32, 4, 2), 8, (("pp", 2), ("dp", 4))),
        (sizes(64, 4, 2), 8, (("ep", 8),)),
        (sizes(32, 4, 2, sequence_parallel_size=2), 8, ()),
        # AutoTP counts all ranks, but where an mpu takes the others out.
        (sizes(64, 4, 2, tensor_parallel={"autotp_size": 2}), 8, ()),
        (sizes(32, 4, 2, tensor_parallel={"autotp_size": 2}), 8, ()),
        # Nobody knows what a dimension of this name is.
        (sizes(32, 4, 2), 8, (("a", 4), ("b", 2))),
        (sizes(64, 4, 2), 8, (("a", 4), ("b", 2))),
        (sizes(7, 2, 3, elasticity={"enabled": True}), 8, ()),
    ],
)
def test_sizes_that_come_out(config: Any, world: int, mesh: Any) -> None:
    assert batch(config, world, mesh) == []


@pytest.mark.parametrize(
    ("config", "world", "mesh", "message", "fix"),
    [
        (
            sizes(30, 4),
            4,
            (),
            "train_batch_size 30 is not divided evenly by micro batch 4 × 4 ranks",
            '"train_batch_size": 16 with "gradient_accumulation_steps": 1, or '
            '"train_batch_size": 32 with "gradient_accumulation_steps": 2',
        ),
        (
            sizes(30),
            4,
            (),
            "30 is not divided evenly by 4 ranks",
            '"train_batch_size": 28 with "train_micro_batch_size_per_gpu": 7, or '
            '"train_batch_size": 32 with "train_micro_batch_size_per_gpu": 8',
        ),
        (
            sizes(2, None, 2),
            4,
            (),
            "2 is not divided evenly by accumulation 2 × 4 ranks",
            '"train_batch_size": 8 with "train_micro_batch_size_per_gpu": 1',
        ),
        (
            sizes(30, 4, 2),
            4,
            (),
            "train_batch_size 30 is not micro batch 4 × accumulation 2 × 4 ranks = 32",
            '"train_batch_size": 32 with "gradient_accumulation_steps": 2',
        ),
        (
            sizes(30, "auto", "auto"),
            4,
            (),
            "30 is not divided evenly by 4 ranks",
            '"train_batch_size": 28 with',
        ),
        (
            sizes(30, 4),
            16,
            (("dp", 4), ("sp", 2), ("tp", 2)),
            "micro batch 4 × 4 data-parallel ranks (16 ranks, sp=2, tp=2)",
            '"train_batch_size": 32',
        ),
    ],
)
def test_a_batch_that_does_not_divide(
    config: Any, world: int, mesh: Any, message: str, fix: str
) -> None:
    (found,) = batch(config, world, mesh)
    assert (found.code, found.severity) == ("batch-does-not-divide", Severity.FAIL)
    assert message in found.message
    assert fix in found.fix


@pytest.mark.parametrize(
    ("config", "world", "mesh", "message", "fix"),
    [
        (
            sizes(64, 4, 2),
            4,
            (),
            "64 = micro batch 4 × accumulation 2 × 8 ranks, but there are 4 ranks",
            'start 8 ranks, or "gradient_accumulation_steps": 4, or "train_batch_size": 32',
        ),
        (
            sizes(64, 4, 2),
            8,
            (("tp", 2), ("dp", 4)),
            "there are 4 data-parallel ranks (8 ranks, tp=2)",
            "start 16 ranks",
        ),
        (
            sizes(8, 1, 1, data_parallel_size=8, sequence_parallel_size=2),
            8,
            (),
            "data_parallel_size 8 × sequence_parallel_size 2 is 16, but there are 8 ranks",
            'start 16 ranks, or write "data_parallel_size": 4',
        ),
        (
            sizes(8, 1, sequence_parallel_size=3),
            8,
            (),
            "sequence_parallel_size 3 does not divide the 8 ranks",
            "start 6 or 9 ranks, or give sequence_parallel_size one of 1, 2, 4, 8",
        ),
        (
            sizes(8, 1, tensor_parallel={"autotp_size": 3}),
            8,
            (),
            "tensor_parallel.autotp_size 3 does not divide the 8 ranks",
            "start 6 or 9 ranks",
        ),
        (
            sizes(6, 1, zero_optimization={"stage": 3, "zero_hpz_partition_size": 4}),
            6,
            (),
            "zero_hpz_partition_size 4 does not divide the 6 ranks",
            "one of 1, 2, 3, 6",
        ),
        (
            sizes(8, 1, sequence_parallel_size=2),
            8,
            (("dp", 2), ("sp", 4)),
            "sequence_parallel_size is 2, but --mesh has 4 there",
            "give both the size",
        ),
    ],
)
def test_a_configuration_for_another_world(
    config: Any, world: int, mesh: Any, message: str, fix: str
) -> None:
    (found,) = batch(config, world, mesh)
    assert (found.code, found.severity) == ("world-size-config-mismatch", Severity.FAIL)
    assert message in found.message
    assert fix in found.fix


def test_what_is_said_elsewhere_is_not_said_here() -> None:
    assert batch(sizes(8, 1, 3), 8, (("dp", 3), ("tp", 3))) == []  # the mesh does not divide
    assert batch(sizes("8", 1, 3), 8) == []  # the value is wrong
    (found,) = batch(sizes(None, None, 3), 8)
    assert (found.code, found.severity) == ("deepspeed-config-bad-value", Severity.WARN)


@given(*[st.integers(1, 60)] * 4)
def test_sizes_that_multiply_fit_and_a_fix_works(
    micro: int, steps: int, ranks: int, train: int
) -> None:
    whole = micro * steps * ranks
    assert fits(whole, micro, steps, ranks)
    assert fits(whole, micro, None, ranks)
    assert fits(whole, None, steps, ranks)
    assert fits(whole, None, None, ranks)
    for found in batch(sizes(train, micro), ranks):
        for word in found.fix.split(", or "):
            size, more = (int(part.split(": ")[1]) for part in word.split(" with "))
            assert batch(sizes(size, micro, more), ranks) == []


def _deepspeed_accepts(config: dict[str, Any], ranks: int) -> bool:
    from deepspeed.runtime.config import DeepSpeedConfig

    made = DeepSpeedConfig.__new__(DeepSpeedConfig)
    made.world_size = ranks
    made.train_batch_size = config.get(TRAIN)
    made.train_micro_batch_size_per_gpu = config.get(MICRO)
    made.gradient_accumulation_steps = config.get(STEPS)
    try:
        made._configure_train_batch_size()
    except AssertionError:
        return False
    return True


def test_the_arithmetic_is_that_of_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    for train in (None, 1, 4, 6, 8, 12, 24):
        for micro in (None, 1, 2, 3):
            for steps in (None, 1, 2):
                for ranks in (1, 2, 3, 4):
                    config = sizes(train, micro, steps)
                    ours = batch(config, ranks) == []
                    assert ours == _deepspeed_accepts(config, ranks), (config, ranks)
