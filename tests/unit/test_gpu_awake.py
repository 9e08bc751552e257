"""GPUs are kept awake by open device files, until the run ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

from nccl_doctor.system import forks
from nccl_doctor.toolkit.gpu.awake import keep_awake


def held_by(pid: int) -> set[str]:
    files = set()
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        try:
            files.add(os.path.basename(os.readlink(handle)))
        except OSError:  # closed meanwhile
            continue
    return {name for name in files if name.startswith("nvidia")}


def test_every_gpu_that_may_be_opened_is_held_until_the_end(tmp_path: Path) -> None:
    dev = tmp_path / "dev"
    dev.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (dev / name).touch()
    (dev / "nvidia2").symlink_to(dev / "gone")
    pid = keep_awake(tmp_path)
    assert pid is not None
    try:
        assert pid in forks.living
        until = time.monotonic() + 10
        while len(held_by(pid)) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert held_by(pid) == {"nvidia0", "nvidia1", "nvidia11"}
    finally:
        forks.stop_service(pid)
    assert not Path(f"/proc/{pid}").exists()


def test_without_a_gpu_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    before = set(forks.living)
    assert keep_awake(tmp_path) is None
    assert forks.living == before
