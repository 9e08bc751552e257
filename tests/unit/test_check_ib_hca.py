"""NCCL_IB_HCA on made-up hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Scope, Severity, Skip
from nccl_doctor.checks.ib_hca import IbHca
from nccl_doctor.checks.rdma import Rdma
from nccl_doctor.judge.causes import explain
from nccl_doctor.toolkit.fabric.ports import rdma_ports
from nccl_doctor.toolkit.fabric.road import admitted
from nccl_doctor.toolkit.nccl.conf import Setting
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import calls, judge, only
from tests.support.observing import observe

CHECK = IbHca()


def look(root: Path, hca: str | None, **env: str) -> dict[str, Any]:
    told = env if hca is None else {"NCCL_IB_HCA": hca, **env}
    return observe(IbHca, told, backend="nccl", root=root)


def cluster(*hosts: dict[str, Any]) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    seen = dict(zip(names, hosts, strict=True))
    return make_cluster(names, check="ib_hca", by_host=seen, backend="nccl")


def by_ranks(facts: dict[int, dict[str, Any]]) -> Cluster:
    return make_cluster(check="ib_hca", by_rank=facts, backend="nccl")


def by_rdma(root: Path, hca: str) -> dict[str, Any]:
    ports = admitted({"NCCL_IB_HCA": Setting(hca, "environment")}, rdma_ports(sysfs(root)))
    told = {"NCCL_IB_HCA": [hca, "environment"]}
    return {"ports": ports, "road": "infiniband", "settings": told}


def sysfs(root: Path) -> Path:
    return root / "sys/class/infiniband"


def with_rdma(made: Cluster, facts: list[dict[str, Any]]) -> Cluster:
    hosts = tuple(
        replace(host, facts={**host.facts, "rdma": {ALONE: outcome(one)}})
        for host, one in zip(made.hosts, facts, strict=True)
    )
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    return replace(made, hosts=hosts, ranks=ranks)


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
    assert "matches no port; the host has: mlx5_0:1 ACTIVE" in found[0].message
    assert ("excludes every" in found[0].kind.title) is hca.startswith("^")


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
    assert "the host has: none" in found.message


def test_a_list_that_leaves_a_port_that_is_down(root: Path) -> None:
    fabrics.add_device(root, "mlx5_8", state="1: DOWN", pci="0000:2f:00.0")
    good, bad = look(root, "mlx5"), look(root, "mlx5_8")
    found = only(
        CHECK, cluster(good, bad), "ib-hca-port-down", hosts=["nd1"], interfaces=["mlx5_8:1"]
    )
    assert found.level is Severity.FAIL
    assert "matches mlx5_8:1 DOWN, none active" in found.message


def test_one_of_several_names_is_down_everywhere(root: Path) -> None:
    fabrics.add_device(root, "mlx5_8", state="1: DOWN", pci="0000:2f:00.0")
    bad = look(root, "mlx5_0,mlx5_8")
    found = judge(CHECK, cluster(bad, bad))
    assert [(f.code, f.where.interfaces) for f in found] == [
        ("ib-hca-port-down", ("mlx5_8:1",))
    ] * 2
    assert {f.level for f in found} == {Severity.WARN}


def test_down_on_some_hosts_is_told_there_whatever_the_others_have(
    root: Path, tmp_path: Path
) -> None:
    sick = fabrics.connectx7(tmp_path / "sick", 7)
    fabrics.add_device(sick, "mlx5_7", state="1: DOWN", pci="0000:2f:00.0")
    hca = "mlx5_6,mlx5_7"
    good, bad = look(root, hca), look(sick, hca)
    where = {"hosts": ["nd1"], "interfaces": ["mlx5_7:1"]}
    found = only(CHECK, cluster(good, bad), "ib-hca-port-down", **where)
    assert found.level is Severity.WARN
    only(CHECK, cluster(good, bad, good), "ib-hca-port-down", **where)
    many = judge(CHECK, cluster(bad, good, bad))
    assert [f.where.hosts for f in many] == [("nd0",), ("nd2",)]


@pytest.mark.parametrize(
    ("state", "physical", "code"),
    [("DOWN", "Disabled", "rdma-port-down"), ("INIT", "LinkUp", "rdma-port-unconfigured")],
)
def test_what_check_rdma_finds_out_is_the_cause(
    root: Path, tmp_path: Path, state: str, physical: str, code: str
) -> None:
    sick = fabrics.connectx7(tmp_path / "sick", 7)
    fabrics.add_device(sick, "mlx5_7", state=f"1: {state}", pci="0000:2f:00.0")
    fabrics.write(sick, "sys/class/infiniband/mlx5_7/ports/1/phys_state", f"5: {physical}")
    hca = "mlx5_6,mlx5_7"
    both = with_rdma(
        cluster(look(root, hca), look(sick, hca)), [by_rdma(root, hca), by_rdma(sick, hca)]
    )
    explained = explain([*CHECK.judge(both), *Rdma().judge(both)], both)
    assert {f.code: f.explained_by for f in explained} == {code: None, "ib-hca-port-down": code}
    assert {(f.where.hosts, f.where.interfaces) for f in explained} == {(("nd1",), ("mlx5_7:1",))}


def test_another_port_that_is_down_is_not_the_cause(root: Path, tmp_path: Path) -> None:
    sick = fabrics.connectx7(tmp_path / "sick", 6)
    for name in ("mlx5_6", "mlx5_7"):
        fabrics.add_device(sick, name, state="1: DOWN", pci=f"0000:2{name[-1]}:00.0")
    other = fabrics.connectx7(tmp_path / "other", 7)
    fabrics.add_device(other, "mlx5_7", state="1: DOWN", pci="0000:27:00.0")
    hca = "mlx5_5,mlx5_6,mlx5_7"
    roots = [root, sick, other]
    both = with_rdma(cluster(*(look(r, hca) for r in roots)), [by_rdma(r, hca) for r in roots])
    explained = explain([*CHECK.judge(both), *Rdma().judge(both)], both)
    assert {(f.code, f.where.hosts, f.where.interfaces, f.explained_by) for f in explained} == {
        ("rdma-port-down", ("nd1",), ("mlx5_6:1",), None),
        ("ib-hca-port-down", ("nd1",), ("mlx5_6:1",), "rdma-port-down"),
        # Down on most hosts: for check rdma that is a port that nobody uses.
        ("ib-hca-port-down", ("nd1",), ("mlx5_7:1",), None),
        ("ib-hca-port-down", ("nd2",), ("mlx5_7:1",), None),
    }


def test_one_port_of_a_device_is_enough_where_none_is_named(tmp_path: Path) -> None:
    fabrics.add_device(tmp_path, "mlx5_0")
    for file, text in {"state": "1: DOWN", "link_layer": "InfiniBand"}.items():
        fabrics.write(tmp_path, f"sys/class/infiniband/mlx5_0/ports/2/{file}", text)
    assert judge(CHECK, cluster(look(tmp_path, "=mlx5_0"))) == []
    found = only(
        CHECK,
        cluster(look(tmp_path, "=mlx5_0:1,mlx5_0:2")),
        "ib-hca-port-down",
        hosts=["nd0"],
        interfaces=["mlx5_0:2"],
    )
    assert "mlx5_0:2 DOWN" in found.message


class TestByRank:
    """A wrapper may give each rank a list of its own."""

    def test_every_rank_is_read(self) -> None:
        assert CHECK.scope is Scope.RANK

    def test_a_list_of_one_rank(self, root: Path) -> None:
        lists = ["=mlx5_0", "=mlx5_1", "=mlx5_0", "=mlx4_0"]
        made = by_ranks({n: look(root, hca) for n, hca in enumerate(lists)})
        found = only(CHECK, made, "ib-hca-unmatched", hosts=["nd1"], ranks=[3])
        assert found.level is Severity.FAIL

    def test_a_rank_whose_own_port_is_down(self, root: Path) -> None:
        fabrics.add_device(root, "mlx5_8", state="1: DOWN", pci="0000:2f:00.0")
        lists = ["=mlx5_0", "=mlx5_8", "=mlx5_0", "=mlx5_1"]
        made = by_ranks({n: look(root, hca) for n, hca in enumerate(lists)})
        where = {"hosts": ["nd0"], "ranks": [1], "interfaces": ["mlx5_8:1"]}
        assert only(CHECK, made, "ib-hca-port-down", **where).level is Severity.FAIL

    def test_one_list_of_all_ranks_is_the_host_s(self, root: Path) -> None:
        good, bad = look(root, "mlx5"), look(root, "mlx4")
        made = by_ranks({0: good, 1: good, 2: bad, 3: bad})
        only(CHECK, made, "ib-hca-unmatched", hosts=["nd1"])

    def test_a_list_that_only_one_rank_has(self, root: Path) -> None:
        only(
            CHECK,
            by_ranks({1: look(root, "mlx5_0,mlx5_9")}),
            "ib-hca-unmatched",
            hosts=["nd0"],
            ranks=[1],
        )

    def test_the_work_grows_with_the_ranks_and_no_faster(self, root: Path) -> None:
        facts = {n: look(root, f"=mlx5_{n}") for n in range(8)}

        def of(hosts: int) -> Cluster:
            names = [f"nd{i}" for i in range(hosts)]
            by_rank = {n: facts[n % 8] for n in range(8 * hosts)}
            return make_cluster(names, 8, check="ib_hca", by_rank=by_rank, backend="nccl")

        small, large = of(32), of(64)
        assert judge(CHECK, large) == []
        assert calls(lambda: judge(CHECK, large)) < 2.5 * calls(lambda: judge(CHECK, small))


def test_a_prefix_of_many_may_mean_ports_that_nobody_uses(root: Path) -> None:
    fabrics.add_device(root, "mlx5_8", state="1: DOWN", pci="0000:2f:00.0")
    assert judge(CHECK, cluster(look(root, "mlx5"))) == []


def test_a_name_that_is_on_no_host(root: Path, tmp_path: Path) -> None:
    found = only(CHECK, cluster(look(root, "mlx5_0,mlx5_9")), "ib-hca-unmatched", hosts=["nd0"])
    assert found.level is Severity.WARN
    assert "no host has mlx5_9" in found.message
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
    assert found.fix == f"export NCCL_IB_HCA='{fix}'"


def test_efa_is_not_chosen_by_this_list(tmp_path: Path) -> None:
    assert judge(CHECK, cluster(look(fabrics.efa(tmp_path), "mlx5"))) == []


def test_it_is_the_cause_of_hosts_that_take_different_roads(root: Path) -> None:
    made = cluster(look(root, "mlx5"), look(root, "mlx4"), look(root, "mlx5"))
    roads = ("infiniband", "sockets", "infiniband")
    both = with_rdma(made, [{"ports": [], "road": road, "settings": {}} for road in roads])
    explained = explain([*CHECK.judge(both), *Rdma().judge(both)], both)
    assert {f.code: f.explained_by for f in explained} == {
        "ib-hca-unmatched": None,
        "rdma-mixed": "ib-hca-unmatched",
    }
