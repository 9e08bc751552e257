"""Progress of a run on stderr: a board on a terminal, redrawn in place; else a line for long waits.

Below the board the cursor stands on a line of its own: what anybody else writes, also at the end of
a run that is killed, begins there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nccl_doctor.gather.board import MOST_LINES, Phase, Row, Step, lay_out
from nccl_doctor.toolkit.more_time import no_more
from nccl_doctor.toolkit.terminal import complain, obeys_escapes

_EVERY_S = 0.2
_LONG_S, _AGAIN_S = 5.0, 30.0
"""Without a terminal, a wait for others is told once it takes that long, and then so often."""
_WAITS = (Phase.THIS_HOST, Phase.SIGN_IN)
"""Phases in which others may never come. What comes after has its place in the report."""


class Progress:
    """Writer of progress to stderr. `doing` is the step that runs now, shown or not; `speaks`:
    what it is to `tell` is printed.
    """

    def __init__(
        self,
        *,
        shown: bool,
        deadline: float,
        speaks: bool = False,
        logs: bool = False,
        more: Callable[[], float] = no_more,
        began: float | None = None,
    ) -> None:
        """`shown`: this participant has the board of its host; `speaks`: it speaks for its host,
        and prints lines of its own; `logs`: of long waits too, where there is no terminal;
        `more`: seconds by which the deadline is put off; `began`: the `time.monotonic()` second of
        the start of the run; now, if not given.
        """
        self.doing = "starting"
        self._shown = shown and obeys_escapes(sys.stderr)
        self.speaks, self._logs = speaks, speaks and logs and not sys.stderr.isatty()
        self._ends = self._shown or self._logs
        self._deadline, self._more = deadline, more
        self._began = self._step_began = time.monotonic() if began is None else began
        self._until: float | None = None
        self._phase: Phase | None = None
        self._rows: Callable[[], Sequence[Row]] = tuple
        self._drawn: list[str] = []
        self._lock = threading.Lock()  # the watchdog's thread takes the board away
        self._next = 0.0
        self._next_line = 0.0

    def say(self, doing: str, phase: Phase | None = None, until: float | None = None) -> None:
        """Say what runs now, and up to when it may; without `until`, as long as the whole run."""
        now = time.monotonic()
        if until != self._until:
            self._until, self._step_began = until, now
            self._next_line = now + _LONG_S
        self._phase = phase if self._phase is None else max(self._phase, phase or self._phase)
        if doing != self.doing:
            self.doing = doing
            self._next = 0.0
        self.tick()

    def people(self, rows: Callable[[], Sequence[Row]]) -> None:
        """Show these rows from now on; they are asked for each time that the board is drawn."""
        self._rows = rows

    def tick(self) -> None:
        """Draw the board again, at most some times a second."""
        now = time.monotonic()
        waits = self._until is not None and self._phase in _WAITS
        if self._logs and waits and now >= self._next_line:
            self._next_line = now + _AGAIN_S
            complain(self._step().line())
        if self._shown and now >= self._next:
            try:
                self._draw()
            except Exception:  # the terminal is gone, or a row cannot be made: never the run's end
                self._shown = False
            took = time.monotonic() - now
            self._next = now + max(_EVERY_S, 10 * took)  # the rows of thousands of ranks take time

    def tell(self, text: str) -> None:
        """Say something worth a line of its own, on a terminal or not."""
        if self.speaks:
            self._wipe()
            complain(text)

    def hear(self, crumb: Mapping[str, Any]) -> None:
        """Print a step that a check marked with `tell`: a wait that the user may want to end."""
        if crumb.get("tell"):
            self.tell(str(crumb["step"]))

    def end(self, text: str) -> None:
        """Say how it ended, on a host whose report another one has."""
        self.close()
        if self._ends:
            complain(text)

    def close(self) -> None:
        """Take the board away for good, before the report is printed."""
        self._wipe()
        self._shown = self._logs = False

    def _step(self) -> Step:
        now, end = time.monotonic(), self._deadline + self._more()
        if self._until is None:
            return Step(self.doing, now - self._began, end - self._began, self._phase)
        limit = min(self._until, end) - self._step_began
        return Step(self.doing, now - self._step_began, max(0.0, limit), self._phase)

    def _draw(self) -> None:
        size = _size()
        lines = lay_out(self._step(), self._rows(), size.columns - 1, min(MOST_LINES, size.lines))
        if not (sys.stderr.encoding or "").lower().startswith("utf"):
            lines = [line.replace("–", "-") for line in lines]
        self._put(lines, size.columns)

    def _wipe(self) -> None:
        if self._shown and self._drawn:
            self._put([], _size().columns)

    def _put(self, lines: list[str], columns: int) -> None:
        if not self._lock.acquire(timeout=1.0):  # its holder is stuck in a write
            return
        try:
            if not self._shown:
                return
            # A terminal that has become narrower has broken the old lines.
            up = sum(max(1, -(-len(line) // columns)) for line in self._drawn)
            back = f"\x1b[{up}A" if up else ""
            text = "".join(f"{line}\x1b[K\n" for line in lines)
            sys.stderr.write(f"{back}\r{text}\x1b[J")
            sys.stderr.flush()
            self._drawn = lines
        finally:
            self._lock.release()


def _size() -> os.terminal_size:
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):
        return os.terminal_size((80, 24))
    return os.terminal_size((size.columns or 80, size.lines or 24))
