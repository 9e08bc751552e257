"""`run -- torchrun …`: the topology is the job's, and the job follows a good verdict at once."""

from __future__ import annotations

import pytest

from tests.lab import faults
from tests.lab.lab import HEALTHY_S, PATIENT, Lab
from tests.lab.reading import check_cause, check_clean
from tests.lab.run import Run

_JOB = r"""
import os
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
values = torch.ones(1)
dist.all_reduce(values)
names = ("RANK", "GROUP_RANK", "TORCH_CPP_LOG_LEVEL", "RES_OPTIONS")
words = ("job", values.item(), *(os.environ.get(name) for name in names))
sys.stdout.write(" ".join(map(str, words)) + "\n")  # at once: two ranks share the stream
sys.stdout.flush()
dist.destroy_process_group()
"""


def said(run: Run) -> list[str]:
    """Lines of the job, sorted."""
    lines = [line.text for done in run.done for line in done.lines]
    return sorted(line for line in lines if line.startswith("job "))


def script(lab: Lab) -> str:
    path = lab.folder / "job.py"
    path.write_text(_JOB)
    return str(path)


@pytest.mark.parametrize("rendezvous", ["static", pytest.param("c10d", marks=pytest.mark.wide)])
def test_the_job_follows(lab: Lab, rendezvous: str) -> None:
    run = lab.own_doctor(*PATIENT, nproc=2, job=[script(lab)], rendezvous=rendezvous)
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
    faults.drop_ephemeral(lab["nd1"])
    run = lab.own_doctor(*PATIENT, job=[script(lab)])
    check_clean(run, HEALTHY_S)
    check_cause(
        run, run.report, {"peer-blocked", "peer-one-way"}, hosts=["nd1"], links=[("nd0", "nd1")]
    )
    assert said(run) == []
    assert run.codes == [1, 1]
