"""The command line: parse, run, render, exit.

Nothing heavy is imported before a command needs it: --help and --version know neither torch nor any
check.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nccl_doctor import __version__
from nccl_doctor.handover import COMMAND, BeforeCommand, become
from nccl_doctor.params import HostName, LocalRanks, Names, Number, Seconds
from nccl_doctor.settings import (
    check_json_path,
    check_topology,
    fleet_of,
    options_of,
    read_config,
    relayed_options,
)

if TYPE_CHECKING:
    from nccl_doctor.examine import Departure
    from nccl_doctor.fleet import Fleet
    from nccl_doctor.launch import Launch
    from nccl_doctor.options import Options
    from nccl_doctor.record import Report

PROGRAM = "nccl-doctor"

F = TypeVar("F", bound=Callable[..., Any])


class _NotSaved(click.ClickException):
    exit_code = 3


class _NotStarted(click.ClickException):
    exit_code = 3


def _run_options(function: F) -> F:
    """The options of an examination that `run` and `env` share."""
    for option in reversed(
        (
            click.option(
                "--backend",
                type=click.Choice(["auto", "nccl", "gloo"]),
                default="auto",
                show_default=True,
                help="What the job will use; auto: nccl where there is a GPU.",
            ),
            click.option("--select", type=Names(), help="Only these checks or finding codes."),
            click.option("--ignore", type=Names(), help="All but these checks or finding codes."),
            click.option(
                "--json",
                "json",
                metavar="PATH",
                help="Write the report as JSON there too; - is stdout, instead of the text.",
            ),
            click.option("--strict", is_flag=True, help="Warnings fail."),
            click.option(
                "--config",
                metavar="FILE",
                is_eager=True,
                callback=read_config,
                help="Default: nccl-doctor.toml, or [tool.nccl-doctor] in pyproject.toml, of the "
                "working directory.",
            ),
            click.option("--quiet", "-q", is_flag=True, help="Only the verdict and what to fix."),
            click.option("--verbose", "-v", count=True, help="Show passing checks too."),
        )
    ):
        function = option(function)
    return function


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM, message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, /) -> None:
    """Examine a training cluster before the job runs, and name what is wrong, where, and the fix.

    Run it with the launcher and environment of the job:

        torchrun … -m nccl_doctor run

    Exit codes: 0 no failure, 1 a failure, 2 usage or configuration error, 3 not completed.
    """
    _need_command(ctx)


def _need_command(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


@cli.command(cls=BeforeCommand)
@click.option("--nnodes", type=Number(1), help="Number of hosts. [default: 1]")
@click.option("--node-rank", type=Number(0), help="Index of this host. [default: 0]")
@click.option(
    "--nproc-per-node",
    type=LocalRanks(),
    help="Ranks to start here. [default: auto: one per GPU, or 2 without any]",
)
@click.option("--master-addr", type=HostName(), help="Host of rank 0. [default: localhost]")
@click.option("--master-port", type=Number(1, 65535), help="Port there. [default: 29500]")
@click.option(
    "--hostfile",
    metavar="FILE",
    help="Start this on every host of FILE over ssh: lines `host slots=N`, as for deepspeed.",
)
@click.option("--relay", is_flag=True, hidden=True)
@click.option(
    "--level",
    type=click.Choice(["quick", "standard", "full"]),
    default="standard",
    show_default=True,
    help="quick: no collective; standard: collectives; full: sweeps and all pairs.",
)
@click.option(
    "--timeout",
    type=Seconds(),
    default=120.0,
    show_default=True,
    help="The answer is out by then.",
)
@click.option(
    "--join-timeout",
    type=Seconds(),
    default=60.0,
    show_default=True,
    help="How long to wait for participants to sign in.",
)
@click.option(
    "--collective-timeout",
    type=Seconds(),
    default=20.0,
    show_default=True,
    help="One attempt of one group.",
)
@click.option(
    "--output-dir",
    metavar="DIR",
    help="Every host leaves its own view there as node<K>.json; shared by all hosts, it lets the "
    "coordinator hear those that cannot reach it.",
)
@_run_options
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    """Examine the cluster: the pre-flight.

    Under torchrun, srun, mpirun, deepspeed or accelerate this process is one rank of the job. With
    no launcher it starts the ranks of this host itself: run it on every host, with torchrun's
    options. A COMMAND after -- is run in its place if the verdict allows; of torchrun, accelerate
    and deepspeed the options are read.
    """
    from nccl_doctor.launch import detect
    from nccl_doctor.options import Flags

    relayed = relayed_options(ctx) if given["relay"] else None  # before the environment is read
    environ = dict(os.environ)
    command = ctx.meta[COMMAND]
    flags = Flags(
        **{name: given.get(name) for name in Flags.__dataclass_fields__}  # None: not given
    )
    hostfile, entries = given["hostfile"], None
    if command:
        from nccl_doctor.jobflags import flags_of, job_of, set_variables

        job = job_of(ctx, command)
        set_variables(job)
        flags = flags_of(ctx, job, flags)
        if job.starts_remote and job.hosts:
            hostfile, entries = job.hostfile or "the command", job.hosts
    launch = detect(os.environ)
    fleet = None
    if relayed is None and hostfile is not None:
        fleet = fleet_of(ctx, hostfile, flags, launch, entries)
    else:
        check_topology(ctx, flags, launch)
    options = relayed or options_of(ctx, given, first=launch.rank in (0, None))
    from nccl_doctor.output import leave, relay
    from nccl_doctor.run import run as examine
    from nccl_doctor.spawn import NoGpu

    def write(departure: Departure, launch: Launch) -> int:
        return relay(departure, launch) if relayed else leave(departure, launch, options)

    try:
        code = _run_on_hosts(fleet, options) if fleet else examine(options, flags, write)
    except NoGpu as error:
        raise click.UsageError(str(error), ctx) from error
    sys.stdout.flush()
    sys.stderr.flush()
    if command and code == 0:
        become(command, environ)
    # A store client that never answered may still hold a thread, and C++ aborts the process when
    # such a thread is torn down: everything is written, so leave without the tearing down.
    os._exit(code)


def _run_on_hosts(fleet: Fleet, options: Options) -> int:
    """Examine the cluster of a hostfile; the exit code."""
    from nccl_doctor.examine import Departure
    from nccl_doctor.fleet import run_on_hosts
    from nccl_doctor.launch import Launch
    from nccl_doctor.output import leave

    try:
        report = run_on_hosts(fleet, options)
    except OSError as error:
        raise _NotStarted(f"ssh could not be started: {error}") from error
    return leave(Departure(report.exit_code, report), Launch(), options)


@cli.command()
@_run_options
@click.pass_context
def env(ctx: click.Context, /, **given: Any) -> None:
    """Examine this host alone, without any process group."""
    options = options_of(ctx, given, first=True)
    from nccl_doctor.local import examine_here

    report = examine_here(options)
    if options.json_path is not None:
        _save(report, options.json_path)
    if options.json_path != "-":
        _print(report, options)
    sys.exit(report.exit_code)


@cli.command()
def checks() -> None:
    """List the installed checks, built-in and plug-in, in the order in which they run."""
    from tabulate import tabulate

    from nccl_doctor import registry
    from nccl_doctor.report.text import safe

    found = registry.load()
    rows = [
        [
            check.name,
            check.layer.value,
            check.scope.value,
            check.cost,
            safe(found.origins[check.name]),
            " ".join(kind.code for kind in check.kinds),
        ]
        # As they run: what needs no peers is observed before the roll call.
        for check in sorted(found.checks, key=lambda check: check.together)
    ]
    head = ["check", "layer", "scope", "cost", "from", "finds"]
    room = shutil.get_terminal_size((100, 24)).columns
    taken = sum(max(len(str(row[i])) for row in [head, *rows]) + 2 for i in range(5))
    for row in rows:  # tabulate would break a code at its hyphens
        row[5] = textwrap.fill(row[5], max(30, room - taken), break_on_hyphens=False)
    click.echo(tabulate(rows, head, "simple", disable_numparse=True))
    for problem in found.problems:
        click.echo(f"{PROGRAM}: {problem.code}: {safe(problem.message)}", err=True)


@cli.command()
@click.argument("code")
def explain(code: str) -> None:
    """Print the page of a finding code: what it is, why it matters, how to fix it.

    CODE may be the name of a check as well.
    """
    from nccl_doctor import registry
    from nccl_doctor.suggest import suggest

    found = registry.load()
    named = {check.name: check for check in found.checks}
    if code in found.kinds:
        kind = found.kinds[code][0]
        owners = found.owners.get(code, ())
        lines = [
            f"{kind.code}: {kind.title}",
            "",
            f"layer     {kind.layer.value}",
            f"severity  {kind.severity.value}",
            f"check     {', '.join(owners) or 'the engine itself'}",
            "",
            f"Why  {kind.why}",
            f"Fix  {kind.fix}",
        ]
    elif code in named:
        owners = (code,)
        lines = [f"check {code} (layer {named[code].layer.value}) finds", ""]
        lines += [f"  {kind.code}: {kind.title}" for kind in named[code].kinds]
    else:
        hint = suggest(code, [*found.kinds, *named]) or f"; `{PROGRAM} checks` lists them"
        raise click.UsageError(f'no check or finding code is named "{code}"{hint}')
    for page in (registry.page(named[name]) for name in owners):
        lines += ["", "-" * 72, "", page.rstrip()]
    click.echo("\n".join(lines))


@cli.command()
def schema() -> None:
    """Print the JSON Schema of the report."""
    file = importlib.resources.files("nccl_doctor.report").joinpath("schema.json")
    click.echo(file.read_text(encoding="utf-8"), nl=False)


@cli.group(invoke_without_command=True)
@click.pass_context
def report(ctx: click.Context, /) -> None:
    """Work with saved reports."""
    _need_command(ctx)


@report.command()
@click.argument("file")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="What to render it as.",
)
@click.option("--quiet", "-q", is_flag=True, help="Only the verdict and what to fix.")
@click.option("--verbose", "-v", count=True, help="Show passing checks too.")
def show(file: str, format_: str, quiet: bool, verbose: int) -> None:
    """Render a saved report. FILE may be - for stdin. Exits with 0 whatever the report says."""
    from nccl_doctor.options import Options

    saved = _read(file)
    if format_ == "json":
        _save(saved, "-")
    else:
        _print(saved, Options(quiet=quiet, verbosity=verbose))


@report.command()
@click.argument("file")
@click.option("--json", "json_path", metavar="PATH", help="As in run.")
@click.option("--quiet", "-q", is_flag=True, help="Only the verdict and what to fix.")
@click.option("--verbose", "-v", count=True, help="Show passing checks too.")
def judge(file: str, json_path: str | None, quiet: bool, verbose: int) -> None:
    """Judge the facts of a saved report again, with the checks installed here.

    Exits as `run` would have.
    """
    from nccl_doctor import registry
    from nccl_doctor.options import Options
    from nccl_doctor.verdict import judge_again

    check_json_path(json_path)
    saved = _read(file)
    again = judge_again(saved, registry.load(**_chosen([saved])))
    if json_path is not None:
        _save(again, json_path)
    if json_path != "-":
        _print(again, Options(quiet=quiet, verbosity=verbose))
    sys.exit(again.exit_code)


@report.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--json", "json_path", metavar="PATH", help="As in run.")
@click.option("--quiet", "-q", is_flag=True, help="Only the verdict and what to fix.")
@click.option("--verbose", "-v", count=True, help="Show passing checks too.")
def merge(files: tuple[str, ...], json_path: str | None, quiet: bool, verbose: int) -> None:
    """Make one report of those of hosts that never met.

    FILE is the report of rank 0, or the one that a host wrote because it could not reach rank 0
    (report.node1.json); - is stdin. Exits as `run` would have.
    """
    from nccl_doctor import registry
    from nccl_doctor.merge import merge as merged_from
    from nccl_doctor.options import Options

    check_json_path(json_path)
    saved = [_read(file) for file in files]
    try:
        merged = merged_from(saved, registry.load(**_chosen(saved)))
    except ValueError as error:
        raise click.UsageError(f"cannot merge {', '.join(files)}: {error}") from error
    if json_path is not None:
        _save(merged, json_path)
    if json_path != "-":
        _print(merged, Options(quiet=quiet, verbosity=verbose))
    sys.exit(merged.exit_code)


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


# --- reports in and out ---


def _read(file: str) -> Report:
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


def _save(saved: Report, path: str) -> None:
    from nccl_doctor.output import save

    try:
        save(saved, path)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _NotSaved(f"the report was not saved: {path}: {error.strerror}") from error


def _print(saved: Report, options: Options) -> None:
    from nccl_doctor.output import print_report

    print_report(saved, options, sys.stdout)
