"""`--retry`: examine again until the exit code would be 0, for hosts that come up late.

Every host and rank decides for itself, by the exit code that all have, and becomes the next attempt
by the way that a job is started: what this run has left behind is nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from nccl_doctor.system import supervisor
from nccl_doctor.system.terminal import complain

if TYPE_CHECKING:
    from nccl_doctor.model.report import Report

PAUSE_S = 5.0
"""Between two attempts: longer than ranks of one run take to leave, one after the other."""
_LEFT = struct.Struct("d")
_NOT_ASKED = -1.0
_AGAIN = (1, 3)
"""Exit codes that time may change: a usage error stays one."""


class Retries:
    """Whether another examination follows. What a forked rank decides is known here, too.

    Args:
        retry_s: what --retry gives, or None.
    """

    def __init__(self, retry_s: float | None) -> None:
        self._retry_s = retry_s
        self._shared = mmap.mmap(-1, _LEFT.size)
        _LEFT.pack_into(self._shared, 0, _NOT_ASKED)

    @property
    def left_s(self) -> float:
        """Seconds in which others may begin; 0 if the answer of this one counts."""
        return max(0.0, float(_LEFT.unpack_from(self._shared)[0]))

    def comes_again(self, code: int, report: Report | None = None) -> bool:
        """True if another attempt follows; the verdict of this one is then one line on stderr."""
        from nccl_doctor.model.kinds import RUN_INTERRUPTED

        left_s = 0.0
        codes = [finding.code for finding in report.findings] if report else []
        if self._retry_s is not None and code in _AGAIN and RUN_INTERRUPTED.code not in codes:
            left_s = self._retry_s - (time.monotonic() - supervisor.began()) - PAUSE_S
        if left_s <= 0:
            _LEFT.pack_into(self._shared, 0, max(0.0, self.left_s))
            return False
        _LEFT.pack_into(self._shared, 0, left_s)
        if report:
            causes = dict.fromkeys(cause.code for cause in report.root_causes)
            complain(
                f"{report.verdict.upper()}{': ' * bool(causes)}{', '.join(causes)}; examined again "
                f"in {PAUSE_S:g} s (--retry: {left_s:.0f} s left)"
            )
        return True

    def is_open(self, code: int) -> bool:
        """True if another attempt follows, also where no rank came to an answer."""
        asked = _LEFT.unpack_from(self._shared)[0] != _NOT_ASKED
        return self.left_s > 0 if asked else self.comes_again(code)

    def begin_next(self, code: int, command: Sequence[str] = ()) -> NoReturn:
        """End with what this attempt gave, and have the supervisor become the next one."""
        supervisor.written(code)
        supervisor.done(0, self._words(command))
        os._exit(0)

    def _words(self, command: Sequence[str]) -> list[str]:
        from nccl_doctor.launch.ssh.program import own_words

        own = sys.argv[1:]
        own = _without(own[: own.index("--")] if "--" in own else own, ("--retry", "--pause"))
        times = [f"--retry={self.left_s:.1f}", f"--pause={PAUSE_S:g}"]
        return [*own_words(), *own, *times, *(["--", *command] if command else [])]


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """Words of a line without these options and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and word.partition("=")[0] not in options:
            kept.append(word)
        skip = not skip and word in options
    return kept
