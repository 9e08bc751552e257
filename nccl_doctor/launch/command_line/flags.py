"""Read the flags in front of a training script, as the launchers do: all three use argparse.

So does this module, with their option names, and thereby has the same abbreviations, `--flag=value`
and joined short flags, and stops where they stop: at the script, whose own flags are its own.
"""

from __future__ import annotations

import difflib
import re
from argparse import REMAINDER, Action, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nccl_doctor.launch.command_line.job_line import JobLineError, Said

_TYPO = 0.85
"""Likeness from which an unknown flag is a known one misspelt, and not one of another version."""
_TRUTHS = ("true", "false", "yes", "no")


@dataclass(frozen=True)
class FlagTable:
    """The flags of a launcher: names between blanks, spellings of one flag joined by `/`. The
    first long one names it.

    `families` are prefixes of flags that all take a value, but for the `switches`. `dashes`: it
    takes `--a-b` for `--a_b`.
    """

    values: str
    switches: str
    families: tuple[str, ...] = ()
    dashes: bool = True
    abbreviations: bool = True

    def flags(self, takes_value: bool) -> dict[str, list[str]]:
        """Name of every flag → all its spellings."""
        flags = {}
        for word in (self.values if takes_value else self.switches).split():
            names = word.split("/")
            name = next(name for name in names if name.startswith("--"))
            dashed = [spelling.replace("_", "-") for spelling in names] if self.dashes else []
            flags[_key(name)] = list(dict.fromkeys(names + dashed))
        return flags


@dataclass(frozen=True)
class Given:
    """Flags as given. `script` is where the launcher's own flags end."""

    flags: dict[str, Said]
    script: str
    notes: tuple[str, ...] = ()


def read_flags(table: FlagTable, words: Sequence[str]) -> Given:
    """Read the words behind a launcher's name.

    A flag that is not known may be one of another version: it is passed over with a note where it
    is plain that it ends there.

    Raises:
        JobLineError: a value or the script is missing, a flag is misspelt or fits several, or
            nobody can tell whether what follows an unknown flag is its value.
    """
    parser = _Parser(add_help=False, allow_abbrev=table.abbreviations, prog="")
    known: list[str] = []
    for takes_value in (True, False):
        for flag, names in table.flags(takes_value).items():
            nargs = None if takes_value else 0
            parser.add_argument(*names, dest=flag, action=_Keep, nargs=nargs)
            known += names
    for name in dict.fromkeys(word.partition("=")[0] for word in words):
        if _key(name).startswith(table.families or " ") and name not in known:
            parser.add_argument(name, dest=_key(name), action=_Keep)
    parser.add_argument("-h", "--help", action=_Help, nargs=0)
    parser.add_argument("script")
    parser.add_argument("args", nargs=REMAINDER)
    space, unknown = parser.parse_known_args(list(words), Namespace(flags={}))
    before = words[: len(words) - len(space.args) - 1]
    return Given(space.flags, space.script, tuple(_notes(before, space.script, unknown, known)))


def _notes(
    before: Sequence[str], script: str, unknown: Sequence[str], known: Sequence[str]
) -> list[str]:
    """One line for each unknown flag; JobLineError where it spoils the reading."""
    last = before[-1] if before else ""
    if script.lower() in _TRUTHS and last.startswith("-"):
        raise JobLineError(f"{last} takes no value: {script!r} after it is taken for the script")
    notes = []
    for word in unknown:
        name, has_value, _ = word.partition("=")
        close = difflib.get_close_matches(name, known, 1, _TYPO)
        if close:
            raise JobLineError(f'{name} is not a flag; did you mean "{close[0]}"?')
        if word == last and not has_value and not script.endswith(".py"):
            raise JobLineError(
                f"{name} is not known here: {script!r} may be its value or the script; "
                f"write {name}={script} if it is the value"
            )
        if name.startswith("-") and name != "--":
            notes.append(f"{name} is not known here; it is ignored")
    return notes


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


class _Keep(Action):
    """Keep the text and the spelling of a flag; the last one wins, as in argparse."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.flags[self.dest] = Said(values or "", option or self.dest)


class _Help(Action):
    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None
    ) -> None:
        raise JobLineError(f"{option} prints the help and starts nothing")


class _Parser(ArgumentParser):
    """Raises instead of printing and leaving."""

    def error(self, message: str) -> NoReturn:
        value = re.fullmatch(r"argument (\S+): expected one argument", message)
        if value:
            name = value[1].split("/")[0]
            raise JobLineError(f"{name} has no value; is its shell variable set?")
        if message.startswith("the following arguments are required"):
            raise JobLineError("no training script after the flags")
        raise JobLineError(message)
