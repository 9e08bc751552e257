"""Reading and writing of reports, with errors that the command line can show."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nccl_doctor.system import files
from nccl_doctor.system.helpers import send
from nccl_doctor.system.terminal import in_github

if TYPE_CHECKING:
    from nccl_doctor.model.options import Options
    from nccl_doctor.model.report import Report


class NotSaved(click.ClickException):
    """An output could not be written."""

    exit_code = 3


LARGEST = 1 << 30
"""Largest report that is read, in bytes: enough for ten thousand ranks. /dev/zero has no end."""


class Contradiction(click.UsageError):
    """A report has a verdict that its own findings do not allow."""


def read_report(file: str) -> Report:
    """Saved report from a file; `-` is stdin.

    Raises:
        click.UsageError: it cannot be read, or is no report.
        Contradiction: see there.
    """
    from nccl_doctor.judge.conclusion import contradiction

    saved = _report_in(file)
    wrong = contradiction(saved)
    if wrong:
        raise Contradiction(
            f"{file} contradicts itself: {wrong}; for the verdict of its facts: nccl-doctor report "
            f"judge {file}"
        )
    return saved


def _report_in(file: str) -> Report:
    from nccl_doctor.model.report import Report

    try:
        data = _read(file)
    except OSError as error:
        raise click.UsageError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise click.UsageError(f"{file} is not JSON: {error}") from error
    try:
        return Report.from_json(json.loads(data))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise click.UsageError(f"{file} is not JSON: {error}") from error
    except ValueError as error:
        raise click.UsageError(f"{file} is not a report of nccl-doctor: {error}") from error


def read_to_print(file: str) -> Report:
    """Saved report; a command that this version would not print for its facts is a comment.

    Raises:
        click.UsageError: as `read_report`.
    """
    from nccl_doctor import registry
    from nccl_doctor.judge.own_fixes import has_commands, with_own_fixes

    saved = read_report(file)
    return with_own_fixes(saved, registry.load()) if has_commands(saved) else saved


def read_to_judge(file: str) -> Report:
    """Saved report whose facts are to be judged again; its own commands are comments.

    Raises:
        click.UsageError: it cannot be read, or is no report.
    """
    from nccl_doctor import registry
    from nccl_doctor.judge.own_fixes import without_foreign_fixes

    saved = _report_in(file)
    if saved.run.source:
        raise click.UsageError(
            f"{file} is the report of an autopsy, and holds no facts of an examination; give what "
            "the job left to nccl-doctor autopsy again"
        )
    return without_foreign_fixes(saved, registry.load())


def _read(file: str) -> bytes:
    if file != "-":
        return files.read_unpacked(file, LARGEST)
    data = sys.stdin.buffer.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise files.too_long(LARGEST)
    return files.unpacked(data, LARGEST)


def wants_github(given: Mapping[str, Any]) -> bool:
    """Value of --github, or else whether this is a step of GitHub Actions."""
    asked = given.get("github")
    return in_github() if asked is None else bool(asked)


def check_profile(profile: str | None, outputs: Mapping[str, str]) -> str:
    """Exit profile; any but native needs stdout for its line.

    Raises:
        click.UsageError: a report is to be written to stdout too.
    """
    for name, path in outputs.items():
        if path == "-" and profile not in (None, "native"):
            raise click.UsageError(
                f"--exit-profile {profile} and --{name} -: only one of them can use stdout"
            )
    return profile or "native"


def outputs_of(given: Mapping[str, Any], *, check: bool = True) -> dict[str, str]:
    """Format → path, for the formats in the options; with `check`, every path can be written.

    Raises:
        click.UsageError: a path is not a file in a writable folder, or stdout is given twice.
    """
    from nccl_doctor.report.formats import formats

    found = {name: str(given[name]) for name in formats() if given.get(name) is not None}
    for name, path in found.items():
        if check and path != "-":
            _check_path(name, path)
    twice = [f"--{name} -" for name, path in found.items() if path == "-"]
    if len(twice) > 1:
        raise click.UsageError(f"{' and '.join(twice)}: only one of them can use stdout")
    return found


def _check_path(name: str, path: str) -> None:
    """Check, before anything starts, that a report can be written."""
    if not path:
        raise click.UsageError(f"--{name} '': a file name is needed")
    if path.startswith("--"):  # the next option, taken for the name
        raise click.UsageError(
            f"--{name} {path}: a file name is needed before {path}, or - for stdout; for a file of "
            f"that name give ./{path}"
        )
    check_place(f"--{name} {path}", Path(path).parent, lambda: _wrong_with(Path(path)))


def check_place(what: str, folder: str | Path, wrong_with: Callable[[], str]) -> None:
    """Check a folder for output; `what` names it in the error.

    Raises:
        click.UsageError: `wrong_with` returns a reason, or the disk does not answer.
    """
    try:
        words = send(folder, lambda: wrong_with().encode()).decode()
    except OSError as error:
        words = str(error.strerror)
    if words:
        raise click.UsageError(f"{what}: {words}")


def _wrong_with(target: Path) -> str:
    folder = target.parent
    if target.is_dir():
        return "a file name is needed, not a folder"
    if target.exists() and os.access(target, os.W_OK):
        return ""  # a device, a mounted file: written in place
    if not folder.is_dir():
        return f"the folder {folder} does not exist; create it"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"the folder {folder} is not writable"


def give(
    saved: Report,
    outputs: Mapping[str, str],
    options: Options,
    *,
    made_of: str = "-",
    code: int | None = None,
) -> int:
    """Write a report to its outputs, and print it unless stdout is taken.

    If it is redacted and no file is written, the map goes next to the file it was `made_of`.
    Outputs that cannot be written are named on stderr.

    Returns: the exit code of the report, or `code` if given, translated by the exit profile; 3 if
        something could not be written.
    """
    from nccl_doctor.registry import installed
    from nccl_doctor.report.output import give

    start = saved.exit_code if code is None else code
    return give(saved, options, outputs, start, made_of=made_of, checks=installed)
