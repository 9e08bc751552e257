"""The rules of the check `torch_nccl`, on made-up clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Context, Job, Launch, Severity, Skip
from nccl_doctor.checks.torch_nccl import NONBLOCKING, USE_NCCL2, process_group
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster
from tests.support.rows import each_row

pytestmark = pytest.mark.xdist_group("torch")

CHECK = CHECKS["torch_nccl"]
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)


def facts_of(torch: str, use: str | None = None, nonblocking: str | None = None) -> dict[str, Any]:
    group = process_group(torch, use)
    return {"torch": torch, USE_NCCL2: use, NONBLOCKING: nonblocking, "process_group": group}


def cluster_of(*facts: Mapping[str, Any], backend: str = "nccl") -> Cluster:
    hosts = [f"nd{node}" for node in range(len(facts))]
    by_rank = dict(enumerate(facts))
    return make_cluster(hosts, 1, check=CHECK.name, by_rank=by_rank, backend=backend)


@each_row(
    ("torch", "use", "group"),
    [
        ("2.13.0+cu130", None, "nccl-legacy"),
        ("2.13.0+cu130", "1", "nccl-legacy"),
        ("2.14.1+cu130", None, "nccl-legacy"),
        ("2.14.1+cu130", "1", "nccl2"),
        ("2.15.0+cu132", None, "nccl2"),
        ("2.15.0+cu132", "1", "nccl2"),
        ("2.15.0+cu132", "0", "nccl-legacy"),
        ("2.16.0a0+git12ab", None, "nccl2"),
        ("3.0.0", "0", "nccl-legacy"),
    ],
)
def test_what_the_name_nccl_stands_for(torch: str, use: str | None, group: str) -> None:
    assert process_group(torch, use) == group


@pytest.mark.parametrize("torch", ["2.5.1", "2.7.1", "2.13.0", "2.15.0"])
def test_healthy(torch: str) -> None:
    assert judge(cluster_of(*[facts_of(torch)] * 3)) == []


class TestProcessGroup:
    def test_the_variable_on_one_host(self) -> None:
        new, old = facts_of("2.15.0"), facts_of("2.15.0", "0")
        cluster = cluster_of(new, new, old)
        finding = only(cluster, "nccl-backend-differs", hosts=["nd2"], ranks=[2])
        assert finding.level is Severity.FAIL
        assert finding.message == "nccl=nccl-legacy, elsewhere nccl=nccl2"
        assert USE_NCCL2 in (finding.fix or finding.kind.fix)

    def test_a_tie(self) -> None:
        cluster = cluster_of(facts_of("2.15.0"), facts_of("2.15.0", "0"))
        finding = only(cluster, "nccl-backend-differs", hosts=["nd0", "nd1"], ranks=[0, 1])
        assert finding.confidence is Confidence.POSSIBLE

    def test_another_torch_is_the_fault(self) -> None:
        (finding,) = judge(cluster_of(facts_of("2.15.0"), facts_of("2.15.0"), facts_of("2.14.0")))
        assert finding.where.hosts == ("nd2",)
        assert finding.explained_by == "version-differs"

    def test_different_values_that_mean_the_same(self) -> None:
        assert judge(cluster_of(facts_of("2.15.0"), facts_of("2.15.0", "1"))) == []
        assert judge(cluster_of(facts_of("2.13.0"), facts_of("2.13.0", "1"))) == []

    def test_gloo_does_not_mind(self) -> None:
        both = (facts_of("2.15.0"), facts_of("2.15.0", "0"))
        assert judge(cluster_of(*both, backend="gloo")) == []


class TestKnownHang:
    @pytest.mark.parametrize("torch", ["2.6.0+cu124", "2.6.1", "2.7.0+cu128", "2.7.0a0+git79"])
    def test_releases(self, torch: str) -> None:
        cluster = cluster_of(facts_of("2.7.1"), facts_of(torch))
        finding = only(cluster, "torch-known-hang", hosts=["nd1"], ranks=[1])
        assert finding.level is Severity.WARN
        assert finding.confidence is Confidence.POSSIBLE
        assert torch in finding.message

    def test_blocking_is_safe(self) -> None:
        assert judge(cluster_of(facts_of("2.7.0", nonblocking="0"))) == []

    def test_gloo_does_not_mind(self) -> None:
        assert judge(cluster_of(facts_of("2.7.0"), backend="gloo")) == []

    @pytest.mark.parametrize("torch", ["2.3.0", "2.13.0+cu130", "2.14.1"])
    def test_groups_of_gloo_where_the_job_forms_several(self, torch: str) -> None:
        cluster = replace(cluster_of(*[facts_of(torch)] * 2), job=Job(groups="many"))
        for finding in judge(cluster):
            assert (finding.code, finding.level) == ("torch-known-hang", Severity.INFO)
            assert "backend='gloo'" in finding.message
            assert "without device_id" in finding.fix
        assert {f.where.ranks for f in judge(cluster)} == {(0,), (1,)}

    @pytest.mark.parametrize("torch", ["2.2.2", "2.15.0", "2.16.0a0+git12ab"])
    def test_groups_of_gloo_of_other_releases(self, torch: str) -> None:
        cluster = replace(cluster_of(facts_of(torch)), job=Job(mesh=(("dp", 2),)))
        assert judge(cluster) == []


def test_observe_on_this_machine() -> None:
    import torch
    from torch import distributed

    ctx = Context(launch=Launch(), env={USE_NCCL2: "0"})
    if not distributed.is_nccl_available():
        with pytest.raises(Skip, match="without NCCL"):
            CHECK.observe(ctx)
        return
    assert CHECK.observe(ctx) == facts_of(torch.__version__, "0")
