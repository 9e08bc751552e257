"""RDMA ports of made-up hosts, and of a made-up sysfs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Context, Launch, Severity, Skip
from nccl_doctor.checks.rdma import Rdma
from tests import fabrics
from tests.clusters import make_cluster, outcome
from tests.findings import judge, only

CHECK = Rdma()


def port(device: str = "mlx5_0", state: str = "ACTIVE", **more: Any) -> dict[str, Any]:
    return {
        "device": device,
        "port": "1",
        "state": state,
        "physical": "LinkUp" if state == "ACTIVE" else "Disabled",
        "link": "InfiniBand",
        "rate": "400 Gb/sec (4X NDR)",
        "wanted": True,
        **more,
    }


def host(*ports: dict[str, Any], road: str = "infiniband", **settings: str) -> dict[str, Any]:
    told = {name: [value, "environment"] for name, value in settings.items()}
    return {"ports": list(ports), "road": road, "settings": told}


HEALTHY = host(port(), port("mlx5_1"))


def cluster(*hosts: dict[str, Any], backend: str = "nccl", **fields: Any) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    seen = dict(zip(names, hosts, strict=True))
    return make_cluster(names, check="rdma", by_host=seen, backend=backend, **fields)


@pytest.mark.parametrize(
    "hosts",
    [
        [HEALTHY] * 3,
        [host(road="sockets")] * 3,
        [host(port(), port("mlx5_1", "DOWN"))] * 3,  # nobody uses that one
        [host(port(), road="sockets", NCCL_IB_DISABLE="1")] * 2,
        [HEALTHY],
        [host(road="plugin"), HEALTHY, HEALTHY],  # who knows what a plug-in does
    ],
)
def test_hosts_that_agree_are_fine(hosts: list[dict[str, Any]]) -> None:
    assert judge(CHECK, cluster(*hosts)) == []


def test_a_host_without_an_active_port_goes_by_sockets_alone() -> None:
    sick = host(port(state="DOWN"), port("mlx5_1", "INIT"), road="sockets")
    found = only(CHECK, cluster(HEALTHY, sick, HEALTHY), "rdma-mixed", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert "2 by infiniband, 1 by sockets" in found.message
    assert "mlx5_0:1 DOWN" in found.message


def test_the_variable_that_decided_is_named() -> None:
    odd = host(port(), road="sockets", NCCL_IB_DISABLE="1")
    found = only(CHECK, cluster(HEALTHY, HEALTHY, odd), "rdma-mixed", hosts=["nd2"])
    assert "NCCL_IB_DISABLE=1" in found.message


def test_of_two_hosts_nobody_can_tell_which_one_is_odd() -> None:
    found = only(CHECK, cluster(HEALTHY, host(road="sockets")), "rdma-mixed", hosts=["nd0", "nd1"])
    assert found.confidence is Confidence.POSSIBLE


def test_one_port_of_a_host_is_down() -> None:
    sick = host(port(), port("mlx5_1", "DOWN"))
    found = only(
        CHECK,
        cluster(HEALTHY, sick, HEALTHY),
        "rdma-port-down",
        hosts=["nd1"],
        interfaces=["mlx5_1:1"],
    )
    assert found.level is Severity.WARN
    assert "mlx5_1:1 is DOWN" in found.message


def test_a_port_that_the_user_left_out_may_be_down() -> None:
    spare = host(port(), port("mlx5_1", "DOWN", wanted=False))
    assert judge(CHECK, cluster(HEALTHY, spare, HEALTHY)) == []


def test_gloo_uses_no_rdma() -> None:
    assert judge(CHECK, cluster(HEALTHY, host(road="sockets"), HEALTHY, backend="gloo")) == []
    with pytest.raises(Skip, match="does not use NCCL"):
        CHECK.observe(Context(launch=Launch(), env={}, backend="gloo"))


@pytest.mark.parametrize(
    ("env", "road", "wanted"),
    [
        ({}, "infiniband", [True, True]),
        ({"NCCL_IB_DISABLE": "1"}, "sockets", [True, True]),
        ({"NCCL_IB_HCA": "mlx5_1"}, "sockets", [False, True]),
        ({"NCCL_IB_HCA": "^mlx5_1"}, "infiniband", [True, False]),
        ({"NCCL_IB_HCA": "=mlx5_0:1"}, "infiniband", [True, False]),
        ({"NCCL_IB_HCA": "=mlx5_0:2"}, "sockets", [False, False]),
        ({"NCCL_NET": "Socket"}, "sockets", [True, True]),
    ],
)
def test_ports_are_read_from_sysfs(
    tmp_path: Path, env: dict[str, str], road: str, wanted: list[bool]
) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        folder = tmp_path / device / "ports" / "1"
        folder.mkdir(parents=True)
        for name, text in {
            "state": state,
            "phys_state": "5: LinkUp",
            "link_layer": "InfiniBand",
            "rate": "400 Gb/sec (4X NDR)",
        }.items():
            (folder / name).write_text(text + "\n")

    class Here(Rdma):
        folder = tmp_path

    found = Here().observe(Context(launch=Launch(), env=env, backend="nccl"))
    assert [(p["device"], p["state"], p["physical"]) for p in found["ports"]] == [
        ("mlx5_0", "ACTIVE", "LinkUp"),
        ("mlx5_1", "DOWN", "LinkUp"),
    ]
    assert [p["wanted"] for p in found["ports"]] == wanted
    assert found["road"] == road


def test_a_host_without_devices(tmp_path: Path) -> None:
    class Here(Rdma):
        folder = tmp_path / "none"

    found = Here().observe(Context(launch=Launch(), env={}, backend="nccl"))
    assert (found["ports"], found["road"]) == ([], "sockets")


def test_a_host_without_efa_among_hosts_that_have_it() -> None:
    have = host(port("rdmap0s0", link="Unknown", wanted=False), road="efa")
    found = only(CHECK, cluster(have, have, host(road="sockets")), "rdma-mixed", hosts=["nd2"])
    assert "2 by efa, 1 by sockets" in found.message


def test_efa_without_its_plug_in_is_told_by_another_check() -> None:
    have = host(port("rdmap0s0", link="Unknown", wanted=False), road="efa")
    made = cluster(have, have, host(road="sockets"))
    facts = {"net_plugin": {ALONE: outcome({"loaded": None})}}
    hosts = tuple(replace(each, facts={**each.facts, **facts}) for each in made.hosts)
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    assert judge(CHECK, replace(made, hosts=hosts, ranks=ranks)) == []


def test_efa_is_no_verbs_port_for_nccl(tmp_path: Path) -> None:
    class Here(Rdma):
        folder = fabrics.efa(tmp_path) / "sys/class/infiniband"

    found = Here().observe(Context(launch=Launch(), env={}, backend="nccl"))
    assert (found["road"], found["ports"][0]["wanted"]) == ("efa", False)
    assert found["picks"]["rows"][0][:2] == ["data between hosts", "efa"]
