"""Lines as for torchrun, given to `run`: its spellings, --standalone, and what only it knows."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import click

from nccl_doctor.cli.help import PROGRAM
from nccl_doctor.toolkit.terminal import complain


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
                f"{_line(args)}",
                ctx,
            )
        made.append(f"{ours}{equals}{value}" if name in theirs else arg)
    return made


def no_words(ctx: click.Context, words: Sequence[str], args: Sequence[str]) -> None:
    """Refuse `words` that are no options, such as a training script.

    Raises:
        click.UsageError: there are some.
    """
    if words:
        raise click.UsageError(
            f"Got unexpected extra argument ({' '.join(words)}); the line of the job stands "
            f"behind --: {_line(args)}",
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


def _line(args: Sequence[str]) -> str:
    """The line that was meant, where the arguments are a line of a job without `--`."""
    theirs = set(_spellings())
    options = [arg.partition("=")[0] for arg in args if arg.startswith("-")]
    if "--" in args or not theirs.issuperset(options):
        return f"{PROGRAM} run [OPTIONS] -- torchrun …"
    starts = args[0].startswith("-") or args[0].endswith(".py")
    return f"{PROGRAM} run -- {shlex.join(['torchrun', *args] if starts else args)}"
