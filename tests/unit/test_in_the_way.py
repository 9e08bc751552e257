"""What stops a group is not judged again before there are new facts of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import pytest

from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.messages import SignIn
from nccl_doctor.gather.rounds import Blockers
from nccl_doctor.judge.checks import judge_all
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster, Outcome, OutcomeStatus
from nccl_doctor.model.findings import Finding, Kind, Layer
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.options import Options

KIND = Kind("some-fault", Layer.PORT, "title", "why", "fix")
FINE = Outcome(OutcomeStatus.OK)


class Counted(Check):
    """Counts how often it judges."""

    name, layer, kinds = "counted", Layer.PORT, (KIND,)
    reads = ("read",)
    judged = 0

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        type(self).judged += 1
        yield Finding(KIND, "broken")


class Later(Check):
    """Needs what `Counted` judges."""

    name, layer, kinds = "later", Layer.GROUP, ()
    needs: ClassVar[tuple[Layer, ...]] = (Layer.PORT,)


def log() -> EvidenceLog:
    made = EvidenceLog(Launch("env", 0, 2), {}, {})
    made.sign_in(0, SignIn("token", 7, Launch("env", 0, 2), "nd0", "key"), 0.0)
    return made


def asked(check: type[Check], evidence: EvidenceLog, failures: Blockers) -> list[str]:
    cluster = evidence.cluster(OPTIONS, "gloo")
    return [each.code for each in failures.blockers_of(check(), cluster, evidence.state)]


OPTIONS = Options()


def counted(module: str) -> type[Counted]:
    return type("Counted", (Counted,), {"__module__": module, "judged": 0})


@pytest.mark.parametrize(
    ("module", "times"), [("nccl_doctor.checks.counted", [1, 1, 2, 3, 4]), ("plug_in", range(1, 6))]
)
def test_what_no_new_fact_can_have_changed_is_not_judged_again(
    module: str, times: Iterable[int]
) -> None:
    check, evidence = counted(module), log()
    failures = Blockers([check()])
    changes = (
        lambda: None,
        lambda: evidence.record(0, "another", "all", FINE),
        lambda: evidence.record(0, "read", "all", FINE),
        lambda: evidence.record(0, "counted", "all", FINE),
        lambda: evidence.sign_in(1, SignIn("b", 8, Launch("env", 1, 2), "nd1", "k"), 0.0),
    )
    for change, count in zip(changes, times, strict=True):
        change()
        assert asked(Later, evidence, failures) == ["some-fault"]
        assert check.judged == count


def test_who_needs_nothing_of_a_layer_has_it_not_judged() -> None:
    check, evidence = counted("nccl_doctor.checks.counted"), log()
    needs_another = type("Other", (Later,), {"needs": (Layer.NAME,)})
    needs_none = type("None_", (Later,), {"needs": ()})
    for later in (needs_another, needs_none):
        assert asked(later, evidence, Blockers([check()])) == []
    assert check.judged == 0


def test_the_cluster_is_made_again_only_where_there_is_more() -> None:
    evidence = log()
    first = evidence.cluster(OPTIONS, "gloo")
    assert evidence.cluster(OPTIONS, "gloo") is first
    evidence.record(0, "counted", "all", FINE)
    second = evidence.cluster(OPTIONS, "gloo")
    assert second is not first
    assert second.ranks[0].facts == {"counted": {"all": FINE}}
    assert evidence.cluster(OPTIONS, "gloo", complete=False) is not second


class Broken(Counted):
    """Finds something, and breaks."""

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        yield Finding(KIND, "broken")
        raise KeyError("gone")


def found(failures: Blockers, evidence: EvidenceLog) -> dict[str, list[str]]:
    known = failures.known(evidence.state)
    return {name: [each.code for each in findings] for name, findings in known.items()}


@pytest.mark.parametrize("base", [Counted, Broken])
@pytest.mark.parametrize("module", ["nccl_doctor.checks.counted", "plug_in"])
def test_the_verdict_takes_what_was_found_in_these_very_facts(
    module: str, base: type[Counted]
) -> None:
    check, evidence = type("Made", (base,), {"__module__": module}), log()
    failures = Blockers([check()])
    assert found(failures, evidence) == {}
    asked(Later, evidence, failures)
    taken = base is Counted and module != "plug_in"
    expected = {"counted": ["some-fault"]} if taken else {}
    evidence.record(0, "another", "all", FINE)
    assert found(failures, evidence) == expected
    cluster, checks = evidence.cluster(OPTIONS, "gloo"), [check()]
    anew, broken = judge_all(cluster, checks)
    assert judge_all(cluster, checks, failures.known(evidence.state)) == (anew, broken)
    evidence.record(0, "read", "all", FINE)
    assert found(failures, evidence) == {}
