"""`report fixes`: what to type, as a script."""

from __future__ import annotations

import json

import click

from nccl_doctor.cli.help import READ_EXITS, Manual
from nccl_doctor.cli.saving import read_to_print
from nccl_doctor.system.terminal import in_github, inert, safe

_SHOWN = 8


@click.command(
    cls=Manual,
    short_help="Print the fixes as a shell script.",
    exits=READ_EXITS,
    examples=(
        ("What to type on one host", "nccl-doctor report fixes --host gpu07 report.json"),
        (
            "One script for all hosts, to be read before it is run",
            "nccl-doctor report fixes report.json > fixes.sh",
        ),
    ),
)
@click.argument("file")
@click.option("--host", metavar="NAME", help="Only what is typed on this host, as it calls itself.")
@click.option("--json", "as_json", is_flag=True, help="Print the steps as JSON.")
def fixes(file: str, host: str | None, as_json: bool) -> None:
    """Print the fixes of a saved report as a shell script; nothing is run.

    Each step stands below its finding, and above the command that takes it back. Without --host
    it is safe to run on every host; each executes only its own part. FILE may be - for stdin.
    """
    from nccl_doctor.model.fixes import StepHosts
    from nccl_doctor.report.script import render, steps_to_json

    saved = read_to_print(file)
    known = StepHosts(saved.cluster).every
    if host is not None and host not in known:
        names = ", ".join(known[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
        raise click.UsageError(safe(f"--host {host}: no such host in {file}: {names}"))
    script = f"{json.dumps(steps_to_json(saved, host), indent=1)}\n"
    if not as_json:
        script = render(saved, host)
    click.echo(inert(script) if in_github() else script, nl=False)
