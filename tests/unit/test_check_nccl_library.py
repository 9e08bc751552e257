"""The rules of the check `nccl_library`, on made-up clusters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Context, Launch, Severity, Skip
from nccl_doctor.judge.conclusion import conclude
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.reports import RUN

pytestmark = pytest.mark.xdist_group("torch")

CHECK, SOFTWARE = CHECKS["nccl_library"], CHECKS["software"]
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)

HOME = "/venv/site-packages/nvidia/nccl/lib/libnccl.so.2"
SYSTEM = "/usr/lib/x86_64-linux-gnu/libnccl.so.2.18.3"
WHEEL = {"name": "nvidia-nccl-cu13", "version": "2.28.9", "library": HOME}
OLD = {"name": "nvidia-nccl-cu12", "version": "2.27.3", "library": HOME}
FACTS: Mapping[str, Any] = {
    "built": "2.28.9",
    "cuda": "13.0",
    "wheels": [WHEEL],
    "loaded": {"path": HOME, "version": "2.28.9", "fingerprint": "aa"},
    "in_front": [],
}
FOREIGN = {
    **FACTS,
    "loaded": {"path": SYSTEM, "version": "2.18.3", "fingerprint": "bb"},
    "in_front": ["LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu"],
}
STACK = {
    "torch": "2.13.0+cu130",
    "torch_git": "cf30153c",
    "cuda": "13.0",
    "rocm": None,
    "python": "3.11.7",
    "driver": "580.95.05",
}
THREE = ("nd0", "nd1", "nd2")


def cluster_of(*facts: Mapping[str, Any], backend: str = "nccl") -> Cluster:
    return make_cluster(THREE, 1, check=CHECK.name, by_rank=dict(enumerate(facts)), backend=backend)


def test_the_library_of_the_wheel() -> None:
    assert judge(cluster_of(FACTS, FACTS, FACTS)) == []


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({**FACTS, "loaded": None, "wheels": []}, id="linked in"),
        pytest.param({**FOREIGN, "wheels": []}, id="an image without wheels"),
    ],
)
def test_other_healthy_builds(facts: Mapping[str, Any]) -> None:
    assert judge(cluster_of(facts, facts, facts)) == []


class TestReplaced:
    def test_on_one_host(self) -> None:
        finding = only(
            cluster_of(FACTS, FOREIGN, FACTS), "nccl-library-replaced", hosts=["nd1"], ranks=[1]
        )
        assert finding.level is Severity.FAIL
        assert finding.message == (
            f"NCCL 2.18.3 from {SYSTEM}, by LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu; torch was "
            "built with 2.28.9"
        )
        assert finding.fix == "take /usr/lib/x86_64-linux-gnu out of LD_LIBRARY_PATH"

    def test_gloo_does_not_mind(self) -> None:
        cluster = cluster_of(FACTS, FOREIGN, FACTS, backend="gloo")
        finding = only(cluster, "nccl-library-replaced", hosts=["nd1"], ranks=[1])
        assert finding.level is Severity.WARN

    def test_everywhere_and_older(self) -> None:
        found = judge(cluster_of(FOREIGN, FOREIGN, FOREIGN))
        assert {(f.code, f.level) for f in found} == {("nccl-library-replaced", Severity.WARN)}

    def test_everywhere_and_newer_is_meant(self) -> None:
        newer = {**FOREIGN, "loaded": {**FOREIGN["loaded"], "version": "2.30.7"}}
        found = judge(cluster_of(newer, newer, newer))
        assert {(f.code, f.level) for f in found} == {("nccl-library-replaced", Severity.INFO)}

    def test_preloaded_where_there_is_no_wheel(self) -> None:
        preloaded = {**FOREIGN, "wheels": [], "in_front": [f"LD_PRELOAD={SYSTEM}"]}
        same = {**FACTS, "wheels": []}
        cluster = cluster_of(same, same, preloaded)
        finding = only(cluster, "nccl-library-replaced", hosts=["nd2"], ranks=[2])
        assert finding.fix == "unset LD_PRELOAD"

    def test_nobody_knows_which_of_two_versions_is_right(self) -> None:
        cluster = make_cluster(
            ("nd0", "nd1"), 1, check=CHECK.name, by_rank={0: FACTS, 1: FOREIGN}, backend="nccl"
        )
        finding = only(cluster, "nccl-library-replaced", hosts=["nd1"], ranks=[1])
        assert finding.level is Severity.FAIL

    def test_it_is_the_cause_of_versions_that_differ(self) -> None:
        report = conclude(stacked(FACTS, FOREIGN, FACTS), [CHECK, SOFTWARE], run=RUN)
        assert [f.code for f in report.root_causes] == ["nccl-library-replaced"]
        explained = {f.code: f.explained_by for f in report.findings}
        assert explained["version-differs"] == "nccl-library-replaced"

    def test_another_build_of_torch_is_a_cause_of_its_own(self) -> None:
        other = {**FOREIGN, "built": "2.27.3"}
        report = conclude(stacked(FACTS, other, FACTS), [CHECK, SOFTWARE], run=RUN)
        assert [f.code for f in report.root_causes] == ["version-differs"]


def stacked(*facts: Mapping[str, Any]) -> Cluster:
    """A cluster in which check `software` was there too."""
    cluster = cluster_of(*facts)
    for rank, mine in zip(cluster.ranks, facts, strict=True):
        seen = outcome({**STACK, "nccl": mine["built"]})
        both = {**rank.facts, "software": {ALONE: seen}}
        cluster = change_rank(cluster, rank.seat, facts=both)
    return cluster


class TestCollide:
    def test_two_wheels(self) -> None:
        both = {**FACTS, "wheels": [OLD, WHEEL]}
        finding = only(
            cluster_of(FACTS, FACTS, both), "nccl-wheels-collide", hosts=["nd2"], ranks=[2]
        )
        assert finding.level is Severity.WARN
        assert finding.message == (
            f"nvidia-nccl-cu12 2.27.3 and nvidia-nccl-cu13 2.28.9 own one file, {HOME}, which is "
            "NCCL 2.28.9"
        )
        assert finding.fix == (
            "pip uninstall -y nvidia-nccl-cu12 nvidia-nccl-cu13 && "
            "pip install nvidia-nccl-cu13==2.28.9"
        )

    def test_a_file_of_another_version(self) -> None:
        overwritten = {**FACTS, "loaded": {**FACTS["loaded"], "version": "2.27.3"}}
        cluster = cluster_of(overwritten, overwritten, overwritten)
        found = judge(cluster)
        assert {f.code for f in found} == {"nccl-wheels-collide"}
        assert found[0].message == (f"pip lists nvidia-nccl-cu13 2.28.9, but {HOME} is NCCL 2.27.3")

    def test_a_post_release_is_the_same_release(self) -> None:
        wheels = [{**WHEEL, "version": "2.28.9.post1"}]
        assert judge(cluster_of(*[{**FACTS, "wheels": wheels}] * 3)) == []

    def test_wheels_in_different_places(self) -> None:
        apart = {**FACTS, "wheels": [{**OLD, "library": "/other/libnccl.so.2"}, WHEEL]}
        assert judge(cluster_of(apart, FACTS, FACTS)) == []

    def test_a_wheel_without_its_file(self) -> None:
        gone = {**FACTS, "wheels": [{**OLD, "library": None}, WHEEL]}
        assert judge(cluster_of(gone, FACTS, FACTS)) == []


def test_observe_on_this_machine() -> None:
    from torch import distributed

    ctx = Context(launch=Launch(), env={})
    if not distributed.is_nccl_available():
        with pytest.raises(Skip, match="without NCCL"):
            CHECK.observe(ctx)
        return
    facts = CHECK.observe(ctx)
    assert set(facts) == set(FACTS)
    assert judge(cluster_of(facts, facts, facts)) == []
