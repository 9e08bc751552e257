"""What a process with children needs from the kernel, where the kernel has nothing left to give."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nccl_doctor.system import forks

_MEMORY = Path("/sys/fs/cgroup/memory")

SCRIPT = """
import ctypes, errno, os, sys
from nccl_doctor.system.forks import wake_pipe

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


def test_a_moment_outlives_the_parent(tmp_path: Path) -> None:
    """The parent is killed within the block: the block is carried out, and nothing after it."""
    code = """
import os, signal, sys, time
from pathlib import Path
from nccl_doctor.system import forks
folder, parent = Path(sys.argv[1]), os.getpid()
if os.fork() == 0:
    forks.die_with(parent)
    with forks.outliving_parent():
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            time.sleep(0.01)
        (folder / "within").touch()
    (folder / "after").touch()
    os._exit(0)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout as output:
        output.read()  # both have ended
    assert child.wait(30) == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["within"]


def test_without_a_signal_at_the_end_of_the_parent_there_is_none_after_the_block() -> None:
    number = ctypes.c_int(-1)
    with forks.outliving_parent():
        pass
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    assert number.value == 0
