"""`--baseline`: earlier reports, read before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from nccl_doctor.judge.history import Past


def past_of(
    path: str | None, select: Iterable[str] = (), ignore: Iterable[str] = ()
) -> Past | None:
    """Earlier reports from `--baseline`, with the figures of the checks that run; None without it.

    Raises:
        click.UsageError: the file or folder cannot be read, or the file is no report.
    """
    if path is None:
        return None
    if not path:
        raise click.UsageError("--baseline '': a file or a folder is needed")
    from nccl_doctor import registry
    from nccl_doctor.cli.earlier_reports import read_past

    try:
        return read_past(path, registry.load(select, ignore).checks)
    except OSError as error:
        raise click.UsageError(f"--baseline: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise click.UsageError(f"--baseline: {path} is not a report: {error}") from error
