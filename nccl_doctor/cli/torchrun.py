"""Lines as for torchrun, given to `run`: its spellings, --standalone, and what only it knows."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePath
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
    """Whether a word is the beginning of a job's line: a launcher, a Python, or a script."""
    from nccl_doctor.launch.command_line.reader import is_starter

    return word.endswith((".py", ".sh")) or is_starter(word)


def job_line(args: Sequence[str]) -> str:
    """The line that was meant, where a job stands in the place of a command of ours."""
    return _line(args, ())
