"""The line on a terminal until a run has its board: what it waits for, second by second.

A process of its own writes it: importing torch may take a minute, on a file system that hangs it
never ends, and no thread runs meanwhile. It only ever holds up itself: a terminal that takes
nothing stops this process, and no other one. It is there before anything else is imported.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

_EVERY_S = 1.0
_ACK_S = 0.3
_MOST = 200
_HUSH = b"\0"
"""Asks for an empty line, and for an answer."""
_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Variables of which one that is not 0 says that another process speaks for this host."""


class _Ends:
    """The process that writes, and the ends of the pipes to it; None where there is none.

    `is_away`: this process has had the line taken away.
    """

    pid: int | None = None
    is_away: bool = False
    say: int | None = None
    hear: int | None = None


_line = _Ends()


def wanted(arguments: list[str]) -> bool:
    """True if a run with these words, of its own options, is to say what it waits for."""
    is_first = all(os.environ.get(name, "0") == "0" for name in _RANKS)
    return is_first and not {"-q", "--quiet", "--relay", "-h", "--help"} & set(arguments)


def start(limit_s: float, what: str) -> None:
    """Start to write the line, on a terminal, if there is a process to be had for it."""
    if not os.isatty(2) or os.environ.get("TERM", "dumb") in ("", "dumb"):
        return
    try:
        for stream in (0, 1, 2):
            os.fstat(stream)  # of one that is closed, a pipe would take the place
        asked, say = os.pipe()
    except OSError:
        return
    hear, told = os.pipe()
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        for each in (asked, say, hear, told):
            os.close(each)
        return
    if pid == 0:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the others end it
            os.close(say)
            os.close(hear)
            _Writer(told, limit_s, what).write(asked, parent)
        finally:
            os._exit(0)
    os.close(asked)
    os.close(told)
    _line.pid, _line.say, _line.hear = pid, say, hear


def is_shown() -> bool:
    """True if there is such a line, or was."""
    return _line.pid is not None


def end() -> None:
    """End the process that writes the line; only its parent can."""
    if _line.pid is not None:
        with suppress(OSError):  # it has ended, or is no child of this process
            os.kill(_line.pid, signal.SIGKILL)
            os.waitpid(_line.pid, 0)
        _line.pid = None


def doing(what: str, limit_s: float) -> None:
    """Say what is waited for from now on, and how long the whole run may take."""
    _line.is_away = False
    if _line.say is not None:
        try:
            os.write(_line.say, f"{limit_s:g} {what[:_MOST]}\n".encode("ascii", "replace"))
        except OSError:  # it has ended
            _line.say = None


def hush() -> None:
    """Take the line away, before something else is written; `doing` brings it back."""
    if _line.say is None or _line.hear is None or _line.is_away:
        return
    _line.is_away = True
    try:
        os.write(_line.say, _HUSH + b"\n")
        if select.select([_line.hear], [], [], _ACK_S)[0]:
            os.read(_line.hear, 1)
    except OSError:  # it has ended
        _line.say = None


class _Writer:
    """Work of the process that writes; it says at `answers` that the line is away."""

    def __init__(self, answers: int, limit_s: float, what: str) -> None:
        self._answers, self._limit_s = answers, limit_s
        self._began = time.monotonic()
        self._doing: str | None = what

    def write(self, asked: int, parent: int) -> None:
        """Write until no process is left that could say something."""
        self._tick()
        from nccl_doctor.system import forks  # after the first line

        forks.die_with(parent)
        while True:
            rest_s = _EVERY_S - (time.monotonic() - self._began) % _EVERY_S
            if select.select([asked], [], [], None if self._doing is None else rest_s)[0]:
                data = os.read(asked, 4096)
                if not data:
                    return
                for line in data.splitlines():
                    self._hear(line)
            self._tick()

    def _hear(self, line: bytes) -> None:
        if line != _HUSH:
            limit_s, _, self._doing = line.decode("ascii").partition(" ")
            self._limit_s = float(limit_s)
            return
        if self._doing is not None:
            _put("\r\x1b[K")
        self._doing = None
        os.write(self._answers, b".")

    def _tick(self) -> None:
        if self._doing is None:
            return
        spent_s = time.monotonic() - self._began
        said = f"nccl-doctor: {self._doing}, {spent_s:.0f} s (verdict within {self._limit_s:g} s)"
        _put(f"\r{said[: _columns() - 1]}\x1b[K")


def _columns() -> int:
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80


def _put(text: str) -> None:
    with suppress(OSError):  # nobody may read it any more
        os.write(2, text.encode())
