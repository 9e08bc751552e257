"""Answers to whether a finding is an upstream fault, before anybody writes an issue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nccl_doctor import registry
from nccl_doctor.api import Finding, Where
from nccl_doctor.cli.bundle import PROJECTS
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.report import issue as rules
from nccl_doctor.report.issue import comment, upstream_fault
from tests.support.clusters import make_cluster
from tests.support.reports import RUN

KINDS = registry.load().kinds
HERE = Where(ranks=(1,))


def report(*codes: str, backend: str = "nccl"):
    made = conclude(make_cluster(backend=backend), [], run=RUN)
    causes = tuple(Finding(KINDS[code][0], "x", HERE) for code in codes)
    return replace(made, verdict="fail" if causes else "pass", root_causes=causes)


def test_the_codes_that_are_named_exist() -> None:
    assert {*rules._WORK, *rules._REPAIRED} <= set(KINDS)
    assert set(rules.NAMES) == set(rules._FIRST) == set(PROJECTS)


@pytest.mark.parametrize("project", PROJECTS)
@pytest.mark.parametrize("code", ["port-blocked", "host-absent", "gpu-missing", "shm-too-small"])
def test_a_fault_of_the_cluster_is_nobodys_issue(project: str, code: str) -> None:
    answer = upstream_fault(project, report(code))
    assert answer.no
    assert answer.words.startswith(f"no: {code} is a matter of this cluster")
    assert KINDS[code][0].fix.split()[0] in answer.words


def test_what_lies_below_is_repaired_first() -> None:
    answer = upstream_fault("nccl", report("collective-hang", "mtu-blackhole"))
    assert answer.no
    assert "mtu-blackhole" in answer.words
    assert "collective-hang" not in answer.words


@pytest.mark.parametrize("project", PROJECTS)
def test_a_collective_that_nothing_explains_may_be_theirs(project: str) -> None:
    answer = upstream_fault(project, report("collective-wrong-result"))
    assert not answer.no
    assert answer.words.startswith("perhaps: nothing that was examined explains collective-wrong")


def test_a_warning_explains_no_failure() -> None:
    assert not upstream_fault("nccl", report("collective-hang", "cpu-limit-low")).no
    assert upstream_fault("nccl", report("cpu-limit-low")).no


def test_nccl_took_no_part_in_a_run_of_gloo() -> None:
    assert upstream_fault("nccl", report("collective-hang", backend="gloo")).no
    assert not upstream_fault("pytorch", report("collective-hang", backend="gloo")).no


def test_a_fault_that_the_project_knows() -> None:
    assert "it is known there" in upstream_fault("nccl", report("nccl-known-bug")).words
    assert upstream_fault("pytorch", report("nccl-known-bug")).no


def test_a_report_without_a_fault() -> None:
    assert "found nothing wrong" in upstream_fault("nccl", report()).words
    unknown = replace(report(), verdict="unknown")
    assert "is incomplete" in upstream_fault("nccl", unknown).words


def test_nothing_ends_the_comment() -> None:
    made = comment("iptables --to x --> y --!> z\033[2J")
    assert made.isprintable()
    assert made.startswith("iptables --to x -- > y -- > z")
