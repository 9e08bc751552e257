"""`run --autopsy DIR -- COMMAND`: the job with its output kept, and what follows if it dies.

The process that examined becomes this one, which imports little and waits. If the job fails, its
host is examined again with the options of before, and `nccl-doctor autopsy` reads what all hosts
kept, and both reports. The exit code stays that of the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from nccl_doctor.system.files import make_folder, remove, write_private
from nccl_doctor.system.forks import signal_name
from nccl_doctor.system.helpers import send
from nccl_doctor.system.kept import KeptEnd, Silence, leave_as, run_kept
from nccl_doctor.system.leaving import started_below
from nccl_doctor.system.terminal import complain

COMMAND = "keep"
"""First word of the arguments of this process; no command of the command line."""
_TOGETHER_S = 600.0
"""Longest time between the starts of one job on its hosts, with clocks that differ."""
_OTHERS_S = 10.0
"""Time for the other hosts to end, when the job has failed here."""
_LOOK_S = 0.2
_PY_SPY = "py-spy"
_STACK_S = 10.0


@dataclass(frozen=True)
class Plan:
    """Steps that follow the end of the job.

    Attributes:
        folder: of this host, in the folder of --autopsy.
        before: the report of the examination before the job; there is one on rank 0's host.
        again: words that examine the hosts again, up to the options; empty where they cannot be.
        program: words that start this program.
        nnodes: number of hosts.
        first: this is rank 0's host, or the only one that is known.
        hang_after_s: seconds without output after which the job is looked at; None: never.
    """

    folder: str
    before: str
    again: tuple[str, ...]
    program: tuple[str, ...]
    nnodes: int
    first: bool
    hang_after_s: float | None = None

    def words(self, command: Sequence[str]) -> list[str]:
        """The line of the process that keeps the output of a command."""
        return [*self.program, COMMAND, json.dumps(asdict(self)), *command]


def main(words: Sequence[str]) -> NoReturn:
    """Run the job of `Plan.words`, from its second word on; ends as the job ends."""
    plan, command = Plan(**json.loads(words[0])), words[1:]
    folder = Path(plan.folder)
    _note(folder, ended=False)
    silence = None
    if plan.hang_after_s is not None:
        silence = Silence(plan.hang_after_s, lambda pid: _look(plan, folder, pid))
    end = run_kept(command, folder, silence)
    _note(folder, ended=True)
    if end.code:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the job's own end counts
            _follow(plan, folder, end, command)
    leave_as(end.code)


def _follow(plan: Plan, folder: Path, end: KeptEnd, command: Sequence[str]) -> None:
    """Examine the hosts again, and what the job left; prints to stderr alone."""
    how = f"by {signal_name(-end.code)}" if end.code < 0 else f"with exit code {end.code}"
    complain(f"the job ended {how} after {end.seconds:.0f} s; its output is in {folder}")
    folders, all_ended = _folders(folder, _OTHERS_S)
    after = folder / "after.json"
    if not all_ended:
        complain("the hosts are not examined again: the job goes on on some of them")
    elif plan.again and not end.was_asked:
        complain("examining the hosts again")
        words = [*plan.again, f"--again={after}", "--", *command]
        _run(words, stdout=subprocess.DEVNULL)
    if len(folders) == plan.nnodes > 1 and not plan.first:
        complain("the autopsy of all hosts is printed by node 0")
        return
    there = json.loads(send(folder, lambda: _existing(plan.before, str(after))))
    words = [*plan.program, "autopsy", f"--json={folder / 'autopsy.json'}"]
    for name, file in (("before", plan.before), ("after", str(after))):
        words += [f"--{name}={file}"] if file in there else []
    _run([*words, *map(str, folders)], stdout=sys.stderr.fileno())


def _look(plan: Plan, folder: Path, pid: int) -> None:
    """Say where the ranks of a job stand that prints nothing; prints to stderr alone."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        complain(f"the job has printed nothing for {plan.hang_after_s:g} s")
        for rank, process in _ranks_of(pid).items():
            for name, text in _state_of(process).items():
                write_private(folder / f"{name}.rank{rank}.txt", text)
        words = [*plan.program, "autopsy", f"--json={folder / 'hang.json'}"]
        words += map(str, _folders(folder, wait_s=0.0)[0])
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode == 1:
            sys.stderr.write(done.stdout.decode("utf-8", "replace"))
            sys.stderr.flush()
        else:
            missing = "" if shutil.which(_PY_SPY) else f"; with {_PY_SPY} installed more is seen"
            complain(f"nothing here shows which rank it waits for{missing}")


def _ranks_of(pid: int) -> dict[int, int]:
    """Process id of each rank of this host: the command, or started by it, but not by a rank."""
    found: dict[int, int] = {}
    ranks = {0: -1}
    for parent, child in [(0, pid), *started_below(pid)]:
        ranks[child] = _rank_of(child)
        if ranks[child] not in (-1, ranks.get(parent)):
            found[ranks[child]] = child
    return found


def _rank_of(pid: int) -> int:
    """Rank that the variables of a process say; -1 for none."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == b"RANK" and value.isdigit():
                return int(value)
    return -1


def _state_of(pid: int) -> dict[str, bytes]:
    """State of a rank in the kernel, and its Python stack where py-spy is installed: texts, each
    with the name of its file.
    """
    state = {"status": Path(f"/proc/{pid}/status").read_bytes()}
    if path := shutil.which(_PY_SPY):
        words = [path, "dump", "--pid", str(pid)]
        if b"\nState:\tT" in state["status"]:
            words.append("--nonblocking")  # py-spy 0.4 waits for it to stop
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_STACK_S
            )
            state["stack"] = done.stdout + done.stderr
    return state


def _existing(*files: str) -> bytes:
    return json.dumps([file for file in files if Path(file).is_file()]).encode()


def _run(words: Sequence[str], stdout: int) -> None:
    """Run this program, which holds its own time limit."""
    subprocess.run(words, stdin=subprocess.DEVNULL, stdout=stdout, check=False)


def _note(folder: Path, *, ended: bool) -> None:
    """Say in the folder of this host since when its job runs, and whether it has ended."""
    with contextlib.suppress(OSError, RuntimeError):
        note = json.loads(send(folder, lambda: json.dumps(_read(_note_of(folder))).encode()))
        started = note.get("started", 0.0) if ended else time.time()
        write_private(_note_of(folder), json.dumps({"started": started, "ended": ended}))


def _folders(own: Path, wait_s: float) -> tuple[list[Path], bool]:
    """Folders of all hosts of this job, in order, and whether all of them have ended; waits for
    those that have not.
    """

    def look() -> bytes:
        mine = _read(_note_of(own)).get("started", 0.0)
        notes = {each: _read(_note_of(each)) for each in own.parent.iterdir() if each.is_dir()}
        return json.dumps(
            {
                str(folder): note.get("ended") is True
                for folder, note in notes.items()
                if abs(note.get("started", -_TOGETHER_S) - mine) < _TOGETHER_S
            }
        ).encode()

    until = time.monotonic() + wait_s
    while True:
        ended = json.loads(send(own, look))
        if all(ended.values()) or time.monotonic() > until:
            return sorted({own, *map(Path, ended)}), all(ended.values())
        time.sleep(_LOOK_S)


def _note_of(folder: Path) -> Path:
    """The note on a folder, beside it: what is in there is read as text of the job."""
    return folder.with_name(f"{folder.name}.json")


def _read(file: Path) -> dict[str, Any]:
    try:
        note = json.loads(file.read_text())
    except (OSError, ValueError):  # it is just written
        return {}
    return note if isinstance(note, dict) else {}


def folder_name(environ: Mapping[str, str], node_rank: int | None) -> str:
    """Name of the folder of this process: its rank, its node rank, or its host."""
    if environ.get("RANK", "").isdigit():
        return f"rank{environ['RANK']}"
    if node_rank is None:
        node = environ.get("SLURM_NODEID") or environ.get("GROUP_RANK", "")
        node_rank = int(node) if node.isdigit() else None
    host = socket.gethostname()
    return host if node_rank is None else f"node{node_rank}-{host}"


def folder_of(path: str, name: str) -> Path:
    """The folder of this host in that of --autopsy, without what an earlier job left in it.

    Raises:
        OSError: it cannot be made, or nothing can be written there.
    """
    folder = Path(path, name).absolute()
    make_folder(folder)
    found = json.loads(send(folder, lambda: json.dumps(os.listdir(folder)).encode()))
    remove(folder / each for each in found if each.endswith((".log", ".json", ".txt")))
    write_private(_note_of(folder), "{}")
    return folder
