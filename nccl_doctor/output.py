"""Put a report where it was asked for: a file, a stream, a place beside the coordinator's."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nccl_doctor.files import write_whole
from nccl_doctor.options import Options
from nccl_doctor.privacy import MAP, Cover, map_beside
from nccl_doctor.profiles import tell
from nccl_doctor.record import Report
from nccl_doctor.report.facts import render as render_facts
from nccl_doctor.report.formats import renderer
from nccl_doctor.report.github import ROOM, commands, inert, summary
from nccl_doctor.report.text import render as render_text

if TYPE_CHECKING:
    from nccl_doctor.examine import Departure
    from nccl_doctor.launch import Launch

_PIPE_WIDTH = 100


def save(report: Report, form: str, path: str) -> None:
    """Write a report in one format; `-` is stdout. A reader sees the old file or the whole new one.

    Raises:
        OSError: the folder is not there or not writable.
    """
    rendered = renderer(form)(report)
    if path == "-":
        _put(sys.stdout, rendered)
        return
    write_whole(path, rendered)


def covered(
    report: Report, options: Options, outputs: Mapping[str, str], *, made_of: str = "-"
) -> Report:
    """The report as it may be seen: with pseudonyms, where that was asked for.

    Their private map is written beside the first file of `outputs`, or beside the file that the
    report was `made_of`; where there is neither, stderr says that nobody keeps it.

    Raises:
        OSError: the key cannot be read, or the map not be written.
        ValueError: the key file holds no key.
    """
    if not options.redact:
        return report
    path = map_beside(outputs) or (None if made_of == "-" else f"{made_of}{MAP}")
    cover = Cover(path, options.redact_key)
    redacted = cover.of_report(report)
    if path is None and not report.redacted:
        _complain("what the pseudonyms stand for is kept nowhere: no file was asked for (--json)")
    cover.write()
    return redacted


def print_report(report: Report, options: Options, stream: TextIO) -> None:
    """Print the report for people; width, colour and marks as the stream can take them.

    Under the report of a host that was examined by itself (`env`) stand its facts.
    """
    terminal = stream.isatty()
    width = shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns if terminal else _PIPE_WIDTH
    encoding = (stream.encoding or "ascii").lower().replace("-", "")
    plain = not encoding.startswith("utf")
    text = render_text(
        report,
        width=width,
        color=terminal and not os.environ.get("NO_COLOR"),
        verbose=options.verbosity > 0,
        quiet=options.quiet,
        ascii=plain,
    )
    if report.run.get("alone") is True and not options.quiet:
        text += "\n" + render_facts(report, width=width, ascii=plain)
    _put(stream, inert(text) if options.github else text)


def say(report: Report, options: Options, stream: TextIO, code: int) -> int:
    """Print the report for people, or the one line that the system of the exit profile reads.

    Returns: the exit code, which is `code` as that system writes it.
    """
    told = tell(report, options.exit_profile, code)
    if told is None:
        print_report(report, options, stream)
        return code
    if told.line:
        stream.write(f"{told.line}\n")
        stream.flush()
    return told.code


def code_of(report: Report, options: Options, code: int) -> int:
    """An exit code of ours, as the system of the exit profile writes it."""
    told = tell(report, options.exit_profile, code)
    return code if told is None else told.code


def leave(departure: Departure, launch: Launch, options: Options) -> int:
    """Print and save what a participant has to say as it leaves; returns its exit code.

    The coordinator's report goes to stdout and to the files that were asked for. The own view of
    one that never got in goes to stderr and beside the JSON file, once per host.
    """
    report = departure.report
    if report is None:
        return departure.code
    if report.exit_code == 2:
        for problem in launch.problems:
            _complain(problem.message)
    if departure.aside and launch.local_rank not in (0, None):
        told = [f"{found.kind.title}: {found.message}" for found in report.root_causes[:1]]
        _complain(f"rank {launch.rank}: {' '.join(told) or report.summary}")
        return code_of(report, options, departure.code)
    outputs = _beside(options.outputs, launch) if departure.aside else options.outputs
    code = departure.code
    try:
        report = covered(report, options, outputs)
    except (OSError, ValueError) as error:
        _complain(f"the report was not redacted, and is kept to ourselves: {error}")
        return code_of(report, options, max(code, 3))
    for form, path in outputs.items():
        try:
            save(report, form, path)
        except OSError as error:
            _complain(f"the report was not saved: {path}: {error.strerror or error}")
            code = max(code, 3)
    if departure.aside or "-" not in outputs.values():
        code = say(report, options, sys.stderr if departure.aside else sys.stdout, code)
    else:
        code = code_of(report, options, code)
    annotate(report, options, outputs, aside=departure.aside)
    return code


def annotate(
    report: Report, options: Options, outputs: Mapping[str, str], *, aside: bool = False
) -> None:
    """Tell GitHub Actions, where that was asked for: annotations under the report, on stderr where
    stdout is not for people, and what the summary of the step still has room for.
    """
    if not options.github:
        return
    taken = aside or "-" in outputs.values() or options.exit_profile != "native"
    _put(sys.stderr if taken else sys.stdout, commands(report))
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            before = "\n" if file.tell() else ""
            file.write(before + summary(report, ROOM - file.tell() - len(before)))
    except OSError as error:
        _complain(f"the step summary was not written: {path}: {error.strerror or error}")


def relay(departure: Departure, launch: Launch) -> int:
    """Say to whoever started this host over ssh, as JSON on stdout and nothing else, what it needs:
    the report, or the own view of a host that never got in; once per host.
    """
    if departure.report is not None and launch.local_rank in (0, None):
        save(departure.report, "json", "-")
    return departure.code


def _beside(outputs: Mapping[str, str], launch: Launch) -> dict[str, str]:
    """Where an own view is left: `report.json` of node 2 becomes `report.node2.json`.

    As JSON, which `report merge` reads, and as the termination message: that file is each
    container's own.
    """
    mine = {form: path for form, path in outputs.items() if form == "termination" and path != "-"}
    path = outputs.get("json", "-")
    if path == "-":
        return mine
    node = f"rank{launch.rank}" if launch.node_rank is None else f"node{launch.node_rank}"
    target = Path(path)
    aside = target.with_name(f"{target.stem}.{node}{target.suffix or '.json'}")
    return {**mine, "json": str(aside)}


def _put(stream: TextIO, text: str) -> None:
    """Write a text whole, whatever the stream can encode."""
    encoding = stream.encoding or "ascii"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _complain(text: str) -> None:
    sys.stderr.write(f"nccl-doctor: {text}\n")
    sys.stderr.flush()
