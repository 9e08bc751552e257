"""`report diff`: what changed between two runs."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from nccl_doctor.cli.help import READ_EXITS, Manual
from nccl_doctor.cli.options import with_options
from nccl_doctor.cli.redaction import cover_of, redaction_of
from nccl_doctor.cli.saving import NotSaved, read_report
from nccl_doctor.system.terminal import in_github

if TYPE_CHECKING:
    from nccl_doctor.model.report import Report

_PIPE_WIDTH = 100


@click.command(
    cls=Manual,
    short_help="Show what changed between two runs.",
    exits={
        0: "Done, also if something changed, unless --strict is given.",
        1: "With --strict: something is worse.",
        2: READ_EXITS[2],
        3: READ_EXITS[3],
    },
    examples=(
        ("A run that worked, and today's", "nccl-doctor report diff monday.json report.json"),
        (
            "For a script: exit code 1 if something is worse",
            "nccl-doctor report diff --strict --format json monday.json report.json",
        ),
    ),
)
@click.argument("old")
@click.argument("new")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of the output.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 1 if a failure or warning is new, more severe or in more places, or if a host "
    "is gone. Speeds do not count: two runs cannot tell a change from noise.",
)
@with_options("diff")
@click.option("--verbose", "-v", count=True, help="Show also speeds that hardly changed.")
def diff(old: str, new: str, format_: str, strict: bool, verbose: int, **given: Any) -> None:
    """Show what changed between two runs: findings, hosts, versions, settings, speeds.

    OLD and NEW are saved reports; one of them may be - for stdin. With --redact both get the same
    pseudonyms; NEW.map.json holds the real names.
    """
    from nccl_doctor import registry
    from nccl_doctor.judge.history import difference
    from nccl_doctor.report.difference import render
    from nccl_doctor.report.github import inert_as
    from nccl_doctor.report.story import PlaceWords

    if old == new == "-":
        raise click.UsageError("OLD and NEW are both -: only one of them can be stdin")
    redaction = redaction_of(given)
    before, now = read_report(old), read_report(new)
    if redaction["redact"]:
        before, now = _redacted(old, before, new, now, redaction["redact_key"])
    found = difference(before, now, registry.load().checks)
    if format_ == "json":
        told = json.dumps(found.to_json(), indent=1) + "\n"
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns if terminal else _PIPE_WIDTH
        plain = not (sys.stdout.encoding or "ascii").lower().startswith("utf")
        places = PlaceWords(now)
        told = render(found, places, width=width, verbose=verbose > 0, ascii=plain)
    sys.stdout.write(inert_as(format_, told) if in_github() else told)
    sys.stdout.flush()
    raise click.exceptions.Exit(1 if strict and found.is_worse else 0)


def _redacted(
    old: str, before: Report, new: str, now: Report, key: str | None
) -> tuple[Report, Report]:
    """Both reports with pseudonyms of one key: the given one, or that of a map next to them."""
    from nccl_doctor.report.redaction.cover import MAP

    maps = [f"{file}{MAP}" for file in (new, old) if file != "-"]
    cover = cover_of(maps[0], key, maps)
    seen = cover.of_report(before), cover.of_report(now)
    try:
        cover.write()
    except OSError as error:
        raise NotSaved(
            f"the map of the pseudonyms was not written: {maps[0]}: {error.strerror}"
        ) from error
    return seen
