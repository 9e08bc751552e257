"""Check dcgm_diag beside stand-ins for `dcgmi` that test, refuse, print rubbish, hang and die."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Job, Launch, Severity, Skip, Untested
from nccl_doctor.checks.dcgm_diag import DIAGNOSE, DcgmDiag
from tests.dcgm.stand_in import UNREACHABLE, dcgmi, diagnosis, printing, refused
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only

CHECK = DcgmDiag()
BUSY_S = 3.0
RESERVE_S = 8.0


def observed(env: dict[str, str], level: int = 1, left_s: float = 60.0) -> Any:
    until = time.monotonic() + left_s
    context = Context(Launch(launcher="plain"), env, deadline=until, params={"level": level})
    return CHECK.observe(context)


def cluster_of(facts: Any) -> Cluster:
    job = Job(dcgm_level=2)
    return make_cluster(
        ["nd0", "nd1"], 2, check="dcgm_diag", round_name=DIAGNOSE, by_host={"nd1": facts}, job=job
    )


def test_every_host_is_diagnosed_once_and_only_where_it_is_asked_for() -> None:
    with pytest.raises(Skip, match="--with-dcgm was not given"):
        CHECK.plan(make_cluster())
    (round_,) = CHECK.plan(make_cluster(["nd0", "nd1", "nd2"], 2, job=Job(dcgm_level=3)))
    assert round_.groups == ((0,), (2,), (4,))
    assert round_.params == {"level": 3}
    assert round_.deadline_s == 3608.0
    absent = make_cluster(["nd0", "nd1"], 2, job=Job(dcgm_level=1), absent_nodes=[1])
    assert CHECK.plan(absent)[0].groups == ((0,),)


@pytest.mark.parametrize("release", [2, 3, 4])
def test_a_failed_test_names_the_gpu_in_dcgms_words(release: int, tmp_path: Path) -> None:
    said = diagnosis(
        release,
        ("Memory", 0, "Pass", ""),
        ("Memory", 5, "Fail", "Found 7 faulty memory elements on GPU 5"),
        ("PCIe", 2, "Skip", ""),
    )
    facts = observed(printing(tmp_path, f"a line before\n{said}", code=1), level=2, left_s=200)
    assert (tmp_path / "asked").read_text() == "diag -r 2 -j\n"
    assert (facts["level"], facts["tests"]) == (2, 4)
    found = only(CHECK, cluster_of(facts), "gpu-unhealthy", hosts=["nd1"], devices=["GPU 5"])
    assert found.message == (
        "DCGM's diagnosis, level 2, Memory: fail: Found 7 faulty memory elements on GPU 5"
    )
    assert (found.level, found.confidence.value, found.drains) == (Severity.FAIL, "likely", False)


@pytest.mark.parametrize(
    ("test", "gpu", "status", "severity"),
    [
        ("diagnostic", 1, "Fail", Severity.FAIL),
        ("Pulse Test", 1, "Fail", Severity.FAIL),
        ("GPU Memory", 1, "Fail", Severity.FAIL),
        ("memory_bandwidth", 1, "Fail", Severity.WARN),
        ("Targeted Power", 1, "Fail", Severity.WARN),
        ("PCIe", 1, "Fail", Severity.WARN),
        ("memory", 1, "Warn", Severity.WARN),
        ("Persistence Mode", None, "Fail", Severity.WARN),
    ],
)
def test_tests_of_rates_and_of_the_software_are_warnings(
    test: str, gpu: int | None, status: str, severity: Severity, tmp_path: Path
) -> None:
    facts = observed(printing(tmp_path, diagnosis(4, (test, gpu, status, "words"))))
    code = "gpu-unhealthy" if severity is Severity.FAIL else "dcgm-unhealthy"
    devices = {} if gpu is None else {"devices": [f"GPU {gpu}"]}
    found = only(CHECK, cluster_of(facts), code, hosts=["nd1"], **devices)
    assert found.level is severity


def test_a_diagnosis_that_passes_gives_nothing(tmp_path: Path) -> None:
    facts = observed(printing(tmp_path, diagnosis(3, ("Memory", 0, "Pass", ""))))
    assert facts["results"] == []
    assert not judge(CHECK, cluster_of(facts))


@pytest.mark.parametrize(
    ("level", "left_s", "words"),
    [
        (1, 15.0, "dcgmi diag -r 1 takes 10 s or more, and the run has 7 s left for it"),
        (2, 100.0, "dcgmi diag -r 2 takes 120 s or more, and the run has 92 s left for it"),
        (4, 5.0, "dcgmi diag -r 4 takes 3600 s or more, and the run has 0 s left for it"),
    ],
)
def test_without_the_time_it_is_not_started(
    level: int, left_s: float, words: str, tmp_path: Path
) -> None:
    env = dcgmi(tmp_path, f"touch {tmp_path}/asked")
    with pytest.raises(Untested) as raised:
        observed(env, level, left_s)
    assert str(raised.value) == f"{words}: give a longer --timeout"
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            refused("Error: a diagnostic is already running"),
            "DCGM did not run the diagnosis: E",
        ),
        (
            UNREACHABLE,
            "dcgmi diag -r 1 -j ended with 1 without a result: Error: unable",
        ),
        ("rubbish", "dcgmi diag -r 1 -j ended with 1 without a result: rubbish"),
        ("", "dcgmi diag -r 1 -j ended with 1 without a result: nothing"),
        ("{}", "dcgmi diag -r 1 -j ended with 1 without a result: {}"),
        (
            '{"DCGM Diagnostic": {"test_categories": [7, {"tests": [{"name": 3}]}]}}',
            "dcgmi diag",
        ),
    ],
)
def test_no_result_is_no_pass(said: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(Untested) as raised:
        observed(printing(tmp_path, said, code=1))
    assert str(raised.value).startswith(reason)


def test_a_diagnosis_of_which_every_test_was_skipped_is_no_pass(tmp_path: Path) -> None:
    said = diagnosis(4, ("memory", 0, "Skip", "")).replace('"Pass"', '"Skip"')
    with pytest.raises(Untested, match="without a result"):
        observed(printing(tmp_path, said))


def test_without_dcgmi_it_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(Untested, match="dcgmi is not installed here"):
        observed({"PATH": str(tmp_path)})


def test_a_diagnosis_that_hangs_is_told_to_stop_in_time(tmp_path: Path) -> None:
    script = f"trap 'touch {tmp_path}/stopped; exit 1' TERM\necho $$ > {tmp_path}/pid\n"
    env = dcgmi(tmp_path, f"{script}while :; do sleep 0.05; done")
    started = time.monotonic()
    with pytest.raises(Untested, match="dcgmi diag did not end within 10 s"):
        observed(env, left_s=10.4 + RESERVE_S)
    assert time.monotonic() - started < 10.4 + BUSY_S
    assert (tmp_path / "stopped").exists()  # as dcgmi stops the host engine then
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
