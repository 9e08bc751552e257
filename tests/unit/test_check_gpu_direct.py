"""GPUs and NICs of made-up hosts, and what stands between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Context, Launch, Severity, Skip
from nccl_doctor.checks.gpu_direct import GpuDirect
from tests import fabrics
from tests.clusters import make_cluster
from tests.findings import judge, only

CHECK = GpuDirect()


def look(root: Path, **env: str) -> dict[str, Any]:
    class Here(GpuDirect):
        pass

    Here.root = root
    found = Here().observe(Context(launch=Launch(), env=env, backend="nccl"))
    return dict(json.loads(json.dumps(found)))


def host(root: Path, env: dict[str, str] | None = None, **gpus: Any) -> dict[str, Any]:
    fabrics.connectx7(root, 2)
    fabrics.add_gpus(root, **gpus)
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
    fabrics.add_gpus(tmp_path)
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


def test_where_there_is_nothing_between_it_is_no_pass(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no NVIDIA GPU here"):
        look(fabrics.connectx7(tmp_path / "a"))
    with pytest.raises(Skip, match="one GPU, and no active RDMA port"):
        look(fabrics.add_gpus(tmp_path / "b", 1))
