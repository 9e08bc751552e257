"""Plain torchrun on a case, with every way in which ranks talk: does the job run?"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nccl_doctor.autopsy.examine import examine
from nccl_doctor.autopsy.kinds import CAUSE_NOT_TOLD
from tests.lab.corpus import Case
from tests.lab.corpus.inject import prepare
from tests.lab.lab import Lab
from tests.lab.processes import Process

STOCK_CAP_S = 60.0
TRIES = 5
"""Before a job is said to run where the doctor says `fail`: some end well by luck only."""
RUNS = "exit 0"
BACKEND = "gloo"
JOB = """
from itertools import combinations

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for group in (dist.group.WORLD, dist.new_group()):
    for count in (1, 1 << 20):
        values = torch.ones(count)
        dist.all_reduce(values, group=group)
        assert values[-1].item() == world
    mine = torch.full((world,), float(rank))
    parts = [torch.empty(world) for _ in range(world)]
    dist.all_gather(parts, mine, group=group)
    assert [part[0].item() for part in parts] == list(range(world))
    theirs = torch.empty(world)
    dist.all_to_all_single(theirs, mine, group=group)
    assert theirs.tolist() == list(range(world))
    dist.broadcast(mine, 0, group=group)
    assert mine[0].item() == 0
    dist.barrier(group=group)
for pair in combinations(range(world), 2):
    for source, target in (pair, pair[::-1]):
        if rank == source:
            dist.send(torch.ones(1), target)
        elif rank == target:
            dist.recv(torch.empty(1), source)
print("the job is done", flush=True)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Stock:
    """What plain torchrun with that job said: its first telling line and when it came.

    `ended` is the exit codes in words, where all hosts were done within the cap. `code` is the
    cause in what all hosts printed, by `nccl-doctor autopsy`, and `sure` its confidence.
    """

    words: str
    seconds: float | None
    ended: str
    code: str = ""
    sure: str = ""

    @property
    def runs(self) -> bool:
        """Whether the job came to its end on all hosts."""
        return self.ended == RUNS


def can_be_tried(case: Case) -> bool:
    """Whether a case is there from the start, for a job of the backend of this job."""
    return not case.during and "nccl" not in case.options


def run_again(case: Case) -> Stock:
    """The first of further tries that does not come to its end, or the last one."""
    for number in range(2, TRIES + 1):
        said = run_stock(case)
        if not said.runs:
            return replace(said, ended=f"{said.ended}, at try {number}")
    return said


def run_stock(case: Case, cap_s: float = STOCK_CAP_S) -> Stock:
    """Run plain torchrun on the same case in a fresh lab, as a user would."""
    with Lab(case.names, clocks=case.clocks) as lab:
        lab.fresh = True
        scene = prepare(case, lab)
        folder = lab.new_folder()
        script = folder / "job.py"
        script.write_text(JOB)
        processes = lab.torchrun(
            [str(script)],
            nproc=case.nproc,
            hosts=scene.started,
            per_host=scene.flags,
            per_host_env=scene.env,
            wrap=scene.wrap,
            late_s=scene.late_s,
            folder=folder,
        )
        in_time = lab.wait(processes, cap_s)
        words, seconds = _telling(processes, cap_s)
        codes = [process.returncode for process in processes]
        if in_time and not any(codes):
            return Stock("the job runs", max(p.seconds or 0.0 for p in processes), RUNS)
        running = [p.host.name for p in processes if p.returncode is None]
        ended = f"{', '.join(running)} still waiting" if running else f"exit {codes}"
        return Stock(words, seconds, ended, *_autopsy(processes, folder / "printed"))


def _autopsy(processes: Sequence[Process], folder: Path) -> tuple[str, str]:
    """Code and confidence of the cause in what the hosts printed; empty where none is found."""
    folder.mkdir()
    for node, process in enumerate(processes):
        text = "".join(f"{line.text}\n" for line in process.lines)
        (folder / f"node{node}.log").write_text(text or "\n")
    causes = examine([str(folder)], io.BytesIO(), started="").root_causes
    told = [cause for cause in causes if cause.kind != CAUSE_NOT_TOLD]
    return (told[0].code, told[0].confidence.value) if told else ("", "")


_TELLING = re.compile(r"Error\b|error:|timed out|Exception|cannot|unable|failed", re.IGNORECASE)
_NOISE = re.compile(r"Traceback|File \"|hostname of the client socket|ProcessGroup.*warn")

_PREFIX = re.compile(r"^.*?(?=[A-Z][A-Za-z]+Error|The |Gloo |\[c10d\])")


def _telling(processes: Sequence[Process], cap_s: float) -> tuple[str, float | None]:
    """The first line of all hosts that says that something is wrong, before any was killed."""
    lines = [
        (line.seconds, process.host.name, line.text.strip())
        for process in processes
        for line in process.lines
        if _TELLING.search(line.text) and not _NOISE.search(line.text)
        if line.seconds < cap_s - 0.5
    ]
    if not lines:
        return "nothing", None
    seconds, host, text = min(lines)
    text = _PREFIX.sub("", text, count=1)[:160]  # it matches again behind an empty match
    return f"{host}: {text}", seconds
