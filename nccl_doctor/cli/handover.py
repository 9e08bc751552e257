"""`run … -- COMMAND`: split the command from the line. `toolkit/guardian.py` becomes it."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from nccl_doctor.cli.help import Manual
from nccl_doctor.cli.torchrun import no_words, respelled

COMMAND = "nccl-doctor.command"
"""Key in the click context for the command: a list of words, empty without a command."""
_BEHIND = "nccl-doctor.behind"
"""Key in the click context: whether the word to complete stands behind `--`."""


class BeforeCommand(Manual):
    """Click command whose line may end with `-- COMMAND …`, which click does not parse."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before `--`, which may be spelt as for torchrun.

        Raises:
            click.UsageError: no command follows `--`, or part of one stands before it.
        """
        command: list[str] = []
        given = args
        if "--" in args:
            at = args.index("--")
            args, command = args[:at], args[at + 1 :]
            if not (command or ctx.resilient_parsing):
                raise click.UsageError("no command after --", ctx)
        ctx.meta[COMMAND] = command
        if ctx.resilient_parsing:  # a shell completes the line
            ctx.meta[_BEHIND] = "--" in given
            return super().parse_args(ctx, args)
        own = {name for param in self.get_params(ctx) for name in param.opts}
        ctx.allow_extra_args = True  # they are refused with better words
        rest = super().parse_args(ctx, respelled(ctx, args, own))
        no_words(ctx, rest, args, own)
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Options; behind `--` files, as that line is another program's."""
        if ctx.meta.get(_BEHIND):
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usage line of click, with the command."""
        formatter.write_usage(ctx.command_path, "[OPTIONS] [-- COMMAND ...]")
