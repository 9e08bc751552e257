"""The command line: parse, run, render, exit.

Nothing heavy is imported before a command needs it: --help and --version know neither torch nor any
check.
"""

from __future__ import annotations

import click

from nccl_doctor import __version__
from nccl_doctor.cli.autopsy import autopsy
from nccl_doctor.cli.completion import complete_files, completion
from nccl_doctor.cli.examination import env, run
from nccl_doctor.cli.help import PROGRAM, RUN_EXITS, ManualGroup, need_command
from nccl_doctor.cli.pages import checks, explain, schema, versions
from nccl_doctor.cli.reports import report


@click.group(
    cls=ManualGroup,
    invoke_without_command=True,
    exits=RUN_EXITS,
    examples=(
        ("This machine alone: one rank per GPU, or two gloo ranks", "nccl-doctor run"),
        (
            "On each of two hosts, with the launcher and the environment of the job",
            "torchrun --nnodes 2 --node-rank $NODE_RANK --nproc-per-node 8 \\\n"
            "    --master-addr head --master-port 29500 -m nccl_doctor run",
        ),
        (
            "In front of the job: the job starts only on exit code 0",
            "nccl-doctor run -- deepspeed train.py",
        ),
        ("The meaning of a finding, and the fix", "nccl-doctor explain peer-one-way"),
    ),
)
@click.option(
    "--version",
    is_flag=True,
    help="Show the version and exit; -v: with commit, Python, torch and paths.",
)
@click.option("-v", "--verbose", is_flag=True, hidden=True)
# `deepspeed --module nccl_doctor run` puts it in front of `run`; LOCAL_RANK says the same.
@click.option("--local_rank", type=int, hidden=True, expose_value=False)
@click.pass_context
def cli(ctx: click.Context, /, version: bool, verbose: bool) -> None:
    """Examine a training cluster before the job runs, and name what is wrong, where, and the fix.

    `nccl-doctor COMMAND --help` shows the options. `python -m nccl_doctor` is the same program.
    """
    if version:
        click.echo(versions() if verbose else f"{PROGRAM} {__version__}")
        ctx.exit()
    if verbose:
        raise click.NoSuchOption("-v", ctx=ctx)
    need_command(ctx)


for _command in (run, env, autopsy, checks, explain, report, schema, completion):
    cli.add_command(_command)
complete_files(cli)
