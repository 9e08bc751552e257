"""`report diff`: what changed between two runs."""

from __future__ import annotations

import json
import shutil
import sys

import click

from nccl_doctor.cli.help import READ_EXITS, Manual
from nccl_doctor.cli.saving import read_report

_PIPE_WIDTH = 100


@click.command(
    cls=Manual,
    short_help="What changed between two runs.",
    exits={
        0: "Done, whatever has changed, unless --strict is given.",
        1: "With --strict: something is worse.",
        2: READ_EXITS[2],
    },
    examples=(
        ("The run that worked, and today's", "nccl-doctor report diff monday.json report.json"),
        (
            "For a program, failing where it is worse",
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
    help="What to render it as.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 1 if a failure or warning is new, graver or in more places, or a host is gone. "
    "Speeds do not count: two runs cannot tell a change from noise.",
)
@click.option("--verbose", "-v", count=True, help="Show speeds that hardly changed, too.")
def diff(old: str, new: str, format_: str, strict: bool, verbose: int) -> None:
    """What changed between two runs: findings, hosts, versions, settings, speeds.

    OLD and NEW are saved reports; one of them may be - for stdin.
    """
    from nccl_doctor import registry
    from nccl_doctor.history import difference
    from nccl_doctor.report.difference import render
    from nccl_doctor.report.places import Places

    if old == new == "-":
        raise click.UsageError("OLD and NEW are both -: only one of them can have stdin")
    before, now = read_report(old), read_report(new)
    found = difference(before, now, registry.load().checks)
    if format_ == "json":
        sys.stdout.write(json.dumps(found.to_json(), indent=1) + "\n")
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns if terminal else _PIPE_WIDTH
        plain = not (sys.stdout.encoding or "ascii").lower().startswith("utf")
        places = Places(now)
        sys.stdout.write(render(found, places, width=width, verbose=verbose > 0, ascii=plain))
    sys.stdout.flush()
    sys.exit(1 if strict and found.is_worse else 0)
