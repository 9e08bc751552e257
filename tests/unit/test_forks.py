"""What a process with children needs from the kernel, where the kernel has nothing left to give."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/sys/fs/cgroup/memory")

SCRIPT = """
import ctypes, errno, os, sys
from nccl_doctor.toolkit.forks import wake_pipe

folder = sys.argv[1]
with open(folder + "/cgroup.procs", "w") as procs:
    procs.write(str(os.getpid()))
assert ctypes.CDLL(None).mlockall(1) == 0, "so that only pipes ask for memory"
_, wake_end = wake_pipe()
others = [os.pipe()[1] for _ in range(200)]
used = os.open(folder + "/memory.usage_in_bytes", os.O_RDONLY)
limit = os.open(folder + "/memory.limit_in_bytes", os.O_WRONLY)
os.write(limit, os.read(used, 99))
refused = False
for other in others:
    try:
        os.write(other, b"a")
    except OSError as error:
        refused = error.errno == errno.ENOMEM
        break
os._exit(0 if refused and os.write(wake_end, b"b") == 1 else 3)
"""


@pytest.fixture
def nothing_left() -> Iterator[Path]:
    """A cgroup in which the kernel refuses memory and kills nobody: only version 1 has that."""
    folder = _MEMORY / f"nccl-doctor-forks-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.oom_control").write_text("1")
    except OSError as error:
        pytest.skip(f"this machine has no such cgroup: {error}")
    yield folder
    folder.rmdir()


def test_a_signal_finds_room_in_its_pipe_where_no_memory_is_left(nothing_left: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, nothing_left], timeout=30, check=False)
    assert done.returncode == 0, "3: it found no room, or other pipes found some"
