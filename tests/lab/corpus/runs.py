"""Run one case: with the doctor's own launcher, and with plain torchrun beside it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.lab.corpus import Case
from tests.lab.corpus.inject import Scene, prepare
from tests.lab.corpus.score import Score, score
from tests.lab.lab import TOTAL_S, Lab
from tests.lab.processes import Process
from tests.lab.run import Run
from tests.lab.slurm import Slurm

STOCK_CAP_S = 60.0
_SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for count in (1, 1 << 20):
    values = torch.ones(count)
    dist.all_reduce(values)
    assert values[-1].item() == dist.get_world_size()
print("all-reduce ok", flush=True)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Result:
    """What the doctor said of a case.

    `seconds` from the start of the first host to the end of the last that can end; `codes` are exit
    codes; `text` is everything, for whoever has to find out why it is wrong; `unstruck` as in
    `Examined`.
    """

    score: Score
    seconds: float
    codes: tuple[int | None, ...]
    answer: dict[str, Any] | None
    leftovers: tuple[str, ...]
    text: str
    unstruck: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stock:
    """What plain torchrun with an all-reduce said: its first telling line and when it came.

    `ended` is the exit codes in words, where all hosts were done within the cap.
    """

    words: str
    seconds: float | None
    ended: str


def run(case: Case, join_s: float, *, fresh: bool = False) -> Result:
    """Examine one case in a lab of its own; `fresh`: as a user would start it, for its time."""
    with Lab(case.names, clocks=case.clocks) as lab:
        lab.fresh = fresh
        slurm = Slurm(lab) if case.launcher == "srun" else None
        scene = prepare(case, lab)
        before = set(lab.shared_memory())  # a case may have files there, which have to stay
        done, answer, others, unstruck = examine(case, scene, join_s, slurm)
        ended = [each for each in done.done if each.host not in lab.frozen]
        left = [each for each in done.leftovers if each not in before]
        if lab.frozen:
            left = []  # they are stopped, and hold what they had
        return Result(
            score(case.without(unstruck), answer, others),
            max(each.seconds for each in ended),
            tuple(each.code for each in ended),
            answer,
            tuple(left),
            str(done),
            unstruck,
        )


class Examined(NamedTuple):
    """The run of a case, the report that a reader ends up with, all others, and the hosts on which
    what was to begin during the run never did.
    """

    done: Run
    answer: dict[str, Any] | None
    others: Sequence[dict[str, Any]]
    unstruck: tuple[str, ...] = ()


def examine(case: Case, scene: Scene, join_s: float, slurm: Slurm | None = None) -> Examined:
    """Examine a case in a lab that it was set up in."""
    views = scene.lab.new_folder() / "views"
    views.mkdir()
    options = ("--join-timeout", f"{join_s:g}", "--output-dir", str(views), *case.options)
    with scene.striking() as unstruck:
        done = _start(case, scene, slurm, options)
    return Examined(done, *_answer(done, views, scene.lab.python), tuple(sorted(unstruck)))


def _start(case: Case, scene: Scene, slurm: Slurm | None, options: Sequence[str]) -> Run:
    """The doctor on every host of a case, by its launcher."""
    lab = scene.lab
    if slurm is not None:
        counts = (f"-N{case.hosts}", f"--ntasks-per-node={case.nproc}")
        variables = {name: text for each in scene.env.values() for name, text in each.items()}
        return slurm.doctor(counts, "--timeout", f"{TOTAL_S:g}", *options, env=variables)
    if case.launcher == "plain":
        more: dict[str, Any] = {"hosts": scene.started, "per_host": scene.env}
        return lab.plain_doctor(*options, nproc=case.nproc, **more)
    more = {
        "nproc": case.nproc,
        "hosts": scene.started,
        "per_host": scene.flags,
        "per_host_env": scene.env,
        "wrap": scene.wrap,
        "late_s": scene.late_s,
    }
    if case.launcher == "torchrun":
        return lab.torchrun_doctor(*options, **more)
    if case.launcher == "c10d":
        job = lab.new_folder() / "job.py"
        job.write_text(_SCRIPT)
        more |= {"job": [str(job)], "rendezvous": "c10d"}
    return lab.own_doctor(*options, **more)


def _answer(
    done: Run, views: Path, python: str
) -> tuple[dict[str, Any] | None, Sequence[dict[str, Any]]]:
    """The report that a reader ends up with, and all others.

    Where a coordinator met everybody it could, that is its report. Where there was none, or hosts
    did not join, it is all views merged, as `report merge` does it.
    """
    files = sorted(views.glob("node*.json"))
    reports = [json.loads(path.read_text()) for path in files]
    others = [*reports, *done.partial.values()]
    met = [each for each in (done.report, *reports) if each and each["run"]["complete"]]
    if met or not files:
        return (met[0] if met else done.report), others
    merged = subprocess.run(
        [python, "-m", "nccl_doctor", "report", "merge", "--json", "-", *map(str, files)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return json.loads(merged.stdout), others


def run_stock(case: Case, cap_s: float = STOCK_CAP_S) -> Stock:
    """Run plain torchrun with an all-reduce on the same case in a fresh lab, as a user would."""
    with Lab(case.names, clocks=case.clocks) as lab:
        lab.fresh = True
        scene = prepare(case, lab)
        folder = lab.new_folder()
        script = folder / "job.py"
        script.write_text(_SCRIPT)
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
            return Stock("the job runs", max(p.seconds or 0.0 for p in processes), "exit 0")
        running = [p.host.name for p in processes if p.returncode is None]
        ended = f"{', '.join(running)} still waiting" if running else f"exit {codes}"
        return Stock(words, seconds, ended)


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
