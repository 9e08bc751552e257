"""One `observe()` in a forked child that may hang, crash or be killed without harming the run.

A child announces every step before it blocks (a breadcrumb), sends its facts as one JSON line, and
leaves. One that misses its deadline is first examined as a person would (what was its last step,
its Python stack, its /proc state, the end of its output), then killed with all it started.

Forking from a supervisor that has imported torch costs some 10 ms; importing torch again would cost
1–5 s. The supervisor must have no busy thread of its own while it forks: a lock that such a thread
holds at that moment stays locked in the child for ever (seen with torch's store server, whose
thread does name look-ups; hence `doorkeeper` runs it in a process of its own).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nccl_doctor.cluster import Outcome, OutcomeStatus
from nccl_doctor.contract import Skip, Untested
from nccl_doctor.forks import end, fork, living, settle

MAX_MESSAGE_BYTES = 8 << 20
"""More than this from one child is a fault of the check, not a fact."""
MAX_BREADCRUMBS = 40
LOG_TAIL_BYTES = 4000
STACK_BYTES = 16000
AT_ONCE = 64
"""Children at the same time."""
_FILES = 3
"""Open files of this process for each child, which the later ones inherit."""
_OWN_FILES = 64
"""What a child needs for itself."""
STACK_WAIT_S = 0.3
_MUTE = ("T", "t", "Z", "")
"""State letters of processes that answer no signal."""


Work = Callable[["Line"], Mapping[str, Any]]
"""Runs in the child: is given the line to whoever waits, returns the facts."""


@dataclass
class Job:
    """One piece of work for one child.

    `deadline` is a `time.monotonic()` second. `name` becomes the child's process name. `heard` is
    given each breadcrumb as it comes.
    """

    name: str
    work: Work
    deadline: float
    heard: Callable[[Mapping[str, Any]], None] = lambda crumb: None
    _pid: int = 0
    _pipe: int = -1
    _log: int = -1
    _stack: int = -1
    _started: float = 0.0
    _state: str = ""
    _wchan: str = ""
    _buffer: bytearray = field(default_factory=bytearray)
    _received: int = 0
    _breadcrumbs: list[dict[str, Any]] = field(default_factory=list)
    _witness: dict[str, Any] = field(default_factory=dict)
    _result: dict[str, Any] | None = None

    def start(self) -> None:
        """Fork the child."""
        read_end, write_end = os.pipe()
        self._log = os.memfd_create(f"{self.name}-log")
        self._stack = os.memfd_create(f"{self.name}-stack")
        self._started = time.monotonic()
        pid, parent = fork()
        if pid == 0:
            os.close(read_end)
            _child(self, write_end, parent)
        os.close(write_end)
        self._pid, self._pipe = pid, read_end
        with contextlib.suppress(OSError):  # the child does it too: whoever comes first
            os.setpgid(pid, pid)
        living.add(pid)

    def pump(self) -> bool:
        """Read what the child has sent. Returns False when it will send no more."""
        data = os.read(self._pipe, 1 << 16)
        self._received += len(data)
        if self._received > MAX_MESSAGE_BYTES:
            self._result = {"raised": f"sent more than {MAX_MESSAGE_BYTES} bytes"}
            return False
        self._buffer += data
        if b"\n" not in data:
            return bool(data)
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            message = json.loads(line)
            if "crumb" in message:
                self._breadcrumbs = [*self._breadcrumbs[-MAX_BREADCRUMBS + 1 :], message["crumb"]]
                self.heard(message["crumb"])
            elif "witness" in message:
                self._witness.update(message["witness"])
            else:
                self._result = message
        return bool(data)

    def ask(self) -> None:
        """Look at a stuck child as it is, then make it write its Python stack, if it can answer."""
        self._state, self._wchan = _proc_state(self._pid), _proc_text(self._pid, "wchan")
        if self._state not in _MUTE:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGUSR1)

    def conclude(self, *, late: bool) -> Outcome:
        """End the child and say how it ended; a `late` one was asked what it is doing."""
        if late:
            self._await_stack()
        status = end(self._pid, patient=not late)
        living.discard(self._pid)
        outcome = self._outcome(late, status)
        for fd in (self._pipe, self._log, self._stack):
            os.close(fd)
        return outcome

    def _await_stack(self) -> None:
        if self._state not in _MUTE:
            until = time.monotonic() + STACK_WAIT_S
            while time.monotonic() < until and not os.fstat(self._stack).st_size:
                time.sleep(0.01)
            time.sleep(0.02)  # the handler writes thread by thread

    def _outcome(self, late: bool, status: int | None) -> Outcome:
        common: dict[str, Any] = {
            "breadcrumbs": tuple(self._breadcrumbs),
            "duration_s": time.monotonic() - self._started,
        }
        result = self._result
        if result is not None and "facts" in result:
            return Outcome(OutcomeStatus.OK, facts=result["facts"], **common)
        if result is not None and "skip" in result:
            return Outcome(OutcomeStatus.SKIPPED, reason=result["skip"], **common)
        if result is not None and "untested" in result:
            return Outcome(OutcomeStatus.UNTESTED, reason=result["untested"], **common)
        common["log_tail"] = _tail(self._log, LOG_TAIL_BYTES)
        if result is not None:
            return Outcome(OutcomeStatus.RAISED, reason=result["raised"], **common)
        common["stack"] = _tail(self._stack, STACK_BYTES, from_start=True)
        common["witness"] = self._witness
        if late:
            return Outcome(OutcomeStatus.HUNG, state=self._state, wchan=self._wchan, **common)
        if status is not None and os.WIFSIGNALED(status):
            name = _signal_name(os.WTERMSIG(status))
            return Outcome(OutcomeStatus.DIED, signal=name, **common)
        code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
        return Outcome(OutcomeStatus.DIED, exit_code=code, **common)


def run(jobs: Iterable[Job], tick: Callable[[], None] = lambda: None) -> list[Outcome]:
    """Run every job, each in its own child, as many at once as there is room for; wait for all.

    Args:
        jobs: what to run; returns by the latest of their deadlines, plus a second to collect.
        tick: called several times a second while waiting.

    Returns: outcomes in the order of `jobs`.
    """
    outcomes: dict[int, Outcome] = {}
    waiting: dict[int, Job] = {}
    to_come = deque(enumerate(jobs))
    room = _room()
    while waiting or to_come:
        now = time.monotonic()
        while to_come and len(waiting) < room:
            index, job = to_come.popleft()
            if now >= job.deadline:
                words = f"no room in time: {room} children at once"
                outcomes[index] = Outcome(OutcomeStatus.UNTESTED, reason=words)
                continue
            job.start()
            waiting[index] = job
        late = [index for index, job in waiting.items() if now >= job.deadline]
        for index in late:  # all at once: each needs a moment to answer
            waiting[index].ask()
        for index in late:
            outcomes[index] = waiting.pop(index).conclude(late=True)
        if not waiting:
            continue
        pipes = {job._pipe: index for index, job in waiting.items()}
        nearest = min(job.deadline for job in waiting.values())
        patience = min(max(0.0, nearest - time.monotonic()), 0.2)
        readable, _, _ = select.select(list(pipes), [], [], patience)
        for fd in readable:
            index = pipes[fd]
            if not waiting[index].pump():
                outcomes[index] = waiting.pop(index).conclude(late=False)
        tick()
    return [outcomes[index] for index in sorted(outcomes)]


def _room() -> int:
    """How many children at once: the limit of open files may be low, and is itself to be found."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return AT_ONCE
    free = limit - len(os.listdir("/proc/self/fd")) - _OWN_FILES
    return max(1, min(AT_ONCE, free // _FILES))


def _child(job: Job, pipe: int, parent: int) -> NoReturn:
    """Body of the child; never returns."""
    code = 1
    try:
        settle(job.name, parent)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(job._log, 1)
        os.dup2(job._log, 2)
        # Line by line: what a child said before it hung must not be lost in a buffer.
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable(file=job._stack, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=job._stack, all_threads=True)
        line = Line(pipe, job._started)
        line.send(_result(job.work, line))
        code = 0
    finally:
        os._exit(code)


def _result(work: Work, line: Line) -> dict[str, Any]:
    try:
        return {"facts": work(line)}
    except Skip as reason:
        return {"skip": str(reason)}
    except Untested as reason:
        return {"untested": str(reason)}
    except Exception:  # the boundary that turns whatever a check did into a fact
        return {"raised": traceback.format_exc(limit=-8)[-LOG_TAIL_BYTES:]}


class Line:
    """The child's end of the pipe; whole messages, from any thread."""

    def __init__(self, pipe: int, started: float) -> None:
        self._pipe = pipe
        self._started = started
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """One message: `{"facts"}`, `{"crumb"}`, …"""
        try:
            line = json.dumps(message)
        except (TypeError, ValueError) as error:
            line = json.dumps({"raised": f"the facts are not JSON: {error}"})
        data = memoryview(line.encode() + b"\n")
        with self._lock:
            while data:
                data = data[os.write(self._pipe, data) :]

    def breadcrumb(self, step: str, **details: Any) -> None:
        """Say what comes next, before it may block."""
        at_s = round(time.monotonic() - self._started, 4)
        self.send({"crumb": {"step": step, "at_s": at_s, **details}})

    def witness(self, name: str, value: Any) -> None:
        """Say something of this child's own state; the last value of a name holds."""
        self.send({"witness": {name: json.loads(json.dumps(value, default=str))}})


def _proc_text(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""


def _proc_state(pid: int) -> str:
    """State letter of /proc/PID/stat; the process name before it may hold any character."""
    after_name = _proc_text(pid, "stat").rpartition(")")[2].split()
    return after_name[0] if after_name else ""


def _tail(fd: int, limit: int, *, from_start: bool = False) -> str:
    size = os.fstat(fd).st_size
    start = 0 if from_start else max(0, size - limit)
    return os.pread(fd, limit, start).decode("utf-8", "replace").strip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
