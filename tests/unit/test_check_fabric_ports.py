"""RDMA ports of made-up hosts, compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Severity, Skip
from nccl_doctor.checks.fabric_ports import FabricPorts
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = FabricPorts()
Tree = Callable[[Path], Any]


def look(root: Path, backend: str = "nccl", **env: str) -> dict[str, Any]:
    return observe(FabricPorts, env, backend=backend, root=root)


def cluster(*hosts: dict[str, Any], **fields: Any) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    seen = dict(zip(names, hosts, strict=True))
    return make_cluster(names, check="fabric_ports", by_host=seen, backend="nccl", **fields)


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    return look(fabrics.connectx7(tmp_path / "good"))


def with_device(root: Path, ports: int, name: str, **device: Any) -> Path:
    fabrics.connectx7(root, ports)
    fabrics.add_device(root, name, pci="0000:2f:00.0", **device)
    return root


def test_hosts_that_are_alike_are_fine(good: dict[str, Any]) -> None:
    assert judge(CHECK, cluster(good, good, good)) == []
    assert judge(CHECK, cluster(good)) == []


def test_roce_and_efa_hosts_that_are_alike_are_fine(tmp_path: Path) -> None:
    for tree in (fabrics.roce, fabrics.efa):
        seen = look(tree(tmp_path / tree.__name__))
        assert judge(CHECK, cluster(seen, seen)) == []


@pytest.mark.parametrize("env", [{"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}])
def test_rdma_that_is_turned_off_is_not_compared(tmp_path: Path, env: dict[str, str]) -> None:
    with pytest.raises(Skip, match="turns RDMA off"):
        look(fabrics.connectx7(tmp_path), **env)


def test_no_device_and_no_nccl_are_no_pass(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no RDMA device here"):
        look(tmp_path)
    with pytest.raises(Skip, match="does not use NCCL"):
        look(fabrics.connectx7(tmp_path), backend="gloo")


def test_a_device_that_fell_off_the_bus(tmp_path: Path, good: dict[str, Any]) -> None:
    sick = look(fabrics.connectx7(tmp_path, 7))
    found = only(
        CHECK,
        cluster(good, sick, good),
        "rdma-device-missing",
        hosts=["nd1"],
        interfaces=["mlx5_7:1"],
    )
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert "7 RDMA ports that NCCL may use, 8 on the other hosts: no mlx5_7:1" in found.message
    doubtful = only(
        CHECK, cluster(good, sick), "rdma-device-missing", hosts=["nd1"], interfaces=["mlx5_7:1"]
    )
    assert doubtful.confidence is Confidence.POSSIBLE


def test_a_host_with_more_is_not_to_blame(tmp_path: Path, good: dict[str, Any]) -> None:
    more = look(fabrics.connectx7(tmp_path / "a", 9))
    storage = look(with_device(tmp_path / "b", 8, "mlx5_8", rate="100 Gb/sec (4X EDR)"))
    for host in (more, storage):
        assert judge(CHECK, cluster(good, host, good)) == []


def test_what_the_user_left_out_is_not_compared(tmp_path: Path) -> None:
    good = look(fabrics.connectx7(tmp_path / "a", 2), NCCL_IB_HCA="mlx5_0")
    odd = look(
        with_device(tmp_path / "b", 1, "mlx5_9", rate="100 Gb/sec (4X EDR)"), NCCL_IB_HCA="mlx5_0"
    )
    assert judge(CHECK, cluster(good, odd, good)) == []


def test_a_port_that_is_down_is_the_business_of_another_check(
    tmp_path: Path, good: dict[str, Any]
) -> None:
    sick = look(with_device(tmp_path, 7, "mlx5_7", state="1: DOWN", rate="10 Gb/sec (4X SDR)"))
    assert judge(CHECK, cluster(good, sick, good)) == []


def test_a_port_that_runs_at_half_the_rate(tmp_path: Path, good: dict[str, Any]) -> None:
    sick = look(with_device(tmp_path, 7, "mlx5_7", rate="200 Gb/sec (2X NDR)"))
    found = only(
        CHECK,
        cluster(good, sick, good),
        "rdma-rate-differs",
        hosts=["nd1"],
        interfaces=["mlx5_7:1"],
    )
    assert found.level is Severity.WARN
    assert "200 Gb/sec (2X NDR); the other hosts: 400 Gb/sec (4X NDR)" in found.message
    doubtful = only(
        CHECK, cluster(good, sick), "rdma-rate-differs", hosts=["nd1"], interfaces=["mlx5_7:1"]
    )
    assert doubtful.confidence is Confidence.POSSIBLE


def test_the_slow_port_is_found_among_others_that_are_slow_everywhere(tmp_path: Path) -> None:
    slow = "200 Gb/sec (4X HDR)"
    good = look(with_device(tmp_path / "a", 2, "mlx5_9", rate=slow))
    root = with_device(tmp_path / "b", 1, "mlx5_9", rate=slow)
    fabrics.add_device(root, "mlx5_1", pci="0000:2e:00.0", rate=slow)
    only(
        CHECK,
        cluster(good, good, look(root)),
        "rdma-rate-differs",
        hosts=["nd2"],
        interfaces=["mlx5_1:1"],
    )


def test_two_hosts_of_two_rates_are_both_named(tmp_path: Path) -> None:
    fast, slow = tmp_path / "a", tmp_path / "b"
    fabrics.add_device(fast, "mlx5_0")
    fabrics.add_device(slow, "mlx5_0", rate="200 Gb/sec (4X HDR)")
    found = judge(CHECK, cluster(look(fast), look(slow)))
    assert [f.code for f in found] == ["rdma-rate-differs"] * 2
    assert {f.where.hosts for f in found} == {("nd0",), ("nd1",)}
    assert all(f.confidence is Confidence.POSSIBLE for f in found)


def test_a_host_whose_ports_are_ethernet(tmp_path: Path, good: dict[str, Any]) -> None:
    root = tmp_path / "odd"
    for number in range(8):
        fabrics.add_device(
            root, f"mlx5_{number}", layer="Ethernet", pci=f"0000:{0x1A + number:02x}:00.0"
        )
    found = only(CHECK, cluster(good, good, look(root)), "rdma-fabric-differs", hosts=["nd2"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert "Ethernet here; the other hosts: InfiniBand" in found.message


def test_a_host_that_has_an_ethernet_port_more_is_connected(
    tmp_path: Path, good: dict[str, Any]
) -> None:
    both = look(with_device(tmp_path, 8, "mlx5_8", layer="Ethernet"))
    assert "rdma-fabric-differs" not in {f.code for f in judge(CHECK, cluster(good, good, both))}


def test_the_rate_of_another_link_layer_is_not_compared(
    tmp_path: Path, good: dict[str, Any]
) -> None:
    root = tmp_path / "odd"
    for number in range(8):
        fabrics.add_device(
            root,
            f"mlx5_{number}",
            layer="Ethernet",
            rate="200 Gb/sec (4X HDR)",
            pci=f"0000:{0x1A + number:02x}:00.0",
        )
    only(CHECK, cluster(good, good, look(root)), "rdma-fabric-differs", hosts=["nd2"])
    tie = judge(CHECK, cluster(good, look(root)))
    assert {f.code for f in tie} == {"rdma-fabric-differs"}
    slow = look(with_device(tmp_path / "slow", 7, "mlx5_7", rate="200 Gb/sec (2X NDR)"))
    found = judge(CHECK, cluster(good, good, slow, look(root)))
    assert {(f.code, f.where.hosts) for f in found} == {
        ("rdma-fabric-differs", ("nd3",)),
        ("rdma-rate-differs", ("nd2",)),
    }


@pytest.mark.parametrize("rate", ["400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)"])
def test_one_port_of_several_is_ethernet(tmp_path: Path, good: dict[str, Any], rate: str) -> None:
    odd = look(with_device(tmp_path, 7, "mlx5_7", layer="Ethernet", rate=rate))
    found = only(
        CHECK,
        cluster(good, odd, good),
        "rdma-fabric-differs",
        hosts=["nd1"],
        interfaces=["mlx5_7:1"],
    )
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert "mlx5_7:1: Ethernet; the other hosts: InfiniBand" in found.message


def by_ranks(hosts: list[dict[str, Any]], lists: dict[int, str], **more: str) -> Cluster:
    """Two ranks on every host, each with its own NCCL_IB_HCA as check environment saw it."""
    made = cluster(*hosts)
    ranks = []
    for rank in made.ranks:
        told = {"NCCL_IB_HCA": lists[rank.seat], **more} if rank.seat in lists else {}
        variables = {
            name: {"value": value, "origin": "environment", "line": 0}
            for name, value in told.items()
        }
        facts = {"environment": {ALONE: outcome({"variables": variables})}}
        ranks.append(replace(rank, facts=facts))
    return replace(made, ranks=tuple(ranks))


def test_the_ports_of_all_ranks_of_a_host_are_compared(tmp_path: Path) -> None:
    usual = look(fabrics.connectx7(tmp_path / "a", 2), NCCL_IB_HCA="=mlx5_0")
    root = with_device(tmp_path / "b", 1, "mlx5_1", rate="200 Gb/sec (2X NDR)")
    sick = look(root, NCCL_IB_HCA="=mlx5_0")
    lists = {seat: f"=mlx5_{seat % 2}" for seat in range(6)}
    where = {"hosts": ["nd1"], "interfaces": ["mlx5_1:1"]}
    hosts = [usual, sick, usual]
    only(CHECK, by_ranks(hosts, lists), "rdma-rate-differs", **where)
    one_list = dict.fromkeys(range(6), "=mlx5_0")
    assert judge(CHECK, by_ranks(hosts, one_list)) == []
    assert judge(CHECK, cluster(*hosts)) == []  # nobody said what the other ranks have
    # A rank that has no list may use every port.
    only(
        CHECK,
        by_ranks(hosts, {0: "=mlx5_0", 2: "=mlx5_0", 4: "=mlx5_0"}),
        "rdma-rate-differs",
        **where,
    )
    assert judge(CHECK, by_ranks(hosts, lists, NCCL_IB_DISABLE="1")) == []


def test_another_subnet(tmp_path: Path) -> None:
    def host(name: str, prefix: str) -> dict[str, Any]:
        gid = f"{prefix}:b83f:d203:0049:c1a2"
        fabrics.add_device(tmp_path / name, "mlx5_0", gids={0: (gid, "IB/RoCE v1")})
        return look(tmp_path / name)

    usual, other = host("a", "fe80:0000:0000:0000"), host("b", "fec0:0000:0000:0001")
    found = only(CHECK, cluster(usual, other, usual), "rdma-fabric-differs", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert "fec0:0000:0000:0001 here" in found.message


def test_another_mtu(tmp_path: Path) -> None:
    def host(name: str, mtu: int) -> dict[str, Any]:
        fabrics.add_device(tmp_path / name, "mlx5_0", layer="Ethernet", mtu=mtu)
        return look(tmp_path / name)

    usual = host("a", 9000)
    found = only(
        CHECK,
        cluster(usual, usual, host("b", 1500)),
        "rdma-mtu-differs",
        hosts=["nd2"],
        interfaces=["mlx5_0:1"],
    )
    assert "MTU 1024; the other hosts: MTU 4096" in found.message
    assert judge(CHECK, cluster(usual, host("c", 4200))) == []  # the same for RoCE


def test_the_mtu_of_infiniband_is_what_verbs_said(good: dict[str, Any]) -> None:
    def with_mtus(*codes: int | None) -> Cluster:
        made = cluster(*[good] * len(codes))
        hosts = []
        for host, mtu in zip(made.hosts, codes, strict=True):
            mtus = {f"mlx5_{n}:1": 4096 for n in range(8)} if mtu else {}
            said = {"rdma": {ALONE: outcome({"mtus": {**mtus, "mlx5_3:1": mtu}})}}
            hosts.append(replace(host, facts={**host.facts, **(said if mtu else {})}))
        ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
        return replace(made, hosts=tuple(hosts), ranks=ranks)

    found = only(
        CHECK,
        with_mtus(4096, 2048, 4096, None),
        "rdma-mtu-differs",
        hosts=["nd1"],
        interfaces=["mlx5_3:1"],
    )
    assert "MTU 2048; the other hosts: MTU 4096" in found.message
    assert judge(CHECK, with_mtus(2048, 2048)) == []
    assert judge(CHECK, with_mtus(4096, None)) == []


def test_another_firmware_is_only_mentioned(tmp_path: Path) -> None:
    def host(name: str, firmware: str) -> dict[str, Any]:
        fabrics.add_device(tmp_path / name, "mlx5_0", firmware=firmware)
        return look(tmp_path / name)

    usual = host("a", "28.39.1002")
    found = only(
        CHECK,
        cluster(usual, host("b", "28.35.2000"), usual),
        "rdma-firmware-differs",
        hosts=["nd1"],
    )
    assert found.level is Severity.INFO
    assert "28.35.2000 here; the other hosts: 28.39.1002" in found.message


@pytest.mark.parametrize(
    ("slot", "is_slow"),
    [
        ({"width": "8"}, True),  # 252 Gb/s for 400
        ({"speed": "16.0 GT/s PCIe"}, True),
        ({"width": "8", "rate": "100 Gb/sec (4X EDR)"}, False),  # enough for its port
        ({"width": "8", "state": "1: DOWN"}, False),
        ({"speed": "Unknown"}, False),  # a virtual function
        ({}, False),
    ],
)
def test_a_slot_that_is_too_slow(tmp_path: Path, slot: dict[str, str], is_slow: bool) -> None:
    fabrics.add_device(tmp_path, "mlx5_0", **slot)  # type: ignore[arg-type]
    seen = cluster(look(tmp_path), look(tmp_path))
    found = judge(CHECK, seen)
    assert [f.code for f in found] == ["rdma-pci-slow"] * (2 if is_slow else 0)
    for one in found:
        assert one.where.devices == ("mlx5_0",)
        assert "0000:1a:00.0" in one.fix
