"""Builds the stand-in for libnvidia-ml.so.1, describes machines to it, and observes them.

Each GPU is read in a process of its own. They are forked from a small process: the one that runs
the tests holds thousands of them in its memory, and a fork of it costs ten times as much.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.checks.gpu_state.gather import gather_gpus
from nccl_doctor.model.cluster import Outcome
from tests.support.huge_pages import use_huge_pages
from tests.support.stand_ins import Look, observe_with

SOURCE = Path(__file__).with_name("libnvidia-ml.c")
MACHINES = Path(__file__).with_name("machines")
NAME = "libnvidia-ml.so.1"
Machine = dict[str, dict[str, Any]]
"""GPU (`"-"`: the machine) → call → answer, as `libnvidia-ml.c` says."""


def build(folder: Path, *flags: str) -> Path:
    """The library, in a folder of its own."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc) to build the stand-in for NVML")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    library = folder / NAME
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wno-comment"]
    command += [*flags, f"-Wl,-soname,{NAME}", "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return library


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-0000-0000-000000000000"


def h100s(count: int = 8) -> Machine:
    """A healthy machine with NVSwitch."""
    return described("h100x8", count)


def described(name: str, count: int | None = None) -> Machine:
    """A machine of `machines/NAME.json`.

    A file says what `each` GPU and the `host` answer, call by call, and what single `gpus` answer
    in place of that; `like` names the file that it changes. `{index}` and `{slot}` stand for a
    GPU's number and its place on the bus; a call with `{link}`, `{counter}` or `{other}` for one
    call about each NVLink, each of its counters, each GPU behind it. `finds` is what the doctor
    says of it: code, severity and GPU.
    """
    story = read(name)
    count = count or int(story["count"])
    machine: Machine = {"-": {key: _text(v, count=count) for key, v in story["host"].items()}}
    for index in range(count):
        gpu: dict[str, Any] = {}
        for key, value in story["each"].items():
            value = _text(value, index=index, slot=0x18 + index)
            for of in _those_of(key, index, count, int(story["nvlinks"])):
                gpu[key.format(**of)] = value
        machine[str(index)] = gpu
    for number, calls in story.get("gpus", {}).items():
        machine[number].update(calls)
    return machine


def read(name: str) -> dict[str, Any]:
    """The file itself, over the one that it is like."""
    story: dict[str, Any] = json.loads((MACHINES / f"{name}.json").read_text())
    return {**read(story["like"]), **story} if "like" in story else story


def _text(value: Any, **names: int) -> Any:
    return value.format(**names) if isinstance(value, str) else value


def _those_of(key: str, index: int, count: int, nvlinks: int) -> Iterator[dict[str, int]]:
    """What the names in a call stand for."""
    ranges = {"link": range(nvlinks), "counter": range(3), "other": range(index + 1, count)}
    used = [name for name in ranges if f"{{{name}}}" in key]
    for values in itertools.product(*(ranges[name] for name in used)):
        yield dict(zip(used, values, strict=True))


def _answer(value: Any) -> Any:
    """`!GPU_IS_LOST` by the number that the library has for it."""
    if not (isinstance(value, str) and value.startswith("!")):
        return value
    import pynvml

    number = getattr(pynvml, f"NVML_ERROR_{value[1:]}", None)
    return value if number is None else f"!{number}"


def write(machine: Mapping[str, Mapping[str, Any]], file: Path) -> Path:
    lines = [
        f"{gpu} {key} {_answer(value)}"
        for gpu, calls in machine.items()
        for key, value in calls.items()
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def observe(library: Path, description: Path, look: Look, deadline_s: float = 20.0) -> Outcome:
    """`look` in a probe child that has the stand-in loaded, with this description."""
    settings = {"NVML_STAND_IN": str(description)}
    return observe_with(library, settings, "gpu_state", look, deadline_s)


def gathered(library: Path, description: Path, root: Path, deadline_s: float) -> Outcome:
    """What the check gathers of a machine, below this root, by a child of the small process."""
    return small_process().submit(_gather, library, description, root, deadline_s).result()


@functools.cache
def small_process() -> ProcessPoolExecutor:
    """The one of this process, started."""
    context = multiprocessing.get_context("spawn")
    started = ProcessPoolExecutor(1, context, _stay_small)
    assert started.submit(os.getpid).result() != os.getpid()
    return started


def _stay_small() -> None:
    importlib.import_module("pynvml")
    gc.freeze()  # no child needs to go through what is imported, and so to copy it
    use_huge_pages()


def _gather(library: Path, description: Path, root: Path, deadline_s: float) -> Outcome:
    until = time.monotonic() + deadline_s
    left = functools.partial(_left, until)
    return observe(library, description, lambda crumb: gather_gpus(crumb, root, left), deadline_s)


def _left(until: float) -> float:
    return until - time.monotonic()
