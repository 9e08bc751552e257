"""What delays a job explains a group that looks hung there, and nothing that is certain."""

from __future__ import annotations

from dataclasses import replace

from nccl_doctor.api import Confidence, Effect, Finding, Kind, Layer, Severity, Where
from nccl_doctor.judge.causes import explain, root_causes
from tests.support.clusters import make_cluster

SLOW = Kind("slow", Layer.NAME, "t", "w", "f", Severity.WARN, effects=(Effect.DELAYS,))
LOSSY = Kind("lossy", Layer.SPEED, "t", "w", "f", Severity.WARN, effects=(Effect.DELAYS,))
ODD = Kind("odd", Layer.NAME, "t", "w", "f", Severity.WARN)
BLOCKED = Kind("blocked", Layer.PORT, "t", "w", "f")
HANG = Kind("hang", Layer.COLLECTIVE, "t", "w", "f", effects=(Effect.TIMED_OUT,))
ERROR = Kind("error", Layer.COLLECTIVE, "t", "w", "f")

ND1 = Where(hosts=("nd1",))
ALL = Where(hosts=("nd0", "nd1"), ranks=(0, 1, 2, 3))


def roots(*findings: Finding) -> list[str]:
    return [each.code for each in root_causes(explain(findings, make_cluster()))]


def hang(confidence: Confidence = Confidence.LIKELY) -> Finding:
    return Finding(HANG, "no progress", ALL, confidence=confidence)


def test_slow_names_or_a_lossy_link_explain_a_hang_that_nobody_is_sure_of() -> None:
    assert roots(Finding(SLOW, "1 s", ND1), hang()) == ["slow"]
    link = Finding(LOSSY, "9 %", Where(links=(("nd0", "nd1"),)))
    assert roots(link, hang(Confidence.POSSIBLE)) == ["lossy"]


def test_what_is_certain_has_its_own_cause() -> None:
    assert roots(Finding(SLOW, "1 s", ND1), hang(Confidence.CERTAIN)) == ["hang"]


def test_a_group_that_certainly_hangs_forming_on_the_slow_host_alone_is_slow() -> None:
    forming = replace(HANG, layer=Layer.GROUP)
    certain = Finding(forming, "fails alone", Where(hosts=("nd1",), ranks=(2, 3)))
    assert roots(Finding(SLOW, "1 s", ND1), certain) == ["slow"]
    assert roots(Finding(SLOW, "1 s", ND1), certain.replaced(where=ALL)) == ["hang"]


def test_an_error_is_not_a_missed_deadline() -> None:
    raised = Finding(ERROR, "out of memory", ALL, confidence=Confidence.POSSIBLE)
    assert roots(Finding(SLOW, "1 s", ND1), raised) == ["error"]


def test_a_host_that_came_too_late_was_delayed() -> None:
    absent = Kind("absent", Layer.RANKS, "t", "w", "f", effects=(Effect.TIMED_OUT,))
    late = Finding(absent, "not there", ND1, confidence=Confidence.LIKELY)
    assert roots(Finding(SLOW, "1 s", ND1), late) == ["slow"]
    assert roots(Finding(SLOW, "1 s", Where(hosts=("nd0",))), late) == ["absent"]


def test_elsewhere_or_of_another_kind_it_explains_nothing() -> None:
    alone = replace(hang(), where=Where(hosts=("nd0",), ranks=(0, 1)))
    assert roots(Finding(SLOW, "1 s", ND1), alone) == ["hang"]
    assert roots(Finding(ODD, "odd", ND1), hang()) == ["hang"]


def test_information_explains_nothing() -> None:
    slow = Finding(SLOW, "1 s, on a busy machine", ND1, severity=Severity.INFO)
    assert roots(slow, hang()) == ["hang"]


def test_a_failure_explains_it_rather() -> None:
    found = explain([Finding(SLOW, "1 s", ND1), Finding(BLOCKED, "b", ND1), hang()], make_cluster())
    assert {each.code: each.explained_by for each in found}["hang"] == "blocked"
    assert [each.code for each in root_causes(found)] == ["blocked"]


def test_a_variable_or_a_limit_does_not_shut_a_port() -> None:
    for layer in (Layer.HOST, Layer.ENV):
        fault = Kind("fault", layer, "t", "w", "f")
        both = [Finding(fault, "x", ND1), Finding(BLOCKED, "b", ND1)]
        assert sorted(roots(*both)) == ["blocked", "fault"]
        assert roots(Finding(fault, "x", ND1), hang(Confidence.CERTAIN)) == ["fault"]


def test_a_difference_may_break_whoever_meets_it() -> None:
    odd = Kind("odd-one", Layer.ENV, "t", "w", "f", effects=(Effect.DIFFERENCE,))
    crash = Kind("crash", Layer.COLLECTIVE, "t", "w", "f")
    on_nd0 = Finding(crash, "SIGSEGV", Where(hosts=("nd0",), ranks=(0, 1)))
    assert roots(Finding(odd, "x", ND1), on_nd0) == ["odd-one"]
    assert sorted(roots(Finding(odd, "x", ND1), Finding(BLOCKED, "b", Where(hosts=("nd0",))))) == [
        "blocked",
        "odd-one",
    ]


def test_a_misspelt_variable_makes_no_link_slow() -> None:
    typo = Kind("typo", Layer.ENV, "t", "w", "f", Severity.WARN)
    slow = Kind("link", Layer.SPEED, "t", "w", "f", Severity.WARN)
    assert sorted(roots(Finding(typo, "x", ND1), Finding(slow, "s", ND1))) == ["link", "typo"]
