"""Errors of hardware that are counted meanwhile, on made-up hosts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import (
    ALONE,
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Launch,
    Severity,
    Skip,
    Untested,
    Where,
)
from nccl_doctor.checks.hardware_errors import HardwareErrors
from nccl_doctor.checks.memory_errors import MemoryErrors
from nccl_doctor.checks.pcie_errors import PcieErrors
from nccl_doctor.judge.causes import explain
from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.report.profiles import drains
from nccl_doctor.toolkit.groups.kinds import CRASHED
from tests.support import hardware
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.hardware import GPU, GPU_PORT, NIC, NIC_PORT, ROOT_PORT

CHECK = HardwareErrors()
MODULE = "CPU_SrcID#0_MC#0_DIMM#0"
SKIPPED = Outcome(OutcomeStatus.SKIPPED, reason="nobody counts")
Facts = dict[str, Any]
Host = dict[str, Any]


def look(check: type[Check], root: Path) -> Facts | Outcome:
    try:
        facts = check().observe(Context(launch=Launch(), env={}, root=root))
    except Skip as reason:
        return Outcome(OutcomeStatus.SKIPPED, reason=str(reason))
    return dict(json.loads(json.dumps(facts)))


def watched(
    root: Path, happens: Callable[[Path], Any] = lambda root: None, took_s: float = 90
) -> Host:
    """What a host's three checks saw, with something happening in between."""
    pcie, memory = look(PcieErrors, root), look(MemoryErrors, root)
    happens(root)
    late = look(HardwareErrors, root)
    assert isinstance(late, dict)
    for early in (pcie, memory):
        if isinstance(early, dict):
            late["at_s"] = early["at_s"] + took_s
    return {"pcie_errors": pcie, "memory_errors": memory, "hardware_errors": late}


def cluster(*hosts: Host) -> Cluster:
    made = make_cluster([f"nd{i}" for i in range(len(hosts))], nproc=1)
    ranks = [
        replace(
            rank,
            facts={
                name: {"late" if name == "hardware_errors" else ALONE: outcome(facts)}
                for name, facts in host.items()
            },
        )
        for rank, host in zip(made.ranks, hosts, strict=True)
    ]
    return replace(made, ranks=tuple(ranks))


def tree(root: Path) -> Path:
    return hardware.memory(hardware.pcie(root), {"dimm0": (0, 7), "dimm1": (0, 0)})


@pytest.fixture
def quiet(tmp_path: Path) -> Host:
    return watched(tree(tmp_path / "quiet"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tree(tmp_path / "root")


def test_counters_that_stand_still_are_fine_whatever_they_stand_at(root: Path, quiet: Host) -> None:
    hardware.count(root, GPU, "fatal", SDES=9)
    hardware.count(root, NIC, "correctable", RxErr=99999)
    hardware.memory(root, {"dimm0": (3, 4000)})
    assert judge(CHECK, cluster(quiet, watched(root))) == []


@pytest.mark.parametrize(
    ("severity", "name"), [("fatal", "SDES"), ("fatal", "UnsupReq"), ("nonfatal", "CmpltTO")]
)
def test_an_uncorrectable_error_of_a_link(
    root: Path, quiet: Host, severity: str, name: str
) -> None:
    sick = watched(root, lambda root: hardware.count(root, GPU, severity, **{name: 1}))
    made = cluster(quiet, sick, quiet)
    found = only(CHECK, made, "pcie-errors", hosts=["nd1"], devices=[GPU])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert found.message == f"in 90 s, GPU {GPU}: {severity} {name} +1"


def test_one_that_a_scan_of_the_bus_brings_about(root: Path, quiet: Host) -> None:
    scanned = watched(root, lambda root: hardware.count(root, NIC, "nonfatal", UnsupReq=3))
    found = only(CHECK, cluster(scanned, quiet), "pcie-errors", hosts=["nd0"], devices=[NIC])
    assert found.level is Severity.INFO


@pytest.mark.parametrize(
    ("many", "took_s", "told"),
    [(8, 5, False), (9, 5, True), (16, 120, False), (17, 120, True), (9, 120, False)],
)
def test_packets_sent_again_by_the_minute(
    root: Path, quiet: Host, many: int, took_s: float, told: bool
) -> None:
    hardware.count(root, NIC, "correctable", BadTLP=100)

    def replays(root: Path) -> None:
        hardware.count(root, NIC, "correctable", BadTLP=100 + many)

    made = cluster(quiet, watched(root, replays, took_s))
    if told:
        found = only(CHECK, made, "pcie-errors", hosts=["nd1"], devices=[NIC])
        assert found.level is Severity.WARN
        assert found.message.endswith(f"network card {NIC}: correctable BadTLP +{many}")
    else:
        assert judge(CHECK, made) == []


def test_advisory_errors_are_none_of_a_link(root: Path, quiet: Host) -> None:
    def advise(root: Path) -> None:
        hardware.count(root, GPU, "correctable", NonFatalErr=5000, HeaderOF=50, CorrIntErr=50)

    assert judge(CHECK, cluster(quiet, watched(root, advise))) == []


def test_both_ends_of_a_link_are_one_finding(root: Path, quiet: Host) -> None:
    def fail(root: Path) -> None:
        hardware.count(root, GPU, "correctable", RxErr=40)
        hardware.count(root, GPU_PORT, "correctable", Timeout=30)

    made = cluster(quiet, watched(root, fail))
    found = only(CHECK, made, "pcie-errors", hosts=["nd1"], devices=[GPU_PORT, GPU])
    assert found.message == (
        f"in 90 s, PCIe port {GPU_PORT}: correctable Timeout +30; GPU {GPU}: correctable RxErr +40"
    )


def test_two_links_are_two_findings_and_a_port_between_makes_them_one(root: Path) -> None:
    def fail(root: Path) -> None:
        for address in (GPU, NIC):
            hardware.count(root, address, "nonfatal", CmpltTO=1)

    def fail_all(root: Path) -> None:
        fail(root)
        for address in (GPU_PORT, ROOT_PORT, NIC_PORT):
            hardware.count(root, address, "nonfatal", CmpltTO=1)

    found = judge(CHECK, cluster(watched(root, fail)))
    assert [f.where.devices for f in found] == [(GPU,), (NIC,)]
    for address in (GPU, NIC):
        hardware.count(root, address, "nonfatal")
    (one,) = judge(CHECK, cluster(watched(root, fail_all)))
    assert one.where.devices == (ROOT_PORT, GPU_PORT, NIC_PORT, GPU, NIC)


def test_memory_that_fails_now_takes_the_host_out_of_service(root: Path, quiet: Host) -> None:
    sick = watched(root, lambda root: hardware.memory(root, {"dimm0": (1, 20), "dimm1": (0, 0)}))
    made = cluster(quiet, sick, quiet)
    found = only(CHECK, made, "memory-failing", hosts=["nd1"], devices=[MODULE])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.CERTAIN)
    assert found.message == "1 uncorrected error in 90 s"
    assert drains(found)
    crash = Finding(CRASHED, "SIGBUS", Where(hosts=("nd1",), ranks=(1,)))
    explained = {f.code: f.explained_by for f in explain([found, crash], made)}
    assert explained == {"memory-failing": None, "rank-crashed": "memory-failing"}


def test_what_it_had_before_is_part_of_what_fails_now(root: Path, quiet: Host) -> None:
    hardware.memory(root, {"dimm0": (1, 7), "dimm1": (0, 0)})
    still = watched(root)
    sick = watched(root, lambda root: hardware.memory(root, {"dimm0": (2, 7), "dimm1": (0, 0)}))
    before = MemoryErrors()
    assert only(before, cluster(quiet, still), "memory-errors", hosts=["nd1"], devices=[MODULE])
    made = cluster(quiet, sick)
    (old,) = judge(before, made)
    assert old.explained_by == "memory-failing"
    (new,) = judge(CHECK, made)
    assert {f.code: f.explained_by for f in explain([old, new], made)} == {
        "memory-failing": None,
        "memory-errors": "memory-failing",
    }


@pytest.mark.parametrize(("more", "level"), [(9, Severity.INFO), (10, Severity.WARN)])
def test_corrected_errors_that_come_now(
    root: Path, quiet: Host, more: int, level: Severity
) -> None:
    def correct(root: Path) -> None:
        hardware.memory(root, {"dimm0": (0, 7 + more), "dimm1": (0, 0)})

    made = cluster(quiet, watched(root, correct))
    found = only(CHECK, made, "memory-errors", hosts=["nd1"], devices=[MODULE])
    assert (found.level, found.confidence) == (level, Confidence.LIKELY)
    assert found.message == f"{more} corrected errors in 90 s"
    assert not drains(found)


def test_counts_that_were_set_back_or_are_new_say_nothing(root: Path, quiet: Host) -> None:
    hardware.count(root, GPU, "fatal", SDES=4)
    hardware.memory(root, {"dimm0": (5, 0)})

    def start_anew(root: Path) -> None:
        hardware.count(root, GPU, "fatal", SDES=1)
        hardware.memory(root, {"dimm0": (0, 0), "dimm1": (2, 0)}, days=0)
        hardware.memory(root, {"dimm0": (9, 9)}, controller="mc1")

    assert judge(CHECK, cluster(quiet, watched(root, start_anew))) == []


def test_what_is_not_known_at_both_times_says_nothing(root: Path, quiet: Host) -> None:
    def fail(root: Path) -> None:
        hardware.count(root, GPU, "fatal", SDES=1)
        hardware.memory(root, {"dimm0": (1, 7), "dimm1": (0, 0)})

    sick = watched(root, fail)
    lost = {"pcie_errors": Outcome(OutcomeStatus.HUNG), "memory_errors": SKIPPED}
    assert judge(CHECK, cluster(quiet, {**sick, **lost})) == []
    silent = {**sick, "hardware_errors": Outcome(OutcomeStatus.SILENT)}
    assert judge(CHECK, cluster(quiet, silent)) == []
    half = {**sick, "pcie_errors": SKIPPED}
    only(CHECK, cluster(quiet, half), "memory-failing", hosts=["nd1"], devices=[MODULE])


def test_only_hosts_with_something_to_read_are_asked_again(quiet: Host) -> None:
    nothing = {"pcie_errors": SKIPPED, "memory_errors": SKIPPED}
    half = {**quiet, "pcie_errors": SKIPPED}
    (one,) = CHECK.plan(cluster(nothing, quiet, half))
    assert (one.name, one.groups) == ("late", ((1,), (2,)))
    with pytest.raises(Skip, match="neither pcie_errors nor memory_errors"):
        CHECK.plan(cluster(nothing, nothing))
    with pytest.raises(Skip):
        CHECK.plan(make_cluster(["nd0"], absent_nodes=[0]))


def test_counts_that_are_gone_at_the_end_are_no_pass(tmp_path: Path) -> None:
    with pytest.raises(Untested, match="are gone"):
        look(HardwareErrors, tmp_path)
