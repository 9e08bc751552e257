"""Folding and explaining: pure rules on made-up clusters."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nccl_doctor.api import Cluster, Confidence, Effect, Finding, Layer, Severity, Where
from nccl_doctor.judge.causes import explain, fold
from tests.support.clusters import make_cluster
from tests.support.reports import kind
from tests.support.verdicts import DEVICE, GROUP, HOST, NAME, NOTE, PORT, RISK, SPEED, at


def explained(*findings: Finding, cluster: Cluster | None = None) -> dict[str, str | None]:
    cluster = cluster or make_cluster(("nd0", "nd1", "nd2"))
    return {f.code: f.explained_by for f in explain(findings, cluster)}


# --- fold ---


def test_the_same_fault_on_many_ranks_is_one_finding():
    parts = [Finding(HOST, "64 MiB", at(f"nd{i // 2}", ranks=(i,)), {"rank": i}) for i in range(4)]
    (one,) = fold(reversed(parts))
    assert one.where == at("nd0", "nd1", ranks=(0, 1, 2, 3))
    assert one.evidence == {"each": [{"rank": i} for i in range(4)]}


def test_equal_evidence_is_kept_once():
    (one,) = fold([Finding(HOST, "m", at(h), {"free": 1}) for h in ("nd0", "nd1")])
    assert one.evidence == {"free": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"message": "other"},
        {"severity": Severity.WARN},
        {"fix": "other"},
        {"confidence": Confidence.LIKELY},
        {"explained_by": "mid-port"},
        {"kind": PORT},
    ],
)
def test_findings_that_say_something_else_stay_apart(change):
    one = Finding(HOST, "m", at("nd0"))
    assert len(fold([one, one.replaced(where=at("nd1"), **change)])) == 2


def test_evidence_that_is_not_json_is_not_a_reason_to_lose_a_finding():
    (one,) = fold([Finding(HOST, "m", evidence={"when": {1, 2}})])
    assert "1" in json.dumps(one.evidence)


# --- explain ---


@pytest.mark.parametrize(
    ("low", "high"),
    [
        pytest.param(Where(), at("nd1"), id="nowhere is everywhere"),
        pytest.param(at("nd1"), at("nd1"), id="host covers itself"),
        pytest.param(at("nd1"), at("nd1", ranks=(2, 3)), id="host covers its ranks"),
        pytest.param(at("nd1"), at(ranks=(3,)), id="rank is known to be there"),
        pytest.param(at(ranks=(2, 3)), at("nd1"), id="all ranks cover the host"),
        pytest.param(at("nd1"), at(links=(("nd0", "nd1"),)), id="host covers its links"),
        pytest.param(at(links=(("nd0", "nd1"),)), at(links=(("nd1", "nd0"),)), id="link both ways"),
        pytest.param(Where(nodes=(1,)), at("nd1"), id="node is the host"),
    ],
)
def test_a_lower_failure_explains_what_lies_in_its_place(low, high):
    got = explained(Finding(HOST, "", low), Finding(DEVICE, "", high))
    assert got == {"low-host": None, "up-device": "low-host"}


@pytest.mark.parametrize(
    ("low", "high"),
    [
        pytest.param(at("nd1"), at("nd0"), id="other host"),
        pytest.param(at("nd1"), at("nd0", "nd1"), id="one of two hosts"),
        pytest.param(at("nd1"), Where(), id="everywhere"),
        pytest.param(at("nd1", ranks=(2,)), at("nd1", ranks=(3,)), id="host beside a rank"),
        pytest.param(at("nd1", ranks=(2,)), at("nd1"), id="one rank of a host"),
        pytest.param(at(links=(("nd0", "nd1"),)), at("nd1"), id="a link is not its end"),
        pytest.param(at(links=(("nd0", "nd1"),)), at(links=(("nd0", "nd2"),)), id="other link"),
    ],
)
def test_a_lower_failure_elsewhere_explains_nothing(low, high):
    got = explained(Finding(HOST, "", low), Finding(DEVICE, "", high))
    assert got == {"low-host": None, "up-device": None}


def test_one_bad_member_explains_its_whole_group():
    got = explained(
        Finding(HOST, "", at("nd1")), Finding(GROUP, "", at("nd0", "nd1", ranks=(0, 1, 2, 3)))
    )
    assert got["top-group"] == "low-host"


def test_a_group_elsewhere_is_not_explained():
    got = explained(Finding(HOST, "", at("nd2")), Finding(GROUP, "", at(ranks=(0, 1))))
    assert got["top-group"] is None


def test_the_lowest_layer_is_the_cause():
    got = explained(
        Finding(PORT, "", at("nd1")), Finding(GROUP, "", at("nd1")), Finding(NAME, "", at("nd1"))
    )
    assert got == {"low-name": None, "mid-port": "low-name", "top-group": "low-name"}


def test_the_same_layer_explains_nothing():
    other = kind("other-host", Layer.HOST)
    assert explained(Finding(HOST, "", at("nd1")), Finding(other, "", at("nd1"))) == {
        "low-host": None,
        "other-host": None,
    }


def test_a_warning_never_explains_a_failure_and_only_symptoms_otherwise():
    risk = Finding(RISK, "", at("nd1"))
    assert explained(risk, Finding(GROUP, "", at("nd1")))["top-group"] is None
    warned = kind("up-warn", Layer.DEVICE, Severity.WARN)
    assert explained(risk, Finding(warned, "", at("nd1")))["up-warn"] is None
    assert explained(risk, Finding(SPEED, "", at("nd1")))["slow-link"] == "a-risk"
    assert explained(Finding(RISK, ""), Finding(SPEED, "", at("nd1")))["slow-link"] is None


def test_no_group_makes_a_link_slow():
    slow = replace(SPEED, effects=(Effect.DELAYS,))
    group = Finding(GROUP, "", at("nd1"))
    assert explained(group, Finding(SPEED, "", at("nd1")))["slow-link"] == "top-group"
    assert explained(group, Finding(slow, "", at("nd1")))["slow-link"] is None
    assert explained(Finding(PORT, "", at("nd1")), Finding(slow, "", at("nd1"))) == {
        "mid-port": None,
        "slow-link": "mid-port",
    }


def test_what_is_only_worth_knowing_neither_explains_nor_is_explained():
    low_note = kind("low-note", Layer.LAUNCH, Severity.INFO)
    got = explained(
        Finding(HOST, "", at("nd1")),
        Finding(NOTE, "", at("nd1")),
        Finding(low_note, "", at("nd1")),
    )
    assert got == {"low-note": None, "low-host": None, "a-note": None}


def test_a_judge_knows_better_than_the_layers():
    got = explained(
        Finding(HOST, "", at("nd1")),
        Finding(PORT, "", at("nd1")),
        Finding(GROUP, "", at("nd1"), explained_by="mid-port"),
    )
    assert got["top-group"] == "mid-port"


def test_a_cause_that_nobody_found_is_no_cause():
    assert explained(Finding(PORT, "", explained_by="gone"))["mid-port"] is None


def test_a_cause_is_at_least_as_severe():
    got = explained(Finding(RISK, "", at("nd0")), Finding(PORT, "", explained_by="a-risk"))
    assert got["mid-port"] is None


def test_causes_never_go_in_a_circle():
    got = explained(
        Finding(PORT, "", at("nd1"), explained_by="top-group"),
        Finding(GROUP, "", at("nd1")),
    )
    assert got == {"mid-port": "top-group", "top-group": None}
    assert explained(Finding(PORT, "", explained_by="mid-port")) == {"mid-port": None}
