"""RDMA devices below recorded trees; NCCL_IB_HCA and GIDs as NCCL reads them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.toolkit.fabric.counters import counters_risen, error_counters
from nccl_doctor.toolkit.fabric.direct import (
    acs_control,
    gpu_direct_road,
    read_gpu_direct,
    redirecting_bridges,
    translating,
)
from nccl_doctor.toolkit.fabric.gids import GidKind, fixed_index, gid_tables, pick_gid, wanted_kind
from nccl_doctor.toolkit.fabric.hca import HcaList, rdma_admits, rdma_off
from nccl_doctor.toolkit.fabric.ports import rdma_devices, rdma_ports, roce_mtu
from nccl_doctor.toolkit.nccl.conf import Setting
from tests.support import fabrics
from tests.support.rows import each_row

V2 = GidKind(2, "IPv4")


def told(**values: str) -> dict[str, Setting]:
    return {name: Setting(value, "environment") for name, value in values.items()}


# --- ports ---


def test_a_host_with_eight_ndr_ports(tmp_path: Path) -> None:
    devices = rdma_devices(fabrics.connectx7(tmp_path))
    assert [device["device"] for device in devices] == [f"mlx5_{i}" for i in range(8)]
    first = devices[0]
    assert (first["driver"], first["firmware"]) == ("mlx5_core", "28.39.1002")
    assert first["pci"] == {
        "address": "0000:1a:00.0",
        "width": 16.0,
        "width_max": 16.0,
        "speed": 32.0,
        "speed_max": 32.0,
    }
    (port,) = first["ports"]
    assert (port["name"], port["state"], port["gbps"]) == ("mlx5_0:1", "ACTIVE", 400.0)
    assert (port["subnet"], port["sm_lid"], port["mtu"]) == ("fe80:0000:0000:0000", 1, None)


def test_a_roce_port_has_the_mtu_of_its_interface(tmp_path: Path) -> None:
    (device, _) = rdma_devices(fabrics.roce(tmp_path))
    (port,) = device["ports"]
    assert (port["netdev"], port["mtu"], port["subnet"]) == ("eth_mlx5_0", 4096, "")


@pytest.mark.parametrize(
    ("mtu", "found"), [(9000, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (300, None)]
)
def test_what_ethernet_leaves_of_an_mtu(mtu: int, found: int | None) -> None:
    assert roce_mtu(mtu) == found


def test_what_cannot_be_read_is_empty(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/hello").mkdir(parents=True)
    (device,) = rdma_devices(tmp_path)
    (port,) = device["ports"]
    assert (port["state"], port["rate"], port["gbps"]) == ("", "", None)
    assert rdma_devices(tmp_path / "none") == []


def test_devices_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        fabrics.add_device(tmp_path, f"mlx5_{number}", pci=f"0000:{number:02x}:00.0")
    ports = rdma_ports(tmp_path / "sys/class/infiniband")
    assert [port["device"] for port in ports] == ["mlx5_1", "mlx5_2", "mlx5_10"]


# --- counters ---


def test_a_counter_that_moves(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path, 2)
    before = error_counters(tmp_path)
    assert before["mlx5_0:1"]["symbol_error"] == 7
    at = "sys/class/infiniband/mlx5_1/ports/1"
    fabrics.write(tmp_path, f"{at}/counters/symbol_error", "12")
    fabrics.write(tmp_path, f"{at}/counters/link_downed", "0")  # the driver was loaded again
    fabrics.write(tmp_path, f"{at}/hw_counters/local_ack_timeout_err", "N/A")
    assert counters_risen(before, error_counters(tmp_path)) == {"mlx5_1:1": {"symbol_error": 5}}
    assert counters_risen({}, before) == {}


# --- NCCL_IB_HCA ---


@each_row(
    ("value", "admitted"),
    [
        ("", ["mlx5_0:1", "mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]),
        ("mlx5_1", ["mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]),
        ("=mlx5_1", ["mlx5_1:1", "mlx5_1:2"]),
        ("=mlx5_1:2", ["mlx5_1:2"]),
        ("=mlx5_1:2:0:1", ["mlx5_1:2"]),
        ("=mlx5_1:", ["mlx5_1:1", "mlx5_1:2"]),
        ("=mlx5_1:x", []),
        ("^mlx5_1", ["mlx5_0:1"]),
        ("^=mlx5_1", ["mlx5_0:1", "mlx5_10:1"]),
        ("^=mlx5_1:2,mlx5_0", ["mlx5_1:1", "mlx5_10:1"]),
        ("==mlx5_0", []),  # the second sign is a part of the name
        (",,mlx5_0,", ["mlx5_0:1"]),
        (" mlx5_0", []),
        ("ib0", []),
        ("^", []),
    ],
)
def test_the_list_is_read_as_nccl_reads_it(value: str, admitted: list[str]) -> None:
    ports = [("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_1", 2), ("mlx5_10", 1)]
    found = [f"{d}:{p}" for d, p in ports if HcaList.parse(value).admits(d, p)]
    assert found == admitted


def test_some_port_of_a_device() -> None:
    assert rdma_admits("=mlx5_1:2", "mlx5_1")
    assert not rdma_admits("=mlx5_1:2", "mlx5_1", 1)


@pytest.mark.parametrize(
    ("settings", "off"),
    [
        ({}, ""),
        ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1"),
        ({"NCCL_IB_DISABLE": "true"}, ""),  # NCCL reads 0
        ({"NCCL_NET": "Socket"}, "NCCL_NET=Socket"),
        ({"NCCL_NET": "IB"}, ""),
    ],
)
def test_what_turns_rdma_off(settings: dict[str, str], off: str) -> None:
    assert rdma_off(told(**settings)) == off


# --- GIDs ---


def gids(root: Path, **kinds: Any) -> list[dict[str, Any]]:
    fabrics.add_device(root, "mlx5_0", layer="Ethernet", **kinds)
    (table,) = gid_tables(root)
    return list(table["gids"])


def test_a_gid_table(tmp_path: Path) -> None:
    found = gids(tmp_path, gids=fabrics.roce_gids())
    assert [(e["index"], e["version"], e["address"]) for e in found] == [
        (0, 1, "fe80::ac0:ebff:fe01:203"),
        (1, 2, "fe80::ac0:ebff:fe01:203"),
        (2, 1, "10.0.0.1"),
        (3, 2, "10.0.0.1"),
    ]


def test_infiniband_ports_have_no_gid_to_choose(tmp_path: Path) -> None:
    assert gid_tables(fabrics.connectx7(tmp_path)) == []


@pytest.mark.parametrize(
    ("settings", "searches", "index", "kind"),
    [
        ({}, True, 3, "RoCE v2 over IPv4"),
        ({}, False, 0, "RoCE v1 over IPv6"),
        ({"NCCL_IB_GID_INDEX": "1"}, True, 1, "RoCE v2 over IPv6"),
        ({"NCCL_IB_GID_INDEX": "3"}, False, 3, "RoCE v2 over IPv4"),
        ({"NCCL_IB_GID_INDEX": "-1"}, True, 3, "RoCE v2 over IPv4"),
        ({"NCCL_IB_GID_INDEX": "auto"}, True, 0, "RoCE v1 over IPv6"),  # NCCL reads 0
        ({"NCCL_IB_ROCE_VERSION_NUM": "1"}, True, 2, "RoCE v1 over IPv4"),
        ({"NCCL_IB_GID_INDEX": "7"}, True, 7, None),
        ({"NCCL_IB_ADDR_RANGE": "10.0.0.0/24"}, True, 3, "RoCE v2 over IPv4"),
        ({"NCCL_IB_ADDR_RANGE": "10.9.0.0/24"}, True, 0, "RoCE v1 over IPv6"),
        ({"NCCL_IB_ADDR_RANGE": "nonsense/x"}, True, 3, "RoCE v2 over IPv4"),
    ],
)
def test_the_gid_that_nccl_would_take(
    tmp_path: Path, settings: dict[str, str], searches: bool, index: int, kind: str | None
) -> None:
    have = told(**settings)
    pick = pick_gid(
        gids(tmp_path, gids=fabrics.roce_gids()),
        wanted_kind(have),
        fixed_index(have),
        subnet=settings.get("NCCL_IB_ADDR_RANGE", ""),
        searches=searches,
    )
    assert (pick.index, str(pick.kind) if pick.kind else None) == (index, kind)


def test_ipv6_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    table = {
        **fabrics.roce_gids(),
        2: ("fd00:0000:0000:0000:0000:0000:0000:0005", "IB/RoCE v1"),
        3: ("fd00:0000:0000:0000:0000:0000:0000:0005", "RoCE v2"),
    }
    wanted = wanted_kind(told(NCCL_IB_ADDR_FAMILY="AF_INET6"))
    assert pick_gid(gids(tmp_path, gids=table), wanted).index == 3


def test_an_empty_table(tmp_path: Path) -> None:
    found = gids(tmp_path, gids={0: ("fe80:0000:0000:0000:0000:0000:0000:0000", "RoCE v2")})
    assert found == []
    assert pick_gid(found, V2).kind is None


# --- GPUs ---


@pytest.mark.parametrize(
    ("made", "settings", "road"),
    [
        ({"driver": fabrics.OPEN_DRIVER}, {}, "DMA-BUF"),
        ({"driver": fabrics.OPEN_DRIVER}, {"NCCL_DMABUF_ENABLE": "0"}, "none"),
        ({"driver": fabrics.OPEN_DRIVER, "kernel": "5.4.0"}, {}, "none"),
        ({"modules": ("nvidia_peermem",)}, {}, "nvidia_peermem"),
        ({}, {}, "none"),
    ],
)
def test_the_road_to_the_memory_of_gpus(
    tmp_path: Path, made: dict[str, Any], settings: dict[str, str], road: str
) -> None:
    facts = read_gpu_direct(fabrics.add_gpus(tmp_path, **made))
    assert gpu_direct_road(facts, told(**settings))[0] == road
    assert facts["models"] == ["NVIDIA H100 80GB HBM3"]


def test_iommu_and_acs(tmp_path: Path) -> None:
    fabrics.add_device(tmp_path, "mlx5_0", group="DMA-FQ")
    fabrics.add_gpus(tmp_path, group="identity", acs=fabrics.ACS_ON, cmdline="intel_iommu=on quiet")
    facts = read_gpu_direct(tmp_path)
    assert translating(facts) == ["0000:1a:00.0"]
    assert facts["boot"] == ["intel_iommu=on"]
    assert len(redirecting_bridges(facts)) == 2


@pytest.mark.parametrize(("acs", "found"), [(None, None), (0, 0), (fabrics.ACS_ON, 0x1D)])
def test_acs_is_read_by_root_alone(acs: int | None, found: int | None) -> None:
    assert acs_control(fabrics.config_space(acs)) == found


def test_a_bridge_that_does_not_answer_says_nothing_about_acs() -> None:
    assert acs_control(b"\xff" * 4096) is None
    lost = bytearray(fabrics.config_space(fabrics.ACS_ON))
    lost[0x140:] = b"\xff" * (4096 - 0x140)  # it fell asleep while it was read
    assert acs_control(bytes(lost)) is None


def test_what_is_masked_is_not_taken_for_nothing(tmp_path: Path) -> None:
    fabrics.add_gpus(tmp_path, acs=0)
    seen = read_gpu_direct(tmp_path)
    assert (seen["gpus_on_pci"], seen["boot"]) == (2, [])
    shutil.rmtree(tmp_path / "sys/bus/pci")
    (tmp_path / "proc/cmdline").write_text("")
    masked = read_gpu_direct(tmp_path)
    assert (masked["gpus_on_pci"], masked["boot"]) == (0, None)


def test_a_configuration_space_without_acs_or_with_a_circle() -> None:
    assert acs_control(bytes(4096)) == 0
    circle = bytearray(4096)
    circle[0x100:0x104] = (0x100 << 20 | 1).to_bytes(4, "little")
    assert acs_control(bytes(circle)) == 0


def test_a_machine_without_anything(tmp_path: Path) -> None:
    facts = read_gpu_direct(tmp_path)
    assert gpu_direct_road(facts, {}) == ("none", "no NVIDIA driver")
    assert (facts["iommu"], facts["acs"], facts["modules"]) == ({}, {}, [])
