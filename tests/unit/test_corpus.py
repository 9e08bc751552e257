"""The records of the corpus are well formed, and a score says what it should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nccl_doctor import registry
from tests.lab.corpus import LAUNCHERS, Case, Cause, load
from tests.lab.corpus.inject import STEPS, check
from tests.lab.corpus.score import score
from tests.lab.corpus.screens import Printed, causes_on
from tests.lab.corpus.typed import cure_of

CORPUS = load()


def test_there_are_enough_of_each_kind() -> None:
    faults = CORPUS.faults
    assert len(faults) >= 150
    assert len([case for case in faults if len(case.expect) > 1]) >= 30
    assert len([case for case in faults if case.during]) >= 20
    assert {case.launcher for case in faults} == set(LAUNCHERS)
    assert len(CORPUS.healthy) >= 40
    for hosts in (2, 3, 4):
        assert any(case.hosts == hosts for case in faults)
    places = {host for case in faults for cause in case.expect for host in cause.hosts}
    assert {"nd0", "nd1", "nd2"} <= places
    assert len([case for case in faults if case.slice]) >= 8


def faults_of(case: Case, codes: set[str]) -> Iterator[str]:
    """Why a record cannot be set up or scored; `codes` are those that there are."""
    for step in case.inject:
        try:
            check(step)
        except ValueError as error:
            yield str(error)
        if step.get("on", case.names[0]) not in case.names:
            yield f"no host {step['on']}"
    for cause in case.expect:
        yield from (f"no code {code}" for code in cause.codes - codes)
        hosts = {*cause.hosts, *(host for link in cause.links for host in link)}
        yield from (f"no host {host}" for host in hosts - set(case.names))
        yield from (f"no node {node}" for node in cause.nodes if node >= case.hosts)
    if bool(case.expect) != (case in CORPUS.faults):
        yield "a fault expects something, and what is healthy nothing"


def test_every_record_can_be_set_up_and_scored() -> None:
    codes = set(registry.load().kinds)
    cases = [*CORPUS.faults, *CORPUS.healthy]
    wrong = [f"{case.id}: {fault}" for case in cases for fault in faults_of(case, codes)]
    assert not wrong, "\n".join(wrong)


def test_every_step_is_used() -> None:
    used = {step["do"] for case in (*CORPUS.faults, *CORPUS.healthy) for step in case.inject}
    assert used == set(STEPS)


@pytest.mark.parametrize("bad", [{"do": "nothing"}, {"do": "late", "on": "nd0"}, {}])
def test_a_bad_step_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="corpus"):
        check(bad)


def report(*roots: tuple[str, dict[str, list[Any]]]) -> dict[str, Any]:
    nowhere: dict[str, list[Any]] = {"hosts": [], "links": [], "nodes": []}
    rest = {"severity": "fail", "explained_by": None}
    return {"findings": [{"code": code, "where": {**nowhere, **at}, **rest} for code, at in roots]}


LINK = Case("a", "", expect=(Cause(frozenset(["x", "y"]), links=frozenset([("nd0", "nd1")])),))
BOTH = Case("b", "", expect=(Cause(frozenset(["x"]), hosts=frozenset(["nd0", "nd1"])),))


def test_right_means_code_and_place_and_nothing_else() -> None:
    right = report(("y", {"links": [["nd0", "nd1"]]}))
    assert score(LINK, right).is_right
    assert not score(LINK, report(("z", {"links": [["nd0", "nd1"]]}))).is_right
    assert not score(LINK, report(("y", {"links": [["nd1", "nd0"]]}))).is_right
    assert not score(LINK, report()).is_right
    assert not score(LINK, None).is_right
    more = report(("y", {"links": [["nd0", "nd1"]]}), ("x", {"hosts": ["nd2"]}))
    assert score(LINK, more).blamed == ("nd2",)
    assert not score(LINK, more).is_right


def test_hosts_may_stand_in_one_finding_or_in_several() -> None:
    assert score(BOTH, report(("x", {"hosts": ["nd0", "nd1"]}))).is_right
    assert score(BOTH, report(("x", {"hosts": ["nd1"]}), ("x", {"hosts": ["nd0"]}))).is_right
    assert not score(BOTH, report(("x", {"hosts": ["nd1"]}))).is_right
    # The links that a host's fault breaks are no other place.
    links = {"hosts": ["nd0", "nd1"], "links": [["nd0", "nd2"]]}
    assert score(BOTH, report(("x", links))).is_right


def test_no_other_report_may_blame_a_healthy_host() -> None:
    right = report(("y", {"links": [["nd0", "nd1"]]}))
    assert score(LINK, right, [report(("y", {"hosts": ["nd1"]}))]).is_right
    assert score(LINK, right, [report(("y", {"hosts": ["nd2"]}))]).blamed == ("nd2",)


def test_what_is_explained_or_only_information_does_not_count() -> None:
    found = report(("y", {"links": [["nd0", "nd1"]]}), ("z", {"hosts": ["nd1"]}), ("i", {}))
    found["findings"][1]["explained_by"] = "y"
    found["findings"][2]["severity"] = "info"
    assert score(LINK, found).is_right
    found["findings"][1] |= {"explained_by": None, "severity": "warn"}
    assert [str(cause) for cause in score(LINK, found).wrong] == ["z (nd1)"]


def test_healthy_means_nothing_at_all() -> None:
    healthy = Case("c", "")
    assert score(healthy, report()).is_right
    assert not score(healthy, report(("x", {}))).is_right


SCREEN = """\
nccl-doctor: FAIL: 2 problems on 1 of 2 hosts: Connections on ephemeral ports work in one
direction only

✗ A title that is so long that it stands on two lines of the screen, as some of them do
  [peer-one-way]
  where nd1, nd0 → nd1, nd2 ↔
        nd3
  seen  no answer [sic]
        nd7 is not a place
  why   whatever [x]
  fix   # on nd0

✗ Another  [host-absent]
  where node 2
  seen  nothing
  where ranks 2-3 on nd4
  seen  nothing

? Nowhere  [rank-silent]
  seen  nothing

Explained by the above, gone when it is fixed
  · port-refused (nd5): explained by host-absent

Warnings
  ! mtu-differs (nd1): 1400 on eth0
  ! dns-slow: slow twice in a row

Links between hosts
  ✗ nd6
Next: nccl-doctor explain peer-one-way
"""


def test_a_screen_is_read_as_a_person_does() -> None:
    links = {("nd0", "nd1"), ("nd2", "nd3"), ("nd3", "nd2")}
    assert list(causes_on(SCREEN.splitlines())) == [
        Cause(frozenset(["peer-one-way"]), frozenset(["nd1"]), frozenset(links)),
        Cause(frozenset(["host-absent"]), frozenset(["nd4"]), nodes=frozenset([2])),
        Cause(frozenset(["rank-silent"])),
        Cause(frozenset(["mtu-differs"]), frozenset(["nd1"])),
        Cause(frozenset(["dns-slow"])),
    ]


@pytest.mark.parametrize(
    ("code", "host", "is_so"),
    [
        ("x", "nd1", True),  # as injected
        ("z", "nd1", True),  # the answer knows it, and what explains it
        ("other", "nd1", False),
        ("x", "nd2", False),
    ],
)
def test_what_a_host_prints_may_not_contradict_the_answer(
    code: str, host: str, is_so: bool
) -> None:
    answer = report(("x", {"hosts": ["nd0", "nd1"]}), ("z", {"hosts": ["nd1"]}))
    answer["findings"][1]["explained_by"] = "x"
    said = Printed("nd0", Cause(frozenset([code]), frozenset([host])))
    scored = score(BOTH, answer, screens=[said])
    assert scored.is_right
    assert scored.fails == ("x",)
    assert scored.is_right_everywhere is is_so
    assert scored.untrue == (() if is_so else (f"nd0 prints {code} ({host})",))


@pytest.mark.parametrize(
    ("line", "can"),
    [
        ("ip link set dev eth0 up", True),
        ("# --master-addr 192.168.77.1", True),
        ("# --master-addr ADDRESS", False),
        ("# export MASTER_ADDR=192.168.77.1", False),
    ],
)
def test_a_fix_with_a_blank_cannot_be_typed(line: str, can: bool) -> None:
    step = {"command": line, "shows": ""}
    assert cure_of([step]) == ([step] if can else [])
