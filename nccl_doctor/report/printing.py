"""Printing of a report, for people or for the system of an exit profile."""

from __future__ import annotations

import errno
import os
import select
import time
from typing import TextIO

from nccl_doctor.model.options import Options
from nccl_doctor.model.report import Report
from nccl_doctor.report import host_screen
from nccl_doctor.report.facts import render as render_facts
from nccl_doctor.report.github import inert_as
from nccl_doctor.report.profiles import tell
from nccl_doctor.report.sections import Checks, no_checks
from nccl_doctor.report.text import Text
from nccl_doctor.toolkit import errands
from nccl_doctor.toolkit.terminal import in_github, wants_color

_PIECE = 1024
"""Characters of one write: a pipe that has room takes 4096 bytes (PIPE_BUF) without a wait."""
_PIPE_WIDTH = 100
_MOST_WIDTH = 120
_WIDEST = 10_000


class Printer:
    """Prints a report in two parts: what was found, and at the end the exit code, which says
    whether all files were written.

    Width, colour and marks are as the stream can take them. What it does not take now, as a
    terminal that is stopped, is printed at the end, as is all for a system that reads one line.
    Without a stream, nothing is printed.
    """

    def __init__(self, options: Options, stream: TextIO | None, checks: Checks = no_checks) -> None:
        self._options = options
        self._stream = stream
        self._checks = checks
        self._rest: str | None = None

    def begin(self, report: Report) -> None:
        """Print what was found, or what the stream takes of it at once.

        Raises:
            OSError: the stream takes nothing.
        """
        stream = self._stream
        if stream is not None and self._options.exit_profile == "native":
            text = _as_taken(stream, self._text(report, stream).found(), "text")
            self._rest = _not_taken(stream, text, 0.0)

    def end(self, report: Report, code: int) -> None:
        """Print the rest: the same report, with the exit code that it is left with; `code` is that
        of this process.

        Under the report of a host that was examined by itself (`env`) stands what it is, and with
        `verbose` all its facts.

        Raises:
            OSError: the stream takes nothing; TimeoutError if nobody reads it.
        """
        stream, options = self._stream, self._options
        if stream is None:
            return
        answer = tell(report, options.exit_profile, code)
        if answer is not None:
            if answer.line:
                put(stream, f"{answer.line}\n", "text")
            return
        made = self._text(report, stream)
        text = made.end(report) if self._rest is not None else made.found() + made.end(report)
        if report.run.alone and not options.quiet:
            width, plain = _width_of(stream), _is_plain(stream)
            text += "\n" + (
                render_facts(report, width=width, ascii=plain)
                if options.verbosity
                else host_screen.render(report, self._checks, width=width, ascii=plain)
            )
        put(stream, text, "text", self._rest or "")

    def _text(self, report: Report, stream: TextIO) -> Text:
        return Text(
            report,
            width=_width_of(stream),
            color=wants_color(stream),
            verbose=self._options.verbosity,
            quiet=self._options.quiet,
            ascii=_is_plain(stream),
            checks=self._checks,
        )


def put(stream: TextIO, text: str, form: str = "", before: str = "") -> None:
    """Write a text whole, whatever the stream can encode; of a form, unless it is for a runner.

    `before`: what of an earlier text was not taken.

    Raises:
        OSError: the stream takes nothing; TimeoutError if nobody reads it, long before the deadline
            of this process: who stands still must not cost the exit code, and the other ranks wait.
    """
    started = time.monotonic()
    if _not_taken(stream, before + _as_taken(stream, text, form), errands.patience()):
        waited_s = time.monotonic() - started
        raise TimeoutError(errno.ETIMEDOUT, f"nobody has read it for {waited_s:.0f} s")


def _as_taken(stream: TextIO, text: str, form: str) -> str:
    """The text as the stream can encode it."""
    if form and in_github():
        text = inert_as(form, text)
    encoding = stream.encoding or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _not_taken(stream: TextIO, text: str, patience_s: float) -> str:
    """The rest of a text, after writing what the stream takes, with so long a wait for its reader
    each time.
    """
    for start in range(0, len(text), _PIECE):
        if not _has_room(stream, patience_s):
            return text[start:]
        stream.write(text[start : start + _PIECE])
        stream.flush()
    return ""


def _has_room(stream: TextIO, patience_s: float) -> bool:
    """Whether the stream takes something in time."""
    limit_s = None if patience_s == float("inf") else patience_s
    try:
        return bool(select.select([], [stream], [], limit_s)[1])
    except (OSError, ValueError):  # a stream that is no file, or closed: a write will tell
        return True


def _is_plain(stream: TextIO) -> bool:
    """Whether the stream takes nothing but ASCII."""
    return not (stream.encoding or "ascii").lower().replace("-", "").startswith("utf")


def _width_of(stream: TextIO) -> int:
    """Columns of the text: COLUMNS, else those of the terminal, but no more than can be read."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isascii() and asked.isdecimal() and 0 < int(asked) < _WIDEST:
        return int(asked)
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):  # a stream that is no file
        columns = 0
    return min(columns, _MOST_WIDTH) if columns else _PIPE_WIDTH
