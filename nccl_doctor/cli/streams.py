"""stdout and stderr whose reader may exit, and whose disk may be full.

A reader that had enough (`nccl-doctor run | head -1`) is no error: what it does not read goes
nowhere, and the exit code stays what it is.
"""

from __future__ import annotations

import io
import os
import sys
from typing import BinaryIO

from nccl_doctor.toolkit.forks import open_streams


class CannotPrint(OSError):
    """stdout took no more, and not because its reader left."""


class _Stream(io.TextIOWrapper):
    """A text stream that shows what it can, and after an error swallows what follows."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Lead the descriptor elsewhere: what is in the buffers, and what comes, is not missed."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        self._tell(error)

    def _tell(self, error: OSError) -> None:
        """Tell the program of the error; on stderr it is ignored."""


class _Stdout(_Stream):
    def _tell(self, error: OSError) -> None:
        if not isinstance(error, BrokenPipeError):
            raise CannotPrint(error.errno, error.strerror)


def protect() -> None:
    """Give this process a stdout and a stderr that bear whatever happens to them, once."""
    open_streams()
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = _protected(_Stdout, sys.stdout, 1)
    sys.stderr = _protected(_Stream, sys.stderr, 2)


def _protected(made: type[_Stream], stream: object, number: int) -> _Stream:
    if not isinstance(stream, io.TextIOWrapper):  # closed, and so None
        return made(open(number, "wb", closefd=False), "utf-8", "backslashreplace")
    encoding = stream.encoding
    by_line = stream.line_buffering or stream.write_through  # the latter by PYTHONUNBUFFERED
    buffer: BinaryIO = stream.detach()  # type: ignore[assignment]
    # A terminal or pipe that cannot show a character must not cost the report.
    return made(buffer, encoding, "backslashreplace", line_buffering=by_line)
