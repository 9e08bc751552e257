"""`autopsy`: what a job that died or hangs left."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import click

from nccl_doctor.cli.help import Manual
from nccl_doctor.cli.options import with_options
from nccl_doctor.cli.redaction import redaction_of
from nccl_doctor.cli.saving import check_profile, give, outputs_of, read_report, wants_github


@click.command(
    cls=Manual,
    short_help="Find out which rank of a dead job failed first.",
    exits={
        0: "Nothing in the text shows a failure.",
        1: "The cause was found.",
        2: "An input cannot be read, or the line is wrong.",
        3: "The job failed, and the given text does not tell the cause.",
    },
    examples=(
        ("The console of a job", "nccl-doctor autopsy slurm-4711.out"),
        ("All files of torchrun --log-dir logs", "nccl-doctor autopsy logs"),
        ("The output of kubectl logs --prefix", "nccl-doctor autopsy - < pods.txt"),
        (
            "With the examinations of its hosts",
            "nccl-doctor autopsy --before before.json --after after.json job.log",
        ),
        ("As JSON, for a ticket", "nccl-doctor autopsy --redact --json death.json logs.tar.gz"),
    ),
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@with_options("autopsy")
def autopsy(
    paths: tuple[str, ...], exit_profile: str, quiet: bool, verbose: int, **given: Any
) -> None:
    """Find out which rank of a dead job failed first, of what, and which ranks lost it.

    PATH is a file, a folder or an archive with what the job left: consoles of all ranks or of each,
    in the form of any launcher, error files of torchelastic, flight-recorder dumps, stacks of
    py-spy. - is stdin. More text tells more: give that of every host, and of the launcher.
    """
    from nccl_doctor.autopsy.examine import examine, examine_files, with_examinations
    from nccl_doctor.model.options import Options

    outputs, redaction = outputs_of(given), redaction_of(given)
    profile = check_profile(exit_profile, outputs)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        if "-" in paths:
            report = examine(paths, sys.stdin.buffer, started=now)
        else:
            report = examine_files(paths, started=now)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    before, after = (given[name] and read_report(given[name]) for name in ("before", "after"))
    report = with_examinations(report, before or None, after or None)
    options = Options(
        exit_profile=profile, github=wants_github(given), quiet=quiet, verbosity=verbose
    )
    raise click.exceptions.Exit(give(report, outputs, replace(options, **redaction)))
