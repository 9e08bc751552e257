"""GPUs of this host as the kernel shows them, and what GPU code runs on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nccl_doctor.toolkit.gpu import devices
from nccl_doctor.toolkit.gpu.devices import count_gpus, host_gpus, index_of_own
from nccl_doctor.toolkit.versions import arch_runs_on
from tests.support.rows import each_row


@each_row(
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
    seen = {"nodes": 2, "proc": 3, "kfd": 0, "driver": driver, "nouveau": 0}
    assert host_gpus(tmp_path) == seen
    (tmp_path / "dev/kfd").touch()
    (tmp_path / "dev/dri").mkdir()
    (tmp_path / "dev/dri/renderD128").touch()
    assert host_gpus(tmp_path)["kfd"] == 1
    nouveau = tmp_path / "sys/bus/pci/drivers/nouveau"
    for name in ("bind", "module", "0000:01:00.0", "0000:02:00.0"):
        (nouveau / name).mkdir(parents=True)
    assert host_gpus(tmp_path)["nouveau"] == 2


def test_an_mi300x_is_one_gpu_though_it_has_eight_render_nodes(tmp_path: Path) -> None:
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/kfd").touch()
    for minor in range(128, 144):
        (tmp_path / f"dev/dri/renderD{minor}").touch()
    for node, minor in enumerate((0, 0, 128, 136)):  # two CPUs, two GPUs
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        text = f"simd_count {304 * 4 * bool(minor)}\ndrm_render_minor {minor}\nhive_id 1\n"
        (folder / "properties").write_text(text)
    assert host_gpus(tmp_path)["kfd"] == 2
    (tmp_path / "dev/dri/renderD136").unlink()  # a container that was given the other one
    assert host_gpus(tmp_path)["kfd"] == 1
    for minor in range(129, 136):  # divided into eight
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{minor}"
        folder.mkdir()
        (folder / "properties").write_text(f"drm_render_minor {minor}\n")
    assert host_gpus(tmp_path)["kfd"] == 8


@pytest.mark.parametrize(
    ("seen", "number"),
    [((2, 8, 0), 2), ((0, 8, 0), 8), ((0, 0, 4), 4), ((0, 0, 0), 0)],
)
def test_a_container_counts_the_gpus_that_it_was_given(
    seen: tuple[int, int, int], number: int
) -> None:
    assert count_gpus(dict(zip(("nodes", "proc", "kfd"), seen, strict=True))) == number


@pytest.mark.parametrize(
    ("local_rank", "count", "index"),
    [(0, 8, 0), (7, 8, 7), (3, 1, 0), (2, 2, 0), (None, 8, 0), (3, 0, 3)],
)
def test_the_gpu_of_a_rank(local_rank: int | None, count: int, index: int) -> None:
    assert index_of_own(local_rank, count) == index


DRIVER = """
int cuDeviceGet(int *device, int index) { *device = 7; return index > 1 ? 101 : 0; }
int NAME(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = 16 * device + i;
    return device == 7 ? 0 : 1;
}
"""


@pytest.mark.parametrize(
    ("call", "index", "found"),
    [
        ("cuDeviceGetUuid_v2", 0, "70717273-7475-7677-7879-7a7b7c7d7e7f"),
        ("cuDeviceGetUuid", 1, "70717273-7475-7677-7879-7a7b7c7d7e7f"),
        ("cuDeviceGetUuid_v2", 2, "None"),
        ("cuDeviceGetName", 0, "None"),
    ],
)
def test_the_uuid_of_a_gpu_where_torch_does_not_say_it(
    tmp_path: Path, call: str, index: int, found: str
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc) to build a stand-in for libcuda")
    source = tmp_path / "cuda.c"
    source.write_text(DRIVER.replace("NAME", call))
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)],
        check=True,
        timeout=60,
    )
    ask = "from nccl_doctor.toolkit.gpu.devices import uuid_by_driver as ask; print(ask(INDEX))"
    said = subprocess.run(
        [sys.executable, "-c", ask.replace("INDEX", str(index))],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert said.stdout.strip() == found


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize(
    ("properties", "found"),
    [
        ({"pci_domain_id": 0, "pci_bus_id": 0x1D, "pci_device_id": 0}, "0000:1d:00.0"),
        ({}, None),  # an older torch
    ],
)
def test_the_bus_id_of_a_gpu_comes_from_torch_where_it_gives_it(
    properties: dict[str, int], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    known = {"name": "AMD Instinct MI300X", "total_memory": 192 << 30, "major": 9, "minor": 4}
    seen = SimpleNamespace(**known, **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert devices._device(0)["bus_id"] == found
