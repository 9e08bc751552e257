"""The environment variables of NCCL, torch, gloo, UCX and their neighbours: a table.

The table is data, in the TOML files beside this one. Their sections:

* `[library]`: `complete`, prefixes whose names are all in the table; `near`, prefixes
  for which only typing errors are reported; `ignored`, other names under these prefixes;
  `known_to`, the version that the table was made from; `in_files`, whether NCCL's configuration
  files reach the library.
* `[variables]`: name → `kind`, `since`, `default`, `moved`, `does`, `deprecated_by`, `gone`.
* `[values]`: the words or numbers that are allowed. `[reading]`: special rules for reading it.
* `[differs]`: the severity if ranks differ. `[leftover]`: values that are meant for debugging.
  `[limits]`: of time-outs and retries. `[unread]`: names that people set and no library reads,
  with what to do instead; `[excludes]`: with the variable that takes their list after a `^`.
  `[gone]`: names that older versions read. `[files]`: how the named file is used.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from nccl_doctor.toolkit.tables import read_table

FILES = ("inspector", "nccl", "torch", "gloo", "ucx", "others")
"""Names of the files; of two with a prefix of a name, the first counts."""
KINDS = ("int", "float", "bool", "flag", "enum", "words", "names", "list", "path", "url", "text")
"""How a value is read. `bool` is 0 or 1 for NCCL and any yes-or-no word for torch, `flag` is 1 or
anything else, `float` a number as Python reads it, `enum` one word, `words` a list of allowed
words, `names` a list of interfaces or devices, `list` any other list. The value of a `url` is never
recorded."""
AUTO = "auto"
"""A default that is decided at run time."""


@dataclass(frozen=True)
class Leftover:
    """Values that are set for debugging and forgotten; `*` is any value.

    `needs`: `local peers`, `infiniband` or `three gloo ranks`, without which it does no harm.
    `misleads`: it makes a healthy job fail. The first that holds counts.
    """

    values: tuple[str, ...]
    severity: str
    why: str
    needs: str = ""
    misleads: bool = False


@dataclass(frozen=True)
class Limit:
    """Limits of a value: below `shortest` a healthy job may fail; above `longest` the unit is
    probably wrong.
    """

    shortest: int
    note: str
    unit: str = ""
    longest: int | None = None
    severity: str = "warn"


@dataclass(frozen=True)
class NamedFile:
    """Use of the file that a variable names, by its library.

    Attributes:
        use: `read` or `write`; for `write` its folder has to be there.
        then: what the library does without it.
        missing: the severity of that.
        form: `topology` or `graphs`, as in `nccl.xml_files`.
        inside: the file, where the variable names its folder.
        empty: `always` where an empty name counts as set, or the default file that it then hides.
    """

    use: str
    then: str
    missing: str = "warn"
    form: str = ""
    inside: str = ""
    empty: str = ""


@dataclass(frozen=True)
class Variable:
    """One row.

    Attributes:
        library: which file of the table it is in.
        since: first version of the library that reads it; empty where unknown.
        default: as one would type it; `auto` where it is decided at run time, None where unset.
        moved: first version with another default → that one, in order.
        deprecated_by: the name that wins over this one.
        gone: first version of the library that does not read it, `<=` where it may have been an
            older one; `instead` is the variable to use.
        advice: what to know before renaming it.
        differs: `fail`, `warn` or `info` where hosts differ, `free` where they may.
        inside: the same for ranks of one host.
        only: values one of which must be among the differing ones for that.
        raises: version since which a value that is not allowed is an error; empty for never.
        whole: the number must be all of the value.
        always: read also where the backend is not NCCL, whatever the name says.
        mixed: whether it matters only where a host has GPUs of several models.
        rails: whether it lists cards, one for each rail: hosts may have other names for them.
        in_files: whether NCCL's configuration files reach it.
        file: how the file that it names is used; None where it names none, or that is not known.
    """

    name: str
    library: str
    kind: str
    since: str = ""
    default: str | None = None
    moved: tuple[tuple[str, str], ...] = ()
    does: str = ""
    deprecated_by: str = ""
    gone: str = ""
    instead: str = ""
    advice: str = ""
    values: tuple[str, ...] = ()
    cased: bool = False
    whole: bool = False
    always: bool = False
    mixed: bool = False
    rails: bool = False
    raises: str = ""
    differs: str = "warn"
    inside: str = "warn"
    only: tuple[str, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    limit: Limit | None = None
    in_files: bool = False
    file: NamedFile | None = None

    def at(self, version: tuple[int, ...]) -> Variable:
        """The row of a release of its library; of none that is known, the first one."""
        news = [new for since, new in self.moved if version >= tuple(map(int, since.split(".")))]
        return replace(self, default=news[-1]) if news else self

    @property
    def is_aid(self) -> bool:
        """True if it is a debugging aid, at least with some values."""
        return bool(self.leftovers)

    @property
    def as_nccl(self) -> bool:
        """True if its text is read with the functions of C, as NCCL and its plug-ins do."""
        return self.library in ("nccl", "inspector")

    @property
    def read_by(self) -> str:
        """`nccl`, `gloo` or `deepspeed` where nothing else reads it, else the empty string."""
        if self.as_nccl:
            return "nccl"
        if self.library == "gloo":
            return "gloo"
        if self.always:
            return ""
        words = {"NCCL_": "nccl", "GLOO_": "gloo", "DEEPSPEED_": "deepspeed"}
        return next((reader for word, reader in words.items() if word in self.name), "")


@dataclass(frozen=True)
class TableLibrary:
    """The names and prefixes that one file of the table covers."""

    name: str
    complete: tuple[str, ...]
    near: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    known_to: str = ""
    in_files: bool = False
    in_files_prefixes: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """True if a name under its prefixes belongs to a build, an image or a plug-in."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)


@dataclass(frozen=True)
class VariableTable:
    """All rows by name, the libraries, and names that no library reads: with advice, and with the
    variable that takes their list after a `^`.
    """

    variables: Mapping[str, Variable]
    libraries: tuple[TableLibrary, ...]
    unread: Mapping[str, str]
    excludes: Mapping[str, str]

    def library_of(self, name: str) -> TableLibrary | None:
        """The library that has a complete prefix of this name, or None."""
        return next((lib for lib in self.libraries if name.startswith(lib.complete)), None)


@functools.cache
def table() -> VariableTable:
    """The whole table, read once."""
    variables: dict[str, Variable] = {}
    libraries: list[TableLibrary] = []
    unread: dict[str, str] = {}
    excludes: dict[str, str] = {}
    for name in FILES:
        data = read_table(__package__, f"{name}.toml")
        library = TableLibrary(**_tuples(data["library"]))
        libraries.append(library)
        unread |= data.get("unread", {})
        excludes |= data.get("excludes", {})
        rows = data["variables"]
        rows |= {gone: {"kind": "text", **row} for gone, row in data.get("gone", {}).items()}
        variables |= {each: _variable(each, row, data, library) for each, row in rows.items()}
    return VariableTable(variables, tuple(libraries), unread, excludes)


@functools.cache
def rail_variables() -> tuple[str, ...]:
    """Names of the variables that list cards for a plug-in, one for each rail, in their order.

    From the file of the plug-ins alone: probe children ask for no more, and the whole table takes
    ten times as long to read.
    """
    return tuple(sorted(read_table(__package__, "others.toml")["reading"]["rails"]))


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}


def _variable(
    name: str, row: Mapping[str, Any], data: Mapping[str, Any], library: TableLibrary
) -> Variable:
    reading, differs = data.get("reading", {}), data["differs"]
    # An old name means what the new one means.
    key = row.get("deprecated_by", name)
    severity = next(
        (level for level in ("fail", "warn", "info", "free") if key in differs.get(level, ())),
        differs.get("default", "warn"),
    )
    raised = library.name == "torch" and row["kind"] in ("int", "bool")
    limit = data.get("limits", {}).get(key)
    leftovers = data.get("leftover", {}).get(key, ())
    file = data.get("files", {}).get(key)
    return Variable(
        name,
        library.name,
        **{**row, "moved": tuple(map(tuple, row.get("moved", ())))},
        values=tuple(data.get("values", {}).get(key, ())),
        cased=name in reading.get("cased", ()),
        whole=name in reading.get("whole", ()),
        always=name in reading.get("always", ()),
        mixed=name in reading.get("mixed", ()),
        rails=name in reading.get("rails", ()),
        raises=reading.get("raises", {}).get(name, "0" if raised else ""),
        differs=severity,
        inside=differs.get("inside", {}).get(key, severity),
        only=tuple(differs.get("only", {}).get(key, ())),
        leftovers=tuple(Leftover(**_tuples(each)) for each in leftovers),
        limit=None if limit is None else Limit(**limit),
        in_files=library.in_files or name.startswith(library.in_files_prefixes or ("\0",)),
        file=None if file is None else NamedFile(**file),
    )
