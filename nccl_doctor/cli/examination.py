"""`run` and `env`: examine this cluster, or this host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nccl_doctor.cli.baseline import past_of
from nccl_doctor.cli.help import RUN_EXITS, Manual
from nccl_doctor.cli.key import key_of
from nccl_doctor.cli.line import COMMAND, BeforeCommand, stand_alone
from nccl_doctor.cli.needs import meet_at, needs_of
from nccl_doctor.cli.options import with_options
from nccl_doctor.cli.redaction import folder_redaction_of
from nccl_doctor.cli.retry import Retries
from nccl_doctor.cli.saving import give
from nccl_doctor.cli.settings import (
    options_of,
    relayed_more_time,
    relayed_options,
    tell_of_config,
)
from nccl_doctor.report.formats import formats
from nccl_doctor.system import supervisor

if TYPE_CHECKING:
    from nccl_doctor.gather.context import Key
    from nccl_doctor.gather.fleet import Fleet
    from nccl_doctor.judge.history import Past
    from nccl_doctor.model.launch import Launch
    from nccl_doctor.model.options import Flags, Options
    from nccl_doctor.model.report import ParticipantResult


class _NotStarted(click.ClickException):
    exit_code = 3


@click.command(
    cls=BeforeCommand,
    short_help="Examine the cluster before the job starts.",
    exits=RUN_EXITS,
    examples=(
        ("This host alone, with every check in the report", "nccl-doctor run -vv"),
        (
            "Under torchrun, on each of two hosts",
            "torchrun --nnodes 2 --node-rank $NODE_RANK --nproc-per-node 8 \\\n"
            "    --master-addr head --master-port 29500 \\\n"
            "    -m nccl_doctor run --json report.json",
        ),
        ("Under Slurm, in the allocation of the job", "srun nccl-doctor run --json report.json"),
        (
            "Without a launcher, on each of two hosts: reports why a rendezvous cannot form",
            "nccl-doctor run --nnodes 2 --node-rank $NODE_RANK --master-addr head",
        ),
        ("On every host of a hostfile, over ssh", "nccl-doctor run --hostfile hosts"),
        (
            "On many hosts: some below each two leaf switches call each other",
            "srun nccl-doctor run --topology /etc/slurm/topology.conf",
        ),
        (
            "In front of the job: the job starts only on exit code 0",
            "nccl-doctor run -- torchrun --nproc-per-node 8 train.py",
        ),
        (
            "With the groups of a device mesh, and the time that rank 0 needs to load data",
            "nccl-doctor run --mesh dp=2,tp=4 --expect-load-seconds 1200",
        ),
        (
            "In CI, with warnings as failures",
            "nccl-doctor run --strict --json report.json --junit report.xml",
        ),
        (
            "Compared with earlier runs of the same hosts; the report is kept for later runs",
            "nccl-doctor run --baseline past --json past/today.json",
        ),
        (
            "With DCGM's diagnosis of the GPUs of each host, which takes minutes",
            "nccl-doctor run --with-dcgm 2 --timeout 600",
        ),
        (
            "With connections that stay silent for ten minutes, as in a pause of the job",
            "nccl-doctor run --hold-idle 600 --timeout 720",
        ),
        (
            "With the storage of the job: is it there, shared, writable, and not slow on one host",
            "nccl-doctor run --path /ckpt --path /data:ro",
        ),
        (
            "With ports of services: free on their host, and reachable from the others",
            "nccl-doctor run --endpoint head:6379 --endpoint 0:8265",
        ),
        (
            "With services outside of the job: name, proxy, certificate and answer on every host",
            "nccl-doctor run --reach https://huggingface.co --reach tcp://registry:5000",
        ),
        (
            "Of a job that meets in a file: not left over, shared by all hosts, with locks",
            "nccl-doctor run --init-method file:///shared/init-42",
        ),
        (
            "Quickly: without collectives and without the check of the clocks",
            "nccl-doctor run --level quick --ignore clock",
        ),
    ),
)
@with_options("run")
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    """Examine the cluster before the job starts.

    Under torchrun, srun, mpirun, deepspeed or accelerate this process is one rank of the job.
    Without a launcher it starts the ranks of this host itself: run it on every host, with the
    options of torchrun, in either spelling (--node-rank, --node_rank). A COMMAND after -- is the
    job: its hosts and ranks are read from it, and it replaces this process if the exit code would
    be 0.

    Rank 0 prints the report to stdout; progress goes to stderr. The report is complete within
    --timeout, whatever is broken, and all ranks exit with the same code.
    """
    from dataclasses import replace

    from nccl_doctor.cli.job import job_of
    from nccl_doctor.cli.topology import topology_of
    from nccl_doctor.launch.ranks import DEFAULT_PORT

    relayed = relayed_options(ctx) if given["relay"] else None  # before the environment is read
    # The time to read the options counts, but not that until they were told over ssh.
    started = supervisor.began() if relayed is None else time.monotonic()
    limit_s = given["timeout"] if relayed is None else relayed.timeout_s
    supervisor.set_deadline(started + limit_s)
    command = ctx.meta[COMMAND]
    key = key_of(ctx, given)
    stand_alone(ctx, given)
    meet_at(ctx, given, os.environ)
    flags, launch, fleet, deepspeed, line = topology_of(ctx, given, command)
    kept = _folder_of_job(ctx, given, flags.node_rank)
    options = relayed
    past = None
    if options is None:
        first = launch.rank in (0, None)
        options = options_of(ctx, given, first=first)
        job = job_of(ctx, given, deepspeed=deepspeed, first=first and not flags.node_rank)
        starter = "" if line.launcher == "none" else line.launcher
        least, most = line.nnodes or 1, line.max_nnodes or 1
        elastic = (least, most) if least < most else None
        job = replace(
            job,
            launcher=starter,
            rendezvous=line.rendezvous,
            elastic=elastic,
            max_restarts=line.max_restarts,
            unread=line.unread,
            asks_ssh=line.asks_ssh,
            **needs_of(given, flags.master_port or launch.master_port or DEFAULT_PORT),
        )
        options = replace(options, job=job)
        past = past_of(options.baseline, options.select, options.ignore) if first else None
        if launch.local_rank in (0, None):
            tell_of_config(ctx, given)
    retries = Retries(given["retry"])
    if fleet:
        code = _run_on_hosts(fleet, options, past, started, retries)
    else:
        code = _run_here(
            ctx, options, flags, past, retries, key=key, started=started, command=command
        )
    sys.stdout.flush()
    sys.stderr.flush()
    if retries.is_open(code):
        retries.begin_next(code, command)
    if kept is not None:
        command = _kept(kept, given, flags, launch, command)
    supervisor.done(code, () if given["again"] else command)
    # A store client that never answered may still hold a thread, and C++ aborts the process when
    # such a thread is torn down: everything is written, so leave without the tearing down.
    os._exit(code)


def _folder_of_job(ctx: click.Context, given: dict[str, Any], node_rank: int | None) -> Path | None:
    """Folder in which the output of the job is kept, by --autopsy; the report goes there too, if it
    goes into no other file. With --again it is one more examination, for that file alone.

    Raises:
        click.UsageError: there is no command, or the folder cannot be used.
    """
    if given["again"]:
        outputs = {**dict.fromkeys(formats()), "json": given["again"]}
        given.update(outputs, autopsy=None, output_dir=None, github=False, baseline=None)
    if given["autopsy"] is None:
        if given["hang_after"] is not None and not given["again"]:
            raise click.UsageError("--hang-after needs --autopsy DIR", ctx)
        return None
    if not ctx.meta[COMMAND]:
        raise click.UsageError("--autopsy is for the COMMAND behind --", ctx)
    from nccl_doctor.cli.keep import folder_name, folder_of

    try:
        folder = folder_of(given["autopsy"], folder_name(os.environ, node_rank))
    except OSError as error:
        words = f"--autopsy {given['autopsy']}: {error.strerror}"
        raise click.UsageError(words, ctx) from error
    given["json"] = given["json"] or str(folder / "before.json")
    return folder


def _kept(
    folder: Path, given: dict[str, Any], flags: Flags, launch: Launch, command: Sequence[str]
) -> list[str]:
    """The line of the process that starts the job and keeps its output."""
    from nccl_doctor.cli.keep import Plan
    from nccl_doctor.launch.ssh.program import own_words

    own = sys.argv[1 : sys.argv.index("--")]
    is_rank = launch.rank is not None and not flags.starts_ranks
    plan = Plan(
        folder=str(folder),
        before="" if given["json"] == "-" else os.path.abspath(given["json"]),
        # Ranks of one job end at different times: they would not meet again.
        again=() if is_rank else (*own_words(), *own),
        program=own_words(),
        nnodes=flags.nnodes or 1,
        first=not (flags.node_rank or launch.rank),
        hang_after_s=given["hang_after"],
    )
    return plan.words(command)


def _run_here(
    ctx: click.Context,
    options: Options,
    flags: Flags,
    past: Past | None,
    retries: Retries,
    *,
    key: Key | None,
    started: float,
    command: Sequence[str],
) -> int:
    """Exit code after examining the cluster, as one of its ranks or hosts."""
    from nccl_doctor.gather.run import run as examine
    from nccl_doctor.launch.ranks import NoGpu, TooManyRanks
    from nccl_doctor.registry import installed
    from nccl_doctor.report.output import leave, leave_unable, relay
    from nccl_doctor.system.masking import command_line
    from nccl_doctor.system.terminal import complain

    def write(result: ParticipantResult, launch: Launch) -> int:
        if ctx.params["relay"]:
            return relay(result, launch)
        if retries.comes_again(result.code, result.report):
            return result.code
        code = leave(result, launch, options, installed)
        if code and command and launch.local_rank in (0, None):
            complain(f"not started: {command_line(command)}")
        return code

    try:
        return examine(
            options,
            flags,
            write,
            lambda why: leave_unable(why, options),
            started=started,
            past=past,
            redaction=folder_redaction_of(options),
            key=key,
            more=relayed_more_time() if ctx.params["relay"] else None,
            logs=not ctx.params["relay"],  # whoever started it there reads its stderr
        )
    except (NoGpu, TooManyRanks) as error:
        raise click.UsageError(str(error), ctx) from error


def _run_on_hosts(
    fleet: Fleet, options: Options, past: Past | None, started: float, retries: Retries
) -> int:
    """Exit code after examining the cluster of a hostfile."""
    from nccl_doctor.gather.fleet import run_on_hosts
    from nccl_doctor.launch.ssh.connection import TooFewFiles
    from nccl_doctor.model.launch import Launch
    from nccl_doctor.model.report import ParticipantResult
    from nccl_doctor.registry import installed
    from nccl_doctor.report.output import leave

    try:
        report = run_on_hosts(fleet, options, past, started=started)
    except TooFewFiles as error:
        raise click.UsageError(f"--hostfile {fleet.path}: {error}") from error
    except OSError as error:
        raise _NotStarted(f"ssh could not be started: {error}") from error
    if retries.comes_again(report.exit_code, report):
        code = report.exit_code
    else:
        code = leave(ParticipantResult(report.exit_code, report), Launch(), options, installed)
    supervisor.written(code)
    return code


@click.command(
    cls=Manual,
    short_help="Show this host on one screen, and what is wrong with it.",
    exits=RUN_EXITS,
    examples=(
        ("This host on one screen, as for a question in a forum", "nccl-doctor env"),
        (
            "Only the GPUs, so that Slurm can drain a broken node",
            "nccl-doctor env --select gpu_state --backend nccl --exit-profile slurm",
        ),
        (
            "Only the variables that NCCL and torch read from the environment",
            "nccl-doctor env --select environment -v",
        ),
    ),
)
@with_options("env")
@click.pass_context
def env(ctx: click.Context, /, **given: Any) -> None:
    """Examine this host alone, without a process group, and show it on one screen.

    Below the verdict: versions, GPUs, the interfaces that gloo and NCCL take, limits, and the
    variables that steer them. -v prints every fact, --json saves it.

    Does not wait for other hosts or ranks; checks that need them are left out. Takes some seconds,
    most of them to import torch.
    """
    options = options_of(ctx, given, first=True)
    tell_of_config(ctx, given)
    from nccl_doctor.gather.run import examine_here
    from nccl_doctor.report.output import leave_unable

    report = examine_here(options, lambda why: leave_unable(why, options))
    retries = Retries(given["retry"])
    if retries.comes_again(report.exit_code, report):
        retries.begin_next(report.exit_code)
    code = give(report, options.outputs, options)
    supervisor.written(code)
    raise click.exceptions.Exit(code)
