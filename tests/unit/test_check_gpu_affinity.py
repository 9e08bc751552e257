"""Ranks far from their GPUs, on made-up clusters and in recorded folders of sysfs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Context, Launch, Severity, Skip
from nccl_doctor.checks.gpu_affinity import GpuAffinity
from nccl_doctor.checks.gpu_affinity.gpu_places import as_sysfs, place_on_host
from nccl_doctor.checks.gpu_affinity.nic_places import HOW_NEAR
from nccl_doctor.report.lines import is_table
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only

pytestmark = pytest.mark.xdist_group("torch")

CHECK = GpuAffinity()
NEAR, FAR = "0000:1b:00.0", "0000:9d:00.0"
CPUS = {0: "0-31,64-95", 1: "32-63,96-127"}


def device(root: Path, path: str, numa: int = -1, cpus: str = "") -> Path:
    """A device below /sys/devices, with its link among the PCI devices."""
    folder = root / "sys/devices" / path
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{numa}\n")
    (folder / "local_cpulist").write_text(f"{cpus or CPUS.get(numa, '0-127')}\n")
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / folder.name).symlink_to(os.path.relpath(folder, bus))
    return folder


def nic(root: Path, folder: Path, **names: str) -> None:
    """What the device is called among the network devices."""
    for kind, name in names.items():
        entry = root / "sys/class" / kind / name
        entry.mkdir(parents=True)
        (entry / "device").symlink_to(os.path.relpath(folder, entry))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two sockets; on the first a switch with a GPU and a NIC, and an onboard NIC."""
    switch = "pci0000:17/0000:17:01.0/0000:18:00.0"
    device(tmp_path, f"{switch}/0000:19:00.0/{NEAR}", 0)
    device(tmp_path, f"pci0000:97/0000:97:01.0/{FAR}", 1)
    fast = device(tmp_path, f"{switch}/0000:19:01.0/0000:1c:00.0", 0)
    nic(tmp_path, fast, infiniband="mlx5_0", net="ens1")
    nic(tmp_path, device(tmp_path, "pci0000:17/0000:17:03.0/0000:1e:00.0", 0), net="ens2")
    nic(tmp_path, device(tmp_path, "pci0000:00/0000:00:1c.0", 0), net="eno1")
    (tmp_path / "sys/class/net/lo").mkdir()
    return tmp_path


def names(place: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [
        (each["name"], None if each["near"] is None else HOW_NEAR[each["near"]])
        for each in place["nics"]
    ]


def test_the_place_of_a_gpu_is_read(machine: Path) -> None:
    place = place_on_host(NEAR, machine)
    assert place["numa"] == 0
    assert place["cpus"] == [*range(32), *range(64, 96)]
    assert names(place) == [
        ("mlx5_0 (ens1)", "same PCIe switch"),
        ("ens2", "same root complex"),
        ("eno1", "same NUMA node"),
    ]
    assert {near for _, near in names(place_on_host(FAR, machine))} == {"another NUMA node"}


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert place_on_host(NEAR, tmp_path) == {"numa": None, "cpus": [], "nics": []}
    folder = device(tmp_path, f"LNXSYSTM:00/{NEAR}")
    (folder / "local_cpulist").write_text("some\n")
    (folder / "numa_node").write_text("\n")
    nic(tmp_path, device(tmp_path, "virtio0"), net="eth0")
    place = place_on_host(NEAR, tmp_path)
    assert (place["numa"], place["cpus"], names(place)) == (None, [], [("eth0", None)])


@pytest.mark.parametrize(
    ("said", "sysfs"),
    [
        ("0000:3B:00.0", "0000:3b:00.0"),
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("00010001:00:00.0", "10001:00:00.0"),
        ("../../etc", None),
        ("", None),
    ],
)
def test_addresses_are_written_as_in_sysfs(said: str, sysfs: str | None) -> None:
    assert as_sysfs(said) == sysfs


def seen(machine: Path, address: str, cpus: set[int], uuid: str | None = "GPU-1") -> dict[str, Any]:
    context = Context(launch=Launch(), env={}, root=machine)
    return GpuAffinity().look(uuid, address, cpus, context)


def cluster(*ranks: dict[str, Any]) -> Any:
    hosts = [f"nd{i}" for i in range(len(ranks) // 2)]
    by_rank = dict(enumerate(ranks))
    return make_cluster(hosts, 2, check=CHECK.name, by_rank=by_rank, backend="nccl")


def test_a_rank_on_the_other_socket_is_named(machine: Path) -> None:
    good = seen(machine, NEAR, set(range(32)))
    bad = seen(machine, FAR, set(range(16)))
    made = cluster(good, good, good, bad)
    found = only(CHECK, made, "rank-far-from-gpu", hosts=["nd1"], ranks=[3], devices=["GPU-1"])
    assert found.message == (
        "may run on CPUs 0–15; its GPU is beside CPUs 32–63, 96–127 of NUMA node 1"
    )
    assert "numactl --cpunodebind=1 --preferred=1" in found.fix
    assert found.level is Severity.WARN


@pytest.mark.parametrize("cpus", [set(range(128)), {31, 32}, {64}])
def test_a_rank_that_may_run_near_its_gpu_is_fine(machine: Path, cpus: set[int]) -> None:
    assert judge(CHECK, cluster(*[seen(machine, NEAR, cpus)] * 2)) == []


def test_where_nothing_is_known_nothing_is_said(tmp_path: Path) -> None:
    assert judge(CHECK, cluster(*[seen(tmp_path, NEAR, {1})] * 2)) == []


def test_without_a_node_the_cpus_are_named(machine: Path) -> None:
    (machine / "sys/bus/pci/devices" / FAR / "numa_node").write_text("-1\n")
    bad = seen(machine, FAR, {0}, None)
    good = seen(machine, NEAR, {0})
    found = only(CHECK, cluster(good, bad), "rank-far-from-gpu", hosts=["nd0"], ranks=[1])
    assert found.message.endswith("beside CPUs 32–63, 96–127")


def test_the_nearest_network_devices_are_a_table(machine: Path) -> None:
    table = seen(machine, NEAR, {0, 1})["places"]
    assert is_table(table)
    row = [NEAR, 0, "0–31, 64–95", "0–1", "mlx5_0 (ens1)", "same PCIe switch"]
    assert table["rows"] == [row]
    assert is_table(seen(machine, "0000:ff:00.0", {0})["places"])


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_without_a_gpu_it_is_skipped(backend: str) -> None:
    import torch

    if torch.version.cuda:
        pytest.skip("this torch is built for GPUs")
    launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1)
    with pytest.raises(Skip, match="gloo" if backend == "gloo" else "built without CUDA"):
        CHECK.observe(Context(launch=launch, env={}, backend=backend))
