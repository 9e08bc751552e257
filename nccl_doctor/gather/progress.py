"""Progress of a run on stderr: a board on a terminal, redrawn in place; else a line for long waits.

Below the board the cursor stands on a line of its own: what anybody else writes, also at the end of
a run that is killed, begins there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.messages import SignIn
from nccl_doctor.model.findings import Layer, numbered
from nccl_doctor.system import tick
from nccl_doctor.system.deadline import no_more
from nccl_doctor.system.terminal import complain, obeys_escapes, safe
from nccl_doctor.toolkit.slurm import host_ranges

# The board of a run on a terminal, as lines: what runs now, who is here, who is behind. Pure.


MOST_LINES = 12
_FEW = 8
"""Hosts of which each has a line; of more, only those that are behind."""


class Phase(IntEnum):
    """The phases of a run, in their order."""

    START = 1
    THIS_HOST = 2
    SIGN_IN = 3
    NETWORK = 4
    GROUPS = 5
    SPEED = 6
    VERDICT = 7


def phase_of(layer: Layer) -> Phase:
    """Phase in which the rounds of a check of this layer are held."""
    if layer is Layer.SPEED:
        return Phase.SPEED
    in_groups = (Layer.DEVICE, Layer.GROUP, Layer.COLLECTIVE)
    return Phase.GROUPS if layer in in_groups else Phase.NETWORK


@dataclass(frozen=True)
class BoardRow:
    """One host, or several without a name: how it stands, and whether others wait for it."""

    name: str
    words: str
    late: bool = False


@dataclass(frozen=True)
class CurrentStep:
    """The step that runs now, its time so far, and the limit that ends it."""

    doing: str
    spent_s: float
    limit_s: float
    phase: Phase | None = None

    def line(self, width: int = 1000) -> str:
        """The step in one line: what does not fit is cut from its words, not from its times."""
        before = f"[{self.phase.value}/{len(Phase)}] " if self.phase else ""
        after = f" ({min(self.spent_s, self.limit_s):.0f} of {self.limit_s:.0f} s)"
        return before + _cut(safe(self.doing), width - len(before) - len(after)) + after


def lay_out(
    step: CurrentStep, rows: Sequence[BoardRow], width: int, height: int = MOST_LINES
) -> list[str]:
    """The board, of at most `height` lines, none longer than `width`."""
    lines = [step.line(width)]
    shown = list(rows)
    rest = ""
    if len(rows) > _FEW or len(rows) >= height:
        late: dict[str, list[str]] = defaultdict(list)
        for row in rows:
            if row.late:
                late[row.words].append(row.name)
        shown = [BoardRow(host_ranges(names), words, late=True) for words, names in late.items()]
        others = len(rows) - sum(map(len, late.values()))
        rest = f"{others} other hosts are not behind" if others else ""
    room = height - len(lines) - bool(rest)
    if len(shown) > room:
        room = max(0, height - 2)
        rest = f"and {len(shown) - room} more"
    name_width = min(max((len(safe(row.name)) for row in shown[:room]), default=0), width // 2)
    for row in shown[:room]:
        name = _cut(safe(row.name), name_width).ljust(name_width)
        lines.append(_cut(f"  {name}  {safe(row.words)}", width))
    if rest:
        lines.append(_cut(f"  {rest}", width))
    return lines[:height]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."[: max(0, width)]


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
        self._rows: Callable[[], Sequence[BoardRow]] = tuple
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
        tick.hush()
        self._phase = phase if self._phase is None else max(self._phase, phase or self._phase)
        if doing != self.doing:
            self.doing = doing
            self._next = 0.0
        self.tick()

    def people(self, rows: Callable[[], Sequence[BoardRow]]) -> None:
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
        tick.hush()
        self._wipe()
        self._shown = self._logs = False

    def _step(self) -> CurrentStep:
        now, end = time.monotonic(), self._deadline + self._more()
        if self._until is None:
            return CurrentStep(self.doing, now - self._began, end - self._began, self._phase)
        limit = min(self._until, end) - self._step_began
        return CurrentStep(self.doing, now - self._step_began, max(0.0, limit), self._phase)

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


# Rows of the board: how each host of a run stands, as rank 0 knows it. Pure.


def rows_of_sign_in(evidence: EvidenceLog, *, named: bool) -> list[BoardRow]:
    """The hosts that have signed in, and who is missing; `named`: by the names of the hosts."""
    names = dict.fromkeys(_name(evidence.who(seat), named) for seat in evidence.seats)
    rows = [BoardRow(name, "here") for name in names]
    missing = evidence.not_here()
    return [*rows, *([BoardRow(missing, "not here yet", late=True)] if missing else [])]


def rows_of_round(
    evidence: EvidenceLog, answered: Mapping[int, bool], *, named: bool
) -> list[BoardRow]:
    """The hosts of a round; `answered` says of each seat whether its answer is there."""
    awaited: dict[str, list[int]] = {}
    for seat, is_there in answered.items():
        who = evidence.who(seat)
        late = awaited.setdefault(_name(who, named), [])
        if not is_there and who is not None and who.launch.rank is not None:
            late.append(who.launch.rank)
    return [
        BoardRow(
            name, f"{numbered('rank', ranks)} not done yet" if ranks else "done", late=bool(ranks)
        )
        for name, ranks in awaited.items()
    ]


def _name(who: SignIn | None, named: bool) -> str:
    if who is not None and named:
        return who.host_name
    node = None if who is None else who.launch.node_rank
    return "a host" if node is None else f"node {node}"
