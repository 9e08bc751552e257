"""`run … -- COMMAND`: split the command from the line. `toolkit/guardian.py` becomes it."""

from __future__ import annotations

import click

from nccl_doctor.cli.help import Manual

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
