"""Record of a job, as its command describes it, and the flags that the command has."""

from __future__ import annotations

import difflib
import re
from argparse import REMAINDER, Action, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from nccl_doctor.launch.command_line.installed import installed_flags
from nccl_doctor.launch.ssh.hostfile import Entry
from nccl_doctor.model.job import Rendezvous, UnreadHosts
from nccl_doctor.system.helpers import send


class JobLineError(ValueError):
    """The line cannot start the job that it describes; the text is one line that says why."""


def is_file(path: Path) -> bool:
    """True if a file is there that a line names, or that its launcher would look for.

    Raises:
        JobLineError: its disk does not answer.
    """
    try:
        return send(path.parent, lambda: str(path.is_file()).encode()) == b"True"
    except OSError as error:
        raise JobLineError(f"{path}: {error.strerror}") from error


@dataclass(frozen=True)
class JobLine:
    """Job that a command describes, as its launcher would read it. None: not given.

    Defaults of the launcher stand here too, with the source `default`.

    Attributes:
        launcher: `torchrun`, `accelerate`, `deepspeed`, `vllm`, `sglang`, `fabric`, `horovodrun`,
            `colossalai`, or `none` for a line that none of them starts.
        nnodes: hosts that must be there for the job to start; of an elastic range, the fewest.
        max_nnodes: hosts that may join; equal to `nnodes` but for an elastic range.
        node_rank: of this host. None also where the launcher gives the node ranks out.
        nproc_per_node: `auto`, `gpu`, `cpu` or a number, here.
        master_addr: where the hosts meet; None where the launcher finds it out as it starts.
        master_port: None where any free port will do.
        ranks_assigned: the rendezvous gives out the node ranks (torchrun's c10d); whose address is
            `master_addr` hosts it.
        is_host: `--rdzv-conf is_host=…`: whether this host serves the rendezvous, if given.
        rendezvous: torchrun's options for it, for the checks.
        max_restarts: how often torchrun's agents start failed ranks again.
        starts_remote: one line on one host starts all the others: DeepSpeed with a hostfile, over
            ssh or with the launcher of --launcher; accelerate with mpirun's.
        shell_here: of these, one starts the ranks of its own host without ssh.
        hostfile: its path, as written. `hosts` are those of it that a DeepSpeed job uses, in order
            of node rank, with as many slots as ranks.
        unread: other hosts that a line names which starts no launcher that is known.
        asks_ssh: words with which deepspeed calls ssh before it starts ranks here, if it does.
        environ: variables that the line itself sets for its ranks; None: unset.
        sources: field → flag, variable or file that it is from.
        notes: what the user should know, one line each.
    """

    launcher: str = "none"
    nnodes: int | None = None
    max_nnodes: int | None = None
    node_rank: int | None = None
    nproc_per_node: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    ranks_assigned: bool = False
    is_host: bool | None = None
    run_id: str | None = None
    local_addr: str | None = None
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    max_restarts: int | None = None
    starts_remote: bool = False
    shell_here: bool = False
    hostfile: str | None = None
    hosts: tuple[Entry, ...] = ()
    ssh_port: int | None = None
    unread: UnreadHosts = field(default_factory=UnreadHosts)
    asks_ssh: tuple[str, ...] = ()
    environ: Mapping[str, str | None] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class LineValue(NamedTuple):
    """One value of a line, and what said it: a flag, a variable, or a key of a file."""

    text: str
    source: str


GivenFlags = Mapping[str, LineValue]
"""Flag, without hyphens in front and with underscores → its value. A switch has none."""


class Draft:
    """Builder of a `JobLine`."""

    def __init__(self, launcher: str, notes: tuple[str, ...] = ()) -> None:
        self._fields: dict[str, Any] = {"launcher": launcher}
        self._sources: dict[str, str] = {}
        self._notes = list(notes)

    def put(self, name: str, value: Any, source: str = "") -> None:
        """Set a field, with its source."""
        self._fields[name] = value
        if source:
            self._sources[name] = source

    def note(self, line: str) -> None:
        """Add a line for the user."""
        self._notes.append(line)

    def done(self) -> JobLine:
        """The record."""
        return JobLine(**self._fields, sources=self._sources, notes=tuple(self._notes))


DEFAULT = "default"
"""Source of a value that is the launcher's default."""
MAX_PORT = 65535
_MANY = 10_000_000


def number(said: LineValue, low: int, high: int = _MANY) -> int:
    """The whole number of a text, read as the launchers' `int()` does.

    Raises:
        JobLineError: it is none, or lies outside.
    """
    text = said.text.strip()
    if not text:
        raise JobLineError(f"{said.source} is empty; is its shell variable set?")
    try:
        value = int(text)
    except ValueError:
        raise JobLineError(f"{said.source} {text!r} is not a whole number") from None
    if not low <= value <= high:
        bound = f"at least {low}" if high == _MANY else f"{low} to {high}"
        raise JobLineError(f"{said.source} {value} is not {bound}")
    return value


# Read the flags in front of a training script, as the launchers do: all three use argparse.
#
# So does this module, with their option names, and thereby has the same abbreviations,
# `--flag=value` and joined short flags, and stops where they stop: at the script, whose own flags
# are its own.


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

    flags: dict[str, LineValue]
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
        self.flags: dict[str, LineValue] = space.flags
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
        namespace.flags[self.dest] = LineValue(values or "", option or self.dest)


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
