"""The rules of the check `nccl_library`, on made-up clusters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from nccl_doctor import registry
from nccl_doctor.api import Cluster, Context, Launch, Severity, Skip
from tests import findings
from tests.clusters import make_cluster

CHECK = next(check for check in registry.load().checks if check.name == "nccl_library")
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
