"""The whole program on the machines of the gallery: in order they pass, each fault is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nccl_doctor.api import Level, Severity
from nccl_doctor.checks.group_speed.measured import NVLS
from tests.machines import gallery
from tests.machines.page import page
from tests.machines.program import Fault, Gallery, Machine, loud
from tests.machines.tools import build, folders
from tests.support.reports import through_json

pytestmark = pytest.mark.xdist_group("machines")

MACHINES = gallery.machines()
FAULTS = [(machine, fault) for machine in MACHINES for fault in machine.faults]


@pytest.fixture(scope="module")
def tried() -> Iterator[Gallery]:
    with folders() as (hosts, shm):
        yield Gallery(hosts, build(hosts), shm)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.title)
def test_a_healthy_machine_passes(machine: Machine, tried: Gallery) -> None:
    report = through_json(tried.run(machine))
    told = [
        (each.code, each.message) for each in report.findings if each.level is not Severity.INFO
    ]
    assert told == []
    open_ = {each.name: each.reason for each in report.checks if each.status.value == "unknown"}
    assert open_ == {}
    assert (report.verdict, report.exit_code) == ("pass", 0)


BY_NVLS = {
    *("AWS p5.48xlarge", "Azure ND H100 v5", "DGX H100", "GB200 NVL72", "GCP a3-megagpu-8g"),
    *("HGX B200", "Slurm, one GPU per task"),
}
"""Machines whose GPUs are Hopper or later and in one NVLink fabric."""
EACH_NIC = {
    *("Azure ND H100 v5", "DGX H100", "GH200", "HGX B200", "MI300X", "MIG slices"),
    "Slurm, one GPU per task",
}
"""Machines whose hosts reach each other by verbs, and not by NVLink."""
OFTEN = ("DGX H100", "HGX B200", "GB200 NVL72")


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(each, marks=() if each.title in OFTEN else pytest.mark.wide, id=each.title)
        for each in MACHINES
    ],
)
def test_a_healthy_machine_passes_with_the_rounds_of_level_full(
    machine: Machine, tried: Gallery
) -> None:
    report = tried.run(machine, level=Level.FULL)
    told = [
        (each.code, each.message) for each in report.findings if each.level is not Severity.INFO
    ]
    assert told == []
    assert (report.verdict, report.exit_code) == ("pass", 0)
    ranks = 2 * machine.ranks
    by_nvls = report.cluster.evidence("group_speed", NVLS)
    assert len(by_nvls) == ranks * (machine.title in BY_NVLS)
    by_nic = report.cluster.evidence("network_speed", "rails-0-0")
    assert bool(by_nic) == (machine.title in EACH_NIC)


@pytest.mark.wide  # each rule has tests of its own
@pytest.mark.parametrize(
    ("machine", "fault"), FAULTS, ids=[f"{m.title}: {f.title}" for m, f in FAULTS]
)
def test_a_fault_is_named_with_its_place_and_nothing_else_is(
    machine: Machine, fault: Fault, tried: Gallery
) -> None:
    report = through_json(tried.run(machine, fault))
    broken = tried.broken(machine, fault)
    causes = [(each.code, each.level, each.message) for each in loud(report)]
    assert [cause[:2] for cause in causes] == [(fault.code, fault.severity)], causes
    (cause,) = loud(report)
    assert cause.where.hosts == ((broken.name,) if fault.names_host else ())
    assert cause.where.ranks == fault.ranks_of(machine)
    assert cause.where.devices == fault.devices(broken)
    assert cause.where.interfaces == fault.interfaces
    assert report.exit_code == int(fault.severity is Severity.FAIL)
    elsewhere = [each for each in report.findings if each.level is not Severity.INFO]
    assert all(set(each.where.hosts) <= {broken.name} for each in elsewhere), elsewhere


@pytest.mark.wide
def test_the_page_says_what_the_runs_said(tried: Gallery) -> None:
    written = (Path(__file__).parents[2] / "docs/machines.md").read_text(encoding="utf-8")
    assert page(tried, MACHINES) == written, "run scripts/machines.py"
