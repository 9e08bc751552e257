"""Whether the commands of a fix can be typed as they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from nccl_doctor.api import Fix, Step
from nccl_doctor.model.fixes import UNKNOWN

_UNKNOWN = re.compile(rf"\b(?:{'|'.join(UNKNOWN)})\b")
_LEFT_OUT = re.compile(r"<[a-z][\w -]*>|…|\.\.\.")
_FOR_ZSH = re.compile(r"(?:^|\s)=\w")
"""A word that zsh takes for the name of a command; `export A==b` has none."""


def steps_of(fix: str) -> Iterator[Step]:
    """Steps of a fix, and of its other ways."""
    if isinstance(fix, Fix):
        yield from fix.steps
        for other in fix.alternatives:
            yield from other.steps


def wrong_lines(fix: str) -> list[str]:
    """Commands that a shell would take otherwise than they are meant, and what takes them back."""
    lines = [line for step in steps_of(fix) for line in (step.command, step.undo) if line]
    return [line for line in lines if _is_wrong(line)]


def _is_wrong(line: str) -> bool:
    if _LEFT_OUT.search(line) or len(line.splitlines()) != 1:
        return True
    if line.startswith("#"):
        return not line.startswith("# ")
    return bool(_UNKNOWN.search(line) or _FOR_ZSH.search(line)) or not _is_whole(line)


def _is_whole(line: str) -> bool:
    try:
        return bool(shlex.split(line)) and line.count("$(") <= line.count(")")
    except ValueError:
        return False
