"""Links of made-up hosts that went down before, and those of hosts that were only started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Context, Launch, Severity, Skip
from nccl_doctor.checks.fabric_ports import FabricPorts
from nccl_doctor.checks.link_flaps import LinkFlaps
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome, reread
from tests.support.findings import judge, only
from tests.support.observing import observe
from tests.support.uplinks import look, nic

CHECK = LinkFlaps()
NAMES = ("nd0", "nd1", "nd2")
UP = {"up_s": 12 * 86400.0}


def cluster(names: tuple[str, ...] = NAMES, **facts: dict[str, dict[str, Any]]) -> Cluster:
    """Hosts that were started twelve days ago; `facts`: check → host → its facts."""
    made = make_cluster(names, nproc=1, backend="nccl")
    seen = {CHECK.name: dict.fromkeys(names, UP), **facts}
    hosts = []
    for host in made.hosts:
        mine = {
            check: {ALONE: outcome(by_host[host.name or ""])}
            for check, by_host in seen.items()
            if host.name in by_host
        }
        hosts.append(replace(host, facts=reread(mine)))
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    return replace(made, hosts=tuple(hosts), ranks=ranks)


def carriers(changes: dict[str, int | None], **more: Any) -> Cluster:
    seen = {name: look(name, nic(name, changes=number)) for name, number in changes.items()}
    return cluster(tuple(changes), uplink=seen, **more)


def ports(root: Path, downs: int = 3, **env: str) -> dict[str, Any]:
    fabrics.connectx7(root, 2)
    fabrics.write(root, "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", "3")
    fabrics.write(root, "sys/class/infiniband/mlx5_1/ports/1/counters/link_downed", str(downs))
    told = {"NCCL_CONF_FILE": "/nonexistent", **env}
    return observe(FabricPorts, told, backend="nccl", root=root)


def test_an_interface_that_went_down_again_and_again_is_named() -> None:
    made = carriers({"nd0": 2, "nd1": 47, "nd2": 4})
    found = only(CHECK, made, "link-flapped", hosts=["nd1"], interfaces=["eth0"])
    assert (found.level, found.confidence) == (Severity.INFO, Confidence.LIKELY)
    assert found.message == (
        "eth0 went down 23 times in 12 days or less; usual on the other hosts: 2"
    )
    assert "replace cable and transceiver" in found.kind.fix


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"nd0": 2, "nd1": 3, "nd2": 2}, id="started"),
        pytest.param({"nd0": 2, "nd1": 18, "nd2": 2}, id="a few"),
        pytest.param({"nd0": 40, "nd1": 60, "nd2": 44}, id="a switch that everybody lost"),
        pytest.param({"nd0": None, "nd1": None, "nd2": None}, id="a kernel that does not count"),
    ],
)
def test_healthy_links(changes: dict[str, int | None]) -> None:
    assert judge(CHECK, carriers(changes)) == []


def test_an_interface_that_the_job_does_not_use_may_flap() -> None:
    wireless = nic("nd1", "wlan0", addresses=["10.0.0.9"], changes=400)
    seen = {name: look(name) for name in NAMES} | {"nd1": look("nd1", nic("nd1"), wireless)}
    assert judge(CHECK, cluster(uplink=seen)) == []
    taken = {"nd1": {"listen": [{"interface": "wlan0", "address": "10.0.0.9"}]}}
    made = cluster(uplink=seen, interfaces=taken)
    only(CHECK, made, "link-flapped", hosts=["nd1"], interfaces=["wlan0"])


def test_an_interface_that_carries_roce_counts(tmp_path: Path) -> None:
    fabrics.roce(tmp_path, 1)
    told = {"NCCL_CONF_FILE": "/nonexistent"}
    roce = observe(FabricPorts, told, backend="nccl", root=tmp_path)
    second = nic("nd1", "eth_mlx5_0", addresses=["10.0.0.1"], changes=400)
    seen = {name: look(name) for name in NAMES} | {"nd1": look("nd1", nic("nd1"), second)}
    made = cluster(uplink=seen, fabric_ports={"nd1": roce})
    only(CHECK, made, "link-flapped", hosts=["nd1"], interfaces=["eth_mlx5_0"])


def test_an_rdma_port_that_went_down_again_and_again_is_named(tmp_path: Path) -> None:
    fine, sick = ports(tmp_path / "a"), ports(tmp_path / "b", 31)
    made = cluster(fabric_ports={"nd0": fine, "nd1": fine, "nd2": sick})
    found = only(CHECK, made, "link-flapped", hosts=["nd2"], interfaces=["mlx5_1:1"])
    assert found.message.startswith("mlx5_1:1 went down 31 times")
    assert judge(CHECK, cluster(fabric_ports=dict.fromkeys(NAMES, fine))) == []


def test_a_port_that_nccl_may_not_use_may_flap(tmp_path: Path) -> None:
    spare = ports(tmp_path / "a", 31, NCCL_IB_HCA="=mlx5_0")
    assert judge(CHECK, cluster(fabric_ports={"nd0": ports(tmp_path / "b"), "nd1": spare})) == []


def test_one_host_needs_no_link() -> None:
    assert judge(CHECK, carriers({"nd0": 400})) == []
    with pytest.raises(Skip, match="one host"):
        CHECK.observe(Context(launch=Launch(nnodes=1), env={}))


def test_when_the_host_was_started(tmp_path: Path) -> None:
    fabrics.write(tmp_path, "proc/uptime", "3600.25 14000.00")
    assert observe(LinkFlaps, root=tmp_path) == {"up_s": 3600.25}
    assert observe(LinkFlaps, root=tmp_path / "none") == {"up_s": None}
