"""The name of the program, and the answer of a group without a command."""

from __future__ import annotations

import click

PROGRAM = "nccl-doctor"


def need_command(ctx: click.Context) -> None:
    """Print the help and exit with code 2 if a group is called without a command."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)
