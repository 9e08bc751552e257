"""`report …`: work with saved reports."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from nccl_doctor.cli.baseline import baseline_option, past_of
from nccl_doctor.cli.bundle import bundle, issue
from nccl_doctor.cli.difference import diff
from nccl_doctor.cli.help import READ_EXITS, RUN_EXITS, Manual, ManualGroup
from nccl_doctor.cli.redaction import redact_options, redaction_of
from nccl_doctor.cli.saving import (
    check_profile,
    give,
    output_options,
    outputs_of,
    profile_option,
    read_report,
    wants_github,
)
from nccl_doctor.cli.words import need_command
from nccl_doctor.report.formats import formats
from nccl_doctor.report.profiles import PROFILES

if TYPE_CHECKING:
    from nccl_doctor.model.report import Report


@click.group(
    cls=ManualGroup,
    invoke_without_command=True,
    examples=(
        ("A report that somebody sent", "nccl-doctor report show report.json"),
        (
            "Of hosts that never met, one verdict",
            "nccl-doctor report merge report.json report.node1.json",
        ),
        ("What changed since it worked", "nccl-doctor report diff monday.json report.json"),
    ),
)
@click.pass_context
def report(ctx: click.Context, /) -> None:
    """Work with saved reports, those that --json wrote.

    No cluster is needed: facts travel with the report. FILE may be - for stdin.
    """
    need_command(ctx)


@report.command(
    cls=Manual,
    short_help="Render a saved report.",
    exits={**READ_EXITS, 0: "Done, whatever the report says, unless --exit-profile is given."},
    examples=(
        ("As the run printed it, with every check", "nccl-doctor report show -v report.json"),
        (
            "As a page for a browser",
            "nccl-doctor report show --format html report.json > report.html",
        ),
        (
            "For others, with pseudonyms",
            "nccl-doctor report show --redact --format markdown report.json",
        ),
    ),
)
@click.argument("file")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", *formats()]),
    default="text",
    show_default=True,
    help="What to render it as.",
)
@click.option(
    "--exit-profile",
    type=click.Choice(PROFILES),
    help="Exit as `run` would have, as that system reads it, and print one line for it.",
)
@redact_options
@click.option("--quiet", "-q", is_flag=True, help="Only the verdict and what to fix.")
@click.option("--verbose", "-v", count=True, help="Show passing checks too.")
def show(
    file: str, format_: str, exit_profile: str | None, quiet: bool, verbose: int, **given: Any
) -> None:
    """Render a saved report, in any format. FILE may be - for stdin."""
    from nccl_doctor.model.options import Options

    redaction = redaction_of(given)
    saved = read_report(file)
    outputs = {} if format_ == "text" else {format_: "-"}
    profile = check_profile(exit_profile, outputs)
    options = Options(exit_profile=profile, quiet=quiet, verbosity=verbose, **redaction)
    code = 0 if exit_profile is None else saved.exit_code
    sys.exit(give(saved, outputs, options, made_of=file, code=code))


@report.command(
    cls=Manual,
    short_help="Judge the facts of a report with today's rules.",
    exits=RUN_EXITS,
    examples=(
        (
            "A report of last week, by the checks that are installed now",
            "nccl-doctor report judge report.json",
        ),
        (
            "The same, beside earlier runs of these hosts",
            "nccl-doctor report judge --baseline past report.json",
        ),
    ),
)
@click.argument("file")
@output_options
@profile_option
@baseline_option
@redact_options
@click.option("--quiet", "-q", is_flag=True, help="Only the verdict and what to fix.")
@click.option("--verbose", "-v", count=True, help="Show passing checks too.")
def judge(
    file: str, exit_profile: str, baseline: str | None, quiet: bool, verbose: int, **given: Any
) -> None:
    """Judge the facts of a saved report again, with the checks installed here.

    Nothing is measured. FILE may be - for stdin. Exits as `run` would have.
    """
    from nccl_doctor import registry
    from nccl_doctor.judge.history import judge_beside
    from nccl_doctor.model.options import Options

    outputs, redaction = outputs_of(given), redaction_of(given)
    profile = check_profile(exit_profile, outputs)
    saved = read_report(file)
    chosen = _chosen([saved])
    again = judge_beside(saved, registry.load(**chosen), past_of(baseline, **chosen))
    options = Options(
        exit_profile=profile, github=wants_github(given), quiet=quiet, verbosity=verbose
    )
    sys.exit(give(again, outputs, replace(options, **redaction), made_of=file))


@report.command(
    cls=Manual,
    short_help="Make one report of those of hosts that never met.",
    exits=RUN_EXITS,
    examples=(
        (
            "The views of all hosts that --output-dir gathered",
            "nccl-doctor report merge views/*.json",
        ),
        (
            "The report of rank 0, and of a host that could not reach it",
            "nccl-doctor report merge --json whole.json report.json report.node1.json",
        ),
    ),
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@output_options
@profile_option
@redact_options
@click.option("--quiet", "-q", is_flag=True, help="Only the verdict and what to fix.")
@click.option("--verbose", "-v", count=True, help="Show passing checks too.")
def merge(
    files: tuple[str, ...], exit_profile: str, quiet: bool, verbose: int, **given: Any
) -> None:
    """Make one report of those of hosts that never met.

    FILE is the report of rank 0, or the one that a host wrote because it could not reach rank 0
    (report.node1.json); - is stdin. Exits as `run` would have.
    """
    from nccl_doctor import registry
    from nccl_doctor.judge.merge_reports import merge as merged_from
    from nccl_doctor.model.options import Options

    outputs, redaction = outputs_of(given), redaction_of(given)
    profile = check_profile(exit_profile, outputs)
    saved = [read_report(file) for file in files]
    try:
        merged = merged_from(saved, registry.load(**_chosen(saved)))
    except ValueError as error:
        raise click.UsageError(f"cannot merge {', '.join(files)}: {error}") from error
    options = Options(
        exit_profile=profile, github=wants_github(given), quiet=quiet, verbosity=verbose
    )
    sys.exit(give(merged, outputs, replace(options, **redaction), made_of=files[0]))


for _command in (diff, bundle, issue):
    report.add_command(_command)


def _chosen(reports: Sequence[Report]) -> dict[str, list[str]]:
    """What to select and to ignore: whatever any of the runs looked for, as far as it is here."""
    from nccl_doctor import registry

    every = registry.load()
    known = {*every.kinds, *every.origins}
    selected, ignored = (
        [set(_strings(saved.run.get("options"), name)) & known for saved in reports]
        for name in ("select", "ignore")
    )
    return {
        "select": sorted(set[str]().union(*selected)) if all(selected) else [],
        "ignore": sorted(set[str].intersection(*ignored)),
    }


def _strings(table: Any, key: str) -> list[str]:
    items = table.get(key, ()) if isinstance(table, Mapping) else ()
    return [item for item in items if isinstance(item, str)] if isinstance(items, list) else []
