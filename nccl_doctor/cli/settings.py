"""Options from the command line and the configuration file, checked before anything starts.

Every error is one line. Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from nccl_doctor.cli.key import SECRET
from nccl_doctor.cli.line import COMMAND
from nccl_doctor.cli.redaction import redaction_of
from nccl_doctor.cli.saving import check_place, check_profile, outputs_of, wants_github

if TYPE_CHECKING:
    from nccl_doctor.model.options import Options
    from nccl_doctor.system.deadline import MoreTime

_CONFIG = "nccl-doctor.config"
"""Key in the click context for the configuration file and its tables."""
LEFT_OUT = "nccl-doctor.left-out"
"""Key in the click context for lines about files that are left out: another user may have written
them.
"""


def read_config(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Read the configuration file; callback of --config. Its values become defaults of options.

    Raises:
        click.UsageError: there is a file, and it cannot be used.
    """
    from nccl_doctor.cli.config import ConfigError, load

    try:
        config = load(value, Path.cwd())
    except ConfigError as error:
        raise click.UsageError(str(error), ctx) from error
    except OSError as error:
        raise click.UsageError(f"cannot read the working directory: {error}", ctx) from error
    known = {item.name for item in ctx.command.params}
    ctx.default_map = {key: item for key, item in config.values.items() if key in known}
    ctx.meta[_CONFIG] = {"expected": config.values.get("expected", {}), "config": config.file}
    ctx.meta[LEFT_OUT] = list(config.left_out)
    return value


def tell_of_config(ctx: click.Context, given: Mapping[str, Any]) -> None:
    """Say on stderr which files were left out, and with --verbose which configuration is used."""
    from nccl_doctor.system.terminal import complain

    for line in ctx.meta[LEFT_OUT]:
        complain(line)
    if given["verbose"]:
        complain(f"configuration: {ctx.meta[_CONFIG]['config'] or 'none'}")


def options_of(ctx: click.Context, given: Mapping[str, Any], *, first: bool) -> Options:
    """Options of an examination, from the parameters of the command.

    `first`: this participant writes the report.

    Raises:
        click.UsageError: options exclude each other, name an unknown check, or leave no check to
            run; or the report could not be written.
    """
    from nccl_doctor.model.findings import Level
    from nccl_doctor.model.options import Options

    if given["quiet"] and given["verbose"]:
        raise click.UsageError("--quiet and --verbose exclude each other", ctx)
    outputs = outputs_of(given, check=first)
    profile = check_profile(given["exit_profile"], outputs)
    if ctx.meta.get(COMMAND) and profile != "native":
        raise click.UsageError(
            f"--exit-profile {profile} and a command after --: the exit code is that of the "
            "command; leave the option out",
            ctx,
        )
    check_output_dir(given.get("output_dir"))
    select, ignore = given["select"] or (), given["ignore"] or ()
    _check_names(ctx, select, ignore)
    timeout = given.get("timeout", Options.timeout_s)
    return Options(
        backend=given["backend"],
        level=Level(given.get("level", "standard")),
        select=select,
        ignore=ignore,
        timeout_s=timeout,
        timeout_grows="timeout" in given and _is_default(ctx, "timeout"),
        join_timeout_s=_within(ctx, given, "join_timeout", Options.join_timeout_s, timeout),
        collective_timeout_s=_within(
            ctx, given, "collective_timeout", Options.collective_timeout_s, timeout
        ),
        strict=given["strict"],
        outputs=outputs,
        github=wants_github(given),
        output_dir=given.get("output_dir"),
        baseline=given.get("baseline"),
        exit_profile=profile,
        hands_over=bool(ctx.meta.get(COMMAND)),
        verbosity=given["verbose"],
        quiet=given["quiet"],
        agents_from=given.get("agents_from") or Options.agents_from,
        **redaction_of(given, check=first),
        **ctx.meta[_CONFIG],
    )


def _within(
    ctx: click.Context, given: Mapping[str, Any], name: str, default: float, timeout: float
) -> float:
    """A part of --timeout: an error if given and longer; a default becomes shorter instead."""
    seconds = float(given.get(name, default))
    if seconds <= timeout:
        return seconds
    if _is_default(ctx, name):
        return timeout
    raise click.UsageError(
        f"--{name.replace('_', '-')} {seconds:g} is longer than --timeout {timeout:g}; "
        f"raise --timeout or lower --{name.replace('_', '-')}",
        ctx,
    )


def _is_default(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) in (None, ParameterSource.DEFAULT)


def _check_names(ctx: click.Context, select: Sequence[str], ignore: Sequence[str]) -> None:
    if not (select or ignore):
        return
    from nccl_doctor import registry

    try:
        found = registry.load(select, ignore)
    except registry.UnknownName as error:
        raise click.UsageError(str(error), ctx) from error
    if not found.checks:
        raise click.UsageError("--select and --ignore leave no check to run", ctx)


def relayed_options(ctx: click.Context) -> Options:
    """Options for a host that was started over ssh, read from standard input.

    Raises:
        click.UsageError: they are of another version, or name a check that is not installed here.
        click.Abort: the process that started this one is gone.
    """
    from nccl_doctor.launch.ssh.connection import attend

    try:
        options, ctx.meta[SECRET] = attend()
    except EOFError as error:
        raise click.Abort from error
    except (ValueError, KeyError, TypeError) as error:
        raise click.UsageError(
            f"--relay: cannot read the options; is nccl-doctor the same version on all hosts? "
            f"{error!r}",
            ctx,
        ) from error
    _check_names(ctx, options.select, options.ignore)
    return options


def relayed_more_time() -> MoreTime:
    """Record of the time by which the end is put off, which tells the process at the other end of
    ssh.
    """
    from nccl_doctor.launch.ssh.connection import tell_more
    from nccl_doctor.system.deadline import MoreTime

    return MoreTime(tell_more)


def check_output_dir(path: str | None) -> None:
    """Check, before anything starts, the folder for partial reports.

    Raises:
        click.UsageError: it is not a writable folder.
    """
    if path is None:
        return
    if not path:
        raise click.UsageError("--output-dir '': a folder name is needed")
    check_place(f"--output-dir {path}", path, lambda: _wrong_with(path))


def _wrong_with(folder: str) -> str:
    if not os.path.isdir(folder):
        return "no such folder; create it"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "the folder is not writable"
