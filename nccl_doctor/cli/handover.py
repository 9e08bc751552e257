"""`run … -- COMMAND`: split the command from the line, and replace this process by it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click

from nccl_doctor.cli.help import Manual
from nccl_doctor.toolkit.masking import masked_command
from nccl_doctor.toolkit.terminal import complain

COMMAND = "nccl-doctor.command"
"""Key in the click context for the command: a list of words, empty without a command."""


class BeforeCommand(Manual):
    """Click command whose line may end with `-- COMMAND …`, which click does not parse."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before `--`.

        Raises:
            click.UsageError: no command follows `--`.
        """
        command: list[str] = []
        if "--" in args:
            at = args.index("--")
            args, command = args[:at], args[at + 1 :]
            if not command:
                raise click.UsageError("no command after --", ctx)
        ctx.meta[COMMAND] = command
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usage line of click, with the command."""
        formatter.write_usage(ctx.command_path, "[OPTIONS] [-- COMMAND ...]")


def exec_command(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command, with the environment of the start.

    Ends with exit code 2 and the reason on stderr if that is not possible.
    """
    signal.alarm(0)  # an alarm outlives exec
    try:
        os.execvpe(command[0], list(command), dict(environ))
    except OSError as error:
        complain(f"cannot run {masked_command(command[:1])}: {error.strerror}")
        os._exit(2)
