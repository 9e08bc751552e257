"""Calls to a driver in children of a probe child, so that one that never returns blocks no other.

A call on a faulty GPU may hang forever, or kill its process. Each GPU is therefore read in its own
process: a GPU that hangs costs the deadline and is named, and the answers of the others are there.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.model.cluster import MAX_BREADCRUMBS
from nccl_doctor.system.forks import Standstill, end, fork_child, kill, look_at, signal_name
from nccl_doctor.toolkit.gpu.nvml import Crumb

Work = Callable[[Crumb], Any]
"""A function that leaves a breadcrumb before each call and returns what JSON can hold."""

RESERVE_S = 6.0
"""Part of a deadline for what comes after reading each GPU, and for reporting."""
_REAP_S = 0.3
_PATIENCE_S = 1.0
_LATE = "did not return within"
_LOOK_AGAIN_S = 0.1
_LEAP_S = 1.0
"""A wait that takes this much longer than it was meant to: this process itself did not run."""


@dataclass
class WorkEnd:
    """The end of one piece of work.

    Attributes:
        value: what it returned; None where it did not.
        how: empty where it returned, else how it ended: `did not return within 30 s`, the
            name of a signal, or the last line of an exception.
        raised: the traceback of an unexpected error; a mistake of the work, not of the driver.
        crumb: its last breadcrumb, with `step`.
        state, wchan: of a stuck process, as /proc has them; of one that was seen in uninterruptible
            sleep (D) and a moment later was not, the later ones.
        stopped_s: seconds for which the process that waits was itself stopped, and nobody ran.
    """

    value: Any = None
    how: str = ""
    raised: str = ""
    crumb: Mapping[str, Any] = field(default_factory=dict)
    state: str = ""
    wchan: str = ""
    stopped_s: float = 0.0

    @property
    def died(self) -> bool:
        """True if its process ended without an answer."""
        return bool(self.how) and not (self.raised or self.how.startswith(_LATE))

    def without_answer(self) -> dict[str, Any]:
        """Facts of a GPU at which it ended so: `raised` `{call, how}`, else `wedged` `{call, how,
        state, wchan, stopped_s}`.
        """
        call = str(self.crumb.get("call", "the driver"))
        if self.raised:
            return {"raised": {"call": call, "how": self.how}}
        end = {"how": self.how, "state": self.state, "wchan": self.wchan}
        return {"wedged": {"call": call, **end, "stopped_s": self.stopped_s}}


def each_apart(works: Iterable[Work], limit_s: float, crumb: Crumb) -> list[WorkEnd]:
    """Run all at once, each in a process of its own, for at most `limit_s` seconds.

    Args:
        works: what to run.
        limit_s: seconds after which those that have not returned are killed; may be infinite. One
            that a signal has stopped is not waited for so long.
        crumb: called with the breadcrumbs of every child as they come, of many at once with as
            many of the last as are kept.

    Returns: one for each of `works`, in their order.

    Raises:
        OSError: no process can be started.
    """
    children = [_GpuProcess(work) for work in works]
    begun = time.monotonic()
    until = begun + limit_s
    open_pipes = {child.pipe: child for child in children}
    stopped_s = 0.0
    try:
        while open_pipes and (left := until - time.monotonic()) > 0:
            before = time.monotonic()
            readable, _, _ = select.select(list(open_pipes), [], [], min(left, _PATIENCE_S))
            leap_s = time.monotonic() - before - min(left, _PATIENCE_S)
            stopped_s += leap_s if leap_s > _LEAP_S else 0.0
            if not readable:
                running = [each for each in open_pipes.values() if not each.is_stopped()]
                if not running:
                    break
            for pipe in readable:
                if not open_pipes[pipe].pump(crumb):
                    del open_pipes[pipe]
        late = list(open_pipes.values())
        for child in late:
            child.look()
        if any(child.ended.state == "D" for child in late):
            time.sleep(_LOOK_AGAIN_S)  # one who reads from a disk is there for moments only
            for child in late:
                child.look()
        for child in late:
            waited_s = min(limit_s, time.monotonic() - begun)
            child.give_up(f"{_LATE} {waited_s:.0f} s", round(stopped_s, 1))
    finally:
        by = time.monotonic() + _REAP_S
        for child in children:
            child.conclude(by)
    return [child.ended for child in children]


def twice_apart(
    works: Sequence[Work], limit_s: float, left: Callable[[], float], crumb: Crumb
) -> list[WorkEnd]:
    """Results of `each_apart`; work whose process died is tried once more.

    `left`: seconds until this process is killed.
    """
    ends = each_apart(works, limit_s, crumb)
    died = [number for number, end in enumerate(ends) if end.died]
    limit_s = min(limit_s, left() - RESERVE_S)
    if died and limit_s > 1.0:
        again = each_apart([works[number] for number in died], limit_s, crumb)
        for number, end in zip(died, again, strict=True):
            ends[number] = end
    return ends


class _GpuProcess:
    """One process, in the process group of the probe child."""

    def __init__(self, work: Work) -> None:
        self.ended = WorkEnd()
        self._returned = False
        self._standstill = Standstill()
        self._rest = b""
        self.pipe, write_end = os.pipe()
        self._pid = fork_child(lambda: _serve(work, write_end))
        os.close(write_end)

    def pump(self, crumb: Crumb) -> bool:
        """Read what it says. Returns: whether more may come."""
        data = os.read(self.pipe, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines[-MAX_BREADCRUMBS - 1 :]:  # more at once would be lost all the same
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

    def is_stopped(self) -> bool:
        """Look at it. Returns: whether a signal has stopped it for too long."""
        self.look()
        return self._standstill.is_too_long(self.ended.state)

    def look(self) -> None:
        """Note how a stuck one stands."""
        self.ended.state, self.ended.wchan = look_at(self._pid)

    def give_up(self, how: str, stopped_s: float) -> None:
        """Kill a stuck one."""
        self.ended.how, self.ended.stopped_s = how, stopped_s
        kill(self._pid)

    def conclude(self, by: float) -> None:
        """Reap it, killing what still runs at the `time.monotonic()` second `by`; one that the
        kernel does not let go is left to it.
        """
        os.close(self.pipe)
        status = end(self._pid, patient=True, by=by)
        if status is None:
            kill(self._pid)
        elif not (self._returned or self.ended.how):
            self.ended.how = _cause(status)


def _serve(work: Work, pipe: int) -> int:
    """Body of the child."""
    faulthandler.disable()  # its file is closed below
    # Above all the pipe of the probe child: as long as it is open, somebody waits at it.
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
    return 0


def _cause(status: int) -> str:
    """Reason for the end of a process that gave no answer."""
    if os.WIFSIGNALED(status):
        return f"killed the process, {signal_name(os.WTERMSIG(status))}"
    return f"ended the process with exit code {os.WEXITSTATUS(status)}"
