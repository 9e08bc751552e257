"""Printing of a report, and writing to its outputs: a file, a stream, a file next to another."""

from __future__ import annotations

import errno
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nccl_doctor.model.options import Options
from nccl_doctor.model.report import ParticipantResult, Report
from nccl_doctor.report import facts
from nccl_doctor.report.facts import render as render_facts
from nccl_doctor.report.formats import pieces
from nccl_doctor.report.github import ROOM, commands, inert_as, summary
from nccl_doctor.report.next_step import beside
from nccl_doctor.report.profiles import tell, unable
from nccl_doctor.report.story import Checks, no_checks
from nccl_doctor.report.text import TextReport
from nccl_doctor.system import helpers
from nccl_doctor.system.files import append, write_whole
from nccl_doctor.system.helpers import send
from nccl_doctor.system.terminal import complain, in_github, safe, wants_color

if TYPE_CHECKING:
    from nccl_doctor.model.launch import Launch


# Printing of a report, for people or for the system of an exit profile.


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
                else facts.render_host(report, self._checks, width=width, ascii=plain)
            )
        put(stream, text, "text", self._rest or "")

    def _text(self, report: Report, stream: TextIO) -> TextReport:
        return TextReport(
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
    if _not_taken(stream, before + _as_taken(stream, text, form), helpers.time_left()):
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
    """True if the stream takes something in time."""
    limit_s = None if patience_s == float("inf") else patience_s
    try:
        return bool(select.select([], [stream], [], limit_s)[1])
    except (OSError, ValueError):  # a stream that is no file, or closed: a write will tell
        return True


def _is_plain(stream: TextIO) -> bool:
    """True if the stream takes nothing but ASCII."""
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


_STDOUT = {"-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"}


def save(report: Report, form: str, path: str, checks: Checks = no_checks) -> None:
    """Write a report in one format; `-` is stdout. A reader sees the old file or the whole new one.

    Raises:
        OSError: the folder is not there or not writable, or the disk is full.
    """
    rendered = pieces(form, checks)(report)
    if path in _STDOUT:
        put(sys.stdout, "".join(rendered), form)
    else:
        write_whole(path, rendered)


def covered(
    report: Report,
    options: Options,
    outputs: Mapping[str, str],
    *,
    made_of: str = "-",
    said: Sequence[str] = (),
) -> tuple[Report, Sequence[str], str]:
    """The report as it may be seen, with pseudonyms where that was asked for; what is `said` beside
    it, with the same; and why nobody will know what they stand for, where that is so.

    Their private map is written beside the first file of `outputs`, or beside the file that the
    report was `made_of`; where there is neither, stderr says that nobody keeps it.

    Raises:
        OSError: the key cannot be read.
        ValueError: the key file holds no key.
    """
    if not options.redact:
        return report, said, ""
    from nccl_doctor.report.redaction.cover import MAP, Cover, map_beside

    path = map_beside(outputs) or (None if made_of == "-" else f"{made_of}{MAP}")
    cover = Cover(path, options.redact_key, folder=options.output_dir)
    redacted, problem = cover.of_report(report), ""
    if said:
        text = cover.text_of(report)
        said = [text.replaced(words) for words in said]
        cover.keep(text.book)
    if path is None and not report.redacted:
        complain("the map of the pseudonyms is not saved: no output file is given (--json)")
    try:
        cover.write()
    except OSError as error:
        problem = f"the map of the pseudonyms was not written: {path}: {error.strerror or error}"
    return redacted, said, problem


def code_of(report: Report, options: Options, code: int) -> int:
    """An exit code of ours, as the system of the exit profile writes it."""
    answer = tell(report, options.exit_profile, code)
    return code if answer is None else answer.code


def leave(
    result: ParticipantResult, launch: Launch, options: Options, checks: Checks = no_checks
) -> int:
    """Print and save the report of a participant at its end; returns its exit code.

    The coordinator's report goes to stdout and to the output files. The partial report of a host
    that could not sign in goes to stderr and to a file next to the JSON file, once per host.
    """
    report = result.report
    if report is None:
        return result.code
    problems = launch.problems if report.exit_code == 2 else ()
    said = [problem.message for problem in problems]
    if result.aside and launch.local_rank not in (0, None):
        for words in () if options.redact else said:
            complain(words)
        cause = [
            found.kind.title if options.redact else f"{found.kind.title}: {found.message}"
            for found in report.root_causes[:1]
        ]
        complain(f"rank {launch.rank}: {' '.join(cause) or report.verdict.upper()}")
        return code_of(report, options, result.code)
    outputs = _beside(options.outputs, launch) if result.aside else options.outputs
    return give(report, options, outputs, result.code, said=said, aside=result.aside, checks=checks)


def leave_unable(reason: str, options: Options) -> int:
    """Exit code of a run without a report; a profile that prints a line prints one."""
    complain(reason)
    answer = unable(options.exit_profile, reason)
    if answer is None:
        return 3
    if answer.line:
        put(sys.stdout, f"{answer.line}\n", "text")
    return answer.code


def give(
    report: Report,
    options: Options,
    outputs: Mapping[str, str],
    code: int,
    *,
    made_of: str = "-",
    said: Sequence[str] = (),
    aside: bool = False,
    checks: Checks = no_checks,
) -> int:
    """Write a report where it was asked for, and print it unless stdout is taken.

    What cannot be written costs one line on stderr and exit code 3, and nothing else. What stdout
    takes of the verdict is printed first: files of thousands of ranks take seconds, and a disk may
    not answer. What it does not take is printed last: its reader may stand still.

    Args:
        report: what to give, redacted here where `options` say so.
        options: how it was asked for.
        outputs: format → path.
        code: the doctor's exit code so far.
        made_of: the file that the report comes from, which the map then belongs beside.
        said: what else to say on stderr; names in it become pseudonyms too.
        aside: the report is the partial report of one host, and goes to stderr.
        checks: asked what they have to show beside their findings.

    Returns: the exit code, in the words of the exit profile.
    """
    try:
        seen, said, unmapped = covered(report, options, outputs, made_of=made_of, said=said)
    except (OSError, ValueError) as error:
        verdict = report.verdict.upper()
        complain(f"{verdict}; the report could not be redacted, so it is not shown: {error}")
        return code_of(report, options, max(code, 3))
    report = seen
    for words in filter(None, (unmapped, *said)):
        complain(words)
    stream = sys.stderr if aside else None if _take_stdout(outputs) else sys.stdout
    printer = Printer(options, stream, checks)
    unprinted = _tried(report, lambda: printer.begin(report))
    problems: dict[str, str] = {}

    def left() -> Report:
        return _as_left(report, code, lost=bool(unmapped or unprinted or problems))

    saved = report
    # Last what somebody reads meanwhile; of the files, JSON, which says how the others went.
    for form in sorted(outputs, key=lambda form: (_is_read_now(outputs[form]), form == "json")):
        saved = left() if form == "json" else saved
        if problem := _saved(left(), form, outputs[form], checks):
            problems[form] = problem
    for form, path in outputs.items():
        if form in problems:
            complain(
                _unprinted(report, problems[form])
                if path == "-"
                else f"the report was not saved: {path}: {problems[form]}"
            )
    ended = max(code, 3) if unmapped or unprinted or problems else code
    if not unprinted:
        last = left()

        def finish() -> None:
            printer.end(last, ended)
            annotate(last, options, outputs, checks, aside=aside)

        unprinted = _tried(report, finish)
        ended = max(ended, 3) if unprinted else ended
    differs = "json" in outputs and left().exit_code != saved.exit_code
    if differs and "json" not in problems and _is_plain_file(outputs["json"]):
        _saved(left(), "json", outputs["json"], checks)
    return code_of(left(), options, ended)


def _is_read_now(path: str) -> bool:
    """True for a stream, whose reader may stand still."""
    return path in _STDOUT or path.startswith(("/dev/", "/proc/"))


def _tried(report: Report, print_it: Callable[[], None]) -> bool:
    """Print something. Returns: whether that failed, which stderr then says."""
    try:
        print_it()
    except Exception as error:  # a stream that is closed, or a text that cannot be made
        why = error.strerror if isinstance(error, OSError) else None
        complain(_unprinted(report, why or str(error) or repr(error)))
        return True
    return False


def _as_left(report: Report, code: int, *, lost: bool) -> Report:
    """The report, which must not say success where an output is lost: this process says 3."""
    return replace(report, exit_code=3) if lost and report.exit_code == code == 0 else report


def _is_plain_file(path: str) -> bool:
    """False also where the disk does not answer: what is no file is not written twice."""
    try:
        return send(Path(path).parent, lambda: str(Path(path).is_file()).encode()) == b"True"
    except OSError:
        return False


def _unprinted(report: Report, problem: str) -> str:
    """One line in place of what stdout should have shown."""
    verdict = f"{report.verdict.upper()}: {safe(report.summary)}"
    return f"the report was not printed: {problem}; the verdict is {verdict}"


def _saved(report: Report, form: str, path: str, checks: Checks) -> str:
    """Write a report in one format; returns what went wrong, or the empty string."""
    try:
        save(report, form, path, checks)
    except OSError as error:
        return error.strerror or str(error)
    except Exception as error:  # one format that breaks must not cost the others
        return f"cannot be written as {form}: {error!r}"
    return ""


def annotate(
    report: Report,
    options: Options,
    outputs: Mapping[str, str],
    checks: Checks = no_checks,
    *,
    aside: bool = False,
) -> None:
    """Tell GitHub Actions, where that was asked for: annotations under the report, on stderr where
    stdout is not for people, and what the summary of the step still has room for.
    """
    if not options.github:
        return
    taken = aside or _take_stdout(outputs) or options.exit_profile != "native"
    put(sys.stderr if taken else sys.stdout, commands(report))
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        append(Path(path), lambda size: _summarised(report, size, checks))
    except OSError as error:
        complain(f"the step summary was not written: {path}: {error.strerror or error}")


def _take_stdout(outputs: Mapping[str, str]) -> bool:
    """True if one of the files is stdout."""
    return not _STDOUT.isdisjoint(outputs.values())


def _summarised(report: Report, size: int, checks: Checks) -> str:
    """The summary, to follow so many bytes that the step has written."""
    before = "\n" if size else ""
    return before + summary(report, ROOM - size - len(before), checks)


def relay(result: ParticipantResult, launch: Launch) -> int:
    """Write to stdout, as JSON and nothing else, the report for the process that started this host
    over ssh: the report of the coordinator, or the partial report of a host that could not sign in;
    once per host.
    """
    if result.report is not None and launch.local_rank in (0, None):
        save(result.report, "json", "-")
    return result.code


def _beside(outputs: Mapping[str, str], launch: Launch) -> dict[str, str]:
    """Outputs for a partial report: `report.json` of node 2 becomes `report.node2.json`.

    As JSON, which `report merge` reads, and as the termination message: that file is each
    container's own.
    """
    mine = {form: path for form, path in outputs.items() if form == "termination" and path != "-"}
    path = outputs.get("json", "-")
    if path == "-":
        return mine
    node = f"rank{launch.rank}" if launch.node_rank is None else f"node{launch.node_rank}"
    return {**mine, "json": beside(path, node)}
