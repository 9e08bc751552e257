"""`run … -- COMMAND`: take the command off the line, see that it exists, and become it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click

from nccl_doctor.cli.help import Manual

COMMAND = "nccl-doctor.command"
"""Where the command waits in the click context: a list of words, empty where there is none."""


class BeforeCommand(Manual):
    """A click command whose line may end with `-- COMMAND …`, which click does not look into."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Options from what stands before `--`.

        Raises:
            click.UsageError: nothing stands after it.
        """
        command: list[str] = []
        if "--" in args:
            at = args.index("--")
            args, command = args[:at], args[at + 1 :]
            if not command:
                raise click.UsageError("-- is followed by no command", ctx)
        ctx.meta[COMMAND] = command
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does, and the command."""
        formatter.write_usage(ctx.command_path, "[OPTIONS] [-- COMMAND ...]")


def become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command, with the environment that we were started with.

    Ends with exit code 2, and a line that says why, where that cannot be done.
    """
    signal.alarm(0)  # an alarm outlives exec
    try:
        os.execvpe(command[0], list(command), dict(environ))
    except OSError as error:
        sys.stderr.write(f"nccl-doctor: cannot run {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(2)
