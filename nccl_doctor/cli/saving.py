"""Reports in and out, with errors that the command line can show."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from nccl_doctor.options import Options
    from nccl_doctor.record import Report


class NotSaved(click.ClickException):
    """The report could not be written."""

    exit_code = 3


def read_report(file: str) -> Report:
    """A saved report; `-` is stdin.

    Raises:
        click.UsageError: it cannot be read, or is no report.
    """
    from nccl_doctor.record import Report

    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise click.UsageError(f"cannot read {file}: {error.strerror}") from error
    try:
        return Report.from_json(json.loads(data))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise click.UsageError(f"{file} is not JSON: {error}") from error
    except ValueError as error:
        raise click.UsageError(f"{file} is not a report of nccl-doctor: {error}") from error


def save_report(saved: Report, path: str) -> None:
    """Write a report as JSON; `-` is stdout.

    Raises:
        NotSaved: it could not be written.
    """
    from nccl_doctor.output import save

    try:
        save(saved, path)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise NotSaved(f"the report was not saved: {path}: {error.strerror}") from error


def print_saved(saved: Report, options: Options) -> None:
    """Print a report for people, on stdout."""
    from nccl_doctor.output import print_report

    print_report(saved, options, sys.stdout)
