"""The rules of the check `deepspeed_launch`, on made-up clusters."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Severity, Skip
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster
from tests.support.findings import everywhere

CHECK = CHECKS["deepspeed_launch"]
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)

TOLD = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "nd0",
    "MASTER_PORT": "29500",
}


def cluster_of(missing: Sequence[str], mpi4py: str | None, launcher: str = "srun") -> Cluster:
    facts: Mapping[str, Any] = {"missing": list(missing), "mpi4py": mpi4py}
    cluster = make_cluster(check=CHECK.name, by_rank=dict.fromkeys(range(4), facts))
    return everywhere(cluster, range(4), launcher=launcher)


@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(cluster_of([], None, "torchrun"), id="all told"),
        pytest.param(cluster_of(["RANK"], "4.0.1"), id="mpi4py is there"),
        pytest.param(cluster_of(["RANK"], None, "none"), id="nothing was launched"),
        pytest.param(cluster_of(["RANK"], None, "nccl-doctor"), id="set once it has its place"),
    ],
)
def test_healthy(cluster: Cluster) -> None:
    assert judge(cluster) == []


def test_srun_alone() -> None:
    found = judge(cluster_of(["RANK", "LOCAL_RANK"], None))
    assert [f.where.ranks for f in found] == [(0,), (1,), (2,), (3,)]
    assert {(f.code, f.level) for f in found} == {("deepspeed-needs-mpi4py", Severity.INFO)}
    assert found[0].message == "RANK, LOCAL_RANK not set, and mpi4py not installed"
    assert found[0].fix == "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID (in each task)"


def test_another_launcher_has_no_variables_of_slurm() -> None:
    assert all(f.fix == "" for f in judge(cluster_of(["RANK"], None, "mpirun")))


def install(site: Path, name: str) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def test_observe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(Skip, match="not installed"):
        CHECK.observe(Context(Launch(), {}))
    install(tmp_path, "deepspeed")
    assert CHECK.observe(Context(Launch(), TOLD)) == {"missing": [], "mpi4py": None}
    install(tmp_path, "mpi4py")
    facts = CHECK.observe(Context(Launch(), {"RANK": "0"}))
    assert facts["missing"] == ["LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    assert facts["mpi4py"] == "1.0"
