"""GPUs of this host as the kernel shows them, and what GPU code runs on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccl_doctor.api import arch_runs_on, count_gpus, host_gpus


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("compute_90", (12, 0), True),
        ("compute_90a", (10, 0), False),
        ("compute_120", (9, 0), False),
        ("sm_100f", (10, 3), True),
        ("sm_100f", (12, 0), False),
        ("gfx942", (9, 4), False),
    ],
)
def test_binary_compatibility(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert arch_runs_on(arch, capability) is runs


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\n",
         "580.95.05"),
        ("something else\n", None),
    ],
)  # fmt: skip
def test_gpus_as_the_kernel_shows_them(tmp_path: Path, text: str, driver: str | None) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    for bus in ("0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"):
        (gpus / bus).mkdir(parents=True)
    (gpus.parent / "version").write_text(text)
    assert host_gpus(tmp_path) == {"nodes": 2, "proc": 3, "kfd": 0, "driver": driver}
    (tmp_path / "dev/kfd").touch()
    (tmp_path / "dev/dri").mkdir()
    (tmp_path / "dev/dri/renderD128").touch()
    assert host_gpus(tmp_path)["kfd"] == 1


@pytest.mark.parametrize(
    ("seen", "number"),
    [((2, 8, 0), 2), ((0, 8, 0), 8), ((0, 0, 4), 4), ((0, 0, 0), 0)],
)
def test_a_container_counts_the_gpus_that_it_was_given(
    seen: tuple[int, int, int], number: int
) -> None:
    assert count_gpus(dict(zip(("nodes", "proc", "kfd"), seen, strict=True))) == number
