"""CPUs that the ranks of a host share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Severity
from nccl_doctor.checks.cpus import Cpus
from tests import fabrics
from tests.clusters import make_cluster
from tests.findings import judge, only

CHECK = Cpus()


def cpus(affinity: str, count: int, allowed: int = 64, quota: float | None = None) -> Any:
    return {"affinity": affinity, "count": count, "allowed": allowed, "quota": quota}


ALL = cpus("0–63", 64)


def cluster(*bad: dict[str, Any], backend: str = "nccl") -> Cluster:
    seen = dict(enumerate([ALL] * 4 + list(bad) + [ALL] * 4))
    return make_cluster(["nd0", "nd1", "nd2"], 4, check="cpus", by_rank=seen, backend=backend)


def test_cores_for_everybody_are_fine() -> None:
    assert judge(CHECK, cluster(*[ALL] * 4)) == []
    apart = [cpus(f"{8 * i}–{8 * i + 7}", 8) for i in range(4)]
    assert judge(CHECK, cluster(*apart)) == []
    assert judge(CHECK, cluster(*[cpus("0–63", 64, quota=4.0)] * 4)) == []


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_all_ranks_on_one_core_by_a_binding(backend: str) -> None:
    made = cluster(*[cpus("3", 1)] * 4, backend=backend)
    found = only(CHECK, made, "cpu-limit-low", hosts=["nd1"], ranks=[4, 5, 6, 7])
    assert found.level is Severity.WARN
    assert found.message == "4 ranks on CPU 3 of 64"


def test_one_core_each_is_too_few_for_nccl_s_threads() -> None:
    own = [cpus(str(i), 1) for i in range(4)]
    assert judge(CHECK, cluster(*own, backend="gloo")) == []
    found = only(CHECK, cluster(*own), "cpu-limit-low", hosts=["nd1"], ranks=[4, 5, 6, 7])
    assert found.message == "4 ranks on CPU 0 and 1 and 2 and 3 of 64"
    for others in (ALL, cpus("8–15", 8)):
        made = cluster(others, others, others, cpus("5", 1))
        found = only(CHECK, made, "cpu-limit-low", hosts=["nd1"], ranks=[7])
        assert found.message == "1 rank on CPU 5 of 64"


@pytest.mark.parametrize("small", [cpus("0–1", 2, 2), cpus("0–63", 64, quota=1.5)])
def test_a_small_machine_is_a_risk_with_nccl_only(small: dict[str, Any]) -> None:
    for backend, severity in (("nccl", Severity.WARN), ("gloo", Severity.INFO)):
        (found,) = judge(CHECK, cluster(*[small] * 4, backend=backend))
        assert found.level is severity
        assert found.where.hosts == ("nd1",)
    assert found.message.endswith(", CPU time for 1.5" if small["quota"] else "of 2")


def test_this_process() -> None:
    seen = CHECK.observe(Context(launch=Launch(), env={}))
    assert seen["count"] == len(os.sched_getaffinity(0)) <= seen["allowed"]


def test_the_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    for name, text in {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cgroup.controllers": "cpu cpuset\n",
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/cpuset.cpus.effective": "0-7\n",
    }.items():
        fabrics.write(tmp_path, name, text)

    class Here(Cpus):
        root = tmp_path

    seen = Here().observe(Context(launch=Launch(), env={}))
    assert (seen["quota"], seen["allowed"]) == (0.5, 8)
