"""One forked child that serves one piece of work, or several in turn, as seen from both its ends.

The child announces every step before it blocks (a breadcrumb), and sends what it found as one JSON
line. Before it takes the next piece of work it waits for the word of whoever forked it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nccl_doctor.model.check import Skip, Untested
from nccl_doctor.model.cluster import MAX_BREADCRUMBS, Outcome, OutcomeStatus
from nccl_doctor.observe.line import ChildLine, NoLine, sendable
from nccl_doctor.system.forks import (
    Standstill,
    close_others,
    end,
    fork,
    kill,
    living,
    look_at,
    rename,
    settle,
    signal_name,
    unnamed_file,
)
from nccl_doctor.system.leaving import leave
from nccl_doctor.system.masking import masked
from nccl_doctor.toolkit import cpu_wait

MAX_MESSAGE_BYTES = 8 << 20
"""Largest size of facts; a check with more has a fault."""
LOG_TAIL_BYTES = 4000
STACK_BYTES = 16000
_BEFORE_BYTES = 2000
"""Bytes of a log before those that are kept: the word that names a secret may stand there."""
FILES = 4
"""Open files of the parent for each child; later children inherit them."""
LEAST_WAIT_S = 0.2
"""Least wait for a processor for which a deadline is put off."""
BUSY_HOST = "the processors of this host are busy"
_MUTE = ("T", "t", "Z", "")
"""State letters of processes that react to no signal."""
_GO_ON, _LEAVE = b"+", b"-"

Work = Callable[[ChildLine], Mapping[str, Any]]
"""Function that runs in the child: gets the line to the parent, returns the facts."""


@dataclass
class ProbeJob:
    """One piece of work.

    `deadline` is a `time.monotonic()` second. `name` becomes the child's process name. `heard` is
    given each breadcrumb as it comes. All with the same name in `shared` may run in one child. One
    that is `unaided` is done in this process where no child can be started. The child keeps the
    open `files` of this process. The time in which it waited for a processor it gets in addition,
    up to `spare_s`; so does one that begins late, if it `asked_s` for more than is left.
    """

    name: str
    work: Work
    deadline: float
    heard: Callable[[Mapping[str, Any]], None] = lambda crumb: None
    shared: str = ""
    unaided: bool = False
    files: tuple[int, ...] = ()
    spare_s: float = 0.0
    asked_s: float = 0.0

    def begin(self) -> None:
        """Put the deadline off, where the job begins so late that it lacks time."""
        self.put_off(time.monotonic() + self.asked_s - self.deadline)

    def put_off(self, more_s: float) -> None:
        """Put the deadline off by this, or by what there is to spare."""
        more_s = max(0.0, min(more_s, self.spare_s))
        self.deadline += more_s
        self.spare_s -= more_s


@dataclass
class Messages:
    """Messages of the child about its current job; `since` is when the job began, `waited_s` how
    long the child had waited for a processor by then, and `given_s` what it got for such waits.
    """

    since: float
    waited_s: float = 0.0
    given_s: float = 0.0
    log_from: int = 0
    received: int = 0
    breadcrumbs: deque[dict[str, Any]] = field(
        default_factory=lambda: deque(maxlen=MAX_BREADCRUMBS)
    )
    witness: dict[str, Any] = field(default_factory=dict)
    so_far: dict[str, Any] | None = None
    result: dict[str, Any] | None = None


class Child:
    """The parent's end. `jobs` are those it has yet to do, the first of them is under way."""

    def __init__(self, jobs: Iterable[ProbeJob]) -> None:
        """Fork it.

        Raises:
            OSError: no more processes can be started, or no more files opened.
        """
        self.jobs = deque(jobs)
        self.alone = len(self.jobs) == 1
        name = self.job.name
        self._state = self._wchan = ""
        self._standstill = Standstill()
        self._was_in_kernel = self._is_starved = False
        self._buffer = bytearray()
        self._messages = Messages(time.monotonic())
        self.job.begin()
        with contextlib.ExitStack() as opened:  # closed again where the next cannot be had
            self.pipe, write_end = _kept(opened, *os.pipe())
            go_read, self._go = _kept(opened, *os.pipe())
            (self._log,) = _kept(opened, unnamed_file(f"{name}-log"))
            (self._stack,) = _kept(opened, unnamed_file(f"{name}-stack"))
            pid, parent = fork()
            opened.pop_all()
        if pid == 0:
            os.close(self.pipe)
            os.close(self._go)
            _serve(self, write_end, go_read, parent)
        os.close(write_end)
        os.close(go_read)
        self._pid = pid
        with contextlib.suppress(OSError):  # the child does it too: whoever comes first
            os.setpgid(pid, pid)
        living.add(pid)

    @property
    def job(self) -> ProbeJob:
        """The current job."""
        return self.jobs[0]

    @property
    def busy_s(self) -> float:
        """Seconds that it has been at it."""
        return time.monotonic() - self._messages.since

    @property
    def lacked_s(self) -> float:
        """Seconds of its job in which it waited for a processor."""
        return max(0.0, self._waited_s() - self._messages.waited_s)

    def put_off(self) -> bool:
        """Put the deadline of its job off by as long as it waited for a processor since it was last
        asked, where that is worth it, and it does not wait for anything else now. Returns: whether
        it was.
        """
        self._look()
        if self._state != "R":
            return False
        more_s = min(self.lacked_s - self._messages.given_s, self.job.spare_s)
        if more_s < LEAST_WAIT_S:
            return False
        self._messages.given_s += more_s
        self.job.put_off(time.monotonic() + more_s - self.job.deadline)
        return True

    def _waited_s(self) -> float:
        return cpu_wait.waited_s(self._pid) or 0.0

    def is_stopped(self) -> bool:
        """Look at it. Returns: whether a signal has stopped it for too long."""
        self._look()
        return self._standstill.is_too_long(self._state)

    def pump(self) -> bool:
        """Read what the child has sent. Returns False when it will send no more."""
        messages = self._messages
        data = os.read(self.pipe, 1 << 16)
        messages.received += len(data)
        if messages.received > MAX_MESSAGE_BYTES:
            messages.result = {"raised": f"the facts are larger than {MAX_MESSAGE_BYTES} bytes"}
            return False
        self._buffer += data
        if b"\n" not in data:
            return bool(data)
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            message = json.loads(line)
            if "crumb" in message:
                messages.breadcrumbs.append(message["crumb"])
                self.job.heard(message["crumb"])
            elif "witness" in message:
                messages.witness.update(message["witness"])
            elif "so_far" in message:
                messages.so_far = message["so_far"]
            else:
                messages.result = message
        return bool(data)

    @property
    def ready(self) -> bool:
        """True if it has answered, and waits for its next job."""
        return self._messages.result is not None and len(self.jobs) > 1

    def send_on(self) -> Outcome:
        """Send it on to its next job. Returns: how the last one ended."""
        outcome = self._outcome(late=False, status=None)
        self.jobs.popleft()
        size = os.fstat(self._log).st_size
        self._messages = Messages(time.monotonic(), self._waited_s(), log_from=size)
        self.job.begin()
        self._say(_GO_ON)
        return outcome

    def relieve(self) -> list[ProbeJob]:
        """Take the jobs that have not begun away from the child. Returns: these jobs."""
        rest = list(self.jobs)[1:]
        if rest:
            self.jobs = deque([self.job])
            self._say(_LEAVE)
        return rest

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead, which its own pipe tells
            os.write(self._go, word)

    def ask(self) -> None:
        """Look at a stuck child as it is, then make it write its Python stack, if it can answer."""
        self._look()
        self._was_in_kernel = self._state == "D"
        self._is_starved = self._state == "R" and 2 * self.lacked_s > self.busy_s
        if self._state not in _MUTE:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGUSR1)

    def answered(self) -> bool:
        """One that was asked has written its stack, or never will."""
        if self._was_in_kernel:  # who reads from a disk is there for moments only, then writes
            self._look()
        has_written = os.fstat(self._stack).st_size > 0
        is_on_its_way = self._was_in_kernel and self._state in ("D", "R")
        return self._state in _MUTE or (has_written and not is_on_its_way)

    def _look(self) -> None:
        self._state, self._wchan = look_at(self._pid)

    def kill(self) -> None:
        """End it at once; to be followed by `conclude`."""
        kill(self._pid)

    def conclude(self, by: float | None = None) -> Outcome:
        """End the child and say how it ended.

        `by`: of one that missed its deadline, was asked what it does, and was killed, the
        `time.monotonic()` second until which to wait for its end.
        """
        late = by is not None
        status = end(self._pid, patient=not late, by=by)
        living.discard(self._pid)
        outcome = self._outcome(late, status)
        for fd in (self.pipe, self._go, self._log, self._stack):
            os.close(fd)
        return outcome

    @property
    def fell(self) -> bool:
        """True if it ended without an answer, and had other jobs before or after this one."""
        return self._messages.result is None and not self.alone

    def _outcome(self, late: bool, status: int | None) -> Outcome:
        messages = self._messages
        common: dict[str, Any] = {
            "breadcrumbs": tuple(messages.breadcrumbs),
            "duration_s": round(self.busy_s, 4),
        }
        result = messages.result
        if result is not None and "facts" in result:
            part = result.get("untested", "")
            return Outcome(OutcomeStatus.OK, facts=result["facts"], reason=part, **common)
        if result is not None and "skip" in result:
            return Outcome(OutcomeStatus.SKIPPED, reason=result["skip"], **common)
        if result is not None and "untested" in result:
            return Outcome(OutcomeStatus.UNTESTED, reason=result["untested"], **common)
        if result is None and late and messages.so_far is not None:
            step = messages.breadcrumbs[-1]["step"] if messages.breadcrumbs else "its last step"
            return Outcome(OutcomeStatus.OK, messages.so_far, reason=f"hung in {step}", **common)
        if result is None and late and self._is_starved:  # its state tells nothing of what it did
            reason = f"not done in time: {BUSY_HOST}"
            return Outcome(OutcomeStatus.UNTESTED, reason=reason, **common)
        common["log_tail"] = _tail(self._log, messages.log_from)
        if result is not None:
            return Outcome(OutcomeStatus.RAISED, reason=result["raised"], **common)
        common["stack"] = _text(self._stack, 0, STACK_BYTES)
        common["witness"] = messages.witness
        if late:
            return Outcome(OutcomeStatus.HUNG, state=self._state, wchan=self._wchan, **common)
        if status is not None and os.WIFSIGNALED(status):
            name = signal_name(os.WTERMSIG(status))
            return Outcome(OutcomeStatus.DIED, signal=name, **common)
        code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None
        return Outcome(OutcomeStatus.DIED, exit_code=code, **common)


def _kept(opened: contextlib.ExitStack, *descriptors: int) -> tuple[int, ...]:
    for each in descriptors:
        opened.callback(os.close, each)
    return descriptors


def _serve(child: Child, write_end: int, go: int, parent: int) -> NoReturn:
    """Body of the child; never returns."""
    code, deadline, orderly = 1, child.job.deadline, False
    try:
        settle(child.job.name, parent)
        close_others((write_end, go, child._log, child._stack, *child.job.files))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(child._log, 1)
        os.dup2(child._log, 2)
        # Line by line: what a child said before it hung must not be lost in a buffer.
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable(file=child._stack, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=child._stack, all_threads=True)
        while True:
            line = ChildLine(write_end)
            result = _result(child.job.work, line)
            line.send(result)
            deadline, orderly = child.job.deadline, "raised" not in result
            child.jobs.popleft()
            if not child.jobs or os.read(go, 1) != _GO_ON:
                break
            rename(child.job.name)
            child.job.begin()
        code = 0
    finally:
        leave(code, deadline, orderly=orderly)


def _result(work: Work, line: ChildLine) -> dict[str, Any]:
    try:
        return {"facts": work(line)}
    except Skip as reason:
        return {"skip": str(reason)}
    except Untested as reason:
        known = {} if reason.facts is None else {"facts": reason.facts}
        return {"untested": str(reason), **known}
    except Exception:  # the boundary that turns whatever a check did into a fact
        return {"raised": masked(traceback.format_exc(limit=-8))[-LOG_TAIL_BYTES:]}


def outcome_without_child(job: ProbeJob, why: str) -> Outcome:
    """Outcome of a job for which no child can be started: of one that is `unaided`, done here."""
    untested = Outcome(OutcomeStatus.UNTESTED, reason=why)
    if not job.unaided:
        return untested
    result = sendable(_result(job.work, NoLine()))
    return Outcome(OutcomeStatus.OK, facts=result["facts"]) if "facts" in result else untested


def _tail(fd: int, start: int) -> str:
    """The end of what was written since `start`."""
    size = os.fstat(fd).st_size
    limit = LOG_TAIL_BYTES + _BEFORE_BYTES
    return _text(fd, max(start, size - limit), limit)[-LOG_TAIL_BYTES:].strip()


def _text(fd: int, start: int, limit: int) -> str:
    return masked(os.pread(fd, limit, start).decode("utf-8", "replace").strip())
