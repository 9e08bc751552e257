"""The process that the user started: it watches the one that does the work, and cannot be stuck.

`watch` forks before anything is read. The child is the program; it may meet a disk that never
answers, a plug-in that blocks or ends the process, a signal at any moment. The parent opens no
file and imports nothing more. It ends the child at the deadline, takes the signals for as long as
the child cannot, and says so on stderr. It leaves with 0 only after the child has said that the
report is written, and only it becomes the COMMAND behind `--`: nobody has touched its environment,
its limits or its signals.

Where no process can be started, this one does the work itself, under an alarm, so that there is a
report that says so; it never leaves with 0 then.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nccl_doctor.system import forks, helpers, leaving, tick

GRACE_S = 1.8
"""Time after the deadline for the last words of the program itself."""
INTERRUPT_S = 12.0
"""Time for the program to leave after a signal: the hosts of a hostfile are waited for."""
_CALM_S = 3600.0
_REAP_S = 0.5
_SAY_S = 1.0
_LONG_S, _AGAIN_S = 10.0, 30.0
"""A line says what the program does once it takes that long, and then so often."""
_GIVE_BACK_S = 0.3
_TELL_S = 10.0  # most of it to import torch
LAST_S = GRACE_S + _GIVE_BACK_S + _REAP_S
"""Time after the deadline at which a program that hangs has been killed, at the latest."""
_FAILED = 3
_STOPPED = "tT"

Unable = Callable[[str, int], tuple[int, str]]
"""Given a message and an exit code: the exit code and the line on stdout of a call that has no
report, as the exit profile wants them."""


TellDeath = Callable[[Mapping[str, Any], str], None]
"""Given what a process said by `signed_in`, and the name of the signal that killed it: tells the
others. It runs in a child, and may import what it needs."""


@dataclass
class _Own:
    """State of the supervisor as a process of the program knows it.

    `line` is None without one. `worker` is the process that the supervisor waits for: the
    others are below it.
    """

    line: int | None = None
    worker: int = 0
    began: float = field(default_factory=time.monotonic)


_own = _Own()

# -- what the program says to it ------------------------------------------------------------------


def began() -> float:
    """The `time.monotonic()` second at which this process started; now, without a supervisor."""
    return time.monotonic() if _own.line is None else _own.began


def set_deadline(deadline: float) -> None:
    """Set the `time.monotonic()` second by which the program is to be gone."""
    helpers.leave_by(deadline)
    _say(deadline=deadline)


def put_off(deadline: float) -> None:
    """Set a later `time.monotonic()` second by which the program is to be gone; an earlier one than
    was set before changes nothing.
    """
    helpers.leave_by(deadline)
    _say(put_off=deadline)


def doing(what: str, limit_s: float) -> None:
    """Say what the program does, which nothing can interrupt, and the time limit of all of it;
    empty once that is over.
    """
    if what:
        tick.doing(what, limit_s)
    else:
        tick.hush()  # before there are others who would do it
    _say(doing=what)


def hold_for_reader() -> None:
    """Let the program wait for a pager, without a deadline; Ctrl-C is for the pager."""
    helpers.leave_by(float("inf"))
    _say(deadline=float("inf"), pages=True)


def take_signals() -> None:
    """Take the signals in this process from now on; the supervisor sends them on."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forks.SIGNALS)
    _say(takes_signals=True)


def signed_in(**about: Any) -> None:
    """Say what to tell the others if this process is killed; see `TellDeath`."""
    _say(signed_in={**about, "process": os.getpid()})


def written(code: int) -> None:
    """Say that the report is written and what its exit code is: the deadline changes it no more."""
    _say(written=code)


def done(code: int, command: Sequence[str] = ()) -> None:
    """Say that everything is done; of no effect in a process below the one that is watched.

    With a `command`, the supervisor becomes it if the code is 0.
    """
    if os.getpid() == _own.worker:
        _say(done=code, command=list(command))


def _say(**message: Any) -> None:
    if _own.line is None:
        return
    data = memoryview(json.dumps(message).encode() + b"\n")
    with contextlib.suppress(BrokenPipeError):  # then nobody is left to be told
        while data:
            data = data[os.write(_own.line, data) :]


# -- the supervisor -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """Limits that the supervisor holds a program to.

    Attributes:
        limit_s: seconds until the deadline, as long as the program has said nothing else.
        keeps: the program examines. A code of 0 needs a report that is written, and a signal
            before the program takes them is an exit code of ours; else this process dies of it, as
            any command would.
        speaks: say on stderr, where it is no terminal, what a program does for long.
        hands_over: a command is to follow: then a written report is not yet everything.
        unable: see `Unable`.
        tell_death: see `TellDeath`.
    """

    limit_s: float
    keeps: bool = True
    speaks: bool = False
    hands_over: bool = False
    unable: Unable = lambda message, code: (code, "")
    tell_death: TellDeath = lambda about, name: None


def watch(program: Callable[[], int], terms: Terms) -> int:
    """Run `program`, which returns its exit code, in a child and watch it; only from the main
    thread.

    Returns: the exit code, unless this process became the command.
    """
    _own.began = time.monotonic()
    forks.open_streams()
    signals = {*forks.to_catch(), signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    hear, say = os.pipe()
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    try:
        pid = os.fork()
    except OSError as error:
        why = "; raise the limit of processes (`ulimit -u`)" if error.errno == errno.EAGAIN else ""
        words = f"cannot start a process: {error.strerror}{why}"
        if not terms.keeps:
            return _leave_unable(words, _FAILED, terms.unable)
        _tell(2, f"nccl-doctor: {words}\n")
        pid = -1
    if pid < 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.setitimer(signal.ITIMER_REAL, terms.limit_s + GRACE_S)
        return program() or _FAILED
    if pid == 0:
        os.close(hear)
        _work(program, terms, say, parent)
    os.close(say)
    return _Supervisor(pid, hear, signals, before, terms).run()


def _work(program: Callable[[], int], terms: Terms, line: int, parent: int) -> NoReturn:
    code = _FAILED
    try:
        forks.die_with(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        _own.line, _own.worker = line, os.getpid()
        helpers.leave_by(_own.began + terms.limit_s)
        code = program()
        done(code)
    except MemoryError:
        _tell(2, "nccl-doctor: no memory is left (`ulimit -v`, or that of this host)\n")
    except BaseException:  # the boundary of the process
        traceback.print_exc()
    finally:
        os._exit(code)


class _Supervisor:
    def __init__(
        self,
        pid: int,
        hear: int,
        signals: set[signal.Signals],
        before: set[int],
        terms: Terms,
    ) -> None:
        self._pid = pid
        self._hear = hear
        self._signals = signals
        self._before = before
        self._ignored = {n for n in signals if signal.getsignal(n) == signal.SIG_IGN}
        self._terms = terms
        self._deadline = _own.began + terms.limit_s
        self._kill_at = self._deadline + GRACE_S
        self._members: dict[int, Mapping[str, Any]] = {}
        self._buffer = b""
        self._received: list[int] = []
        self._takes_signals = False
        self._written: int | None = None
        self._done: int | None = None
        self._command: Sequence[str] = ()
        self._pages = False
        self._doing = ""
        self._next_line = float("inf")

    def run(self) -> int:
        try:
            return self._watched()
        finally:
            tick.end()

    def _watched(self) -> int:
        wake = self._listen()
        while True:
            next_s = min(self._kill_at, self._next_line)
            left = min(max(0.0, next_s - time.monotonic()), _CALM_S)
            readable, _, _ = select.select([self._hear, wake], [], [], left)
            if self._hear in readable:
                self._read()
            if wake in readable:
                for number in os.read(wake, 256):
                    if number != signal.SIGCHLD and (code := self._interrupted(number)) is not None:
                        return code
            reaped, status = os.waitpid(self._pid, os.WNOHANG)
            if reaped:
                while select.select([self._hear], [], [], 0)[0] and self._read():
                    pass
                return self._ended(status)
            if time.monotonic() >= self._kill_at:
                return self._late()
            if time.monotonic() >= self._next_line:
                self._next_line += _AGAIN_S
                spent_s, limit_s = time.monotonic() - _own.began, self._deadline - _own.began
                _tell(2, f"nccl-doctor: {self._doing} ({spent_s:.0f} of {limit_s:g} s)\n")

    def _listen(self) -> int:
        """Have signals wake this process. Returns: the descriptor that they are read from."""
        wake, wake_end = forks.wake_pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        for number in self._signals:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return wake

    def _read(self) -> bool:
        data = os.read(self._hear, 1 << 16)
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._told(json.loads(line))
        return bool(data)

    def _told(self, message: Mapping[str, Any]) -> None:
        if "deadline" in message:
            self._end_at(message["deadline"])
        if "put_off" in message:
            self._end_at(max(self._deadline, message["put_off"]))
        if "doing" in message and self._terms.speaks and not tick.is_shown():
            self._doing = message["doing"]
            self._next_line = time.monotonic() + _LONG_S if self._doing else float("inf")
        self._pages = self._pages or "pages" in message
        self._takes_signals = self._takes_signals or "takes_signals" in message
        self._written = message.get("written", self._written)
        if "signed_in" in message:
            self._members[message["signed_in"]["process"]] = message["signed_in"]
        if "done" in message:
            self._done, self._command = message["done"], message["command"]

    def _end_at(self, deadline: float) -> None:
        self._deadline = deadline
        if not self._received:
            self._kill_at = deadline + GRACE_S

    def _interrupted(self, number: int) -> int | None:
        """Send a signal on, or end the program if it cannot take it yet; then the exit code."""
        if self._pages and number == signal.SIGINT:
            return None
        self._received.append(number)
        self._kill_at = min(self._kill_at, time.monotonic() + INTERRUPT_S)
        if self._done is not None:
            return None
        if self._takes_signals:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)
            return None
        self._end()
        if not self._terms.keeps and number != signal.SIGINT:
            _die_of(number)
        if not self._terms.keeps:
            return _leave_unable("interrupted", 130, self._terms.unable)
        name = forks.signal_name(number)
        return _leave_unable(f"received {name} before the examination", _FAILED, self._terms.unable)

    def _ended(self, status: int) -> int:
        if self._done is not None and (
            self._done or self._written is not None or not self._terms.keeps
        ):
            return self._leave(self._done)
        if (code := self._settled) is not None:
            return code
        how = os.waitstatus_to_exitcode(status)
        what = f"was killed by {forks.signal_name(-how)}" if how < 0 else f"ended with {how}"
        if how < 0 and not self._received:
            self._tell_the_others(forks.signal_name(-how))
        before = "its answer" if self._done is None else "its report"
        message = f"process {self._pid}, which did the work, {what} before {before}"
        return _leave_unable(message, _FAILED, self._terms.unable)

    def _tell_the_others(self, name: str) -> None:
        """Tell the others that they need not wait for a killed process and those below it."""

        def tell() -> None:
            for about in self._members.values():
                self._terms.tell_death(about, name)

        if self._members:
            _apart(tell, min(self._kill_at, time.monotonic() + _TELL_S))

    def _leave(self, code: int) -> int:
        return self._become(self._command) if self._command and not code else code

    @property
    def _settled(self) -> int | None:
        """Exit code that a report which is written stands for, unless a command was to follow."""
        return None if self._terms.hands_over and not self._written else self._written

    def _become(self, command: Sequence[str]) -> int:
        """Become the command, unless a signal came; with the signals as they were at the start."""
        tick.end()
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        pending = sorted(signal.sigpending() & set(forks.SIGNALS))
        if self._received or pending:
            name = forks.signal_name((self._received or pending)[0])
            return _leave_unable(
                f"received {name}: the command is not started", _FAILED, self._terms.unable
            )
        signal.set_wakeup_fd(-1)
        # Those that this process handles, and those that Python ignores.
        for number in (*self._signals - self._ignored, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        for number in self._ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
        try:
            os.execvp(command[0], list(command))
        except OSError as error:
            from nccl_doctor.system.terminal import complain  # the work is done: now it may

            complain(f"cannot run {command[0]}: {error.strerror}")
        return 2

    def _late(self) -> int:
        state, wchan = forks.look_at(self._pid)
        self._end()
        if self._done is not None:
            return self._leave(self._done)
        if (code := self._settled) is not None:
            return code
        what = f"process {self._pid} did not end"
        if state in _STOPPED:
            what = f"process {self._pid} is stopped (state {state})"
        elif state == "D":
            what = f"process {self._pid} waits in the kernel (state D, {wchan or 'unknown'})"
        why = f"the deadline has passed ({self._deadline - _own.began:g} s)"
        if self._received:
            why = f"received {forks.signal_name(self._received[0])}"
        return _leave_unable(f"{why}; {what}, and there is no report", _FAILED, self._terms.unable)

    def _end(self) -> None:
        """Kill the program; its own children die with it. Returns also if it cannot be killed."""
        _apart(lambda: leaving.give_back_below(self._pid), time.monotonic() + _GIVE_BACK_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        until = time.monotonic() + _REAP_S
        while time.monotonic() < until and not os.waitpid(self._pid, os.WNOHANG)[0]:
            time.sleep(0.005)


def _die_of(number: int) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # not reached unless it is blocked


def _leave_unable(message: str, code: int, unable: Unable) -> int:
    tick.hush()
    code, line = unable(message, code)
    _tell(2, f"nccl-doctor: {message}\n")
    if line:
        _tell(1, f"{line}\n")
    return code


def _tell(stream: int, text: str) -> None:
    """Write a line in a process of its own: the reader of the stream may have stopped."""
    data = text.encode("utf-8", "backslashreplace")
    _apart(lambda: os.write(stream, data), time.monotonic() + _SAY_S)


def _apart(work: Callable[[], object], until: float) -> None:
    """Call a function in a child, which is left alone if it has not ended in time."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:  # there may be no process to be had
        with contextlib.suppress(Exception):
            work()
        return
    if pid == 0:
        try:
            forks.die_with(parent)
            with contextlib.suppress(Exception):  # nobody is left who could do something about it
                work()
        finally:
            os._exit(0)
    while time.monotonic() < until and not os.waitpid(pid, os.WNOHANG)[0]:
        time.sleep(0.002)
