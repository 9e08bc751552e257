"""Memory errors of made-up hosts, counted before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Finding, Severity, Skip, Where
from nccl_doctor.checks.memory_errors import MemoryErrors
from nccl_doctor.judge.causes import explain
from nccl_doctor.model.findings import Kind, Layer
from tests.support import fabrics, hardware
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = MemoryErrors()
Facts = dict[str, Any]


def seen(root: Path) -> Facts:
    return observe(MemoryErrors, root=root)


def cluster(*hosts: Facts) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    by_host = dict(zip(names, hosts, strict=True))
    return make_cluster(names, nproc=1, check="memory_errors", by_host=by_host)


@pytest.fixture
def healthy(tmp_path: Path) -> Facts:
    return seen(hardware.memory(tmp_path / "healthy", {"dimm0": (0, 0), "dimm1": (0, 4)}))


def test_corrected_errors_of_the_past_are_no_news(healthy: Facts) -> None:
    assert healthy["controllers"]["mc0"]["modules"] == {
        "dimm1": {"label": "CPU_SrcID#0_MC#0_DIMM#1", "uncorrected": 0, "corrected": 4}
    }
    assert judge(CHECK, cluster(healthy, healthy)) == []


def test_an_uncorrected_error_is_a_risk_at_its_module(tmp_path: Path, healthy: Facts) -> None:
    hardware.memory(tmp_path, {"dimm0": (2, 40), "dimm1": (0, 3)})
    hardware.memory(tmp_path, {"dimm0": (0, 0)}, controller="mc1")
    made = cluster(healthy, seen(tmp_path), healthy)
    module = "CPU_SrcID#0_MC#0_DIMM#0"
    found = only(CHECK, made, "memory-errors", hosts=["nd1"], devices=[module])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.CERTAIN)
    assert found.message == "2 uncorrected errors in 12 days"


def test_it_is_the_cause_of_nothing_that_is_seen_now(tmp_path: Path) -> None:
    slow = Kind("slow", Layer.SPEED, "title", "why", "fix", Severity.WARN)
    made = cluster(seen(hardware.memory(tmp_path, {"dimm0": (1, 0)})))
    found = [*judge(CHECK, made), Finding(slow, "slow", Where(hosts=("nd0",)))]
    assert {f.code: f.explained_by for f in explain(found, made)} == {
        "memory-errors": None,
        "slow": None,
    }


def test_without_labels_or_modules_the_place_is_the_controllers(
    tmp_path: Path, healthy: Facts
) -> None:
    hardware.memory(tmp_path, {"rank3": (1, 0)}, labels=False, more=(1, 0), days=0)
    made = cluster(seen(tmp_path), healthy)
    found = only(CHECK, made, "memory-errors", hosts=["nd0"], devices=["mc0", "mc0/rank3"])
    assert found.message == "2 uncorrected errors within two days"


def test_what_cannot_be_read_is_not_there(tmp_path: Path) -> None:
    at = "sys/devices/system/edac/mc"
    fabrics.write(tmp_path, f"{at}/mc0/ue_count", "many")
    fabrics.write(tmp_path, f"{at}/power/control", "auto")
    with pytest.raises(Skip, match="no EDAC driver"):
        seen(tmp_path)
    fabrics.write(tmp_path, f"{at}/mc0/ue_count", "1")
    found = only(CHECK, cluster(seen(tmp_path)), "memory-errors", hosts=["nd0"], devices=["mc0"])
    assert found.message == "1 uncorrected error"


def test_where_nobody_counts_is_no_pass(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no EDAC driver"):
        seen(tmp_path)
