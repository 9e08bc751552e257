"""Write the man page of nccl-doctor from what `--help` says: one page with all commands."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import click  # noqa: E402

from nccl_doctor import __version__  # noqa: E402
from nccl_doctor.cli import cli  # noqa: E402
from nccl_doctor.cli.help import PROGRAM, RUN_EXITS, Example, Manual  # noqa: E402
from nccl_doctor.cli.options import grouped  # noqa: E402

FILES = {
    "nccl-doctor.toml": "in the working directory: defaults for the options of run, and expected "
    "values. The table [tool.nccl-doctor] of pyproject.toml stands for it.",
}


def page() -> str:
    """The page, in roff with the macros of man(7)."""
    lines = [
        f'.TH {PROGRAM.upper()} 1 "" "{PROGRAM} {__version__}" "User Commands"',
        *_section("NAME", [f"{PROGRAM} \\- examine a training cluster before the job runs"]),
        *_section("SYNOPSIS", _synopsis()),
        *_section("DESCRIPTION", _text(cli.help or "")),
    ]
    for context in contexts(cli, None, PROGRAM):
        if context.parent is not None:
            lines += _command(context)
    lines += _section("EXIT STATUS", _exits(RUN_EXITS))
    lines += _section("EXAMPLES", _examples(cli.examples))
    lines += _section("FILES", _terms(FILES))
    lines += _section("SEE ALSO", ["nvidia\\-smi(1), ibstat(8), ip(8), nft(8), srun(1)"])
    return "\n".join([*lines, ""])


def contexts(
    command: click.Command, parent: click.Context | None, name: str
) -> Iterator[click.Context]:
    """Every command with its name, groups before what is in them."""
    context = click.Context(command, parent=parent, info_name=name, **command.context_settings)
    yield context
    if isinstance(command, click.Group):
        for inner in sorted(command.commands):
            yield from contexts(command.commands[inner], context, inner)


def _synopsis() -> Iterator[str]:
    for context in contexts(cli, None, PROGRAM):
        if not isinstance(context.command, click.Group):
            formatter = context.make_formatter()
            context.command.format_usage(context, formatter)
            words = formatter.getvalue().partition(":")[2].split()
            path = context.command_path
            yield f".B {_plain(path)}"
            yield _plain(" ".join(words[len(path.split()) :]))
            yield ".br"


def _command(context: click.Context) -> Iterator[str]:
    """The section of a command: its text, options, exit codes and examples."""
    command = context.command
    body = list(_text(command.help or ""))
    records = {
        param.name or "": record
        for param in command.get_params(context)
        if isinstance(param, click.Option) and (record := param.get_help_record(context))
    }
    groups = list(grouped(list(records))) if isinstance(command, Manual) else [("", list(records))]
    for heading, names in groups:
        body += [f".SS {_plain(heading)}"] if len(groups) > 1 else []
        body += _terms(dict(records[name] for name in names))
    if exits := getattr(command, "exits", None):
        body += [".SS Exit codes", *_exits(exits)]
    if examples := getattr(command, "examples", ()):
        body += [".SS Examples", *_examples(examples)]
    return _section(context.command_path.upper(), body)


def _exits(exits: Mapping[int, str]) -> Iterator[str]:
    return _terms({str(code): text for code, text in exits.items()})


def _examples(examples: Sequence[Example]) -> Iterator[str]:
    for what, line in examples:
        yield from (".PP", f"{_plain(what)}:", ".PP", ".nf", ".RS")
        yield from (*map(_plain, line.splitlines()), ".RE", ".fi")


def _section(title: str, body: Sequence[str] | Iterator[str]) -> Iterator[str]:
    yield f'.SH "{_plain(title)}"'
    yield from body


def _text(text: str) -> Iterator[str]:
    """Paragraphs of a help text."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        yield ".PP"
        yield _plain(" ".join(paragraph.split()))


def _terms(terms: Mapping[str, str]) -> Iterator[str]:
    for term, text in terms.items():
        yield from (".TP", f".B {_plain(term)}", _plain(" ".join(text.split())))


def _plain(text: str) -> str:
    """A line that roff prints as it is: hyphens that can be copied, and no control line."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga")
    text = text.replace("'", "\\(aq").replace("…", "...").replace("–", "\\-").replace('"', "\\(dq")
    return f"\\&{text}" if text.startswith((".", " ")) else text


def main(arguments: Sequence[str]) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="man_page.py", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "build" / f"{PROGRAM}.1")
    file = parser.parse_args(arguments).file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {file}; to read it: man -l {file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
