"""Hosts and ranks of the run: from our flags, the command of the job, the hostfile, the launcher.

Two sources may give the same value, never two values: a contradiction is an error before anything
starts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from nccl_doctor.cli.settings import LEFT_OUT
from nccl_doctor.launch.allocation import ignored_hostfile, other_hosts
from nccl_doctor.launch.command_line.job_line import JobLine, JobLineError
from nccl_doctor.launch.detect import detect
from nccl_doctor.launch.ranks import host_flags
from nccl_doctor.model.job import UnreadHosts
from nccl_doctor.model.launch import ENDPOINT, OPTIONS, Launch
from nccl_doctor.model.options import Flags, Options, contradictions
from nccl_doctor.system.terminal import complain

if TYPE_CHECKING:
    from nccl_doctor.gather.fleet import Fleet
    from nccl_doctor.launch.ssh.hostfile import Entry

_FIELDS = ("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")

NO_ID = "none"
"""Default of torchrun's --rdzv-id."""


class Topology(NamedTuple):
    """Flags in force, launch record of this process, hosts to start on (if any), whether the
    command or launcher of the job shows that it uses DeepSpeed, and its command, if there is one.
    """

    flags: Flags
    launch: Launch
    fleet: Fleet | None
    deepspeed: bool
    line: JobLine


def topology_of(ctx: click.Context, given: Mapping[str, Any], command: Sequence[str]) -> Topology:
    """Topology for `run`, with the `command` of the job after `--`, if any.

    Sets the variables that the command sets for its ranks.

    Raises:
        click.UsageError: the command or the hostfile cannot be used, or two sources contradict
            each other. Nothing has been started.
    """
    flags = Flags(**{name: given.get(name) for name in Flags.__dataclass_fields__})
    path, chosen, ssh_port = given["hostfile"], None, None
    launch = detect(os.environ)
    deepspeed = launch.launcher == "deepspeed"
    job = JobLine()
    if command:
        job = _job_of(ctx, command)
        deepspeed = deepspeed or job.launcher == "deepspeed"
        _set_variables(job)
        flags = _flags_of(ctx, job, flags)
        if job.starts_remote and job.hosts:
            path, chosen = job.hostfile or "the command", job.hosts
            ssh_port = job.ssh_port
        launch = detect(os.environ)  # with the variables that the line sets
    if job.launcher == "none" and path is None:
        pods = _elastic_pod(launch)
        if pods.launcher != "none":
            job, flags = pods, _flags_of(ctx, pods, flags)
    if path or flags.nnodes or launch.launcher != "none":
        job = replace(job, unread=UnreadHosts())  # somebody has said which hosts they are
    elif not command:
        job = replace(job, unread=other_hosts(os.environ, command=False))
    if launch.launcher == "mpirun" and path is None:
        job = replace(job, unread=ignored_hostfile(os.environ))
    if path is None or given["relay"]:
        _check(ctx, flags, launch)
        return Topology(flags, launch, None, deepspeed, job)
    fleet = _fleet_of(ctx, path, flags, launch, chosen)
    fleet = replace(fleet, ssh_port=ssh_port, shell_here=job.shell_here)
    return Topology(flags, launch, fleet, deepspeed, job)


# --- the job's own command ---


def _job_of(ctx: click.Context, command: Sequence[str]) -> JobLine:
    """Topology of the job, from its command."""
    from nccl_doctor.launch.command_line.program import which
    from nccl_doctor.launch.command_line.reader import read

    cwd = Path.cwd()
    if problem := which(command, os.environ, cwd):
        raise click.UsageError(f"-- {problem}", ctx)
    try:
        return read(command, os.environ, cwd)
    except JobLineError as error:
        raise click.UsageError(f"-- {error}", ctx) from error


def _elastic_pod(launch: Launch) -> JobLine:
    """Topology of a job whose pods meet by c10d, as in an elastic one of Kubeflow: no variable
    gives a pod its node rank, and torchrun needs none. Empty for every other job.
    """
    pods = launch.per_host and os.environ.get("PET_RDZV_BACKEND") == "c10d"
    if pods and host_flags(launch, os.environ) is None:
        from nccl_doctor.launch.command_line.torchrun import read_variables

        with suppress(JobLineError):  # the launch record says what is wrong with the variables
            line = read_variables(os.environ)
            return line if line.master_addr else JobLine()
    return JobLine()


def _set_variables(line: JobLine) -> None:
    """Set the variables that the command sets for its ranks."""
    for name, value in line.environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _flags_of(ctx: click.Context, line: JobLine, flags: Flags) -> Flags:
    """Flags of the job's command; our own flags for values that it does not give.

    Notes about the command are printed.
    """
    if line.launcher == "none":
        _tell(line)
        return flags
    values = {name: getattr(line, name) for name in _FIELDS}
    values["nnodes"] = line.max_nnodes or line.nnodes  # of an elastic range, all that may come
    merged: dict[str, Any] = {}
    for name, value in values.items():
        own = getattr(flags, name)
        if own is not None and value is not None and str(own) != str(value):
            source = line.sources.get(name, line.launcher)
            raise click.UsageError(
                f"--{name.replace('_', '-')} {own}: the command has {value} ({source}); leave the "
                "option out",
                ctx,
            )
        merged[name] = own if own is not None else value
    _tell(line)
    alone = (merged["nnodes"] or 1) == 1
    return replace(
        flags,
        **merged,
        any_node_rank=(line.ranks_assigned and not alone) or None,
        is_host=line.is_host,
        run_id=line.run_id or (NO_ID if line.ranks_assigned else None),
        starts_ranks=True,
        spelled=_spelled(line),
    )


def _spelled(line: JobLine) -> Mapping[str, str]:
    """The options by which the command takes each field, so that a fix can name them; variables
    where it has the value from one.
    """
    spelled = dict(OPTIONS.get(line.launcher, {}))
    if line.ranks_assigned and line.launcher == "torchrun":
        spelled |= {"master_addr": ENDPOINT, "master_port": ENDPOINT}
    return spelled | {
        name: source
        for name, source in line.sources.items()
        if name in spelled and source.isidentifier() and source.isupper()
    }


def _tell(line: JobLine) -> None:
    for note in line.notes:
        complain(note)


# --- this process as a rank or a host ---


def _check(ctx: click.Context, flags: Flags, launch: Launch) -> None:
    """Check the flags against the launcher, or against one host without a launcher."""
    nnodes, node_rank = flags.nnodes, flags.node_rank
    if launch.launcher != "none" and not flags.starts_ranks:
        lines = contradictions(flags, launch)
        if lines:
            raise click.UsageError("; ".join(lines), ctx)
        return
    if (node_rank or 0) >= (nnodes or 1):
        raise click.UsageError(
            f"--node-rank {node_rank} is out of range for --nnodes {nnodes or 1}", ctx
        )
    if (nnodes or 1) > 1 and flags.master_addr is None:
        raise click.UsageError(
            f"--nnodes {nnodes} needs --master-addr, the name or address of node 0", ctx
        )
    if flags.nproc_per_node is not None:
        from nccl_doctor.launch.ranks import num_local_ranks

        try:
            num_local_ranks(flags.nproc_per_node, os.environ)
        except ValueError as error:
            raise click.UsageError(str(error), ctx) from error


# --- the hosts of a hostfile ---


def _fleet_of(
    ctx: click.Context,
    path: str,
    flags: Flags,
    launch: Launch,
    chosen: tuple[Entry, ...] | None,
) -> Fleet:
    """Hosts of --hostfile, and what to start on each.

    `chosen`: the hosts in it that the job uses, with as many slots as ranks; None: all.
    """
    from nccl_doctor.gather.fleet import Fleet
    from nccl_doctor.launch.ssh import connection, hostfile, program

    if launch.launcher != "none" and not flags.starts_ranks:
        raise click.UsageError(
            f"--hostfile: {launch.launcher} has started this process as one of its ranks; leave "
            f"the option out, or start nccl-doctor once, without {launch.launcher}",
            ctx,
        )
    if flags.node_rank is not None or flags.any_node_rank:
        given = "a c10d rendezvous" if flags.node_rank is None else f"--node-rank {flags.node_rank}"
        raise click.UsageError(
            f"{given}: with --hostfile the line of a host is its node rank; leave it out", ctx
        )
    try:
        entries = chosen or hostfile.read(path)
        nproc = hostfile.ranks_per_host(entries, None if chosen else flags.nproc_per_node, path)
        left_out = ctx.meta.get(LEFT_OUT, [])
        variables = program.exported(os.environ, Path.home(), Path.cwd(), left_out)
    except (hostfile.HostfileError, program.ExportsError) as error:
        raise click.UsageError(str(error), ctx) from error
    if flags.nnodes not in (None, len(entries)):
        raise click.UsageError(
            f"--nnodes {flags.nnodes}: --hostfile {path} names {len(entries)} hosts; leave the "
            "option out",
            ctx,
        )
    if shutil.which("ssh") is None:
        raise click.UsageError("--hostfile needs ssh, and ssh is not in PATH: install it", ctx)
    if len(connection.instructions(Options(), variables)) > connection.WORD_MAX // 2:
        raise click.UsageError(
            f"the variables to export ({', '.join(program.PREFIXES)}…, {program.ENV_FILE}) are "
            f"larger than {connection.WORD_MAX >> 11} KiB; unset those that the job does not need",
            ctx,
        )
    return Fleet.of(path, entries, nproc, flags, variables)
