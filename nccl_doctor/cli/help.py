"""`--help` as a manual page: options in groups, exit codes, and examples that can be typed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import click

PROGRAM = "nccl-doctor"

RUN_EXITS = {
    0: "No failure; warnings are allowed, unless --strict.",
    1: "A failure: the job would not start, would hang or would compute wrongly.",
    2: "Usage or configuration error, or launch variables missing or wrong.",
    3: "Not completed, nothing measured, or a report was not written.",
}
"""Exit codes of every command that judges a cluster."""
READ_EXITS = {
    0: "Done.",
    2: "Usage error, or the file cannot be read or is not a report.",
    3: "The output could not be written.",
}
"""Exit codes of commands that read a report, whatever its verdict."""
ASK_EXITS = {0: "Done.", 2: "Usage error."}

_FEW = 8
"""Options that need no headings."""


def need_command(ctx: click.Context) -> None:
    """Print the help and exit with code 2 if a group is called without a command."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def usage_of(ctx: click.Context) -> str:
    """The usage line of a command, and where to read more."""
    usage = " ".join(ctx.get_usage().removeprefix("Usage: ").split())
    return f"usage: {usage}; see {ctx.command_path} --help"


class Example(NamedTuple):
    """Task and command: one line, or several that end in a backslash."""

    what: str
    line: str


class _CommandPage(click.Command):
    """Command with exit codes and examples."""

    def __init__(
        self,
        *args: Any,
        exits: Mapping[int, str] | None = None,
        examples: tuple[tuple[str, str], ...] = (),
        **given: Any,
    ) -> None:
        super().__init__(*args, **given)
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])
        self.exits = dict(exits or {})
        self.examples = tuple(Example(*example) for example in examples)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of the command.

        Raises:
            click.UsageError: they are wrong; it has the context, which click's parser leaves out.
        """
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes, then the examples."""
        if self.exits:
            with formatter.section("Exit codes"):
                formatter.write_dl([(str(code), text) for code, text in self.exits.items()])
        if self.examples:
            with formatter.section("Examples"):
                for i, example in enumerate(self.examples):
                    if i:
                        formatter.write_paragraph()
                    formatter.write_text(f"{example.what}:")
                    for line in example.line.splitlines():
                        formatter.write(f"{'':{formatter.current_indent + 2}}{line}\n")
        super().format_epilog(ctx, formatter)


class Manual(_CommandPage):
    """Command that shows its options in groups if there are many."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups of options, each under its heading; the rest comes last."""
        from nccl_doctor.cli.options import grouped

        records = {
            param.name or "": record
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)  # the synopsis and the text tell of arguments
            and (record := param.get_help_record(ctx)) is not None
        }
        if len(records) <= _FEW:
            groups: Iterator[tuple[str, list[str]]] = iter([("Options", list(records))])
        else:
            groups = grouped(list(records))
        for heading, names in groups:
            with formatter.section(heading):
                formatter.write_dl([records[name] for name in names])


class ManualGroup(click.Group, _CommandPage):
    """Group of commands, which knows a line of a job that stands in the place of one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command, as click finds it.

        Raises:
            click.UsageError: there is none; if the word begins a job, the error has its line.
        """
        from nccl_doctor.cli.line import job_line, starts_job

        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if ctx.parent is not None or not starts_job(args[0]):
                raise
            words = f"{error.message} The job stands behind run --: {job_line(args)}"
            raise click.UsageError(words, ctx) from error
