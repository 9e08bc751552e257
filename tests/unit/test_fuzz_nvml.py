"""Any answer of an NVIDIA driver: every structure that it fills may hold anything, and every call
may fail. What is read of it is plain data, and is judged without an error.
"""

from __future__ import annotations

import ctypes
import functools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nccl_doctor.checks.gpu_state import GpuState
from nccl_doctor.checks.gpu_state.fields import read_gpu
from nccl_doctor.checks.mnnvl import Mnnvl
from nccl_doctor.toolkit.gpu import nvml
from tests.support.gpu_states import cluster_of, gpu, state

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

SOON_S = 5.0
OK, TOO_SMALL = 0, 7
ERRORS = (1, 2, 3, 4, 6, 9, 13, 15, 16, 17, 21, 25, 999, 4711, -1)
MOST_COUNTED = 40
"""What is counted is allocated by the bindings before anything is checked."""


class Driver:
    """In place of libnvidia-ml.so.1: what a call may fill is filled with bytes drawn from a seed.

    Args:
        seed: of all answers.
        failing: share of the calls that return an error.
        fill: the bytes, from their number and the draw.
    """

    def __init__(
        self, seed: int, failing: float, fill: Callable[[random.Random, int], bytes]
    ) -> None:
        self._draw = random.Random(seed)
        self._failing, self._fill = failing, fill

    def __getattr__(self, name: str) -> Callable[..., int]:
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> int:
        if self._draw.random() < self._failing:
            return self._draw.choice(ERRORS)
        counts = name.endswith("Pages") or "Processes" in name or "Count" in name
        for argument in arguments:
            place = getattr(argument, "_obj", argument)
            if counts and isinstance(place, ctypes.c_uint) and place is not argument:
                place.value = self._draw.randrange(MOST_COUNTED)
            elif isinstance(place, ctypes.Array) or place is not argument:
                size = ctypes.sizeof(place)
                ctypes.memmove(ctypes.addressof(place), self._fill(self._draw, size), size)
        return TOO_SMALL if arguments[-1:] == (None,) else OK


FILLS: dict[str, Callable[[random.Random, int], bytes]] = {
    "zeros": lambda _, size: bytes(size),
    "ones": lambda _, size: b"\xff" * size,
    "any": random.Random.randbytes,
    "text": lambda draw, size: bytes(draw.choice(b"0:.-aG\n\x1b ") for _ in range(size)),
    "small": lambda draw, size: bytes(
        draw.randrange(4) if at % 4 == 0 else 0 for at in range(size)
    ),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from(sorted(FILLS)))
@example(1, 0.0, "any")
@example(1, 0.0, "text")
@example(1, 0.0, "ones")
def test_any_answer_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, failing: float, fill: str
) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", Driver(seed, failing, FILLS[fill]))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    started = time.monotonic()
    library = nvml.Nvml(lambda step, **details: json.dumps([step, details]))
    try:
        versions: dict[str, Any] = dict(nvml.read_system(library))
    except nvml.Refused:
        versions = {"driver": None, "nvml": None, "cuda": None, "count": 2}
    gpus = [read_gpu(library, index, tmp_path).facts for index in range(2)]
    facts = {**state(0, gpus), **versions, **nvml.read_pairs(library, gpus)}
    facts = json.loads(json.dumps(facts))
    assert time.monotonic() - started < SOON_S
    healthy = state(1, [gpu(1, index) for index in range(2)])
    for backend in ("nccl", "gloo"):
        cluster = cluster_of(facts, healthy, nproc=2, backend=backend)
        for check in (GpuState(), Mnnvl()):
            json.dumps([finding.to_json() for finding in check.judge(cluster)])
