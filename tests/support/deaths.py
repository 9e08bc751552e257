"""Real jobs that die: a fault on one rank, a launcher, and the consoles that come of it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.ranks.ranks import BASE, free_port
from tests.support import dying_job

LIMIT_S = 90
LAUNCHERS = ("torchrun", "log-dir", "two-nodes", "one-node", "accelerate", "plain")
"""How a job is started, and which of its text is kept; one-node: only that of the struck one."""
_TWO_NODES = ("two-nodes", "one-node")
_OF_A_FAULT = {
    "launcher-terminated": [each for each in LAUNCHERS if each != "plain"],
    "host-lost": ["two-nodes"],
}
"""Fault → the launchers with which it can be."""

_EXITS = {"rank-exited", "rank-silent"}
_LATE = {"loader-stalled", "collective-missing"}
CODES: Mapping[str, set[str]] = {
    "raises": {"rank-raised"},
    "asserts": {"rank-raised"},
    "memory": {"rank-raised"},
    "raises-before-init": {"rank-raised"},
    "exits": _EXITS,
    "exits-at-once": _EXITS,
    "exits-with-text": {*_EXITS, "rank-raised"},
    "ends-early": {"rank-ended-early", "rank-silent", "rank-exited"},
    "killed": {"rank-killed", "rank-silent"},
    "crashes": {"rank-crashed", "rank-silent"},
    "aborts": {"rank-crashed", "rank-silent"},
    "terminated": {"rank-killed", "rank-silent"},
    "interrupted": {"rank-raised"},
    "stopped": {"rank-frozen", "loader-stalled"},
    "sleeps": _LATE,
    "barrier": {"loader-stalled"},
    "thread": {"rank-raised", "loader-stalled"},
    "disk-full": {"storage-full"},
    "host-lost": {"rank-silent"},
    "launcher-terminated": {"job-stopped"},
    "skips": {*_LATE, "collective-mismatch", "rank-ended-early", "rank-silent"},
    "other-operation": {"collective-missing", "collective-mismatch"},
    "other-size": {"collective-mismatch"},
    "crossed": {"collective-order", "collective-mismatch"},
}
"""Fault → codes that are right for it."""

NOT_IN_THE_TEXT = {"skips", "other-operation", "other-size", "crossed"}
"""Faults of which the text of gloo does not tell whose they are."""
_OF_NO_RANK = {"launcher-terminated", "host-lost"}


@dataclass(frozen=True)
class Death:
    """One job: what is done to which rank at which step, and how it is started."""

    fault: str
    struck: int
    step: int
    ranks: int
    launcher: str

    def __str__(self) -> str:
        return f"{self.fault} on rank {self.struck} of {self.ranks}, {self.launcher}"

    @property
    def culprits(self) -> list[int]:
        """Ranks that are to be named; no text tells which ones a lost host has."""
        return [] if self.fault in _OF_NO_RANK else [self.struck]

    @property
    def is_told(self) -> bool:
        """True if a careful reader of the text can know the rank."""
        if self.fault in NOT_IN_THE_TEXT or self.fault in _OF_NO_RANK:
            return False
        return not (self.launcher == "plain" and self.fault in ("stopped", "thread"))


def drawn(seed: int, number: int) -> Iterator[Death]:
    """Draw jobs, the same for the same seed; every fault comes equally often."""
    dice = random.Random(seed)
    faults: list[str] = []
    for _ in range(number):
        faults = faults or dice.sample(sorted(CODES), len(CODES))
        fault = faults.pop()
        launcher = dice.choice(_OF_A_FAULT.get(fault, LAUNCHERS))
        ranks = dice.choice((4, 4, 8) if launcher in _TWO_NODES else (2, 3, 4, 6, 16))
        yield Death(fault, dice.randrange(ranks), dice.randrange(1, 4), ranks, launcher)


def consoles_of(death: Death, folder: Path) -> list[Path]:
    """Run the job in a folder, and return the paths of what is kept of its text."""
    job = [dying_job.__file__, death.fault, str(death.struck), str(death.step)]
    port = str(free_port())
    ranks, env = str(death.ranks), {**os.environ, **BASE, "HOME": str(folder)}
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if death.launcher == "plain":
        lines = [[sys.executable, *job]] * death.ranks
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks}
        envs = [{**env, **place, "RANK": str(rank)} for rank in range(death.ranks)]
        return _run(lines, envs, [folder / f"rank{rank}.log" for rank in range(death.ranks)])
    if death.launcher in _TWO_NODES:
        half = str(death.ranks // 2)
        at = ["--nnodes", "2", "--nproc-per-node", half, "--master-addr", "127.0.0.1"]
        at += ["--master-port", port]
        lines = [[*torchrun, *at, "--node-rank", str(node), *job] for node in range(2)]
        logs = _run(lines, [env] * 2, [folder / f"node{node}.log" for node in range(2)])
        own = death.struck // (death.ranks // 2)
        return logs if death.launcher == "two-nodes" else [logs[own]]
    if death.launcher == "accelerate":
        accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
        line = [*accelerate, "--num_processes", ranks, "--main_process_port", port, *job]
    elif death.launcher == "log-dir":
        keep = ["--log-dir", str(folder / "logs"), "--redirects", "3"]
        line = [*torchrun, "--standalone", "--nproc-per-node", ranks, *keep, *job]
    else:
        line = [*torchrun, "--standalone", "--nproc-per-node", ranks, *job]
    return [*_run([line], [env], [folder / "console.log"]), *folder.glob("logs")]


def _run(
    lines: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], logs: Sequence[Path]
) -> list[Path]:
    """Start the lines together, each with its output in a file, and wait until all have ended.

    What is stopped is not waited for, and ended after the others.
    """
    children = []
    for line, env, log in zip(lines, envs, logs, strict=True):
        with open(log, "wb") as out:
            children.append(
                subprocess.Popen(
                    line, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and any(map(_is_running, children)):
        time.sleep(0.1)
        if logs[0].name.startswith("rank") and not all(map(_is_running, children)):
            # Without a launcher, the others end by themselves.
            deadline = min(deadline, time.monotonic() + 3 * dying_job.TIMEOUT_S)
    for child in children:
        if child.poll() is None:
            for each in (psutil.Process(child.pid), *psutil.Process(child.pid).children(True)):
                each.kill()
            child.wait()
    return [*logs]


def _is_running(child: subprocess.Popen[bytes]) -> bool:
    return child.poll() is None and psutil.Process(child.pid).status() != psutil.STATUS_STOPPED
