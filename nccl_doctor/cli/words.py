"""What the commands share: the program's name, and how a group without a command answers."""

from __future__ import annotations

import click

PROGRAM = "nccl-doctor"


def need_command(ctx: click.Context) -> None:
    """Of a group that was given no command, print the help, and leave with exit code 2."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)
