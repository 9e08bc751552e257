"""`run` and `env`: examine this cluster, or this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nccl_doctor.cli.baseline import baseline_option, past_of
from nccl_doctor.cli.handover import COMMAND, BeforeCommand, become
from nccl_doctor.cli.help import RUN_EXITS, Manual
from nccl_doctor.cli.params import HostName, LocalRanks, Mesh, Names, Number, Seconds
from nccl_doctor.cli.redaction import redact_options
from nccl_doctor.cli.saving import give, output_options, profile_option
from nccl_doctor.cli.settings import options_of, read_config, relayed_options
from nccl_doctor.model.job import GROUPS

if TYPE_CHECKING:
    from nccl_doctor.gather.examine import ParticipantResult
    from nccl_doctor.gather.over_ssh import Fleet
    from nccl_doctor.judge.history import Past
    from nccl_doctor.model.launch import Launch
    from nccl_doctor.model.options import Flags, Options

F = TypeVar("F", bound=Callable[..., Any])


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
                help="What the job will use; auto: nccl where any host has a GPU.",
            ),
            click.option("--select", type=Names(), help="Only these checks or finding codes."),
            click.option("--ignore", type=Names(), help="All but these checks or finding codes."),
            output_options,
            profile_option,
            redact_options,
            click.option("--strict", is_flag=True, help="Warnings fail."),
            click.option(
                "--config",
                metavar="FILE",
                is_eager=True,
                callback=read_config,
                help="Defaults of options, and expected values. [default: nccl-doctor.toml, or "
                "[tool.nccl-doctor] in pyproject.toml, of the working directory]",
            ),
            click.option("--quiet", "-q", is_flag=True, help="Only the verdict and what to fix."),
            click.option("--verbose", "-v", count=True, help="Show passing checks too."),
        )
    ):
        function = option(function)
    return function


@click.command(
    cls=BeforeCommand,
    short_help="Examine the cluster: the pre-flight.",
    exits=RUN_EXITS,
    examples=(
        ("This machine alone, with every check in the report", "nccl-doctor run -v"),
        (
            "Under torchrun, on each of two hosts",
            "torchrun --nnodes 2 --node-rank $NODE_RANK --nproc-per-node 8 \\\n"
            "    --master-addr head --master-port 29500 \\\n"
            "    -m nccl_doctor run --json report.json",
        ),
        ("Under Slurm, in the allocation of the job", "srun nccl-doctor run --json report.json"),
        (
            "With no launcher, on each of two hosts: says why a rendezvous cannot form",
            "nccl-doctor run --nnodes 2 --node-rank $NODE_RANK --master-addr head",
        ),
        ("On every host of a hostfile, over ssh", "nccl-doctor run --hostfile hosts"),
        (
            "In front of the job, which starts only if the verdict allows",
            "nccl-doctor run -- torchrun --nproc-per-node 8 train.py",
        ),
        (
            "The groups of a device mesh, and how long rank 0 will work alone",
            "nccl-doctor run --mesh dp=2,tp=4 --expect-load-seconds 1200",
        ),
        (
            "In CI, where warnings fail as well",
            "nccl-doctor run --strict --json report.json --junit report.xml",
        ),
        (
            "Against earlier runs of the same hosts, and kept for the next one",
            "nccl-doctor run --baseline past --json past/today.json",
        ),
        (
            "Quickly: no collectives, and not the check of the clocks",
            "nccl-doctor run --level quick --ignore clock",
        ),
    ),
)
@click.option("--nnodes", type=Number(1), help="Number of hosts. [default: 1]")
@click.option("--node-rank", type=Number(0), help="Index of this host. [default: 0]")
@click.option(
    "--nproc-per-node",
    type=LocalRanks(),
    help="Ranks to start here. [default: auto: one per GPU, or 2 without any]",
)
@click.option("--master-addr", type=HostName(), help="Host of rank 0. [default: localhost]")
@click.option(
    "--master-port",
    type=Number(1, 65535),
    help="Port there. [default: 29500; on one host, a free one]",
)
@click.option(
    "--hostfile",
    metavar="FILE",
    help="Start this on every host of FILE over ssh: lines `host slots=N`, as for deepspeed.",
)
@click.option("--relay", is_flag=True, hidden=True)
@click.option(
    "--mesh",
    type=Mesh(),
    help="Device mesh of the job, as in dp=2,sp=1,tp=4: test every group of every dimension.",
)
@click.option(
    "--groups",
    type=click.Choice(GROUPS),
    default="auto",
    show_default=True,
    help="Groups of the job: one, many by new_group, or weight-sync: a side group with processes "
    "of another world (RLHF). auto: not known.",
)
@click.option(
    "--deepspeed-config",
    metavar="FILE",
    help="The job's DeepSpeed configuration: its arithmetic is checked against the cluster.",
)
@click.option(
    "--expect-load-seconds",
    type=Seconds(),
    help="How long rank 0 works alone before the first barrier; the time-outs are held against it.",
)
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
@baseline_option
@_run_options
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    """Examine the cluster: the pre-flight.

    Under torchrun, srun, mpirun, deepspeed or accelerate this process is one rank of the job. With
    no launcher it starts the ranks of this host itself: run it on every host, with torchrun's
    options. A COMMAND after -- is run in its place if the verdict allows; of torchrun, accelerate
    and deepspeed the options are read. The exit code is then that of the COMMAND.

    The report goes to stdout on rank 0, progress to stderr. It is there within --timeout, whatever
    is broken, and all ranks leave with the same exit code.
    """
    from dataclasses import replace

    from nccl_doctor.cli.job import job_of
    from nccl_doctor.cli.topology import topology_of

    relayed = relayed_options(ctx) if given["relay"] else None  # before the environment is read
    environ = dict(os.environ)
    command = ctx.meta[COMMAND]
    flags, launch, fleet, deepspeed = topology_of(ctx, given, command)
    options = relayed
    past = None
    if options is None:
        first = launch.rank in (0, None)
        options = options_of(ctx, given, first=first)
        options = replace(options, job=job_of(ctx, given, deepspeed=deepspeed))
        past = past_of(options.baseline, options.select, options.ignore) if first else None
    code = _run_on_hosts(fleet, options, past) if fleet else _run_here(ctx, options, flags, past)
    sys.stdout.flush()
    sys.stderr.flush()
    if command and code == 0:
        become(command, environ)
    # A store client that never answered may still hold a thread, and C++ aborts the process when
    # such a thread is torn down: everything is written, so leave without the tearing down.
    os._exit(code)


def _run_here(ctx: click.Context, options: Options, flags: Flags, past: Past | None) -> int:
    """Examine the cluster that this process is a rank or a host of; the exit code."""
    from nccl_doctor.gather.run import run as examine
    from nccl_doctor.launch.local_ranks import NoGpu
    from nccl_doctor.report.output import leave, relay

    def write(departure: ParticipantResult, launch: Launch) -> int:
        if ctx.params["relay"]:
            return relay(departure, launch)
        return leave(departure, launch, options)

    try:
        return examine(options, flags, write, past)
    except NoGpu as error:
        raise click.UsageError(str(error), ctx) from error


def _run_on_hosts(fleet: Fleet, options: Options, past: Past | None) -> int:
    """Examine the cluster of a hostfile; the exit code."""
    from nccl_doctor.gather.examine import ParticipantResult
    from nccl_doctor.gather.over_ssh import run_on_hosts
    from nccl_doctor.model.launch import Launch
    from nccl_doctor.report.output import leave

    try:
        report = run_on_hosts(fleet, options, past)
    except OSError as error:
        raise _NotStarted(f"ssh could not be started: {error}") from error
    return leave(ParticipantResult(report.exit_code, report), Launch(), options)


@click.command(
    cls=Manual,
    exits=RUN_EXITS,
    examples=(
        ("This host, as on a login node or in a health check", "nccl-doctor env"),
        (
            "Only the GPUs, for Slurm to drain a broken node",
            "nccl-doctor env --select gpu_state --backend nccl --exit-profile slurm",
        ),
        (
            "Only what NCCL and torch read from the environment",
            "nccl-doctor env --select environment -v",
        ),
    ),
)
@_run_options
@click.pass_context
def env(ctx: click.Context, /, **given: Any) -> None:
    """Examine this host alone, without any process group.

    Nobody else is waited for, and what needs other hosts or ranks is left out. It takes some
    seconds, most of them to import torch.
    """
    options = options_of(ctx, given, first=True)
    from nccl_doctor.gather.this_host import examine_here

    report = examine_here(options)
    sys.exit(give(report, options.outputs, options))
