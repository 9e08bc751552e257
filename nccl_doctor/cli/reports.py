"""`report …`: work with saved reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from nccl_doctor.cli.baseline import past_of
from nccl_doctor.cli.bundle import bundle, issue
from nccl_doctor.cli.difference import diff
from nccl_doctor.cli.fixes import fixes
from nccl_doctor.cli.help import READ_EXITS, RUN_EXITS, Manual, ManualGroup, need_command
from nccl_doctor.cli.options import with_options
from nccl_doctor.cli.redaction import redaction_of
from nccl_doctor.cli.saving import (
    Contradiction,
    check_profile,
    give,
    outputs_of,
    read_to_judge,
    read_to_print,
    wants_github,
)
from nccl_doctor.system.terminal import complain

if TYPE_CHECKING:
    from nccl_doctor.model.report import Report


@click.group(
    cls=ManualGroup,
    invoke_without_command=True,
    examples=(
        ("Show a report from another host", "nccl-doctor report show report.json"),
        (
            "Merge the reports of hosts that could not reach each other",
            "nccl-doctor report merge report.json report.node1.json",
        ),
        (
            "Show what changed since a run that worked",
            "nccl-doctor report diff monday.json report.json",
        ),
    ),
)
@click.pass_context
def report(ctx: click.Context, /) -> None:
    """Work with saved reports, as written by --json.

    No cluster is needed: a report holds all facts. FILE may be - for stdin.
    """
    need_command(ctx)


@report.command(
    cls=Manual,
    short_help="Print a saved report, in any format.",
    exits={**READ_EXITS, 0: "Done, whatever the verdict, unless --exit-profile is given."},
    examples=(
        ("As text, with every check", "nccl-doctor report show -vv report.json"),
        (
            "As a page for a browser, and as text",
            "nccl-doctor report show --html report.html report.json",
        ),
        (
            "As Markdown, with pseudonyms",
            "nccl-doctor report show --redact --format markdown report.json",
        ),
        ("As JSON, on stdout", "nccl-doctor report show --format json report.json.gz"),
    ),
)
@click.argument("file")
@with_options("show")
def show(
    file: str, format_: str, exit_profile: str | None, quiet: bool, verbose: int, **given: Any
) -> None:
    """Print a saved report, in any format, or write it to files. FILE may be - for stdin."""
    from nccl_doctor.model.options import Options

    if format_ != "text":
        given[format_] = _only(f"--format {format_}", f"--{format_}", given[format_])
    outputs, redaction = outputs_of(given), redaction_of(given)
    profile = check_profile(exit_profile, outputs)
    try:
        saved = read_to_print(file)
    except Contradiction as error:
        if profile != "slurm":
            raise
        complain(f"error: {error.format_message()}")  # 0 would say that the node is in order
        raise click.exceptions.Exit(2) from error
    options = Options(
        exit_profile=profile,
        github=bool(given["github"]),
        quiet=quiet,
        verbosity=verbose,
        **redaction,
    )
    code = 0 if exit_profile is None else saved.exit_code
    raise click.exceptions.Exit(give(saved, outputs, options, made_of=file, code=code))


def _only(asked: str, option: str, path: str | None) -> str:
    """stdout, as the format says; an error if the option of that format says another place."""
    if path not in (None, "-"):
        raise click.UsageError(f"{asked} and {option} {path}: leave one of them out")
    return "-"


@report.command(
    cls=Manual,
    short_help="Judge the facts of a saved report again.",
    exits=RUN_EXITS,
    examples=(
        (
            "A report of last week, with the checks that are installed now",
            "nccl-doctor report judge report.json",
        ),
        (
            "The same, compared with earlier runs of these hosts",
            "nccl-doctor report judge --baseline past report.json",
        ),
    ),
)
@click.argument("file")
@with_options("judge")
def judge(
    file: str, exit_profile: str, baseline: str | None, quiet: bool, verbose: int, **given: Any
) -> None:
    """Judge the facts of a saved report again, with the checks installed here.

    Nothing is measured. FILE may be - for stdin. Exit codes are those of `run`.
    """
    from nccl_doctor import registry
    from nccl_doctor.judge.history import judge_beside
    from nccl_doctor.model.options import Options

    outputs, redaction = outputs_of(given), redaction_of(given)
    profile = check_profile(exit_profile, outputs)
    saved = read_to_judge(file)
    chosen = _chosen([saved])
    again = judge_beside(saved, registry.load(**chosen), past_of(baseline, **chosen))
    options = Options(
        exit_profile=profile, github=wants_github(given), quiet=quiet, verbosity=verbose
    )
    raise click.exceptions.Exit(give(again, outputs, replace(options, **redaction), made_of=file))


@report.command(
    cls=Manual,
    short_help="Merge the reports of hosts that could not reach each other.",
    exits=RUN_EXITS,
    examples=(
        (
            "The partial reports of all hosts, from --output-dir",
            "nccl-doctor report merge views/*.json",
        ),
        (
            "The report of rank 0, and that of a host that could not reach it",
            "nccl-doctor report merge --json whole.json report.json report.node1.json",
        ),
    ),
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@with_options("merge")
def merge(
    files: tuple[str, ...], exit_profile: str, quiet: bool, verbose: int, **given: Any
) -> None:
    """Merge the reports of hosts that could not reach each other, and judge them together.

    FILE is the report of rank 0, or the partial report of a host that could not reach rank 0
    (report.node1.json); - is stdin. Exit codes are those of `run`.
    """
    from nccl_doctor import registry
    from nccl_doctor.judge.merge import merge_reports
    from nccl_doctor.model.options import Options

    outputs, redaction = outputs_of(given), redaction_of(given)
    profile = check_profile(exit_profile, outputs)
    saved = [read_to_judge(file) for file in files]
    try:
        merged = merge_reports(saved, registry.load(**_chosen(saved)))
    except ValueError as error:
        raise click.UsageError(f"cannot merge {', '.join(files)}: {error}") from error
    options = Options(
        exit_profile=profile, github=wants_github(given), quiet=quiet, verbosity=verbose
    )
    raise click.exceptions.Exit(
        give(merged, outputs, replace(options, **redaction), made_of=files[0])
    )


for _command in (diff, fixes, bundle, issue):
    report.add_command(_command)


def _chosen(reports: Sequence[Report]) -> dict[str, list[str]]:
    """Names to select and to ignore: all that any of the runs looked for and that exist here."""
    from nccl_doctor import registry

    every = registry.load()
    known = {*every.kinds, *every.origins}
    selected, ignored = (
        [set(_strings(saved.run.options, name)) & known for saved in reports]
        for name in ("select", "ignore")
    )
    vital = {check.name for check in every.checks if check.vital}
    for names, saved in zip(selected, reports, strict=True):
        if names:  # examined beside them, as it was missing there
            names |= vital.intersection(result.name for result in saved.checks)
    return {
        "select": sorted(set[str]().union(*selected)) if all(selected) else [],
        "ignore": sorted(set[str].intersection(*ignored)),
    }


def _strings(table: Mapping[str, Any], key: str) -> list[str]:
    items = table.get(key)
    return [item for item in items if isinstance(item, str)] if isinstance(items, list) else []
