"""From the job's own command behind `--` to the topology of the examination."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from nccl_doctor.hostlaunch import DEFAULT_PORT
from nccl_doctor.jobline import JobLine, JobLineError, read, which
from nccl_doctor.options import Flags

_FIELDS = ("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")

NO_ID = "none"
"""torchrun's --rdzv-id where none is given."""


def job_of(ctx: click.Context, command: Sequence[str]) -> JobLine:
    """What the command says about its job.

    Raises:
        click.UsageError: it cannot be started, or its launcher would refuse it.
    """
    cwd = Path.cwd()
    if problem := which(command, os.environ, cwd):
        raise click.UsageError(f"-- {problem}", ctx)
    try:
        line = read(command, os.environ, cwd)
    except JobLineError as error:
        raise click.UsageError(f"-- {error}", ctx) from error
    return line


def set_variables(line: JobLine) -> None:
    """Examine with the variables that the line sets for its ranks."""
    for name, value in line.environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def flags_of(ctx: click.Context, line: JobLine, flags: Flags) -> Flags:
    """The topology of a job: what its line says, and in other things our own flags.

    What the user should know of the line is printed.

    Raises:
        click.UsageError: the two say different things.
    """
    if line.launcher == "none":
        _tell(line)
        return flags
    told = {name: getattr(line, name) for name in _FIELDS}
    told["nnodes"] = line.max_nnodes or line.nnodes  # of an elastic range, all that may come
    merged: dict[str, Any] = {}
    for name, value in told.items():
        own = getattr(flags, name)
        if own is not None and value is not None and str(own) != str(value):
            source = line.sources.get(name, line.launcher)
            raise click.UsageError(
                f"--{name.replace('_', '-')} {own}: the command says {value} ({source}); leave the "
                "option out",
                ctx,
            )
        merged[name] = own if own is not None else value
    _tell(line)
    alone = (merged["nnodes"] or 1) == 1
    if merged["master_port"] is None and alone:
        merged["master_port"] = _free_port()
    return replace(
        flags,
        **merged,
        any_node_rank=(line.ranks_assigned and not alone) or None,
        is_host=line.is_host,
        run_id=line.run_id or (NO_ID if line.ranks_assigned else None),
        starts_ranks=True,
    )


def _tell(line: JobLine) -> None:
    for note in line.notes:
        click.echo(f"nccl-doctor: {note}", err=True)


def _free_port() -> int:
    """As a launcher would choose one for a job of one host; below the ephemeral ports."""
    for port in range(DEFAULT_PORT, DEFAULT_PORT + 1000):
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return port
    return DEFAULT_PORT
