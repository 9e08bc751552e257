"""Command lines for people to type. Values of hosts are whole words in them. Pure.

A value comes from facts of other hosts, or from a file of a stranger. No shell may take a part of
it for a command.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Callable, Mapping
from string import Formatter
from typing import NamedTuple

UNKNOWN = (
    *("ADDRESS", "BUS_ID", "DEVICE", "FILE", "FOLDER", "INDEX", "MOUNT", "NAME", "NIC", "NUMBER"),
    *("PID", "SIZE"),
)
"""Words that stand for values that are not known. In a line that a shell runs there is none."""
_UNKNOWN = re.compile(rf"\b(?:{'|'.join(UNKNOWN)})\b")


def unknown_in(text: str) -> bool:
    """True if a word of `UNKNOWN` is in a text."""
    return _UNKNOWN.search(text) is not None


class Command(str):
    """A line for a shell, with no more to run than this program wrote; `shell` makes it."""

    __slots__ = ()


class _Grammar(NamedTuple):
    fits: Callable[[str], object]
    unknown: str
    """The word of `UNKNOWN` for a value that does not fit."""


def _is_network(text: str) -> bool:
    try:
        return bool(ipaddress.ip_network(text.partition("%")[0], strict=False)) and "%" not in text
    except ValueError:
        return False


_OPTION = re.compile(r"-[a-zA-LN-Z]|--(?!mo?d?$|modp)[a-z][a-z0-9_-]*")
"""Not -M and --modprobe, by which iptables runs a program."""
_CAPITALS = re.compile(r"[A-Z][A-Z-]+(?:::/64)?")
_GRAMMARS: Mapping[str, _Grammar] = {
    "address": _Grammar(_is_network, "ADDRESS"),
    "name": _Grammar(re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*").fullmatch, "NAME"),
    "number": _Grammar(re.compile(r"(?:[0-9]+(?:[ ,.-][0-9]+)*)?").fullmatch, "NUMBER"),
    "option": _Grammar(_OPTION.fullmatch, "NAME"),
    "pattern": _Grammar(re.compile(r"[A-Za-z0-9_.*-]+").fullmatch, "NAME"),
    "plain": _Grammar(re.compile(r"[A-Za-z0-9_.,:=^/+% -]*").fullmatch, "NAME"),
    "variable": _Grammar(re.compile(r"[A-Za-z_][A-Za-z0-9_]*").fullmatch, "NAME"),
}


def shell(template: str, *values: object) -> Command:
    """A line of a template, which is a literal, and values for its fields, in their order.

    `{}` takes a text as one word, a list as several, and a `Command` as it is. A field with a
    grammar, as `{:number}`, stands inside of quotes, or where a program would obey more than a
    word. A value of another form, or of more than a line, becomes a word of `UNKNOWN`; then, and
    where a program would take a value for an option, the line is a comment.
    """
    said, comment, given = "", template.startswith("# "), iter(values)
    for literal, field, spec, _ in Formatter().parse(template):
        said += literal
        if field is None:
            continue
        value, starts = next(given), not said or said[-1].isspace()
        words: list[str] = []
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, Command):
                words.append(each)
                comment = comment or each.startswith("# ")
                continue
            text = str(each)
            fits = text.isprintable() and (not spec or bool(_GRAMMARS[spec].fits(text)))
            comment = comment or not fits or (starts and not spec and text.startswith("-"))
            if not fits:
                words.append(_stand_in(text, spec))
            else:
                words.append(text if spec else word(text))
        said += " ".join(part.removeprefix("# ") for part in words)
    if next(given, None) is not None:
        raise ValueError(f"{template!r} has fewer fields than values")
    return Command(said if not comment or said.startswith("# ") else f"# {said}")


def _stand_in(text: str, spec: str | None) -> str:
    """The word for a value that does not fit; itself, if it stands for one already."""
    if _CAPITALS.fullmatch(text):
        return text
    return _GRAMMARS[spec].unknown if spec else "NAME"


def word(text: str) -> Command:
    """A word of a command line, as bash and zsh read it: zsh expands a leading `=`."""
    alone = text.startswith("=") and "'" not in text
    return Command(f"'{text}'" if alone else shlex.quote(text))
