"""Rails of made-up hosts, compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Severity, Skip
from nccl_doctor.checks.rails import Rails
from tests.support import fabrics
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = Rails()
NETS = ("10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/24")


def look(root: Path, backend: str = "nccl", **env: str) -> dict[str, Any]:
    env = {"NCCL_CONF_FILE": "/nonexistent", **env}
    return observe(Rails, env, backend=backend, root=root)


def roce(root: Path, nets: Sequence[str] = NETS, names: Sequence[int] = (0, 1, 2)) -> Path:
    """One NIC for each network, in slots 3a, 3b, …, under these numbers."""
    for at, (net, name) in enumerate(zip(nets, names, strict=True)):
        third = int(net.split(".")[2])
        fabrics.add_device(
            root,
            f"mlx5_{name}",
            layer="Ethernet",
            pci=f"0000:{0x3A + at:02x}:00.0",
            gids=fabrics.roce_gids(f"0a00:{third:02x}01"),
            network=net,
            numa=at // 2,
        )
    return root


def cluster(*hosts: dict[str, Any]) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    seen = dict(zip(names, hosts, strict=True))
    return make_cluster(names, check="rails", by_host=seen, backend="nccl")


def test_what_is_seen_of_a_host(tmp_path: Path) -> None:
    found = look(roce(tmp_path, names=(2, 0, 1)))
    assert found["slots"] == ["0000:3a:00.0", "0000:3b:00.0", "0000:3c:00.0"]
    rows = [(r["name"], r["subnet"], r["numa"]) for r in found["rails"]]
    assert rows == [
        ("mlx5_2:1", "10.0.0.0/24", 0),
        ("mlx5_0:1", "10.0.1.0/24", 0),
        ("mlx5_1:1", "10.0.2.0/24", 1),
    ]
    assert found["table"]["rows"][0] == [
        0, "mlx5_2:1", "0000:3a:00.0", 0, "ACTIVE", "10.0.0.0/24",
    ]  # fmt: skip


def test_hosts_that_are_alike_are_fine(tmp_path: Path) -> None:
    for kind in (fabrics.connectx7, fabrics.roce, roce):
        seen = look(kind(tmp_path / kind.__module__ / kind.__name__))
        assert judge(CHECK, cluster(seen, seen, seen)) == []
        assert judge(CHECK, cluster(seen)) == []


def test_cables_that_are_swapped(tmp_path: Path) -> None:
    good = look(roce(tmp_path / "a"))
    swapped = look(roce(tmp_path / "b", (NETS[1], NETS[0], NETS[2])))
    found = only(
        CHECK,
        cluster(good, swapped, good),
        "rail-order-differs",
        hosts=["nd1"],
        interfaces=["mlx5_0:1", "mlx5_1:1"],
    )
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert "mlx5_0:1 is rail 0 in 10.0.1.0/24, elsewhere rail 0 is in 10.0.0.0/24" in found.message
    assert "mlx5_2" not in found.message
    both = judge(CHECK, cluster(good, swapped))
    assert {f.where.hosts for f in both} == {("nd0",), ("nd1",)}
    assert {f.confidence for f in both} == {Confidence.POSSIBLE}


@pytest.mark.parametrize(
    "nets",
    [
        ("10.0.0.0/24",) * 3,  # one subnet for all
        ("10.0.7.0/31", "10.0.8.0/31", "10.0.9.0/31"),  # one for each link
    ],
)
def test_networks_that_say_nothing_of_the_order(tmp_path: Path, nets: Sequence[str]) -> None:
    good, other = look(roce(tmp_path / "a")), look(roce(tmp_path / "b", nets))
    assert judge(CHECK, cluster(good, other, good)) == []


def test_one_list_of_names_means_other_slots(tmp_path: Path) -> None:
    hca = "=mlx5_0,mlx5_1"
    plain = ("10.0.0.0/24",) * 3
    good = look(roce(tmp_path / "a", plain), NCCL_IB_HCA=hca)
    other = look(roce(tmp_path / "b", plain, (0, 2, 1)), NCCL_IB_HCA=hca)
    found = only(
        CHECK,
        cluster(good, other, good),
        "rail-slots-differ",
        hosts=["nd1"],
        interfaces=["mlx5_1:1"],
    )
    assert found.level is Severity.WARN
    assert "mlx5_1:1 is 0000:3c:00.0" in found.message
    assert "the other hosts use 0000:3b:00.0" in found.message


def test_other_names_for_the_same_slots_are_only_mentioned(tmp_path: Path) -> None:
    plain = ("10.0.0.0/24",) * 3
    good = look(roce(tmp_path / "a", plain))
    other = look(roce(tmp_path / "b", plain, (0, 3, 5)))
    found = only(CHECK, cluster(good, other, good), "rdma-names-differ", hosts=["nd1"])
    assert found.level is Severity.INFO
    assert "0000:3b:00.0 is mlx5_3:1, elsewhere mlx5_1:1" in found.message


def test_other_boards_and_other_numbers_are_not_compared(tmp_path: Path) -> None:
    good = look(fabrics.connectx7(tmp_path / "a", 4))
    fewer = look(fabrics.connectx7(tmp_path / "b", 3))
    for at in range(4):
        fabrics.add_device(tmp_path / "c", f"ibp{at}", pci=f"0000:{0x5A + at:02x}:00.0")
    other = look(tmp_path / "c")
    assert judge(CHECK, cluster(good, good, fewer, other)) == []


def test_where_there_is_nothing_to_compare_it_is_no_pass(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no InfiniBand or RoCE port"):
        look(fabrics.efa(tmp_path / "efa"))
    with pytest.raises(Skip, match="turns RDMA off"):
        look(roce(tmp_path / "a"), NCCL_IB_DISABLE="1")
    with pytest.raises(Skip, match="does not use NCCL"):
        look(tmp_path / "a", backend="gloo")


def test_a_routing_table_that_cannot_be_read(tmp_path: Path) -> None:
    roce(tmp_path)
    (tmp_path / "proc/net/route").write_text("Iface\tDestination\nshort\t0\n")
    assert {rail["subnet"] for rail in look(tmp_path)["rails"]} == {""}
