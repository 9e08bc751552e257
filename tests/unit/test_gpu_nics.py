"""GPUs and the NICs beside them: in recorded trees, and on made-up clusters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Context, Launch, Severity
from nccl_doctor.checks.gpu_affinity import GpuAffinity
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.fabrics import add_device, write
from tests.support.findings import judge, only

CHECK = GpuAffinity()
SWITCH = "pci0000:17/0000:17:01.0/0000:18:00.0"


def rank(gpu: int, near: int = 0, **changes: Any) -> dict[str, Any]:
    """A rank beside its GPU's CPUs, and beside port `gpu` of eight."""
    rdma = {
        "near": near,
        "at": [gpu],
        "names": [f"mlx5_{gpu}:1"],
        "own": {},
        "own_near": None,
        "count": 8,
        **changes,
    }
    return {"uuid": f"GPU-{gpu}", "cpus": "0", "beside": "0", "shared": 1, "numa": 0, "rdma": rdma}


def cluster(changes: dict[int, Any], hosts: int = 3, nproc: int = 8) -> Cluster:
    facts = {number: changes.get(number, rank(number % nproc)) for number in range(hosts * nproc)}
    names = [f"nd{node}" for node in range(hosts)]
    return make_cluster(names, nproc, check=CHECK.name, by_rank=facts, backend="nccl")


def test_gpus_with_a_port_each_are_fine() -> None:
    assert judge(CHECK, cluster({})) == []
    assert judge(CHECK, cluster({}, hosts=1)) == []


def test_a_rank_whose_own_port_is_down_is_named_and_the_owner_of_the_other_is_not() -> None:
    down = rank(3, near=2, at=[2], names=["mlx5_2:1"], own={"0000:1c:00.0": "down"}, own_near=0)
    found = only(CHECK, cluster({11: down}), "gpu-far-from-nic", hosts=["nd1"], ranks=[11],
                 devices=["GPU-3"])  # fmt: skip
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert found.message == (
        "0000:1c:00.0 is down (same PCIe switch); nearest usable NIC: mlx5_2:1 (same NUMA node)"
    )
    down["rdma"]["own"] = {"0000:1c:00.0": "left out"}
    found = only(CHECK, cluster({11: down}), "gpu-far-from-nic", hosts=["nd1"], ranks=[11],
                 devices=["GPU-3"])  # fmt: skip
    assert found.confidence is Confidence.POSSIBLE


def test_a_port_that_is_down_explains_that_its_rank_takes_another() -> None:
    down = rank(3, near=2, at=[2], names=["mlx5_2:1"], own={"0000:1c:00.0": "down"}, own_near=0)
    made = cluster({11: down})
    hosts = {}
    for host in made.hosts:
        state = "DOWN" if host.name == "nd1" else "ACTIVE"
        port = {"device": "mlx5_3", "port": "1", "state": state, "physical": "Polling"}
        port |= {"link": "InfiniBand", "rate": "", "wanted": True}
        seen = {"ports": [port], "road": "infiniband", "settings": {}}
        hosts[host.id] = replace(host, facts={"rdma": {ALONE: outcome(seen)}})
    ranks = tuple(replace(each, host=hosts[each.host.id]) for each in made.ranks)
    made = replace(made, hosts=tuple(hosts.values()), ranks=ranks)
    (found,) = judge(CHECK, made)
    assert (found.code, found.explained_by) == ("gpu-far-from-nic", "rdma-port-down")


def test_ranks_that_share_a_gpu_pair_nothing_differently() -> None:
    assert judge(CHECK, cluster({12: rank(3)}, hosts=2)) == []
    parts = {8 + n: {**rank(3), "uuid": f"MIG-{n}", "address": "0000:61:00.0"} for n in (3, 4)}
    assert judge(CHECK, cluster(parts, hosts=2)) == []


def test_a_rank_unlike_most_of_its_host_is_named() -> None:
    found = only(CHECK, cluster({5: rank(5, near=3, at=[4])}, hosts=1), "gpu-far-from-nic",
                 hosts=["nd0"], ranks=[5], devices=["GPU-5"])  # fmt: skip
    assert "(another NUMA node); for 7 other ranks of the host: same PCIe switch" in found.message
    assert found.kind.title.startswith("A rank's GPU is farther from a NIC")


def test_a_board_with_ports_on_one_socket_is_made_so() -> None:
    board = {number: rank(number % 8, near=3 if number % 8 > 3 else 2) for number in range(24)}
    assert judge(CHECK, cluster(board)) == []


def test_a_host_that_pairs_gpus_and_ports_differently_is_the_minority() -> None:
    turned = {16 + local: rank(7 - local) for local in range(8)}
    found = only(CHECK, cluster(turned), "gpu-nic-pairs-differ", hosts=["nd2"],
                 ranks=range(16, 24))  # fmt: skip
    assert found.message.startswith("local rank 0 is next to mlx5_7:1 (rail 7, same PCIe switch); ")
    assert found.message.endswith("and 4 more; the other hosts pair them equally")
    swapped = {16: rank(1), 17: rank(0)}
    only(CHECK, cluster(swapped), "gpu-nic-pairs-differ", hosts=["nd2"], ranks=[16, 17])


def test_two_hosts_that_differ_are_a_tie() -> None:
    found = judge(CHECK, cluster({8: rank(1), 9: rank(0)}, hosts=2))
    assert [(one.code, one.where.hosts) for one in found] == [
        ("gpu-nic-pairs-differ", ("nd0",)),
        ("gpu-nic-pairs-differ", ("nd1",)),
    ]
    assert {one.confidence for one in found} == {Confidence.POSSIBLE}
    assert "a tie between hosts" in found[0].message


def test_hosts_of_another_make_and_hosts_without_rdma_are_not_compared() -> None:
    other = {number: rank(number % 8, at=[0], count=1) for number in range(16, 24)}
    assert judge(CHECK, cluster(other)) == []
    none: dict[str, Any] = {**rank(0), "rdma": None}
    assert judge(CHECK, cluster(dict.fromkeys(range(24), none))) == []
    assert judge(CHECK, cluster(dict.fromkeys(range(8), rank(0, near=None)))) == []  # type: ignore[arg-type]
    old = {key: value for key, value in rank(0).items() if key != "rdma"}
    assert judge(CHECK, cluster(dict.fromkeys(range(24), old))) == []
    assert judge(CHECK, change_rank(cluster({}), 3, local_rank=None)) == []


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A switch with a GPU and a port, and a second port elsewhere."""
    add_device(tmp_path, "mlx5_0", pci="0000:1c:00.0")
    add_device(tmp_path, "mlx5_1", pci="0000:9c:00.0", numa=1)
    for name, folder in (
        ("0000:1b:00.0", f"{SWITCH}/0000:19:00.0/0000:1b:00.0"),
        ("0000:1c:00.0", f"{SWITCH}/0000:19:01.0/0000:1c:00.0"),
        ("0000:9c:00.0", "pci0000:97/0000:97:01.0/0000:9c:00.0"),
    ):
        write(tmp_path, f"sys/devices/{folder}/numa_node", "1" if "9c" in name else "0")
        bus = tmp_path / "sys/bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        (bus / name).symlink_to(tmp_path / "sys/devices" / folder)
    for name, folder in (("mlx5_0", f"{SWITCH}/0000:19:01.0/0000:1c:00.0"),
                         ("mlx5_1", "pci0000:97/0000:97:01.0/0000:9c:00.0")):  # fmt: skip
        link = tmp_path / f"sys/class/infiniband/{name}/device"
        link.unlink()
        link.symlink_to(tmp_path / "sys/devices" / folder)
    return tmp_path


def see(machine: Path, **env: str) -> dict[str, Any]:
    context = Context(launch=Launch(), env=env, root=machine)
    seen = GpuAffinity().look("GPU-1", "0000:1b:00.0", {0}, context)["rdma"]
    assert isinstance(seen, dict)
    return seen


def test_the_port_beside_a_gpu_is_found(machine: Path) -> None:
    seen = see(machine)
    assert (seen["near"], seen["at"], seen["names"]) == (0, [0], ["mlx5_0:1"])
    assert (seen["own"], seen["count"]) == ({}, 2)


def test_a_port_that_is_down_or_left_out_is_told(machine: Path) -> None:
    seen = see(machine, NCCL_IB_HCA="=mlx5_1")
    assert (seen["near"], seen["names"]) == (3, ["mlx5_1:1"])
    assert (seen["own"], seen["own_near"]) == ({"0000:1c:00.0": "left out"}, 0)
    write(machine, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    seen = see(machine)
    assert (seen["near"], seen["own"]) == (3, {"0000:1c:00.0": "down"})


def test_a_machine_without_rdma_says_nothing(tmp_path: Path) -> None:
    context = Context(launch=Launch(), env={}, root=tmp_path)
    assert GpuAffinity().look("GPU-1", "0000:1b:00.0", {0}, context)["rdma"] is None
