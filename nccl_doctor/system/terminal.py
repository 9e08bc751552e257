"""Text and streams of a terminal: nothing that is printed is obeyed, and its reader may leave.

The name of a process, a host, a file or a key, an error message of ssh, any field of a report that
somebody sent: whoever chose it could clear the screen, colour a failure green, or turn the
direction of a line around. All of it goes through `safe` or `lines`, whatever prints it.
"""

from __future__ import annotations

import io
import os
import re
import sys
import unicodedata
from typing import BinaryIO, TextIO

from nccl_doctor.system import tick
from nccl_doctor.system.forks import open_streams
from nccl_doctor.system.masking import masked

_OBEYED = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Control characters; invisible and direction-changing ones; halves of surrogates; private ones."""
_COMMAND = re.compile(r"^(\s*)::|##\[", re.MULTILINE)


def safe(text: str) -> str:
    """Text on one line without anything that a terminal would obey.

    White space becomes one space; control characters, escapes, invisible and direction-changing
    characters are written out as Python would escape them.
    """
    return _written_out(" ".join(str(text).split()))


def lines(text: str) -> str:
    """The same for text of several lines: line ends and tabs stay, and all other white space."""
    return "\n".join("\t".join(map(_written_out, line.split("\t"))) for line in text.split("\n"))


def inert(text: str) -> str:
    """A text for the log of a step, in which the runner of GitHub finds no command to obey."""
    return _COMMAND.sub(lambda found: f"{found[1]}\\::" if found[1] is not None else r"#\#[", text)


def in_github() -> bool:
    """True in a step of GitHub Actions, whose runner reads what is printed."""
    return bool(os.environ.get("GITHUB_ACTIONS"))


def obeys_escapes(stream: TextIO) -> bool:
    """True for a terminal on which the cursor can be moved."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")


def wants_color(stream: TextIO) -> bool:
    """True if text on this stream is to have colours: NO_COLOR and FORCE_COLOR decide, in this
    order, else whether it is a terminal.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if forced := os.environ.get("FORCE_COLOR"):
        return forced != "0"
    return obeys_escapes(stream)


def complain(text: str) -> None:
    """Write one line to stderr, with the name of the program before it, and no secret in it."""
    tick.hush()
    sys.stderr.write(f"nccl-doctor: {inert(safe(masked(text)))}\n")
    sys.stderr.flush()


def _written_out(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _OBEYED else char
        for char in text
    )


# stdout and stderr whose reader may exit, and whose disk may be full.
#
# A reader that had enough (`nccl-doctor run | head -1`) is no error: what it does not read goes
# nowhere, and the exit code stays what it is.


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
