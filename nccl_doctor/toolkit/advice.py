"""Fixes written as one line of a table, with their commands in backticks. Pure.

    `nvidia-smi -L` (all of them?); `nvidia-smi nvlink -e`; or `export A=0` (to see); ask the owner

Parts stand between `; `. Commands that follow each other are one way, `or` begins another, and so
does what is no command. A command that sets something is known by its first word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nccl_doctor.model.fixes import Fix, On, Step, look

_COMMAND = re.compile(r"(or )?`([^`]+)`(?: \((.*)\))?")
_CHANGES = ("# ", "unset ", "ulimit ", "modprobe ", "mkdir ", "pip ", "systemctl ", "sysctl -w ")


def fix_of(text: str, on: On = On.EVERY) -> str:
    """The fix of a line; the line itself where it has no command.

    Args:
        text: as above.
        on: where variables are set.
    """
    if "`" not in text:
        return text
    ways: list[list[Step] | str] = []
    for part in text.split("; "):
        found = _COMMAND.fullmatch(part)
        if found is None:
            ways.append(part.removeprefix("or "))
            continue
        step = _step(found[2], found[3] or "", on)
        if found[1] or not ways or isinstance(ways[-1], str):
            ways.append([step])
        else:
            ways[-1].append(step)
    first, *others = map(_way, ways)
    return Fix(*first.steps, text="" if first.steps else str(first), alternatives=others)


def _way(way: Iterable[Step] | str) -> Fix:
    return Fix(text=way) if isinstance(way, str) else Fix(*way)


def _step(command: str, note: str, on: On) -> Step:
    if command.startswith("export "):
        names = [word.partition("=")[0] for word in command.split()[1:] if "=" in word]
        return Step(command, on, undo=f"unset {' '.join(names)}", note=note)
    if command.startswith(_CHANGES):
        return Step(command, note=note)
    return look(command, note)
