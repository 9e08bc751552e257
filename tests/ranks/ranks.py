"""Start ranks of the tool as plain processes on this machine, and read what they leave."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nccl_doctor.gather.envelope import OPEN, Seal
from nccl_doctor.gather.opening import MEETING, opened, prefix_of
from nccl_doctor.gather.store import ControlStore, StoreLost
from tests.support.forkserver import Forked, read_early
from tests.support.reports import validate
from tests.support.waiting import PATIENCE_S, comes, until

BASE = {"RES_OPTIONS": "timeout:1 attempts:1", "CUDA_VISIBLE_DEVICES": ""}


_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = itertools.cycle(range(20000 + 1000 * _WORKER, 21000 + 1000 * _WORKER))

MAIN = "from nccl_doctor.__main__ import main; main()"


def free_port() -> int:
    """A port that was free a moment ago, below the ephemeral range; no test's twice in a row."""
    for port in itertools.islice(_ports, 1000):
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def rank_env(rank: int, world: int, port: int, **changes: str | None) -> dict[str, str]:
    """Environment of one rank of a one-host job; a change to None removes a variable."""
    env: dict[str, str | None] = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI"))},
        **BASE,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **changes,
    }
    return {key: value for key, value in env.items() if value is not None}


@dataclass
class Ended:
    """How one process ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Ranks:
    """A job of the tool: one process per rank, plain environment.

    A rank whose environment a test changes in what is read early is started afresh, as those are
    that are `fresh`; the others are forked from a process that has imported torch.
    """

    def __init__(
        self,
        folder: Path,
        world: int,
        options: Sequence[str] = (),
        *,
        changes: Mapping[int, Mapping[str, str | None]] | None = None,
        start: Sequence[int] | None = None,
        extra: Mapping[int, Sequence[str]] | None = None,
        fresh: Collection[int] = (),
        before: Mapping[int, str] | None = None,
    ) -> None:
        """`changes` are to the environment of single ranks, `extra` are options of single ranks;
        `before` is Python that runs first, in single ranks.
        """
        self.report_path = folder / "report.json"
        self.port = free_port()
        self.processes: dict[int, subprocess.Popen[str] | Forked] = {}
        self._fresh = fresh
        self._folder, self._world, self._options = folder, world, options
        self._changes, self._extra, self._before = changes or {}, extra or {}, before or {}
        self._started = time.monotonic()
        self.start(range(world) if start is None else start)

    def start(self, indices: Iterable[int]) -> None:
        """Start these ranks."""
        for index in indices:
            changes = self._changes.get(index, {})
            env = rank_env(index, self._world, self.port, **changes)
            arguments = [
                *("run", "--json", str(self.report_path)),
                *self._options,
                *self._extra.get(index, ()),
            ]
            out, err = self._outputs(index)
            before = self._before.get(index)
            if not (read_early(changes) or index in self._fresh):
                self.processes[index] = Forked(
                    arguments,
                    env,
                    folder=self._folder,
                    out=out,
                    err=err,
                    code=f"{before}\n{MAIN}" if before else "",
                )
                continue
            with out.open("w") as stdout, err.open("w") as stderr:
                self.processes[index] = subprocess.Popen(
                    [sys.executable, "-m", "nccl_doctor", *arguments],
                    env=env,
                    stdout=stdout,
                    stderr=stderr,
                    text=True,
                    cwd=self._folder,
                )

    def _outputs(self, index: int) -> tuple[Path, Path]:
        return self._folder / f"{index}.out", self._folder / f"{index}.err"

    def wait(self, timeout_s: float) -> dict[int, Ended]:
        """Wait for all; whoever outstays `timeout_s` is killed and fails the test."""
        ended = {}
        end = self._started + timeout_s
        try:
            for index, process in self.processes.items():
                code = process.wait(max(0.1, end - time.monotonic()))
                out, err = self._outputs(index)
                seconds = time.monotonic() - self._started
                ended[index] = Ended(code, out.read_text(), err.read_text(), seconds)
        finally:
            self.kill()
        return ended

    def kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def report(self) -> dict[str, Any]:
        """The coordinator's report, valid by the published schema."""
        data = json.loads(self.report_path.read_text())
        validate(data)
        return dict(data)


def descendants(pid: int) -> list[int]:
    """Process ids below one process, at this moment."""
    found = []
    with suppress(OSError):  # it, or a thread of it, is over
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found


def is_running(pid: int) -> bool:
    """Whether a process still runs; one that only waits to be reaped does not.

    Its first thread may have ended before the others, which still hold its sockets.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def gone(pids: Sequence[int], timeout_s: float = 3.0) -> bool:
    """Wait until none of the processes runs."""
    return comes(lambda: not any(map(is_running, pids)), timeout_s)


def children(pid: int) -> list[int]:
    """Process ids right below one process, at this moment."""
    with suppress(OSError):
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def supervisor(pid: int, timeout_s: float = 30.0) -> int:
    """The process that does the work of a rank, below the one that was started."""
    return until(lambda: children(pid), timeout_s, every_s=0.001)[0]


def handles(pid: int, number: int, timeout_s: float = 30.0) -> bool:
    """Wait until a process has a handler for a signal."""

    def caught() -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1

    return bool(comes(caught, timeout_s))


def probe_child(pid: int, name: str, timeout_s: float = 30.0) -> int:
    """Wait for the probe child of a check below a process; returns its process id."""

    def found() -> int:
        for child in descendants(pid):
            with suppress(OSError):
                if Path(f"/proc/{child}/comm").read_text().strip() == f"ncd:{name}"[:15]:
                    return child
        return 0

    return until(found, timeout_s, every_s=0.0005, said=lambda: f"no probe child of {name}")


def node(
    folder: Path, number: int, port: int, *options: str, nnodes: int = 2, **env: str
) -> Forked:
    """One node of several of the own launcher, with one rank."""
    own = (
        f"--nnodes={nnodes}",
        f"--node-rank={number}",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
    )
    saved = ("--json", str(folder / "report.json"))
    return Forked(
        ["run", *own, f"--master-port={port}", "--backend=gloo", "--timeout=60", *options, *saved],
        {**os.environ, **BASE, **env},
        folder=folder,
        out=folder / f"out{number}",
        err=folder / f"err{number}",
    )


def is_served(port: int) -> bool:
    """Whether somebody listens at a port of this machine."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def signed_in(port: int, *seats: int, seal: Seal = OPEN) -> ControlStore:
    """Wait until the participants of these seats have signed in to the run whose store is at a
    port; returns that store, for messages of the run.
    """

    def meeting() -> ControlStore | None:
        with suppress(StoreLost):
            return ControlStore("127.0.0.1", port, timeout_s=5, prefix=MEETING, seal=seal)
        return None

    box = until(meeting)
    assert box is not None
    run = box.beside(prefix_of(opened(box, PATIENCE_S)), seal)
    for seat in seats:
        run.get(f"seat/{seat}", PATIENCE_S)
    return run
