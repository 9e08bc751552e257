"""Read the flags in front of a training script, as the launchers do: all three use argparse.

So does this module, with their option names, and thereby has the same abbreviations, `--flag=value`
and joined short flags, and stops where they stop: at the script, whose own flags are its own.
"""

from __future__ import annotations

import difflib
import re
from argparse import REMAINDER, Action, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from nccl_doctor.launch.command_line.installed import installed_flags
from nccl_doctor.launch.command_line.job_line import JobLineError, Said

_TYPO = 0.85
"""Likeness from which an unknown flag is a known one misspelt, and not one of another version."""
_TRUTHS = ("true", "false", "yes", "no")


@dataclass(frozen=True)
class FlagTable:
    """The flags of a launcher: names between blanks, spellings of one flag joined by `/`. The
    first long one names it.

    `families` are prefixes of flags that all take a value, but for the `switches`. `dashes`: it
    takes `--a-b` for `--a_b`. `parser`: `module:function` of the launcher that makes its own
    parser, which is asked for a flag that stands in no table.
    """

    values: str
    switches: str
    parser: str = ""
    families: tuple[str, ...] = ()
    dashes: bool = True
    abbreviations: bool = True

    def flags(self, takes_value: bool) -> dict[str, list[str]]:
        """Name of every flag → all its spellings."""
        flags = {}
        for word in (self.values if takes_value else self.switches).split():
            names = word.split("/")
            name = next((name for name in names if name.startswith("--")), names[0])
            dashed = [spelling.replace("_", "-") for spelling in names] if self.dashes else []
            flags[_key(name)] = list(dict.fromkeys(names + dashed))
        return flags

    def with_more(self, flags: Mapping[str, bool]) -> FlagTable:
        """The same with more flags: spellings joined by `/` → whether it takes a value."""
        values = (name for name, takes_value in flags.items() if takes_value)
        switches = (name for name, takes_value in flags.items() if not takes_value)
        return replace(
            self,
            values=" ".join((self.values, *values)),
            switches=" ".join((self.switches, *switches)),
        )


@dataclass(frozen=True)
class Given:
    """Flags as given. `script` is where the launcher's own flags end."""

    flags: dict[str, Said]
    script: str
    notes: tuple[str, ...] = ()


def read_flags(table: FlagTable, words: Sequence[str]) -> Given:
    """Read the words behind a launcher's name.

    A flag that is not in the table may be one of another version: the installed launcher is asked.
    If it does not know it either, the flag is passed over with a note, and the word after it is its
    value if the line goes on with flags that are known, or with a file of Python.

    Raises:
        JobLineError: a value or the script is missing, or a flag is misspelt or fits several.
    """
    given = _Words(table, words)
    notes = {}
    if given.unknown and (added := given.of_installed()):
        given = _Words(table.with_more(added), words)
        spellings = {name for names in added for name in names.split("/")}
        notes = _ignored(said.source for said in given.flags.values() if said.source in spellings)
    notes |= _ignored(given.unknown)
    for name in given.unknown:
        if close := difflib.get_close_matches(name, given.known, 1, _TYPO):
            raise JobLineError(f'{name} is not a flag; did you mean "{close[0]}"?')
    while (last := given.last) in given.unknown and not given.script.endswith(".py"):
        as_value = given.with_value(last)
        word, taken = given.script, "its value" if as_value else "the script"
        notes[last] = (
            f"{last} is not known here: {word!r} is taken for {taken}; write {last}={word} if it "
            "is the value"
        )
        if not as_value:
            break
        given = as_value
        notes = _ignored(given.unknown) | notes
    if last.startswith("-") and given.script.lower() in _TRUTHS and "no_python" not in given.flags:
        raise JobLineError(
            f"{last} takes no value: {given.script!r} after it is taken for the script"
        )
    return Given(given.flags, given.script, tuple(notes.values()))


def _ignored(names: Iterable[str]) -> dict[str, str]:
    return {name: f"{name} is not known here; it is ignored" for name in names}


class _Words:
    """The words behind a launcher's name, as argparse reads them with the flags of a table.

    Attributes:
        flags: those of the launcher, as given.
        script: where they end.
        last: the word in front of it.
        unknown: flags in front of it that are not in the table.
        known: all spellings of those that are.
    """

    def __init__(self, table: FlagTable, words: Sequence[str]) -> None:
        self._table, self._words = table, words
        parser = _Parser(add_help=False, allow_abbrev=table.abbreviations, prog="")
        self.known: list[str] = []
        for takes_value in (True, False):
            for flag, names in table.flags(takes_value).items():
                nargs = None if takes_value else 0
                parser.add_argument(*names, dest=flag, action=_Keep, nargs=nargs)
                self.known += names
        for name in dict.fromkeys(word.partition("=")[0] for word in words):
            if _key(name).startswith(table.families or " ") and name not in self.known:
                parser.add_argument(name, dest=_key(name), action=_Keep)
        parser.add_argument("-h", "--help", action=_Help, nargs=0)
        parser.add_argument("script")
        parser.add_argument("args", nargs=REMAINDER)
        space, unknown = parser.parse_known_args(list(words), Namespace(flags={}))
        self.flags: dict[str, Said] = space.flags
        self.script: str = space.script
        self._behind: list[str] = space.args
        before = words[: len(words) - len(space.args) - 1]
        self.last = before[-1] if before else ""
        heads = (word.partition("=")[0] for word in unknown)
        self.unknown = [head for head in heads if head.startswith("-") and head != "--"]

    def of_installed(self) -> dict[str, bool]:
        """Flags of the installed launcher that the table lacks, as `FlagTable.with_more` has
        them.
        """
        theirs = installed_flags(self._table.parser)
        return {
            names: theirs[names] for names in theirs if not set(names.split("/")) & {*self.known}
        }

    def with_value(self, name: str) -> _Words | None:
        """The same if the word after this flag is its value; None if no script is left then."""
        goes_on = (
            word.partition("=")[0] in self.known or word.endswith(".py") for word in self._behind
        )
        if not any(goes_on):
            return None
        try:
            return _Words(self._table.with_more({name: True}), self._words)
        except JobLineError:  # nothing is left for the script
            return None


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
