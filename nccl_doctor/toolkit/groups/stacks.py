"""Stacks of `faulthandler`, without the parts that differ between equal ones. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

_FRAME = re.compile(r'\s*File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)')
# The last two parts of the path: as it is here, and as it stands in reports made before.
_BOUNDARIES = ("observe/child.py", "nccl_doctor/child.py")
"""Frames below it lead to the fork of this child, and differ between ranks."""
_SERVANTS = {"gather/store.py", "nccl_doctor/mailbox.py", "groups/witness.py"}
"""Our own threads that only watch."""
_TORCH = "site-packages/"
_MOST_FRAMES = 14

Frame = tuple[str, str, str]
"""Function, file (its last parts), line."""


def signature(stack: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Functions and files of every thread, without lines, addresses and thread ids."""
    return tuple(
        tuple((name, file) for name, file, _ in frames) for frames in _threads(stack) if frames
    )


def main_stack(stack: str) -> str:
    """The stack to read: the main thread first, the innermost call first, one line per call.

    A text without any frame is returned unchanged.
    """
    threads = [frames for frames in _threads(stack) if frames]
    if not threads:
        return stack
    lines = []
    for number, frames in enumerate(threads):
        if number:
            lines.append("another thread:")
        lines += [f"{name} ({file}:{line})" for name, file, line in frames[:_MOST_FRAMES]]
        if len(frames) > _MOST_FRAMES:
            lines.append(f"… and {len(frames) - _MOST_FRAMES} more")
    return "\n".join(lines)


def _threads(stack: str) -> list[list[Frame]]:
    """Frames of each thread, main thread first: `faulthandler` writes it last."""
    threads: list[list[Frame]] = []
    for line in stack.splitlines():
        frame = _frame(line)
        if frame is None:
            if "most recent call first" in line:
                threads.append([])
            continue
        if not threads:
            threads.append([])
        threads[-1].append(frame)
    kept = [
        frames
        for at, frames in enumerate(reversed(threads))
        if at == 0 or _SERVANTS.isdisjoint([file for _, file, _ in frames])
    ]
    return [_above(frames) for frames in kept]


@lru_cache(maxsize=4096)
def _frame(line: str) -> Frame | None:
    """The frame of a line; a thousand ranks that wait have the same lines."""
    match = _FRAME.match(line)
    return match and (match["name"], _short(match["file"]), match["line"])


def _above(frames: list[Frame]) -> list[Frame]:
    """The calls of the check and all that it called."""
    for at, (_, file, _) in enumerate(frames):
        if at and file in _BOUNDARIES:
            return frames[:at]
    return frames


def _short(path: str) -> str:
    """The path of a file within its package, the same on every host."""
    if _TORCH in path:
        return path.rpartition(_TORCH)[2]
    return "/".join(path.split("/")[-2:])
