"""Builds the stand-in for libamd_smi.so, describes machines to it, and observes them.

As with NVML, the processes that read GPUs are forked from a small one.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.checks.amd_gpus.gather import gather_amd
from nccl_doctor.model.cluster import Outcome
from tests.nvml.stand_in import small_process
from tests.support.stand_ins import Look, observe_with

SOURCE = Path(__file__).with_name("libamd_smi.c")
NAME = "libamd_smi.so"
GIB = 1 << 30
Machine = dict[str, dict[str, Any]]
"""GPU (`"-"`: the machine) → key → answer, as `libamd_smi.c` says."""


def build(folder: Path, *flags: str) -> Path:
    """The library, in a folder of its own."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc) to build the stand-in for amdsmi")
    library = folder / NAME
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wno-comment"]
    command += [*flags, f"-Wl,-soname,{NAME}", "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return library


def bus(index: int) -> str:
    return f"0000:{0x0C + 0x11 * index:02x}:00.0"


def uuid(index: int) -> str:
    return f"{index:02x}ff74a1-0000-1000-8000-000000000000"


def mi300x(count: int = 8) -> Machine:
    """A healthy machine whose GPUs all reach each other over xGMI."""
    each = {
        "name": "AMD Instinct MI300X OAM",
        "driver": "6.12.12",
        "memory_total": 192 * GIB,
        "memory_used": 300 << 20,
        "temperature.1.0": 41,
        "temperature.1.5": 100,
        "temperature.2.0": 35,
        "temperature.2.5": 105,
        "ecc": "0 0 0",
        "ecc.0x80": "0 0 0",
        "pages": "-",
        "threshold": 128,
        "pcie": "16 32000 16 32000",
        "power_cap": "750000000 750000000",
        "clock": 2100,
        "level": 0,
        "compute_partition": "SPX",
        "memory_partition": "NPS1",
        "violations": "0 0 0 0 0",
        "links": "UUUUUUUX"[-count:] if count > 1 else "X",
        "link_type": 2,
        "processes": "-",
    }
    gpus = {str(index): {"bdf": bus(index), "uuid": uuid(index), **each} for index in range(count)}
    return {"-": {"gpus": count}, **gpus}


def write(machine: Mapping[str, Mapping[str, Any]], file: Path) -> Path:
    lines = [
        f"{gpu} {key} {value}" for gpu, answers in machine.items() for key, value in answers.items()
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def host(folder: Path, *nodes: str, kfd: bool = True) -> Path:
    """The root of a host with these render nodes."""
    (folder / "dev/dri").mkdir(parents=True)
    if kfd:
        (folder / "dev/kfd").write_text("")
    for node in nodes:
        (folder / "dev/dri" / node).write_text("")
    return folder


def observe(library: Path, description: Path, look: Look, deadline_s: float = 20.0) -> Outcome:
    """`look` in a probe child that has the stand-in loaded, with this description."""
    settings = {"AMDSMI_STAND_IN": str(description)}
    return observe_with(library, settings, "amd_gpus", look, deadline_s)


def gathered(library: Path, description: Path, root: Path, deadline_s: float) -> Outcome:
    """What the check gathers of a machine, below this root, by a child of the small process."""
    return small_process().submit(_gather, library, description, root, deadline_s).result()


def _gather(library: Path, description: Path, root: Path, deadline_s: float) -> Outcome:
    until = time.monotonic() + deadline_s

    def left() -> float:
        return until - time.monotonic()

    return observe(library, description, lambda crumb: gather_amd(crumb, root, left), deadline_s)
