"""The fabric manager in made-up folders of /dev, /proc and /var/log."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccl_doctor.checks.gpu_state.fabric_manager import read_fabric_manager

WORDS = (
    "Jan 15 14:00:00 nd0 nv-fabricmanager[3228]: fabric manager NVIDIA GPU driver interface "
    "version {} don't match with driver version {}. Please update with matching NVIDIA driver "
    "package.\n"
)


def put(root: Path, name: str, text: str = "") -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with four NVSwitches, outside any container."""
    for number in range(4):
        put(tmp_path, f"dev/nvidia-nvswitch{number}")
    put(tmp_path, "dev/nvidia-nvswitchctl")
    put(tmp_path, "proc/1/comm", "systemd\n")
    return put(tmp_path, "proc/2/comm", "kthreadd\n")


def test_a_host_without_nvswitches_is_not_looked_at_further(tmp_path: Path) -> None:
    nothing = {"switches": 0, "running": None, "misfit": None}
    assert read_fabric_manager(tmp_path) == nothing


def test_its_process_is_seen(root: Path) -> None:
    assert read_fabric_manager(root)["switches"] == 4
    assert read_fabric_manager(root)["running"] is False
    put(root, "proc/812/comm", "nv-fabricmanage\n")
    assert read_fabric_manager(root)["running"] is True


def test_in_a_container_nobody_knows(root: Path) -> None:
    put(root, "proc/2/comm", "python\n")
    assert read_fabric_manager(root)["running"] is None


def test_the_last_complaint_about_the_driver_counts(root: Path) -> None:
    told: list[str] = []
    put(root, "var/log/syslog", WORDS.format("530.30.02", "530.41.03") + "x\n" * 9)
    seen = read_fabric_manager(root, lambda step, file: told.append(file))
    assert seen["misfit"] == ["530.30.02", "530.41.03"]
    assert told == ["/var/log/fabricmanager.log", "/var/log/syslog"]
    newer = WORDS.format("550.127.05", "550.120").replace("don't", "doesn't")
    put(root, "var/log/syslog", WORDS.format("530.30.02", "530.41.03") + newer)
    assert read_fabric_manager(root)["misfit"] == ["550.127.05", "550.120"]
    (root / "var/log/syslog").write_bytes(b"\xff\xfe fabric manager NVIDIA\n")
    assert read_fabric_manager(root)["misfit"] is None
