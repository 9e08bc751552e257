"""Rules by which one finding explains another: each decides on a pair of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nccl_doctor.api import Confidence, Effect, Finding, Kind, Layer, Severity, Where
from nccl_doctor.judge.causes import RULES, CausePair, explain, reason_of
from nccl_doctor.judge.place import PlaceIndex
from nccl_doctor.report.story import explained_by
from tests.support.clusters import make_cluster
from tests.support.rows import each_row
from tests.support.verdicts import GROUP, HOST, NAME, NOTE, PORT, SPEED, at

SLOW = replace(SPEED, effects=(Effect.DELAYS,))
LATE = replace(GROUP, effects=(Effect.TIMED_OUT,))
CUT = replace(PORT, effects=(Effect.CUTS_OFF,))
VARIABLE = Kind("low-env", Layer.ENV, "t", "w", "f")
ODD = replace(VARIABLE, effects=(Effect.DIFFERENCE,))
GONE = Kind("lost-rank", Layer.RANKS, "t", "w", "f", effects=(Effect.LOSS,))
RISKY = replace(NAME, severity=Severity.WARN)


def found(kind: Kind, *hosts: str, nodes: tuple[int, ...] = (), **more: Any) -> Finding:
    return Finding(kind, "m", replace(at(*hosts), nodes=nodes), **more)


SHUT = found(PORT, "nd0", effects=(Effect.SHUTS_OUT,))
ROWS = [
    (found(NOTE, "nd0"), found(GROUP, "nd0"), "information explains nothing", False),
    (found(SLOW, "nd1"), found(LATE, "nd1", confidence=Confidence.LIKELY),
     "it delays what took too long there", True),
    (found(SLOW, "nd1"), found(LATE, "nd2", confidence=Confidence.LIKELY),
     "it delays what took too long there", False),
    (found(GROUP, "nd0"), found(HOST, "nd0"), "only a lower layer explains a higher one", False),
    (found(GROUP, "nd0"), found(replace(HOST, layer=Layer.SPEED, effects=(Effect.DELAYS,)), "nd0"),
     "no group makes a host or a link slow", False),
    (found(replace(HOST, effects=(Effect.JOB_ONLY,)), "nd0"), found(GROUP, "nd0"),
     "what breaks only the job explains nothing of the examination, nor the other way round",
     False),
    (found(CUT, "nd1"), found(GONE, "nd1"), "no packet passes there", True),
    (found(CUT, "nd1"), found(GONE, "nd2"), "no packet passes there", False),
    (found(HOST, "nd0"), found(PORT, "nd0"), "a limit or a variable shuts no port", False),
    (found(VARIABLE, "nd0", severity=Severity.WARN), found(GROUP, "nd0"),
     "a warning on a variable explains nothing", False),
    (found(ODD, "nd0"), found(GROUP, "nd2"),
     "hosts that differ break the groups between them", True),
    (found(HOST, "nd0"), found(GROUP, "nd0"), "same place, lower layer", True),
    (found(HOST, "nd0"), found(GROUP, "nd2"), "same place, lower layer", False),
    (found(RISKY, "nd0"), found(GROUP, "nd0", severity=Severity.WARN),
     "a warning on the same place, lower layer", True),
    (found(RISKY, "nd0"), found(GROUP, "nd0"),
     "a warning on the same place, lower layer", False),
]  # fmt: skip


@each_row(("cause", "finding", "reason", "explains"), ROWS)
def test_the_rule_that_decides(cause: Finding, finding: Finding, reason: str, explains: bool):
    ground = PlaceIndex(make_cluster(("nd0", "nd1", "nd2")))
    pair = CausePair(ground, cause, ground.place(cause.where), finding, ground.place(finding.where))
    assert next(rule.reason for rule in RULES if rule.decides(pair)) == reason
    assert reason_of(pair) == (reason if explains else "")


def test_reasons_tell_the_rules_apart():
    reasons = [rule.reason for rule in RULES]
    assert len(set(reasons)) == len(reasons)
    of_rank_0 = {"rank 0's host lets nobody sign in", "it loses messages on the way to rank 0"}
    assert {reason for *_, reason, _ in ROWS} == set(reasons) - of_rank_0


def test_a_port_of_rank_0_that_is_shut_lets_nobody_in():
    cluster = make_cluster(("nd0", "nd1"), 1, absent_nodes=[1])
    port, gone = explain([SHUT, found(replace(GONE, effects=()), nodes=(1,))], cluster)
    assert (port.explained_by, port.explained_why) == (None, "")
    assert gone.explained_by == PORT.code
    assert gone.explained_why == "rank 0's host lets nobody sign in"


def test_what_is_lost_on_the_way_to_rank_0():
    cluster = make_cluster(("nd0", "nd1"))
    lossy = replace(PORT, effects=(Effect.DELAYS,))
    link = Finding(lossy, "m", Where(links=(("nd1", "nd0"),)))
    silent = Finding(replace(GONE, effects=()), "m", at("nd1"))
    assert [each.explained_why for each in explain([link, silent], cluster)][-1] == (
        "it loses messages on the way to rank 0"
    )


def test_the_reason_stands_behind_the_code():
    some = explain([found(HOST, "nd0"), found(GROUP, "nd0")], make_cluster(("nd0", "nd1")))
    assert [explained_by([each]) for each in some] == [
        "",
        f"explained by {HOST.code}: same place, lower layer",
    ]
    by_check = found(GROUP, "nd0", explained_by="other")
    assert explained_by([*some, by_check]) == (
        f"explained by {HOST.code}: same place, lower layer; other"
    )
