"""The line of `run`: the command behind `--`, and the spellings of torchrun."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePath
from typing import Any

import click
from click.shell_completion import CompletionItem

from nccl_doctor.cli.help import PROGRAM, Manual
from nccl_doctor.system.terminal import complain

# Lines as for torchrun, given to `run`: its spellings, --standalone, and what only it knows.


def respelled(ctx: click.Context, args: Sequence[str], own: Collection[str]) -> list[str]:
    """Arguments of `run` with `--node-rank` for `--node_rank`; `own` are the options of `run`.

    Raises:
        click.UsageError: an option of torchrun that `run` does not have.
    """
    theirs = set(_spellings())
    made = []
    for arg in args:
        name, equals, value = arg.partition("=")
        ours = name.replace("_", "-")
        if name in theirs and ours not in own:
            raise click.UsageError(
                f"{name} is an option of torchrun; the line of the job stands behind --: "
                f"{_line(args, own)}",
                ctx,
            )
        made.append(f"{ours}{equals}{value}" if name in theirs else arg)
    return made


def no_words(
    ctx: click.Context, words: Sequence[str], args: Sequence[str], own: Collection[str]
) -> None:
    """Refuse `words` that are no options, such as a training script.

    Raises:
        click.UsageError: there are some.
    """
    if words:
        raise click.UsageError(
            f"Got unexpected extra argument ({' '.join(words)}); the line of the job stands "
            f"behind --: {_line(args, own)}",
            ctx,
        )


def stand_alone(ctx: click.Context, given: dict[str, Any]) -> None:
    """Let --standalone stand for one host, which meets on itself.

    Raises:
        click.UsageError: another option asks for more hosts.
    """
    if not given["standalone"]:
        return
    for name in ("hostfile", "nnodes"):
        if given[name] not in (None, 1):
            raise click.UsageError(
                f"--standalone is for one host, and --{name} {given[name]} for others too: leave "
                "one of them out",
                ctx,
            )
    for name in ("master_addr", "master_port"):
        if given[name] is not None:
            complain(f"--{name.replace('_', '-')} is not used with --standalone")
    given.update(nnodes=1, master_addr=None, master_port=None)


def _spellings() -> Iterator[str]:
    from nccl_doctor.launch.command_line.torchrun import FLAGS

    for takes_value in (True, False):
        for names in FLAGS.flags(takes_value).values():
            yield from names


def _line(args: Sequence[str], own: Collection[str]) -> str:
    """The line that was meant, where the arguments are a line of a job without `--`.

    Options in front of torchrun that it knows go behind it: it has defaults of its own for them.
    """
    at = next((at for at, arg in enumerate(args) if starts_job(arg)), len(args))
    front, line = list(args[:at]), list(args[at:])
    theirs = set(_spellings())
    known = [arg.partition("=")[0] in theirs for arg in front if arg.startswith("-")]
    is_torchrun = not line or line[0].endswith(".py") or PurePath(line[0]).name == "torchrun"
    if line and line[0].endswith(".py"):
        line.insert(0, "torchrun")
    if all(known) and is_torchrun:
        front, line = [], [*(line[:1] or ["torchrun"]), *front, *line[1:]]
    mine = all(arg.partition("=")[0] in own for arg in front if arg.startswith("-"))
    if "--" in args or not line or not mine or (any(known) and front and is_torchrun):
        return f"{PROGRAM} run [OPTIONS] -- torchrun …"
    return f"{shlex.join([PROGRAM, 'run', *front])} -- {shlex.join(line)}"


def starts_job(word: str) -> bool:
    """True if a word is the beginning of a job's line: a launcher, a Python, or a script."""
    from nccl_doctor.launch.command_line.reader import is_starter

    return word.endswith((".py", ".sh")) or is_starter(word)


def job_line(args: Sequence[str]) -> str:
    """The line that was meant, where a job stands in the place of a command of ours."""
    return _line(args, ())


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
