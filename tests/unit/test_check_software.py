"""Versions that differ, on made-up clusters and on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Context, Finding, Launch, Severity
from nccl_doctor.toolkit.versions import differences
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.rows import each_row

pytestmark = pytest.mark.xdist_group("torch")

CHECK = CHECKS["software"]
judge = partial(findings.judge, CHECK)

FACTS = {
    "torch": "2.13.0+cu130",
    "torch_git": "cf30153c4c131c8164ee7798e5022d810682e2cb",
    "cuda": "13.0",
    "rocm": None,
    "nccl": "2.28.9",
    "deepspeed": "0.19.8",
    "accelerate": None,
    "transformers": "5.1.0",
    "python": "3.11.7",
    "python_path": "/opt/job/bin/python",
    "driver": "580.95.05",
}
CPU = {**FACTS, "torch": "2.13.0+cpu", "cuda": None, "nccl": None, "driver": None}


def cluster_of(
    by_rank: Mapping[int, Any] | None = None,
    *,
    hosts: int = 2,
    nproc: int = 8,
    backend: str = "nccl",
) -> Cluster:
    """`hosts` x `nproc` ranks with the same software, but for the facts in `by_rank`; via JSON."""
    every = dict.fromkeys(range(hosts * nproc), FACTS) | dict(by_rank or {})
    return make_cluster(
        [f"nd{node}" for node in range(hosts)],
        nproc,
        check=CHECK.name,
        by_rank=json.loads(json.dumps(every), object_pairs_hook=_numbered),
        backend=backend,
    )


def _numbered(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    return {int(key) if key.isdigit() else key: value for key, value in pairs}


def one_host(node: int, nproc: int, **changes: Any) -> dict[int, Any]:
    """The same change on every rank of one host."""
    return {node * nproc + local: {**FACTS, **changes} for local in range(nproc)}


def places(found: list[Finding]) -> set[tuple[str, Severity, tuple[str, ...], tuple[int, ...]]]:
    return {(f.code, f.level, f.where.hosts, f.where.ranks) for f in found}


def test_the_same_software_everywhere() -> None:
    assert judge(cluster_of()) == []


@each_row(
    ("changes", "severity", "message"),
    [
        ({"nccl": "2.27.3"}, Severity.FAIL, "NCCL 2.27.3; the others have NCCL 2.28.9"),
        ({"torch": "2.12.1+cu130", "torch_git": "aa"}, Severity.FAIL,
         "torch 2.12.1; the others have torch 2.13.0"),
        ({"torch": "2.13.1+cu130", "torch_git": "aa"}, Severity.WARN,
         "torch 2.13.1; the others have torch 2.13.0"),
        ({"deepspeed": None}, Severity.WARN,
         "DeepSpeed not installed; the others have DeepSpeed 0.19.8"),
        ({"transformers": "4.57.0", "accelerate": "1.11.0"}, Severity.WARN,
         "Accelerate 1.11.0, Transformers 4.57.0; the others have Accelerate not installed, "
         "Transformers 5.1.0"),
        ({"torch_git": "aa"}, Severity.WARN,
         "torch built from aa; the others have torch built from cf30153c4c13"),
        ({"python": "3.12.1"}, Severity.WARN, "Python 3.12; the others have Python 3.11"),
        ({"cuda": "12.8", "nccl": "2.27.3", "python": "3.10.2"}, Severity.FAIL,
         "CUDA 12.8, NCCL 2.27.3, Python 3.10; the others have CUDA 13.0, NCCL 2.28.9, "
         "Python 3.11"),
    ],
)  # fmt: skip
def test_the_minority_of_three_to_one_is_blamed(
    changes: dict[str, Any], severity: Severity, message: str
) -> None:
    found = judge(cluster_of(one_host(2, 2, **changes), hosts=4, nproc=2))
    assert places(found) == {("version-differs", severity, ("nd2",), (4, 5))}
    assert found[0].message == message


def test_a_python_patch_is_no_difference() -> None:
    assert judge(cluster_of({0: {**FACTS, "python": "3.11.9"}})) == []


def test_a_tie_is_said_to_be_a_tie() -> None:
    found = judge(cluster_of(one_host(1, 1, nccl="2.27.3"), nproc=1))
    assert places(found) == {("version-differs", Severity.FAIL, ("nd0", "nd1"), (0, 1))}
    assert found[0].message == "a tie, by rank: NCCL 2.28.9 on 0, 2.27.3 on 1"


def test_nccl_versions_do_not_stop_gloo() -> None:
    by_rank = {0: CPU, 1: CPU, 2: CPU, 3: {**CPU, "nccl": "2.27.3"}}
    found = judge(cluster_of(by_rank, hosts=4, nproc=1, backend="gloo"))
    assert found == []  # one rank alone has a value: nothing to compare with


def test_releases_of_torch_work_together_over_gloo() -> None:
    by_rank = {3: {**CPU, "torch": "2.15.0+cu132"}} | dict.fromkeys(range(3), CPU)
    found = judge(cluster_of(by_rank, hosts=4, nproc=1, backend="gloo"))
    assert places(found) == {("version-differs", Severity.WARN, ("nd3",), (3,))}


def test_differences_of_two_kinds_come_apart() -> None:
    stacks = {n: {"torch": "2.13.0", "NCCL": "2.28.9"} for n in range(5)}
    stacks[1] = {"torch": "2.12.0", "NCCL": "2.28.9"}
    stacks[3] = {"torch": "2.13.0", "NCCL": "2.27.3"}
    assert [(d.places, d.values) for d in differences(stacks)] == [
        ((1,), {"torch": "2.12.0"}),
        ((3,), {"NCCL": "2.27.3"}),
    ]


def with_libraries(cluster: Cluster, *loaded: Any) -> Cluster:
    """The facts of check `nccl_library`, by rank."""
    for rank in cluster.ranks:
        found = outcome({"loaded": loaded[rank.seat]})
        facts = {**rank.facts, "nccl_library": {ALONE: found}}
        cluster = change_rank(cluster, rank.seat, facts=facts)
    return cluster


def library(version: str, fingerprint: str = "aa") -> dict[str, str]:
    return {"path": "/x/libnccl.so.2", "version": version, "fingerprint": fingerprint}


class TestLoadedNccl:
    def test_it_counts_more_than_the_build(self) -> None:
        cluster = cluster_of(hosts=3, nproc=1)
        same, other = library("2.28.9"), library("2.18.3")
        found = judge(with_libraries(cluster, same, other, same))
        assert places(found) == {("version-differs", Severity.FAIL, ("nd1",), (1,))}
        assert found[0].message == "NCCL 2.18.3; the others have NCCL 2.28.9"

    def test_other_builds_with_the_same_library(self) -> None:
        cluster = cluster_of(one_host(1, 1, nccl="2.27.3"), hosts=3, nproc=1)
        assert judge(with_libraries(cluster, *[library("2.28.9")] * 3)) == []

    def test_another_file_of_the_same_version(self) -> None:
        cluster = cluster_of(hosts=3, nproc=1)
        same, other = library("2.28.9"), library("2.28.9", "bb")
        found = judge(with_libraries(cluster, same, same, other))
        assert places(found) == {("version-differs", Severity.WARN, ("nd2",), (2,))}
        assert found[0].message == "NCCL file bb; the others have NCCL file aa"

    def test_where_it_is_linked_in_the_build_counts(self) -> None:
        cluster = cluster_of(hosts=3, nproc=1)
        same = library("2.28.9")
        assert judge(with_libraries(cluster, same, None, same)) == []
        old = cluster_of(one_host(1, 1, nccl="2.27.3"), hosts=3, nproc=1)
        found = judge(with_libraries(old, same, None, same))
        assert places(found) == {("version-differs", Severity.FAIL, ("nd1",), (1,))}


def test_observe_on_this_machine() -> None:
    import torch

    seen = json.loads(json.dumps(CHECK.observe(Context(launch=Launch(), env={}))))
    assert set(seen) == set(FACTS)
    assert seen["torch"] == torch.__version__
    assert judge(cluster_of({0: seen}, hosts=1, nproc=1)) == []
    assert not torch.cuda.is_initialized()
