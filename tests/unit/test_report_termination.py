"""The termination message of a container: small, worst first, and silent where nothing failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccl_doctor.api import Confidence, Finding, Layer, Outcome, OutcomeStatus, Severity, Where
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.options import Options
from nccl_doctor.model.report import ParticipantResult, Report
from nccl_doctor.report.formats import termination
from nccl_doctor.report.output import leave
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, kind, made_check, through_json

SHM = kind("shm-small", Layer.HOST)
PORT = kind("port-shut", Layer.PORT)
GROUP = kind("group-hang", Layer.GROUP)
RISK = kind("a-risk", Layer.ROUTE, Severity.WARN)
HOSTILE = "a\033[2Jb\nc\u202ed\ud800"
LIMIT = 3 << 10


def report_of(
    *findings: Finding, hosts=("llm-0", "llm-1"), by_host=None, strict=False, through=through_json
) -> Report:
    facts = {name: {"x": 1} for name in hosts} if by_host is None else by_host
    cluster = make_cluster(hosts, 2, check="shm", by_host=facts)
    made = conclude(cluster, [made_check("shm", finds=findings)], run=RUN, strict=strict)
    return through(made)


def test_what_failed_where_and_the_fix() -> None:
    report = report_of(
        Finding(GROUP, "hung", Where(ranks=(0, 1, 2, 3))),
        Finding(
            PORT,
            "connect to 10.0.0.1:29500: no answer in 3 s",
            Where(links=(("llm-1", "llm-0"),)),
            fix="open the port",
            confidence=Confidence.LIKELY,
        ),
        Finding(RISK, "slow", Where(hosts=("llm-0",))),
    )
    assert termination.render(report) == (
        "nccl-doctor: FAIL: Title of port-shut (llm-1 → llm-0)\n"
        "port-shut (llm-1 → llm-0): connect to 10.0.0.1:29500: no answer in 3 s (likely)\n"
        "  fix: open the port\n"
    )


def test_one_fix_of_several_places_is_written_once() -> None:
    found = [Finding(SHM, f"64 MiB on {name}", Where(hosts=(name,))) for name in ("llm-0", "llm-1")]
    lines = termination.render(report_of(*found)).splitlines()
    assert lines[1:] == [
        "shm-small (llm-0): 64 MiB on llm-0",
        "  fix: fix shm-small",
        "shm-small (llm-1): 64 MiB on llm-1",
    ]


def test_nothing_stands_in_the_way_of_the_log_of_the_job() -> None:
    assert termination.render(report_of()) == ""
    assert termination.render(report_of(Finding(RISK, "slow"))) == ""


def test_a_warning_that_fails_is_said() -> None:
    text = termination.render(report_of(Finding(RISK, "slow"), strict=True))
    assert "a-risk: slow\n  fix: fix a-risk\n" in text


def test_what_could_not_be_tested_is_said() -> None:
    hung = Outcome(OutcomeStatus.HUNG, breadcrumbs=({"step": "open /dev/x", "at_s": 0.0},))
    report = report_of(by_host={"llm-0": {"x": 1}, "llm-1": hung})
    text = termination.render(report)
    assert text.startswith("nccl-doctor: UNKNOWN: ")
    assert text.splitlines()[-1] == "not tested: shm: hung in open /dev/x (llm-1)"


@pytest.mark.parametrize("letter", ["x", "→"])
@pytest.mark.parametrize("length", [10, 5_000])
def test_never_more_than_kubernetes_keeps(letter: str, length: int) -> None:
    found = [
        Finding(
            kind(f"fault-{at:03}"), letter * length, Where(hosts=("llm-0",)), fix=letter * length
        )
        for at in range(60)
    ]
    text = termination.render(report_of(*found, through=lambda report: report))
    assert len(text.encode()) <= LIMIT
    lines = text.splitlines()
    codes = [line.split()[0] for line in lines if line.startswith("fault-")]
    assert codes == [f"fault-{at:03}" for at in range(len(codes))]
    assert len(codes) >= 1
    assert len([line for line in lines if line.startswith("  fix: ")]) >= 1
    left = 60 - len(codes)
    assert lines[-1] == f"and {left} more" if left else length == 10


def test_nothing_that_a_terminal_would_obey() -> None:
    found = Finding(SHM, HOSTILE, Where(hosts=("llm-0",)), fix=HOSTILE)
    text = termination.render(report_of(found, through=lambda report: report))
    assert all(char.isprintable() or char == "\n" for char in text)
    assert len(text.splitlines()) == 3
    text.encode()


@pytest.mark.parametrize("aside", [False, True], ids=["coordinator", "never got in"])
def test_every_container_has_its_own(aside: bool, tmp_path: Path) -> None:
    """The coordinator's, and the own view of one that never got in, at the same path."""
    report = report_of(Finding(SHM, "64 MiB", Where(hosts=("llm-1",))))
    path = tmp_path / "termination-log"
    path.touch()
    options = Options(outputs={"termination": str(path), "json": str(tmp_path / "r.json")})
    launch = Launch(node_rank=1, local_rank=0)
    assert leave(ParticipantResult(1, report, aside=aside), launch, options) == 1
    assert path.read_text() == termination.render(report)
    (saved,) = tmp_path.glob("*.json")
    assert saved.name == ("r.node1.json" if aside else "r.json")
    path.write_text("")
    assert leave(ParticipantResult(1, report, aside=True), Launch(local_rank=1), options) == 1
    assert path.read_text() == ""
