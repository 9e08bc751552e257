"""`--redact`: pseudonyms in reports, and the private map next to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from nccl_doctor.model.options import Options
    from nccl_doctor.report.redaction.cover import Cover, FolderRedaction


def redaction_of(given: Mapping[str, Any], *, check: bool = True) -> dict[str, Any]:
    """Fields of `Options` for redaction; with `check`, the key can be used.

    Raises:
        click.UsageError: the key cannot be used, or is given without --redact.
    """
    key = given.get("redact_key")
    if key is not None and not given["redact"]:
        raise click.UsageError("--redact-key needs --redact")
    if key is not None and check:
        _checked(key)
    return {"redact": bool(given["redact"]), "redact_key": key}


def cover_of(path: str | None, key_file: str | None, beside: Sequence[str] = ()) -> Cover:
    """Key and map for the output of a command; `path` is the file of the map, `beside` are maps of
    what the command reads.

    Raises:
        click.UsageError: the key cannot be used.
    """
    from nccl_doctor.report.redaction.cover import Cover

    if key_file is not None:
        _checked(key_file)
    try:
        return Cover(path, key_file, beside=beside)
    except OSError as error:
        raise click.UsageError(f"the map of the pseudonyms: {error.strerror}") from error


def folder_redaction_of(options: Options) -> FolderRedaction | None:
    """Redaction of what stays in `--output-dir`; None where names may stay."""
    if not options.redact:
        return None
    from nccl_doctor.report.redaction.cover import FolderRedaction

    return FolderRedaction(options.redact_key)


def _checked(path: str) -> None:
    from nccl_doctor.report.redaction.cover import read_key

    try:
        read_key(path)
    except OSError as error:
        raise click.UsageError(f"--redact-key: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise click.UsageError(f"--redact-key {path}: {error}") from error
