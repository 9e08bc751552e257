"""Real Open MPI: `mpirun` without any flag about who is who or where to meet."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.lab import sshd
from tests.lab.lab import HEALTHY_S, JOIN_S, MEET, PATIENT, Lab
from tests.lab.processes import PATH
from tests.lab.reading import check_healthy, validate
from tests.lab.run import Run
from tests.lab.sshd import Ssh


@pytest.fixture(autouse=True)
def _can_run() -> None:
    if reason := sshd.impossible():
        pytest.skip(reason)
    reason = sshd.missing()
    if shutil.which("mpirun", path=PATH) is None:
        reason = "needs openmpi-bin: apt-get install"
    if reason and os.environ.get("CI", "").lower() == "true":
        pytest.fail(f"CI=true, so Open MPI must run: {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)


def mpirun(
    lab: Lab, words: Sequence[str], options: Sequence[str], home: str, front: Sequence[str] = ()
) -> Run:
    """`mpirun … python -m nccl_doctor run` on the first host, and what it left; `front` are the
    words behind `python`.

    Ranks on other hosts get no variable of the lab, so all are given the same.
    """
    folder = lab.new_folder()
    variables = {**lab.env, "TMPDIR": str(folder / "tmp"), "HOME": home}
    doctor = ["env", *(f"{name}={value}" for name, value in variables.items())]
    doctor += [lab.python, *front, "-m", "nccl_doctor", "run"]
    doctor += ["--json", str(folder / "report.json")]
    doctor += ["--backend", "gloo", *PATIENT, *options]
    env = {
        "HOME": home,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    process = lab.hosts[0].run(["mpirun", *words, *doctor], env, folder)
    lab.wait([process], HEALTHY_S + 20)
    return Run.read(folder, {None: [process]})


def identities(report: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    return [(rank["host"], rank["rank"], rank["local_rank"]) for rank in report["ranks"]]


def test_two_hosts(lab: Lab) -> None:
    ssh = Ssh(lab)
    ssh.serve("nd0", "nd1")
    run = mpirun(lab, ["-np", "4", "--host", "nd0:2,nd1:2"], MEET, str(ssh.home))
    check_healthy(run, ranks=4)
    report: Mapping[str, Any] = run.report or {}
    assert report["run"]["launcher"] == "mpirun"
    assert identities(report) == [("nd0", 0, 0), ("nd0", 1, 1), ("nd1", 2, 0), ("nd1", 3, 1)]
    launch = report["ranks"][3]["launch"]
    assert launch["master_addr"] == lab["nd0"].address
    assert launch["sources"]["master_addr"] == "derived from OMPI_MCA_orte_hnp_uri"
    (note,) = [found for found in report["findings"] if found["code"] == "master-not-set"]
    assert note["severity"] == "info"


def test_one_host(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0")
    options = ("--level", "quick", "--select", "launch_record,ranks,port")
    run = mpirun(lab, ["-np", "2", "--oversubscribe"], options, "/root")
    report: Mapping[str, Any] = run.report or {}
    assert run.codes == [0], str(run)
    assert report["verdict"] == "pass", str(run)
    assert identities(report) == [("nd0", rank, rank) for rank in range(2)]
    assert report["ranks"][1]["launch"]["master_addr"] == "127.0.0.1"


@pytest.mark.wide
def test_a_torchrun_of_its_own_for_each_task(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0")
    options = ("--level", "quick", "--select", "launch_record,ranks")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    run = mpirun(lab, ["-np", "2", "--oversubscribe"], options, "/root", torchrun)
    report: Mapping[str, Any] = run.report or {}
    assert run.codes == [0], str(run)
    assert (report["verdict"], report["run"]["world_size"]) == ("pass", 1), str(run)
    assert run.done[0].stdout.count("nccl-doctor: PASS") == 2, "of each run"
    (note,) = report["findings"]
    assert (note["code"], note["severity"]) == ("launch-runs-independent", "info")
    assert "mpirun started 2 tasks, 2 on this host, and each ran torchrun" in note["message"]


@pytest.mark.wide
def test_no_rank_runs_where_mpirun_does(make_lab: Callable[..., Lab]) -> None:
    """As in the launcher pod of an MPIJob: the address that it gives is nobody's failure."""
    lab = make_lab("nd0", "nd1", "nd2")
    ssh = Ssh(lab)
    ssh.serve("nd1", "nd2")
    options = ("--level", "quick", "--select", "launch_record,master_addr,port,ranks")
    options += ("--join-timeout", f"{JOIN_S:g}")
    run = mpirun(lab, ["-np", "2", "--host", "nd1:1,nd2:1"], options, str(ssh.home))
    reports = [report for report in (run.report, *run.partial.values()) if report is not None]
    assert run.codes == [3], str(run)
    assert reports, str(run)
    for report in reports:
        validate(report)
        assert (report["verdict"], report["exit_code"]) == ("unknown", 3), str(run)
        assert [one["code"] for one in report["findings"] if one["severity"] == "fail"] == []
        (note,) = [one for one in report["findings"] if one["code"] == "master-not-set"]
        assert note["severity"] == "warn", str(run)
        assert "mpirun -x MASTER_ADDR=" in note["fix"], str(run)
        assert lab["nd0"].address not in note["fix"]
