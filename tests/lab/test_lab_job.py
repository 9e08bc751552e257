"""`run -- torchrun …`: the topology is the job's, and the job follows a good verdict at once."""

from __future__ import annotations

import json

import pytest

from tests.lab import faults
from tests.lab.lab import HEALTHY_S, MEET, PATIENT, Lab
from tests.lab.reading import check_cause, check_clean
from tests.lab.run import Run
from tests.support import dying_job

JOB = ("-m", "tests.support.small_job")


def said(run: Run) -> list[str]:
    """Lines of the job, sorted."""
    lines = [line.text for done in run.done for line in done.lines]
    return sorted(line for line in lines if line.startswith("job "))


@pytest.mark.parametrize("rendezvous", ["static", pytest.param("c10d", marks=pytest.mark.wide)])
def test_the_job_follows(lab: Lab, rendezvous: str) -> None:
    run = lab.own_doctor(*PATIENT, *MEET, nproc=2, job=JOB, rendezvous=rendezvous)
    assert run.codes == [0, 0], str(run)
    assert run.report is not None, str(run)
    assert run.report["verdict"] == "pass", str(run)
    assert run.report["run"]["world_size"] == 4
    # Its environment is the one that we were started with, and nothing of our own.
    nodes = [0, 0, 1, 1] if rendezvous == "static" else None
    heard = [line.split() for line in said(run)]
    assert [words[:3] for words in heard] == [["job", "4.0", str(rank)] for rank in range(4)]
    assert nodes is None or [int(words[3]) for words in heard] == nodes
    assert {words[4] for words in heard} == {"None"}


def test_the_job_does_not_follow_a_failure(lab: Lab) -> None:
    faults.drop_ephemeral(lab["nd0"])
    run = lab.own_doctor(*PATIENT, nproc=1, job=JOB)
    check_clean(run, HEALTHY_S)
    check_cause(
        run, run.report, {"peer-blocked", "peer-one-way"}, hosts=["nd0"], links=[("nd1", "nd0")]
    )
    assert said(run) == []
    assert run.codes == [1, 1]


@pytest.mark.wide
def test_the_job_follows_where_gloo_connects_from_the_other_side(lab: Lab) -> None:
    faults.drop_ephemeral(lab["nd1"])
    run = lab.own_doctor(*PATIENT, nproc=2, job=JOB)
    check_clean(run, HEALTHY_S)
    assert run.codes == [0, 0], str(run)
    assert run.report is not None, str(run)
    (root,) = run.report["root_causes"]
    assert (root["code"], root["severity"]) == ("peer-one-way", "warn"), str(run)
    assert (root["where"]["hosts"], root["where"]["links"]) == (["nd1"], [["nd0", "nd1"]])
    assert len(said(run)) == 4, str(run)


def test_a_job_that_dies_is_explained_once(lab: Lab) -> None:
    kept = lab.folder / "kept"
    job = (dying_job.__file__, "killed", "3", "1")
    run = lab.own_doctor(
        *PATIENT, *MEET, f"--autopsy={kept}", nproc=2, job=job, timeout_s=3 * HEALTHY_S
    )
    assert run.codes == [1, 1], str(run)
    report = json.loads((kept / "node0-nd0" / "autopsy.json").read_text())
    (cause,) = report["root_causes"]
    assert (cause["code"], cause["where"]["ranks"]) == ("rank-killed", [3]), str(run)
    victims = [found for found in report["findings"] if found != cause]
    assert {found["explained_by"] for found in victims} == {"rank-killed"}
    for name in ("before", "after"):
        assert report["run"][name]["verdict"] == "pass", str(run)
    first, second = run.done
    assert "[rank-killed]" in first.stderr
    assert "[rank-killed]" not in second.stderr
    assert "the autopsy of all hosts is printed by node 0" in second.stderr
