"""Calls to a driver in children of a probe child, so that one that never returns blocks no other.

A call on a faulty GPU may hang forever, or kill its process. Each GPU is therefore read in its own
process: a GPU that hangs costs the deadline and is named, and the answers of the others are there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

Crumb = Callable[..., None]
Work = Callable[[Crumb], Any]
"""A function that leaves a breadcrumb before each call and returns what JSON can hold."""

_PR_SET_PDEATHSIG = 1
_REAP_S = 0.3
_PATIENCE_S = 1.0


@dataclass
class Ended:
    """The end of one piece of work.

    Attributes:
        value: what it returned; None where it did not.
        how: empty where it returned, else how it ended: `did not return within 30 s`, the
            name of a signal, or the last line of an exception.
        raised: the traceback of an unexpected error; a mistake of the work, not of the driver.
        crumb: its last breadcrumb, with `step`.
        state, wchan: of a stuck process, as /proc has them.
    """

    value: Any = None
    how: str = ""
    raised: str = ""
    crumb: Mapping[str, Any] = field(default_factory=dict)
    state: str = ""
    wchan: str = ""


def each_apart(works: Iterable[Work], limit_s: float, crumb: Crumb) -> list[Ended]:
    """Run all at once, each in a process of its own, for at most `limit_s` seconds.

    Args:
        works: what to run.
        limit_s: seconds after which those that have not returned are killed; may be infinite.
        crumb: called with every breadcrumb of every child, as it comes.

    Returns: one for each of `works`, in their order.

    Raises:
        OSError: no process can be started.
    """
    children = [_Child(work) for work in works]
    until = time.monotonic() + limit_s
    open_pipes = {child.pipe: child for child in children}
    try:
        while open_pipes and (left := until - time.monotonic()) > 0:
            readable, _, _ = select.select(list(open_pipes), [], [], min(left, _PATIENCE_S))
            for pipe in readable:
                if not open_pipes[pipe].pump(crumb):
                    del open_pipes[pipe]
        for child in open_pipes.values():
            child.give_up(f"did not return within {limit_s:.0f} s")
    finally:
        for child in children:
            child.end()
    return [child.ended for child in children]


class _Child:
    """A child process and its result."""

    def __init__(self, work: Work) -> None:
        self.ended = Ended()
        self._returned = False
        self._rest = b""
        self.pipe, write_end = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _run(work, write_end, parent)
        os.close(write_end)

    def pump(self, crumb: Crumb) -> bool:
        """Read what the child wrote. Returns: whether more may come."""
        data = os.read(self.pipe, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            kind, said = json.loads(line)
            if kind == "crumb":
                self.ended.crumb = said
                details = {name: value for name, value in said.items() if name != "step"}
                crumb(said["step"], **details)
            elif kind == "value":
                self.ended.value, self._returned = said, True
            else:
                self.ended.raised, self._returned = said, True
                self.ended.how = said.strip().splitlines()[-1]
        return bool(data) and not self._returned

    def give_up(self, how: str) -> None:
        """Note the state of a child that is stuck."""
        self.ended.how = how
        self.ended.state = _proc(self._pid, "stat").rpartition(")")[2].strip()[:1]
        self.ended.wchan = _proc(self._pid, "wchan")

    def end(self) -> None:
        """Kill the child if it still runs; one that the kernel does not release is left."""
        os.close(self.pipe)
        if self.ended.how and not self._returned:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        until = time.monotonic() + _REAP_S
        while time.monotonic() < until:
            reaped, status = os.waitpid(self._pid, os.WNOHANG)
            if reaped:
                if not (self._returned or self.ended.how):
                    self.ended.how = _cause(status)
                return
            time.sleep(0.002)
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def _run(work: Work, pipe: int, parent: int) -> NoReturn:
    """Body of the child; never returns."""
    try:
        faulthandler.disable()  # its file is closed below
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        # Above all the pipe of the probe child: its reader waits as long as the pipe is open.
        os.closerange(3, pipe)
        os.closerange(pipe + 1, 1 << 16)

        def say(kind: str, said: Any) -> None:
            data = json.dumps([kind, said]).encode() + b"\n"
            while data:
                data = data[os.write(pipe, data) :]

        try:
            say("value", work(lambda step, **details: say("crumb", {"step": step, **details})))
        except Exception:  # the boundary of the process: the parent decides
            say("raised", traceback.format_exc(limit=-8)[-4000:])
    finally:
        os._exit(0)


def _cause(status: int) -> str:
    """The end of a child that wrote nothing, in words."""
    if not os.WIFSIGNALED(status):
        return f"ended the process with exit code {os.WEXITSTATUS(status)}"
    try:
        name = signal.Signals(os.WTERMSIG(status)).name
    except ValueError:
        name = f"signal {os.WTERMSIG(status)}"
    return f"killed the process, {name}"


def _proc(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""
