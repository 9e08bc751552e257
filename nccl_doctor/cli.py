"""The command line: parse, run, render, exit.

Nothing heavy is imported before a command needs it: --help and --version know neither torch nor any
check.
"""

from __future__ import annotations

import importlib.resources
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from nccl_doctor import __version__

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]  # generic for the type checker; a plain class before 8.2

    from nccl_doctor.launch import Launch
    from nccl_doctor.options import Flags, Options
    from nccl_doctor.record import Report
    from nccl_doctor.registry import Registry
    from nccl_doctor.supervisor import Departure
else:
    _ParamType = click.ParamType

PROGRAM = "nccl-doctor"

F = TypeVar("F", bound=Callable[..., Any])
_CONFIG = f"{PROGRAM}.config"


class _NotSaved(click.ClickException):
    exit_code = 3


class _Seconds(_ParamType):
    name = "seconds"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds > 0):
            self.fail(f"{value!r} is not a positive number of seconds", param, ctx)
        return seconds


class _Number(_ParamType):
    """A whole number from `low` to `high`."""

    name = "number"

    def __init__(self, low: int, high: int | None = None) -> None:
        self._low = low
        self._high = high

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        text = str(value).strip()
        bound = f"at least {self._low}" if self._high is None else f"{self._low} to {self._high}"
        # isdecimal() as well: int() would take "1_000" and Arabic digits.
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
        if number is None or number < self._low or (self._high and number > self._high):
            elastic = " (a range of nodes is not supported)" if ":" in text else ""
            self.fail(f"{text!r} is not a whole number, {bound}{elastic}", param, ctx)
        return number


class _LocalRanks(_ParamType):
    name = "auto|gpu|cpu|number"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        text = str(value)
        if text not in ("auto", "gpu", "cpu"):
            if not (text.isascii() and text.isdecimal() and len(text) < 7 and int(text) > 0):
                self.fail(f"{text!r} is not auto, gpu, cpu or a number from 1", param, ctx)
            text = str(int(text))
        return text


class _Names(_ParamType):
    """Comma-separated names; a list in the configuration file."""

    name = "names"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        items = value.split(",") if isinstance(value, str) else list(value)
        names = tuple(dict.fromkeys(item.strip() for item in items))
        if "" in names:
            self.fail(f"{value!r} holds an empty name", param, ctx)
        return names


class _HostName(_ParamType):
    name = "host"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        text = str(value)
        if not text or any(char.isspace() or not char.isprintable() for char in text):
            self.fail(f"{text!r} is not a host name or address", param, ctx)
        return text


def _config_callback(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Values of the configuration file become the defaults of the options that follow."""
    from nccl_doctor.config import ConfigError, load

    try:
        config = load(value, Path.cwd())
    except ConfigError as error:
        raise click.UsageError(str(error), ctx) from error
    except OSError as error:
        raise click.UsageError(f"cannot read the working directory: {error}", ctx) from error
    known = {item.name for item in ctx.command.params}
    ctx.default_map = {key: item for key, item in config.items() if key in known}
    ctx.meta[_CONFIG] = {key: config.get(key, {}) for key in ("expected", "thresholds")}
    return value


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
            click.option("--select", type=_Names(), help="Only these checks or finding codes."),
            click.option("--ignore", type=_Names(), help="All but these checks or finding codes."),
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
                callback=_config_callback,
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


@cli.command()
@click.option("--nnodes", type=_Number(1), help="Number of hosts. [default: 1]")
@click.option("--node-rank", type=_Number(0), help="Index of this host. [default: 0]")
@click.option(
    "--nproc-per-node",
    type=_LocalRanks(),
    help="Ranks to start here. [default: auto: one per GPU, or 2 without any]",
)
@click.option("--master-addr", type=_HostName(), help="Host of rank 0. [default: localhost]")
@click.option("--master-port", type=_Number(1, 65535), help="Port there. [default: 29500]")
@click.option(
    "--level",
    type=click.Choice(["quick", "standard", "full"]),
    default="standard",
    show_default=True,
    help="quick: no collective; standard: collectives; full: sweeps and all pairs.",
)
@click.option(
    "--timeout",
    type=_Seconds(),
    default=120.0,
    show_default=True,
    help="The answer is out by then.",
)
@click.option(
    "--join-timeout",
    type=_Seconds(),
    default=60.0,
    show_default=True,
    help="How long to wait for participants to sign in.",
)
@click.option(
    "--collective-timeout",
    type=_Seconds(),
    default=20.0,
    show_default=True,
    help="One attempt of one group.",
)
@_run_options
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    """Examine the cluster: the pre-flight.

    Under torchrun, srun, mpirun, deepspeed or accelerate this process is one rank of the job. With
    no launcher it starts the ranks of this one host itself.
    """
    from nccl_doctor.launch import detect
    from nccl_doctor.options import Flags

    launch = detect(os.environ)
    flags = Flags(
        **{name: given[name] for name in Flags.__dataclass_fields__}  # None: not given
    )
    _check_topology(ctx, flags, launch)
    options = _options(ctx, given, first=launch.rank in (0, None))
    from nccl_doctor.output import leave
    from nccl_doctor.run import run as examine
    from nccl_doctor.spawn import NoGpu

    def write(departure: Departure, launch: Launch) -> int:
        return leave(departure, launch, options)

    try:
        code = examine(options, flags, write)
    except NoGpu as error:
        raise click.UsageError(str(error), ctx) from error
    sys.stdout.flush()
    sys.stderr.flush()
    # A store client that never answered may still hold a thread, and C++ aborts the process when
    # such a thread is torn down: everything is written, so leave without the tearing down.
    os._exit(code)


@cli.command()
@_run_options
@click.pass_context
def env(ctx: click.Context, /, **given: Any) -> None:
    """Examine this host alone, without any process group."""
    options = _options(ctx, given, first=True)
    from nccl_doctor.local import examine_here

    report = examine_here(options)
    if options.json_path is not None:
        _save(report, options.json_path)
    if options.json_path != "-":
        _print(report, options)
    sys.exit(report.exit_code)


@cli.command()
def checks() -> None:
    """List the installed checks, built-in and plug-in."""
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
        for check in found.checks
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
    """Print the page of one finding code: what it is, why it matters, how to fix it."""
    from nccl_doctor import registry
    from nccl_doctor.suggest import suggest

    found = registry.load()
    if code not in found.kinds:
        hint = suggest(code, found.kinds) or f"; `{PROGRAM} checks` lists them"
        raise click.UsageError(f'no finding code is named "{code}"{hint}')
    kind, check = found.kinds[code]
    lines = [
        f"{kind.code}: {kind.title}",
        "",
        f"layer     {kind.layer.value}",
        f"severity  {kind.severity.value}",
        f"check     {check.name if check else 'the engine itself'}",
        "",
        f"Why  {kind.why}",
        f"Fix  {kind.fix}",
    ]
    page = registry.page(check) if check else ""
    if page:
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

    _check_json_path(json_path)
    saved = _read(file)
    every = registry.load()
    known = {*every.kinds, *every.origins}
    chosen = {
        name: [item for item in _strings(saved.run.get("options"), name) if item in known]
        for name in ("select", "ignore")
    }
    again = judge_again(saved, registry.load(**chosen))
    if json_path is not None:
        _save(again, json_path)
    if json_path != "-":
        _print(again, Options(quiet=quiet, verbosity=verbose))
    sys.exit(again.exit_code)


# --- from parameters to options ---


def _options(ctx: click.Context, given: Mapping[str, Any], *, first: bool) -> Options:
    """Options of an examination; `first`: this participant is the one that writes the report."""
    from nccl_doctor.model import Level
    from nccl_doctor.options import Options

    if given["quiet"] and given["verbose"]:
        raise click.UsageError("--quiet and --verbose contradict each other", ctx)
    if first:
        _check_json_path(given["json"])
    select, ignore = given["select"] or (), given["ignore"] or ()
    _check_names(ctx, select, ignore)
    timeout = given.get("timeout", Options.timeout_s)
    return Options(
        backend=given["backend"],
        level=Level(given.get("level", "standard")),
        select=select,
        ignore=ignore,
        timeout_s=timeout,
        join_timeout_s=_within(ctx, given, "join_timeout", Options.join_timeout_s, timeout),
        collective_timeout_s=_within(
            ctx, given, "collective_timeout", Options.collective_timeout_s, timeout
        ),
        strict=given["strict"],
        json_path=given["json"],
        verbosity=given["verbose"],
        quiet=given["quiet"],
        **ctx.meta[_CONFIG],
    )


def _within(
    ctx: click.Context, given: Mapping[str, Any], name: str, default: float, timeout: float
) -> float:
    """A part of --timeout: must not exceed it if it was asked for, else it shrinks with it."""
    seconds = float(given.get(name, default))
    if seconds <= timeout:
        return seconds
    if ctx.get_parameter_source(name) in (None, ParameterSource.DEFAULT):
        return timeout
    raise click.UsageError(
        f"--{name.replace('_', '-')} {seconds:g} is longer than --timeout {timeout:g}; "
        f"raise --timeout or lower it",
        ctx,
    )


def _check_names(ctx: click.Context, select: Sequence[str], ignore: Sequence[str]) -> None:
    if not (select or ignore):
        return
    from nccl_doctor import registry

    try:
        found: Registry = registry.load(select, ignore)
    except registry.UnknownName as error:
        raise click.UsageError(str(error), ctx) from error
    if not found.checks:
        raise click.UsageError("--select and --ignore leave no check to run", ctx)


def _check_topology(ctx: click.Context, flags: Flags, launch: Launch) -> None:
    from nccl_doctor.options import contradictions

    nnodes, node_rank = flags.nnodes, flags.node_rank
    if launch.launcher != "none":
        lines = contradictions(flags, launch)
        if lines:
            raise click.UsageError("; ".join(lines), ctx)
        return
    if (nnodes or 1) > 1:
        raise click.UsageError(
            f"--nnodes {nnodes}: several hosts need a launcher: run "
            f"`torchrun --nnodes {nnodes} … -m nccl_doctor run` on each",
            ctx,
        )
    if node_rank:
        raise click.UsageError(
            f"--node-rank {node_rank} is out of range for --nnodes {nnodes or 1}", ctx
        )
    if flags.nproc_per_node is not None:
        from nccl_doctor.spawn import num_local_ranks

        try:
            num_local_ranks(flags.nproc_per_node, os.environ)
        except ValueError as error:
            raise click.UsageError(str(error), ctx) from error


def _check_json_path(path: str | None) -> None:
    """Before anything starts: a report that cannot be written is found out too late otherwise."""
    if path in (None, "-"):
        return
    target = Path(str(path))
    folder = target.parent
    if not path or target.is_dir():
        raise click.UsageError(f"--json {path or repr(path)}: a file name is needed, not a folder")
    if not folder.is_dir():
        raise click.UsageError(f"--json {path}: the folder {folder} does not exist; create it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise click.UsageError(f"--json {path}: the folder {folder} is not writable")


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
