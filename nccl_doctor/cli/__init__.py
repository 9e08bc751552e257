"""The command line: parse, run, render, exit.

Nothing heavy is imported before a command needs it: --help and --version know neither torch nor any
check.
"""

from __future__ import annotations

import click

from nccl_doctor import __version__
from nccl_doctor.cli.examination import env, run
from nccl_doctor.cli.pages import checks, explain, schema
from nccl_doctor.cli.reports import report
from nccl_doctor.cli.words import PROGRAM, need_command


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM, message="%(prog)s %(version)s")
# `deepspeed --module nccl_doctor run` puts it in front of `run`; LOCAL_RANK says the same.
@click.option("--local_rank", type=int, hidden=True, expose_value=False)
@click.pass_context
def cli(ctx: click.Context, /) -> None:
    """Examine a training cluster before the job runs, and name what is wrong, where, and the fix.

    Run it with the launcher and environment of the job:

        torchrun … -m nccl_doctor run

    Exit codes: 0 no failure, 1 a failure, 2 usage or configuration error, 3 not completed.
    """
    need_command(ctx)


for _command in (run, env, checks, explain, report, schema):
    cli.add_command(_command)
