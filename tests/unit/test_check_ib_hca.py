"""NCCL_IB_HCA on made-up hosts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Context, Launch, Severity, Skip
from nccl_doctor.checks.ib_hca import IbHca
from nccl_doctor.checks.rdma import Rdma
from nccl_doctor.verdict.causes import explain
from tests import fabrics
from tests.clusters import make_cluster, outcome
from tests.findings import judge, only

CHECK = IbHca()


def look(root: Path, hca: str | None, **env: str) -> dict[str, Any]:
    class Here(IbHca):
        pass

    Here.root = root
    told = env if hca is None else {"NCCL_IB_HCA": hca, **env}
    found = Here().observe(Context(launch=Launch(), env=told, backend="nccl"))
    return dict(json.loads(json.dumps(found)))


def cluster(*hosts: dict[str, Any]) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    seen = dict(zip(names, hosts, strict=True))
    return make_cluster(names, check="ib_hca", by_host=seen, backend="nccl")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return fabrics.connectx7(tmp_path / "good")


@pytest.mark.parametrize(
    "hca", ["mlx5", "mlx5_0,mlx5_1", "=mlx5_0:1", "^mlx5_7", "^=mlx5_7:1", "mlx5_3:1"]
)
def test_lists_that_mean_something_are_fine(root: Path, hca: str) -> None:
    assert judge(CHECK, cluster(look(root, hca), look(root, hca))) == []


@pytest.mark.parametrize(
    ("hca", "env", "reason"),
    [
        (None, {}, "NCCL_IB_HCA is not set"),
        ("", {}, "NCCL_IB_HCA is not set"),
        ("mlx5", {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1 turns RDMA off"),
    ],
)
def test_where_there_is_nothing_to_read_it_is_no_pass(
    root: Path, hca: str | None, env: dict[str, str], reason: str
) -> None:
    with pytest.raises(Skip, match=reason):
        look(root, hca, **env)


@pytest.mark.parametrize("hca", ["ib0", "=mlx5", "mlx5_0:2", "^mlx5", "mlx5-0"])
def test_a_list_that_admits_nothing_sends_all_data_over_sockets(root: Path, hca: str) -> None:
    found = judge(CHECK, cluster(look(root, hca), look(root, hca)))
    assert [f.code for f in found] == ["ib-hca-unmatched"] * 2
    assert {f.level for f in found} == {Severity.WARN}
    assert "admits no port; there are: mlx5_0:1 ACTIVE" in found[0].message


def test_a_list_that_fails_one_host_alone_breaks_the_job(root: Path) -> None:
    good, bad = look(root, "mlx5"), look(root, "mlx4")
    found = only(CHECK, cluster(good, bad, good), "ib-hca-unmatched", hosts=["nd1"])
    assert found.level is Severity.FAIL
    assert "NCCL_IB_HCA=mlx4 (environment)" in found.message


def test_it_is_a_failure_where_nccl_may_take_nothing_else(root: Path) -> None:
    found = only(
        CHECK, cluster(look(root, "mlx4", NCCL_NET="IB")), "ib-hca-unmatched", hosts=["nd0"]
    )
    assert found.level is Severity.FAIL


def test_a_host_without_devices_is_not_the_fault_of_the_list(root: Path, tmp_path: Path) -> None:
    good, bare = look(root, "mlx5"), look(tmp_path / "none", "mlx5")
    found = only(CHECK, cluster(good, bare), "ib-hca-unmatched", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert "there are: none" in found.message


def test_a_list_that_leaves_a_port_that_is_down(root: Path) -> None:
    fabrics.add_device(root, "mlx5_8", state="1: DOWN", pci="0000:2f:00.0")
    good, bad = look(root, "mlx5"), look(root, "mlx5_8")
    found = only(
        CHECK, cluster(good, bad), "ib-hca-port-down", hosts=["nd1"], interfaces=["mlx5_8:1"]
    )
    assert found.level is Severity.FAIL
    assert "leaves mlx5_8:1 DOWN, and none is active" in found.message


def test_one_of_several_names_is_down_everywhere(root: Path) -> None:
    fabrics.add_device(root, "mlx5_8", state="1: DOWN", pci="0000:2f:00.0")
    bad = look(root, "mlx5_0,mlx5_8")
    found = judge(CHECK, cluster(bad, bad))
    assert [(f.code, f.where.interfaces) for f in found] == [
        ("ib-hca-port-down", ("mlx5_8:1",))
    ] * 2
    assert {f.level for f in found} == {Severity.WARN}


def test_down_on_one_host_alone_is_told_by_another_check(root: Path, tmp_path: Path) -> None:
    sick = fabrics.connectx7(tmp_path / "sick", 7)
    fabrics.add_device(sick, "mlx5_7", state="1: DOWN", pci="0000:2f:00.0")
    hca = "mlx5_6,mlx5_7"
    assert judge(CHECK, cluster(look(root, hca), look(sick, hca), look(root, hca))) == []


def test_a_prefix_of_many_may_mean_ports_that_nobody_uses(root: Path) -> None:
    fabrics.add_device(root, "mlx5_8", state="1: DOWN", pci="0000:2f:00.0")
    assert judge(CHECK, cluster(look(root, "mlx5"))) == []


def test_a_name_that_is_on_no_host(root: Path, tmp_path: Path) -> None:
    found = only(CHECK, cluster(look(root, "mlx5_0,mlx5_9")), "ib-hca-unmatched", hosts=["nd0"])
    assert found.level is Severity.WARN
    assert "mlx5_9 is on no host" in found.message
    fabrics.add_device(tmp_path / "b", "mlx5_9")
    both = "mlx5_0,mlx5_9"  # one list for two kinds of hosts
    assert judge(CHECK, cluster(look(root, both), look(tmp_path / "b", both))) == []


@pytest.mark.parametrize(
    ("hca", "more", "fix"),
    [
        ("mlx5_1", ["mlx5_10", "mlx5_11"], "=mlx5_1"),
        ("mlx5_1:1,mlx5_10", ["mlx5_11"], "=mlx5_1:1,mlx5_10"),
        ("^mlx5_1", ["mlx5_10", "mlx5_11"], "^=mlx5_1"),
    ],
)
def test_a_name_that_is_a_prefix_of_others(
    tmp_path: Path, hca: str, more: list[str], fix: str
) -> None:
    fabrics.connectx7(tmp_path, 12)
    found = only(
        CHECK, cluster(look(tmp_path, hca)), "ib-hca-overmatch", hosts=["nd0"], interfaces=more
    )
    assert found.fix == f"export NCCL_IB_HCA={fix}"


def test_efa_is_not_chosen_by_this_list(tmp_path: Path) -> None:
    assert judge(CHECK, cluster(look(fabrics.efa(tmp_path), "mlx5"))) == []


def test_it_is_the_cause_of_hosts_that_take_different_roads(root: Path) -> None:
    made = cluster(look(root, "mlx5"), look(root, "mlx4"), look(root, "mlx5"))
    roads = ("infiniband", "sockets", "infiniband")
    hosts = tuple(
        replace(
            host,
            facts={
                **host.facts,
                "rdma": {ALONE: outcome({"ports": [], "road": road, "settings": {}})},
            },
        )
        for host, road in zip(made.hosts, roads, strict=True)
    )
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    both = replace(made, hosts=hosts, ranks=ranks)
    explained = explain([*CHECK.judge(both), *Rdma().judge(both)], both)
    assert {f.code: f.explained_by for f in explained} == {
        "ib-hca-unmatched": None,
        "rdma-mixed": "ib-hca-unmatched",
    }
