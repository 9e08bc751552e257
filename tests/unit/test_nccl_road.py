"""By which network NCCL would go, and what it needs for it, on made-up trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.checks.rdma.picks import table_of_picks
from nccl_doctor.checks.rdma.verbs import barred_devices, ibverbs_error
from nccl_doctor.toolkit.fabric.ports import rdma_ports
from nccl_doctor.toolkit.fabric.road import Access, Road, admitted, choose_road
from nccl_doctor.toolkit.nccl.conf import Setting
from tests.support import fabrics


def told(**settings: str) -> dict[str, Setting]:
    return {name: Setting(value, "environment") for name, value in settings.items()}


def ports(root: Path, **settings: str) -> list[dict[str, Any]]:
    return admitted(told(**settings), rdma_ports(root / "sys/class/infiniband"))


BOTH = ("mlx5_0:1", "mlx5_1:1")


@pytest.mark.parametrize(
    ("settings", "road"),
    [
        ({}, Road("infiniband", "a verbs port is active", BOTH)),
        ({"NCCL_IB_HCA": "mlx5_1"}, Road("infiniband", "NCCL_IB_HCA=mlx5_1", ("mlx5_1:1",))),
        ({"NCCL_IB_DISABLE": "1"}, Road("sockets", "NCCL_IB_DISABLE=1")),
        ({"NCCL_IB_DISABLE": "true"}, Road("infiniband", "a verbs port is active", BOTH)),
        ({"NCCL_IB_HCA": "=mlx5"}, Road("sockets", "no verbs port is active and admitted")),
        ({"NCCL_NET": "Socket"}, Road("sockets", "NCCL_NET=Socket")),
        ({"NCCL_NET": "AWS Libfabric"}, Road("plugin", "NCCL_NET=AWS Libfabric")),
        ({"NCCL_NET": "ib"}, Road("infiniband", "a verbs port is active", BOTH)),
        (
            {"NCCL_NET": "ib", "NCCL_IB_DISABLE": "1"},
            Road("none", "NCCL_NET=ib, and NCCL_IB_DISABLE=1"),
        ),
    ],
)  # fmt: skip
def test_a_host_with_two_ports(tmp_path: Path, settings: dict[str, str], road: Road) -> None:
    have = ports(fabrics.connectx7(tmp_path, 2), **settings)
    assert choose_road(told(**settings), have) == road


@pytest.mark.parametrize(
    ("access", "name", "lacks", "reason"),
    [
        (Access(library="no such file"), "sockets", "library", "libibverbs cannot be loaded"),
        (Access(barred={"mlx5_0": "a", "mlx5_1": "b"}), "sockets", "access", "(mlx5_0: a)"),
        (Access(barred={"mlx5_0": "a"}), "infiniband", "", "a verbs port is active"),
        (Access(plugin="libnccl-net.so"), "infiniband", "", "a verbs port is active"),
    ],
)
def test_what_a_process_may_not_use(
    tmp_path: Path, access: Access, name: str, lacks: str, reason: str
) -> None:
    road = choose_road({}, ports(fabrics.connectx7(tmp_path, 2)), access)
    assert (road.name, road.lacks) == (name, lacks)
    assert reason in road.reason
    assert "mlx5_0:1" not in road.ports or not access.barred


@pytest.mark.parametrize(
    ("settings", "plugin", "road"),
    [
        ({}, None, "efa"),
        ({}, "libnccl-net.so", "efa"),
        ({}, "", "sockets"),
        ({"NCCL_NET_PLUGIN": "none"}, None, "sockets"),
        ({"NCCL_NET": "Socket"}, None, "sockets"),
        ({"NCCL_NET": "AWS Libfabric"}, None, "efa"),
        ({"NCCL_NET": "UCX"}, None, "plugin"),
        ({"NCCL_NET": "IB"}, None, "none"),
    ],
)
def test_efa_needs_a_plug_in(
    tmp_path: Path, settings: dict[str, str], plugin: str | None, road: str
) -> None:
    have = ports(fabrics.efa(tmp_path), **settings)
    found = choose_road(told(**settings), have, Access(plugin=plugin))
    assert found.name == road
    assert bool(found.ports) == (road == "efa")
    assert table_of_picks(told(**settings), found, have, tmp_path)["rows"][0][1] == road


@pytest.mark.parametrize(
    ("net", "barred", "road", "reason"),
    [
        ("", 4, "sockets", "no EFA device can be opened (rdmap0s0: why)"),
        ("Libfabric", 4, "none", "NCCL_NET=Libfabric, and no EFA device"),
        ("", 3, "efa", "EFA, if its plug-in loads"),
        ("AWS Libfabric", 3, "efa", "NCCL_NET=AWS Libfabric"),
    ],
)
def test_devices_of_efa_that_a_container_was_not_given(
    tmp_path: Path, net: str, barred: int, road: str, reason: str
) -> None:
    settings = {"NCCL_NET": net} if net else {}
    have = ports(fabrics.efa(tmp_path), **settings)
    shut = {f"rdmap{number}s0": "why" for number in range(barred)}
    found = choose_road(told(**settings), have, Access(barred=shut))
    assert (found.name, found.lacks) == (road, "" if road == "efa" else "access")
    assert found.reason.startswith(reason)
    assert found.ports == (("rdmap3s0:1",) if road == "efa" else ())
    rows = table_of_picks(told(**settings), found, have, tmp_path)["rows"]
    left_out = [row[2] for row in rows if row[0] == "ports left out"]
    assert left_out == ["3 cannot be opened"] * (road == "efa")


@pytest.mark.parametrize(
    ("settings", "plugin", "road"),
    [
        ({"NCCL_FASTRAK_IFNAME": "enp6s0"}, "libnccl-net.so", "plugin"),  # a3-mega
        ({"NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0"}, "libnccl-net.so", "plugin"),  # a3-high
        ({"NCCL_FASTRAK_IFNAME": "enp6s0"}, "", "sockets"),
        ({"NCCL_FASTRAK_IFNAME": "enp6s0", "NCCL_NET_PLUGIN": "none"}, None, "sockets"),
        ({"NCCL_FASTRAK_IFNAME": "enp6s0", "NCCL_NET": "Socket"}, None, "sockets"),
        ({}, "libnccl-net.so", "sockets"),  # of an image: it would find no device
    ],
)
def test_plug_ins_that_need_no_rdma_port(
    settings: dict[str, str], plugin: str | None, road: str
) -> None:
    found = choose_road(told(**settings), [], Access(plugin=plugin))
    assert found.name == road
    assert ("NCCL_" in found.reason) == (road == "plugin" or "NCCL_NET" in settings)


def test_the_table_of_a_host_with_infiniband(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path, 3)
    fabrics.add_device(tmp_path, "mlx5_3", state="1: DOWN", pci="0000:2a:00.0")
    have = ports(tmp_path)
    road = choose_road({}, have, Access(barred={"mlx5_2": "no"}))
    table = table_of_picks({}, road, have, tmp_path)
    rows = {row[0]: row[1:] for row in table["rows"]}
    assert rows["data between hosts"] == ["infiniband", "a verbs port is active"]
    assert rows["ports"] == ["mlx5_0:1, mlx5_1:1", f"2 of InfiniBand {fabrics.NDR}"]
    assert rows["ports left out"] == ["mlx5_2:1, mlx5_3:1", "1 DOWN, 1 cannot be opened"]
    assert rows["GPUDirect RDMA"] == ["none", "no NVIDIA driver"]
    assert all(len(row) == len(table["columns"]) for row in table["rows"])


def test_the_road_to_gpus_of_amd_is_not_examined(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path, 1)
    (tmp_path / "dev/dri").mkdir(parents=True)
    for name in ("kfd", "dri/renderD128"):
        (tmp_path / "dev" / name).touch()
    have = ports(tmp_path)
    table = table_of_picks({}, choose_road({}, have, Access()), have, tmp_path)
    rows = {row[0]: row[1:] for row in table["rows"]}
    assert rows["GPUDirect RDMA"] == ["not examined", "AMD GPUs"]


def test_the_table_of_a_host_without_devices(tmp_path: Path) -> None:
    road = choose_road({}, [])
    table = table_of_picks({}, road, [], tmp_path)
    assert table["rows"][0] == [
        "data between hosts",
        "sockets",
        "no verbs port is active and admitted",
    ]


def test_devices_are_opened_for_real(tmp_path: Path) -> None:
    fabrics.add_device(tmp_path, "mlx5_0")
    fabrics.add_device(tmp_path, "mlx5_1", opens=False, pci="0000:1b:00.0")
    assert barred_devices(["mlx5_0", "mlx5_1", "mlx5_9"], tmp_path) == {
        "mlx5_1": "/dev/infiniband/uverbs1: No such file or directory",
        "mlx5_9": "no uverbs device in sysfs (module ib_uverbs)",
    }


def test_the_library_is_loaded_for_real() -> None:
    assert ibverbs_error(("nothing-of-the-kind.so", "libc.so.6")) == ""
    assert "cannot open shared object" in ibverbs_error(("nothing-of-the-kind.so",))
