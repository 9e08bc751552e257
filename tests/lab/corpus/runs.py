"""Run one case with the doctor."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.lab.corpus import Case
from tests.lab.corpus.inject import Scene, prepare
from tests.lab.corpus.score import Score, score
from tests.lab.corpus.screens import printed
from tests.lab.corpus.stock import JOB
from tests.lab.lab import TOTAL_S, Lab
from tests.lab.run import Run
from tests.lab.slurm import Slurm


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
            score(case.without(unstruck), answer, others, printed(done)),
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
        job.write_text(JOB)
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
