"""What two reports do not share, and whether that is worse."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from nccl_doctor.api import Finding, Severity, Where
from nccl_doctor.judge.history import Difference, difference
from nccl_doctor.model.kinds import SLOWER
from nccl_doctor.model.report import Report
from nccl_doctor.report.difference import render
from nccl_doctor.report.story import PlaceWords
from tests.support.clusters import make_cluster
from tests.support.exchanges import World, both
from tests.support.pasts import LINKS, saved
from tests.support.reports import kind, made_check, read_with
from tests.unit.test_history import CHECKS, IMAGE, image


def compared(old: Report, new: Report) -> Difference:
    return difference(old, new, CHECKS)


def text_of(found: Difference, new: Report, **how: bool) -> str:
    return render(found, PlaceWords(new), **how)


def found_in(day: int, *findings: Finding, names: tuple[str, ...] = ("nd0", "nd1")) -> Report:
    check = made_check("shm", kinds=[f.kind for f in findings], finds=findings)
    cluster = make_cluster(names, check="shm", by_host={name: {} for name in names})
    return saved(cluster, day, [check])


SMALL = kind("shm-small")
PORT = kind("port-busy", severity=Severity.WARN)


def at(finding_kind, *hosts: str, **more) -> Finding:
    return Finding(finding_kind, "seen", Where(hosts=hosts), **more)


def test_two_reports_of_the_same():
    report = saved(World(3).cluster(), 1)
    found = compared(report, read_with(report, id="b"))
    assert (found.words, found.turns, found.hosts, found.checks) == ((), (), (), ())
    assert found.notes == ()
    assert not found.is_worse
    assert "No finding, host, version or setting has changed." in text_of(found, report)


def test_findings_that_are_new_or_gone():
    old, new = found_in(1, at(SMALL, "nd0")), found_in(2, at(PORT, "nd1"))
    found = compared(old, new)
    assert [(turn.state, turn.finding.code) for turn in found.turns] == [
        ("new", "port-busy"),
        ("gone", "shm-small"),
    ]
    assert found.is_worse
    assert not compared(new, found_in(3)).is_worse
    text = text_of(found, new)
    assert "✗ new: warn port-busy (nd1): seen" in text
    assert "✓ gone: fail shm-small (nd0): seen" in text


def test_findings_that_are_elsewhere_or_graver():
    def turn_of(old: Finding, new: Finding) -> tuple[str, bool]:
        (turn,) = compared(found_in(1, old), found_in(2, new)).turns
        return turn.state, turn.is_worse

    wide = at(SMALL, "nd0", "nd1")
    assert turn_of(at(SMALL, "nd0"), wide) == ("changed", True)
    assert turn_of(wide, at(SMALL, "nd0")) == ("changed", False)
    assert turn_of(wide, wide.replaced(severity=Severity.WARN)) == ("changed", False)
    assert turn_of(wide.replaced(severity=Severity.WARN), wide) == ("changed", True)
    assert turn_of(wide.replaced(severity=Severity.WARN), at(SMALL)) == ("changed", True)


def test_what_they_said_of_runs_before_them_is_no_difference():
    report = found_in(1)
    said = Finding(SLOWER, "slower", Where(hosts=("nd0",)))
    assert compared(report, replace(report, findings=(said,))).turns == ()


def test_what_is_only_worth_knowing_or_explained_is_not_worse():
    info = at(SMALL, "nd0", severity=Severity.INFO)
    assert not compared(found_in(1), found_in(2, info)).is_worse
    cause, effect = at(SMALL, "nd0"), at(kind("slow"), "nd0", explained_by="shm-small")
    old, new = found_in(1, cause), found_in(2, cause, effect)
    (turn,) = compared(old, new).turns
    assert (turn.finding.code, turn.is_worse) == ("slow", False)


def test_a_message_with_other_numbers_is_the_same_finding():
    old, new = at(SMALL, "nd0"), at(SMALL, "nd0").replaced(message="seen again")
    assert compared(found_in(1, old), found_in(2, new)).turns == ()


def test_hosts_that_came_or_went_or_have_another_address():
    old, new = found_in(1), found_in(2, names=("nd0", "nd2"))
    found = compared(old, new)
    assert found.hosts == (("nd1", "192.168.77.2", None), ("nd2", None, "192.168.77.2"))
    assert found.is_worse
    assert re.search(r"^nd1 +192\.168\.77\.2 +–$", text_of(found, new), re.MULTILINE)
    wider = compared(found_in(1, names=("nd0",)), old)
    assert not wider.is_worse
    assert "world size 2 → 4" in wider.notes


def test_versions_with_their_place():
    old = saved(image(), 1, CHECKS)
    mixed = {r: {**IMAGE, **({"torch": "2.13.0"} if r > 1 else {})} for r in range(4)}
    new = saved(make_cluster(check="software", by_rank=mixed), 2, CHECKS)
    found = compared(old, new)
    assert [(w.name, w.before, w.now, w.where.hosts) for w in found.words] == [
        ("torch", "2.12.0", "2.13.0", ("nd1",))
    ]
    assert not [word for word in found.to_json()["setup"] if word["name"] != "torch"]


def test_speeds_are_shown_and_not_judged():
    old = saved(World(3).cluster(), 1)
    new = saved(World(3).slow([("nd0", "nd1")], share=0.5).cluster(), 2)
    found = compared(old, new)
    (change,) = found.notable
    assert (change.now.where.links, change.share) == ((("nd0", "nd1"),), -0.5)
    assert not found.is_worse
    text = text_of(found, new)
    assert "nd0 → nd1  10 Gbit/s  5 Gbit/s  −50 %, worse" in text
    assert "11 changed by less than 10 % (-v)" in text
    assert text_of(found, new, verbose=True).count("round-trip time") == 6
    assert text_of(found, new, ascii=True).isascii()


def test_speeds_of_a_busy_machine_are_said_to_be():
    idle, busy = World(2), World(2).slow(both("nd0", "nd1"), share=0.5).starve("nd0")
    for old, new in ((idle, busy), (busy, idle)):
        reports = saved(old.cluster(), 1), saved(new.cluster(), 2)
        found = compared(*reports)
        assert found.notable == ()
        assert {change.busy for change in found.speeds} == {True}
        assert "measured on a busy machine" in text_of(found, reports[1])


def test_what_makes_it_doubtful_is_noted():
    old, new = saved(World(2).cluster(), 9), saved(World(2, backend="nccl").cluster(), 2)
    assert compared(old, replace(new, redacted=True)).notes == (
        "one of the reports is redacted and the other is not: their names do not match",
        "the first report is newer than the second",
        "backend gloo → nccl",
    )
    assert "both reports are of the same run" in compared(old, old).notes


def test_a_check_that_became_unknown():
    old = saved(World(3).cluster(), 1)
    new = conclude_without_facts(2)
    assert compared(old, new).checks == (("links", "pass", "unknown"),)


def test_the_json_keys_are_held_stable():
    old = saved(World(3).cluster(), 1)
    told = compared(old, saved(World(3).slow([("nd0", "nd1")], share=0.5).cluster(), 2)).to_json()
    assert json.loads(json.dumps(told)) == told
    assert set(told) == {
        *("old", "new", "worse", "notes", "hosts", "setup", "findings", "checks", "speeds"),
    }
    assert set(told["speeds"][0]) == {
        *("name", "before", "now", "check", "where", "unit", "better", "change", "busy"),
    }


def conclude_without_facts(day: int) -> Report:
    return saved(make_cluster([f"nd{i}" for i in range(3)]), day, LINKS)
