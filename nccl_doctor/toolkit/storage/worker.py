"""A process that works in one folder, step by step, and may never come back from its disk.

It is asked over a pipe, and waited for so long only. It does not die with the process that asks: it
sees the end of the pipe, and first removes what it has written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from nccl_doctor.system import forks

_LINE = 1 << 16
_LAST_S = 1.0
"""Time for all to put away what they wrote, once nobody asks any more."""

Step = Callable[..., Mapping[str, Any]]


class Desk:
    """Abilities of a worker: a function for each step. It is made before the fork."""

    steps: Mapping[str, Step]

    def put_away(self) -> None:
        """Remove what is left of this process's files; called before it ends."""


class StorageWorker:
    """The asking end of one process. `late`: it did not answer once, and is not asked again."""

    def __init__(self, name: str, desk: Desk, life_s: float) -> None:
        """Fork it; after `life_s` seconds it is gone, unless its disk keeps even a dead process.

        Raises:
            OSError: no process can be started.
        """
        theirs, self._ask = os.pipe()
        self._hear, said = os.pipe()
        try:
            self._pid, parent = forks.fork()
        except OSError:
            for end in (theirs, self._ask, self._hear, said):
                os.close(end)
            raise
        if self._pid == 0:
            _serve(name, parent, desk, (theirs, said), life_s)
        os.close(theirs)
        os.close(said)
        self.late = False

    def close(self, kill: bool = False) -> None:
        """Let it end. With `kill` at once: it has written nothing."""
        if self._ask >= 0:
            os.close(self._ask)
            os.close(self._hear)
            self._ask = -1
            if kill:
                forks.kill(self._pid)

    def reap(self, by: float) -> None:
        """Wait for its end, but not beyond a `time.monotonic()` second; it ends later by itself."""
        while not os.waitpid(self._pid, os.WNOHANG)[0] and time.monotonic() < by:
            time.sleep(0.002)


def close_all(workers: Sequence[StorageWorker]) -> None:
    """Let all end."""
    for worker in workers:
        worker.close()
    by = time.monotonic() + _LAST_S
    for worker in workers:
        worker.reap(by)


def ask(
    workers: Mapping[int, StorageWorker],
    step: str,
    words: Mapping[int, Mapping[str, Any]],
    limit_s: float,
) -> dict[int, dict[str, Any]]:
    """Ask workers for one step, all at once.

    Args:
        workers: by number; those that were late before are not asked.
        step: of their desks.
        words: number → arguments of the step; others are not asked.
        limit_s: seconds for an answer.

    Returns: number → answer of the step; `{"error": {"step", "errno", "text"}}` where it failed;
    `{"hung": {"step", "after_s", "state", "wchan"}}` where no answer came.

    Raises:
        RuntimeError: a step raised anything but an OSError; its traceback.
    """
    began = time.monotonic()
    waiting = {}
    for number, arguments in words.items():
        worker = workers[number]
        if worker.late:
            continue
        with contextlib.suppress(BrokenPipeError):  # its end shows on the other pipe
            os.write(worker._ask, json.dumps([step, dict(arguments)]).encode() + b"\n")
        waiting[worker._hear] = number
    heard: dict[int, bytes] = dict.fromkeys(waiting, b"")
    answers: dict[int, dict[str, Any]] = {}
    while waiting and (left := began + limit_s - time.monotonic()) > 0:
        for end in select.select(list(waiting), [], [], left)[0]:
            data = os.read(end, _LINE)
            heard[end] += data
            if not data or data.endswith(b"\n"):
                number = waiting.pop(end)
                workers[number].late = not data
                answers[number] = json.loads(heard[end]) if data else {"error": _killed(step)}
    for number in waiting.values():
        answers[number] = _hung(workers[number], step, began)
    for answer in answers.values():
        if "broke" in answer:
            raise RuntimeError(answer["broke"])
    return answers


def _killed(step: str) -> dict[str, Any]:
    return {"step": step, "errno": None, "text": "the process that accessed it was killed"}


def _hung(worker: StorageWorker, step: str, began: float) -> dict[str, Any]:
    worker.late = True
    state, wchan = forks.look_at(worker._pid)
    after_s = round(time.monotonic() - began, 1)
    return {"hung": {"step": step, "after_s": after_s, "state": state, "wchan": wchan}}


def _serve(name: str, parent: int, desk: Desk, pipes: tuple[int, int], life_s: float) -> NoReturn:
    """Body of the process; never returns."""
    asked, answers = pipes
    try:
        forks.settle(name, parent)
        forks.outlive()
        forks.close_others(pipes)
        end = time.monotonic() + life_s
        signal.alarm(math.ceil(life_s) + 1)  # ends it in a wait for the disk that can be ended
        rest = b""
        while data := _told(asked, end):
            rest += data
            if rest.endswith(b"\n"):
                step, arguments = json.loads(rest)
                rest = b""
                os.write(answers, json.dumps(_answer(desk, step, arguments)).encode() + b"\n")
    finally:
        try:
            desk.put_away()
        finally:
            os._exit(0)


def _told(asked: int, end: float) -> bytes:
    """The next words, or nothing at the end of them or of the time."""
    left = end - time.monotonic()
    return os.read(asked, _LINE) if select.select([asked], [], [], max(0.0, left))[0] else b""


def _answer(desk: Desk, step: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return desk.steps[step](**arguments)
    except OSError as error:
        return {"error": {"step": step, "errno": error.errno, "text": error.strerror or str(error)}}
    except Exception:  # the boundary of the process: whoever asks has to know
        return {"broke": traceback.format_exc(limit=-8)}
