"""GPUs and NICs of made-up hosts, and what stands between them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import (
    ALONE,
    Cluster,
    Confidence,
    Outcome,
    OutcomeStatus,
    Severity,
    Skip,
    Untested,
)
from nccl_doctor.checks.gpu_direct import GpuDirect
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = GpuDirect()


def look(root: Path, **env: str) -> dict[str, Any]:
    return observe(GpuDirect, env, backend="nccl", root=root)


def host(root: Path, env: dict[str, str] | None = None, **gpus: Any) -> dict[str, Any]:
    fabrics.connectx7(root, 2)
    fabrics.add_gpus(root, **{"acs": 0, **gpus})
    return look(root, **(env or {}))


def cluster(*hosts: dict[str, Any]) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    seen = dict(zip(names, hosts, strict=True))
    return make_cluster(names, check="gpu_direct", by_host=seen, backend="nccl")


def test_hosts_with_either_road_are_fine(tmp_path: Path) -> None:
    by_module = host(tmp_path / "a", modules=("nvidia_peermem",))
    by_dmabuf = host(tmp_path / "b", driver=fabrics.OPEN_DRIVER)
    assert (by_module["road"], by_dmabuf["road"]) == ("nvidia_peermem", "DMA-BUF")
    assert judge(CHECK, cluster(by_module, by_module, by_dmabuf)) == []


def test_the_module_is_missing_on_one_host(tmp_path: Path) -> None:
    good = host(tmp_path / "a", modules=("nvidia_peermem",))
    bad = host(tmp_path / "b")
    found = only(CHECK, cluster(good, bad, good), "gpudirect-rdma-missing", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert "no nvidia_peermem, proprietary driver" in found.message
    assert "2 other hosts have it" in found.message
    assert found.fix == ""
    off = {**bad, "why": "no nvidia_peermem, open driver, kernel 6.8, NCCL_DMABUF_ENABLE=0"}
    found = only(CHECK, cluster(good, off, good), "gpudirect-rdma-missing", hosts=["nd1"])
    assert found.fix.startswith("unset NCCL_DMABUF_ENABLE")


def test_the_module_is_missing_everywhere(tmp_path: Path) -> None:
    bad = host(tmp_path)
    found = judge(CHECK, cluster(bad, bad))
    assert [f.code for f in found] == ["gpudirect-rdma-missing"] * 2


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({"NCCL_NET_GDR_LEVEL": "LOC"}, {}),
        ({}, {"model": "NVIDIA GeForce RTX 4090"}),
        ({"NCCL_IB_DISABLE": "1"}, {}),
    ],
)
def test_where_nobody_expects_it_nothing_is_missing(
    tmp_path: Path, env: dict[str, str], gpus: dict[str, Any]
) -> None:
    assert judge(CHECK, cluster(host(tmp_path, env, **gpus))) == []


def test_efa_has_a_way_of_its_own(tmp_path: Path) -> None:
    fabrics.efa(tmp_path)
    fabrics.add_gpus(tmp_path, acs=0)
    assert judge(CHECK, cluster(look(tmp_path))) == []


def test_an_iommu_that_translates(tmp_path: Path) -> None:
    good = host(tmp_path / "a", modules=("nvidia_peermem",), group="identity")
    bad = host(
        tmp_path / "b", modules=("nvidia_peermem",), group="DMA-FQ", cmdline="intel_iommu=on"
    )
    found = only(
        CHECK,
        cluster(good, bad),
        "iommu-translates",
        hosts=["nd1"],
        devices=["0000:8a:00.0", "0000:8b:00.0"],
    )
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.POSSIBLE)
    assert "DMA-FQ for 2 GPUs and NICs; kernel options: intel_iommu=on" in found.message


def test_bridges_with_acs(tmp_path: Path) -> None:
    good = host(tmp_path / "a", modules=("nvidia_peermem",), acs=0)
    bad = host(tmp_path / "b", modules=("nvidia_peermem",), acs=fabrics.ACS_ON)
    (found,) = judge(CHECK, cluster(good, bad))
    assert (found.code, found.where.hosts, found.level) == (
        "acs-redirects",
        ("nd1",),
        Severity.WARN,
    )
    assert "ACS control 0x001d on 2 bridges" in found.message


def test_in_a_virtual_machine_and_without_rdma_it_is_only_mentioned(tmp_path: Path) -> None:
    fabrics.write(tmp_path / "a", "proc/cpuinfo", "flags\t\t: fpu hypervisor lahf_lm")
    virtual = host(tmp_path / "a", modules=("nvidia_peermem",), acs=fabrics.ACS_ON, group="DMA")
    alone = look(fabrics.add_gpus(tmp_path / "b", acs=fabrics.ACS_ON, group="DMA"))
    for seen in (virtual, alone):
        found = judge(CHECK, cluster(seen))
        assert [f.code for f in found] == ["iommu-translates", "acs-redirects"]
        assert {f.level for f in found} == {Severity.INFO}


def test_acs_that_nobody_could_read_is_said_to_be_unread(tmp_path: Path) -> None:
    good = host(tmp_path / "a", modules=("nvidia_peermem",))
    user = host(tmp_path / "b", modules=("nvidia_peermem",), acs=None)
    found = only(CHECK, cluster(good, user, good), "acs-not-read", hosts=["nd1"])
    assert found.level is Severity.INFO
    assert found.message == "not read: ACS control of 2 PCIe bridges above GPUs and NICs"
    assert "as root" in found.kind.fix


def test_where_acs_would_only_be_mentioned_nobody_needs_to_read_it(tmp_path: Path) -> None:
    fabrics.write(tmp_path / "a", "proc/cpuinfo", "flags\t\t: fpu hypervisor lahf_lm")
    virtual = host(tmp_path / "a", modules=("nvidia_peermem",), acs=None)
    alone = look(fabrics.add_gpus(tmp_path / "b"))
    assert judge(CHECK, cluster(virtual, alone)) == []


def test_one_bridge_that_was_read_and_redirects_is_enough(tmp_path: Path) -> None:
    seen = host(tmp_path, modules=("nvidia_peermem",), acs=fabrics.ACS_ON)
    seen["acs"][next(iter(seen["acs"]))] = None
    assert [each.code for each in judge(CHECK, cluster(seen))] == ["acs-redirects"]


def test_a_masked_sysfs_is_no_pass(tmp_path: Path) -> None:
    fabrics.add_gpus(tmp_path)
    shutil.rmtree(tmp_path / "sys/bus/pci")
    with pytest.raises(Untested, match="2 GPUs here, but /sys/bus/pci shows none of them"):
        look(tmp_path)


def test_with_a_masked_bus_the_road_is_judged_all_the_same(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path, 2)
    fabrics.add_gpus(tmp_path, acs=0)
    shutil.rmtree(tmp_path / "sys/bus/pci")
    found = {each.code: each for each in judge(CHECK, cluster(look(tmp_path)))}
    assert set(found) == {"gpudirect-rdma-missing", "acs-not-read"}
    assert found["acs-not-read"].message == (
        "not read: ACS and IOMMU of 2 GPUs (/sys/bus/pci shows none of them)"
    )


def test_a_masked_command_line_is_not_called_empty(tmp_path: Path) -> None:
    seen = host(tmp_path, modules=("nvidia_peermem",), group="DMA", cmdline="")
    (found,) = judge(CHECK, cluster(seen))
    assert found.message.endswith("kernel options: unknown, /proc/cmdline cannot be read")
    said = str((found.fix or found.kind.fix).alternatives)
    assert "NCCL_P2P_DISABLE=1" in said
    assert "NCCL_NET_GDR_LEVEL=LOC" in said


def test_a_report_that_does_not_know_what_was_masked(tmp_path: Path) -> None:
    seen = host(tmp_path, modules=("nvidia_peermem",))
    del seen["gpus_on_pci"]
    assert judge(CHECK, cluster(seen)) == []


# GPUs that only PCIe joins ------------------------------------------------------------------------


def beside(made: Cluster, **facts: Any) -> Cluster:
    """What other checks saw on every host, by name of the check; None for ranks without."""
    hosts = tuple(
        replace(each, facts={**each.facts, **{n: {ALONE: outcome(f)} for n, f in facts.items()}})
        for each in made.hosts
    )
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    return replace(made, hosts=hosts, ranks=ranks)


def pcie(links: Any = None) -> dict[str, Any]:
    return {"gpus": [{"index": i, "lost": False, "nvlinks": links} for i in range(2)]}


def copied(error: str | None, *wrong: Any) -> dict[str, Any]:
    return {"peer": {"uuid": "GPU-1", "wrong": list(wrong), "error": error}}


@pytest.mark.parametrize(
    ("gpus", "level"),
    [
        (pcie([]), Severity.WARN),
        (pcie([0, 0]), Severity.WARN),
        (pcie([1, 1]), Severity.INFO),
        (pcie(None), Severity.INFO),  # nobody knows
        ({"gpus": pcie([])["gpus"][:1]}, Severity.INFO),
    ],
)
def test_where_only_pcie_joins_the_gpus_it_is_a_risk(
    tmp_path: Path, gpus: dict[str, Any], level: Severity
) -> None:
    alone = look(fabrics.add_gpus(tmp_path, acs=fabrics.ACS_ON, group="DMA"))
    found = judge(CHECK, beside(cluster(alone), gpu_state=gpus))
    assert {(each.code, each.level) for each in found} == {
        ("iommu-translates", level),
        ("acs-redirects", level),
    }


@pytest.mark.parametrize(
    ("seen", "level"),
    [
        (copied(None), Severity.INFO),
        (copied("CUDA error"), Severity.WARN),
        (copied(None, {"count": 1}), Severity.WARN),
        ({"peer": None}, Severity.WARN),
        (Outcome(OutcomeStatus.HUNG), Severity.WARN),
    ],
)
def test_copies_that_arrived_take_the_alarm_back(
    tmp_path: Path, seen: dict[str, Any], level: Severity
) -> None:
    alone = look(fabrics.add_gpus(tmp_path, acs=0, group="DMA"))
    made = beside(cluster(alone), gpu_state=pcie([]))
    rank = replace(made.ranks[0], facts={"gpu_work": {ALONE: outcome(seen)}})
    (found,) = judge(CHECK, replace(made, ranks=(rank, *made.ranks[1:])))
    assert found.level is level


def test_unread_acs_matters_where_only_pcie_joins_the_gpus(tmp_path: Path) -> None:
    alone = look(fabrics.add_gpus(tmp_path))
    found = judge(CHECK, beside(cluster(alone), gpu_state=pcie([])))
    assert [each.code for each in found] == ["acs-not-read"]


def test_where_there_is_nothing_between_it_is_no_pass(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no NVIDIA GPU here"):
        look(fabrics.connectx7(tmp_path / "a"))
    with pytest.raises(Skip, match="one GPU, and no active RDMA port"):
        look(fabrics.add_gpus(tmp_path / "b", 1))
