"""What breaks a promise in a chaos run, and what does not: rules on made-up outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.lab.chaos import Plan, plan
from tests.lab.chaos.judging import Ended, Judgement, Outcome, judge, touched


def planned(strike: str, **changes: Any) -> Plan:
    values = {
        "launcher": "own",
        "hosts": 3,
        "nproc": 2,
        "strike": strike,
        "victim": "nd1",
        "other": "",
        "role": "",
        "scope": "all",
        **changes,
    }
    return replace(plan(0, 0), **values)


def finding(code: str = "rank-silent", *, by: str | None = None, **where: Any) -> dict[str, Any]:
    places = {"hosts": [], "ranks": [], "links": [], "nodes": [], **where}
    severity = "info" if code == "harmless" else "fail"
    values = {"code": code, "severity": severity, "message": "m", "explained_by": by}
    return {**values, "where": places}


def report(*findings: Mapping[str, Any], verdict: str = "", **changes: Any) -> dict[str, Any]:
    loud = any(each["severity"] != "info" and not each["explained_by"] for each in findings)
    verdict = verdict or ("fail" if loud else "pass")
    return {
        "verdict": verdict,
        "exit_code": {"pass": 0, "warn": 0, "fail": 1, "unknown": 3}[verdict],
        "run": {"complete": True},
        "ranks": [{"rank": rank, "reported": True} for rank in range(6)],
        "checks": [{"name": "links", "status": "pass"}],
        "findings": list(findings),
        **changes,
    }


def ended(*codes: int | None, stderr: str = "", hit: str = "") -> list[Ended]:
    return [Ended(f"nd{n}", None, code, stderr, hit == f"nd{n}") for n, code in enumerate(codes)]


def outcome(each: Plan, *findings: Mapping[str, Any], **changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "struck": each.strike != "none",
        "ranks": each.ranks_of(each.victim),
        "processes": ended(*[1 if findings else 0] * 3),
        "reports": {"run": report(*findings)},
        **changes,
    }
    return Outcome(each, **values)


def blamed(each: Plan, *findings: Mapping[str, Any], **changes: Any) -> bool:
    return bool(judge(outcome(each, *findings, **changes)).blamed)


def test_a_healthy_run_that_passes_is_clean():
    assert judge(outcome(planned("none"))) == Judgement()
    assert not judge(outcome(planned("none"), finding("harmless", hosts=["nd1"]))).blamed


def test_nothing_may_be_found_where_nothing_was_done():
    assert blamed(planned("none"), finding(hosts=["nd1"]))
    assert blamed(planned("none"), finding())
    assert not blamed(planned("none"), reports={"run": report(verdict="unknown")})
    assert blamed(planned("none"), reports={})
    assert blamed(planned("cable"), reports={}, struck=False)
    assert blamed(planned("cable"), finding(hosts=["nd1"]), struck=False)
    assert not blamed(planned("none"), finding(hosts=["nd1"], by="other"))


@pytest.mark.parametrize("strike", ["cable", "flap", "drop", "reject", "path"])
def test_the_network_of_a_host_is_the_host_and_its_links(strike: str):
    each = planned(strike)
    right = finding(hosts=["nd1"], ranks=[2, 3], nodes=[1], links=[["nd0", "nd1"], ["nd1", "nd2"]])
    assert not blamed(each, right)
    assert blamed(each, finding(hosts=["nd0"]))
    assert blamed(each, finding(ranks=[3, 4]))
    assert blamed(each, finding(nodes=[2]))
    assert blamed(each, finding(links=[["nd0", "nd2"]]))
    assert blamed(each, finding("coordinator-lost", ranks=[0]))


@pytest.mark.parametrize("strike", ["shm", "tmp", "memory", "clock"])
def test_a_resource_of_a_host_is_no_link(strike: str):
    assert not blamed(planned(strike), finding(hosts=["nd1"], ranks=[2]))
    assert blamed(planned(strike), finding(links=[["nd0", "nd1"]]))
    assert blamed(planned(strike), finding(hosts=["nd2"]))


def test_a_path_between_two_hosts_is_that_link_alone():
    each = planned("path", other="nd2")
    assert not blamed(each, finding(links=[["nd1", "nd2"], ["nd2", "nd1"]]))
    assert blamed(each, finding(hosts=["nd1"]))
    assert blamed(each, finding("rank-silent", ranks=[4]))
    assert blamed(each, finding(links=[["nd0", "nd1"]]))


def test_who_cannot_be_heard_over_a_path_may_be_called_absent():
    each = planned("path", other="nd0")
    assert not blamed(each, finding("host-absent", nodes=[1], ranks=[2, 3]))
    assert not blamed(each, finding("coordinator-lost", ranks=[0]))
    assert blamed(each, finding("host-slow", hosts=["nd1"]))
    assert blamed(each, finding("host-absent", nodes=[2]))


def test_a_signal_is_the_process_that_got_it():
    each = planned("kill", role="rank")
    assert not blamed(each, finding("rank-killed", hosts=["nd1"], ranks=[3]), ranks=(3,))
    assert blamed(each, finding("rank-killed", ranks=[2]), ranks=(3,))
    assert blamed(each, finding(links=[["nd0", "nd1"]]), ranks=(3,))


def test_a_host_that_lost_another_one_may_name_their_link():
    link, back = {"links": [["nd0", "nd1"]]}, {"links": [["nd1", "nd0"]]}
    for strike in ("kill", "memory"):
        each = planned(strike, role="rank" if strike == "kill" else "")
        for code in ("store-lost", "coordinator-lost", "port-refused"):
            assert not blamed(each, finding(code, **link))
            assert blamed(each, finding(code, **back))
        assert blamed(each, finding("port-blocked", **link))
        assert not blamed(each, finding("port-refused", links=[["nd1", "nd1"]]))
        assert blamed(each, finding("port-refused", links=[["nd0", "nd0"]]))
        assert blamed(each, finding("store-lost", links=[["nd0", "nd2"]]))
    assert blamed(planned("shm"), finding("store-lost", **link))


def test_a_deleted_folder_is_nobodys_fault():
    each = planned("folder")
    assert not blamed(each, finding("report-lost"))
    assert blamed(each, finding(hosts=["nd1"]))


def test_every_report_counts():
    reports = {"run": report(), "view2": report(finding(hosts=["nd2"]), verdict="unknown")}
    assert judge(outcome(planned("cable"), reports=reports)).blamed


@pytest.mark.parametrize(
    ("gap", "changes"),
    [
        ("the run is not complete", {"run": {"complete": False}}),
        ("ranks [5] did not report", {"ranks": [{"rank": r, "reported": r < 5} for r in range(6)]}),
        ("not measured: links", {"checks": [{"name": "links", "status": "unknown"}]}),
        ("nothing was measured", {"checks": []}),
    ],
)
def test_a_pass_with_a_gap_is_a_lie(gap: str, changes: dict[str, Any]):
    for verdict in ("pass", "warn"):
        said = judge(outcome(planned("kill"), reports={"run": report(verdict=verdict, **changes)}))
        assert said.lies == (f"run says {verdict}, but {gap}",)
    honest = report(verdict="unknown", **changes)
    codes = ended(3, 3, 3)
    assert not judge(outcome(planned("kill"), reports={"run": honest}, processes=codes)).lies


def test_a_pass_long_after_a_strike_that_breaks_the_run_is_a_lie():
    for strike, role in (("kill", "rank"), ("term", "launcher"), ("stop", "rank"), ("cable", "")):
        each = planned(strike, role=role)
        assert judge(outcome(each, after_s=9.0)).lies
        assert not judge(outcome(each, after_s=0.4)).lies
        assert not judge(outcome(each, after_s=9.0, struck=False)).lies
    for strike, role in (("kill", "child"), ("stop", "launcher"), ("flap", ""), ("shm", "")):
        assert not judge(outcome(planned(strike, role=role), after_s=9.0)).lies
    assert not judge(outcome(planned("drop", scope="new"), after_s=9.0)).lies


def test_an_exit_code_that_the_report_contradicts_is_a_lie():
    each = planned("none", nproc=1, hosts=2)
    ranks = [{"rank": rank, "reported": True} for rank in range(2)]
    good, bad = report(ranks=ranks), report(finding(hosts=["nd1"]), ranks=ranks)

    def lies(codes: list[int | None], hit: str = "", **reports: Any) -> bool:
        processes = ended(*codes, hit=hit)
        return bool(judge(outcome(each, processes=processes, reports=reports)).lies)

    assert not lies([0, 0], run=good)
    assert lies([0, 1], run=bad)
    assert lies([1, 0], run=good)
    assert lies([3, 1], run=bad)
    assert not lies([1, 1], run=bad)
    assert not lies([3, 1], "nd0", run=bad)
    assert lies([0, 1], "nd0", run=bad)
    assert not lies([None, 1], run=bad)
    assert not lies([-9, 1], run=bad)
    assert lies([1, 0], run=bad, node1=bad)
    assert lies([0, 0])


def test_zero_without_a_report_is_right_only_if_the_report_was_deleted():
    each = planned("folder")
    assert judge(outcome(each, reports={})).lies
    assert not judge(outcome(each, reports={}, reported=True)).lies


def test_torchrun_has_exit_codes_of_its_own():
    each = planned("kill", launcher="torchrun", role="rank")
    silent = {"run": report(verdict="unknown")}
    assert not judge(outcome(each, reports=silent, processes=ended(1, 1, 1))).lies
    assert judge(outcome(each, reports=silent, processes=ended(0, 1, 1))).lies


def test_a_run_that_names_nothing_is_unknown():
    each = planned("kill", role="rank")
    silent = {"reports": {"run": report(verdict="unknown")}, "processes": ended(3, 3, 3)}
    assert judge(outcome(each, **silent)).unknown
    assert judge(outcome(each, struck=False, **silent)).unknown
    assert not judge(outcome(each, struck=False)).unknown
    assert not judge(outcome(each, finding(hosts=["nd1"]))).unknown
    assert not judge(outcome(each, finding("run-interrupted"))).unknown
    assert not judge(outcome(each)).unknown
    words = "nccl-doctor: process 7, which did the work, was killed by SIGKILL before its answer"
    said = {**silent, "processes": ended(3, 3, 3, stderr=words)}
    assert not judge(outcome(each, **said)).unknown


def test_wrong_blame_names_no_cause():
    assert judge(outcome(planned("cable"), finding(hosts=["nd2"]))).unknown


TRACEBACK = """
before
Traceback (most recent call last):
  File "{file}", line 3, in main
    run()
ValueError: no
after
"""


def test_tracebacks_are_found_but_for_the_one_of_torchrun():
    ours = TRACEBACK.format(file="/x/nccl_doctor/cli/run.py")
    theirs = TRACEBACK.format(file="/x/torch/distributed/run.py")
    for launcher, text, found in (
        ("own", ours, 1),
        ("plain", theirs, 1),
        ("torchrun", ours, 1),
        ("torchrun", theirs, 0),
    ):
        each = planned("none", launcher=launcher)
        said = judge(outcome(each, processes=ended(0, stderr=text)))
        assert said.tracebacks == ("nd0: ValueError: no",) * found


def test_late_and_left_are_passed_on():
    said = judge(outcome(planned("none"), late=["nd0: python"], leftovers=["file x"]))
    assert said.late == ("nd0: python",)
    assert said.leftovers == ("file x",)
    assert said.failed


def test_nothing_is_touched_by_a_strike_that_missed():
    assert touched(outcome(planned("cable"), struck=False)) == touched(outcome(planned("none")))
