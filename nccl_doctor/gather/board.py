"""The board of a run on a terminal, as lines: what runs now, who is here, who is behind. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from nccl_doctor.model.findings import Layer
from nccl_doctor.toolkit.slurm import host_ranges
from nccl_doctor.toolkit.terminal import safe

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
class Row:
    """One host, or several without a name: how it stands, and whether others wait for it."""

    name: str
    words: str
    late: bool = False


@dataclass(frozen=True)
class Step:
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


def lay_out(step: Step, rows: Sequence[Row], width: int, height: int = MOST_LINES) -> list[str]:
    """The board, of at most `height` lines, none longer than `width`."""
    lines = [step.line(width)]
    shown = list(rows)
    rest = ""
    if len(rows) > _FEW or len(rows) >= height:
        late: dict[str, list[str]] = defaultdict(list)
        for row in rows:
            if row.late:
                late[row.words].append(row.name)
        shown = [Row(host_ranges(names), words, late=True) for words, names in late.items()]
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
