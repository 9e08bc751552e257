"""A report with pseudonyms in place of names, addresses and paths. Pure.

One walk copies the report and gathers its distinct texts. They tell which names it holds; then each
is rewritten once, and put into the copy. By the key that a value stands behind it is known to be a
host, a path or a version; anything else is free text. A key of a table that is a host's name is
one, unless it may be a word of the format; where all keys of a table are names of hosts, none is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from nccl_doctor.model.cluster import Facts, Outcome
from nccl_doctor.model.report import Report
from nccl_doctor.report.redaction.addresses import is_ip
from nccl_doctor.report.redaction.book import Book
from nccl_doctor.report.redaction.names import (
    COMMON,
    ENDINGS,
    HOST_KEYS,
    HOST_VARIABLES,
    ID_KEYS,
    LABEL_KEYS,
    LABEL_VARIABLES,
    PATH_KEYS,
    SERIAL_KEYS,
    VERSION_KEYS,
    is_host_name,
    words,
)
from nccl_doctor.report.redaction.text import Text
from nccl_doctor.system.masking import MASK, masked, names_secret
from nccl_doctor.toolkit.slurm import slurm_hosts

_SAME = words("""
schema_version tool verdict exit_code code check layer severity title why confidence explained_by
explained_why scope status started backend level launcher
""")
"""Keys of the report itself whose values are the doctor's own words."""
_SECRET = re.compile(r"token|secret|passw|passphrase|api_?key", re.IGNORECASE)
_LISTED = re.compile(r"NODELIST$|^hostlist$")
_CONTROLLER = re.compile(r"WORKING_CLUSTER$")
"""`cluster:host:port:version`, of the controller that a job of a federation talks to."""
_WITH_PORT = re.compile(r"([^:\s]+)(:\d+)")
_UNLIKE_A_WORD = re.compile(r"[\d.:-]")
_ENDING = re.compile(rf"[^\s=]+\.(?:{'|'.join(sorted(ENDINGS))})")
_PLAIN = frozenset({int, float, bool, type(None)})
"""Types of values that name nobody."""
_TEXTS = ("reason", "stack", "state", "wchan", "log_tail", "signal")
"""Texts of an outcome."""
_HOST_KEY = "key of a host"
"""Stands for the key `key` of `hosts`: the machine, and its network."""
_OWN_PARTS = ("run", "findings", "root_causes", "checks", "hosts", "ranks")
_Place = tuple[str, str, "dict[str, str] | None"]
"""Key of a table, the key that shows the type of its value, and the texts behind that; None where
the value stays as it is.
"""
_Places = tuple[tuple[str, ...], list[_Place]]
"""Keys of a table, if they may be rewritten, and its places."""


def redact(report: Report, key: bytes) -> tuple[Report, Book]:
    """The report that can be given away, and the private book that says what its names stand for.

    Hosts, domains, addresses, hardware addresses, users, paths, serial numbers and names of jobs
    are replaced; versions, ports, numbers and the doctor's own words stay. Judged again, it comes
    to the same verdict. A report that is redacted already comes back as it is, with an empty book.

    Args:
        report: what to redact.
        key: the same key gives the same pseudonyms in another report.
    """
    book = Book(key)
    if report.redacted:
        return report, book
    copy = _ReportCopy(report)
    text = copy.known(book)
    replaced = cache(text.replaced)  # one address stands behind many keys
    for behind, texts in copy.texts.items():
        for value in texts:
            texts[value] = _rewritten(text, replaced, behind, value)
    data = copy.rewritten(lambda names: _renamed(text, names))
    data["run"]["redacted_with"] = book.fingerprint
    return Report.from_json({**data, "redacted": True}), book


def known_of(report: Report, book: Book) -> Text:
    """Text replacer for any text that belongs to a report, such as a log of the same run."""
    return _ReportCopy(report).known(book)


def _as_they_are(facts: Facts) -> Facts:
    """Facts in which outcomes stay what they are: as JSON, a large job would have a million."""
    return facts


@dataclass
class _OutcomeCopy:
    """Parts of an outcome, which is made anew when they are rewritten."""

    old: Outcome
    parts: dict[str, Any]
    made: Outcome | None = None

    def rewritten(self) -> Outcome:
        """The outcome; what several hosts or ranks share is one object again."""
        if self.made is None:
            old, parts = self.old, self.parts
            if old.breadcrumbs:
                parts["breadcrumbs"] = tuple(parts["breadcrumbs"])
            if old.extra:
                parts["extra"] = parts.pop("")
            plain = {name: getattr(old, name) for name in ("exit_code", "duration_s", "group")}
            self.made = Outcome(old.status, **plain, **parts)
        return self.made


class _ReportCopy:
    """Copy of a report as JSON, whose texts can be replaced.

    `texts` are all of them, by the key that they stand behind, with their new forms: ranks say
    much the same.
    """

    def __init__(self, report: Report) -> None:
        self.texts: dict[str, dict[str, str]] = defaultdict(dict)
        self._names: dict[str, str] = {}
        self._places: dict[tuple[Any, ...], _Places] = {}
        self._outcomes: dict[int, _OutcomeCopy] = {}
        self._lists: list[tuple[list[Any], dict[str, str]]] = []
        self._tables: list[tuple[dict[str, Any], _Places]] = []
        """All tables of the copy, the inner ones first."""
        data = report.to_json(_as_they_are)
        parts = {k: self._of(k, v, k in _OWN_PARTS) for k, v in data.items() if k not in _SAME}
        self._data, self._parts = data, self._fixed(parts)

    def known(self, book: Book) -> Text:
        """Text replacer that knows the names in the report."""
        text = Text(book)
        for key, texts in (("", self._names), *self.texts.items()):
            for value in texts:
                _learn(text, key, value)
        return text

    def rewritten(self, renamed: Callable[[tuple[str, ...]], dict[str, str]]) -> dict[str, Any]:
        """The report with the new forms of its texts; `renamed`: of the keys of a table."""
        renamed = cache(renamed)
        for items, texts in self._lists:
            items[:] = [texts[item] if type(item) is str else item for item in items]
        for table, (names, places) in self._tables:
            for name, _, new in places:
                item = table[name]
                if type(item) is str and new is not None:
                    table[name] = new[item]
                elif type(item) is _OutcomeCopy:
                    table[name] = item.rewritten()
            if to := renamed(names):
                made = {name if new is None else to[name]: table[name] for name, _, new in places}
                table.clear()
                table.update(made)
        return {**self._data, **self._parts}

    def _of(self, key: str, value: Any, own: bool = False) -> Any:
        """`own`: a table of the report's own, whose keys are part of its format."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, (list, tuple)):
            made = [
                self._table(key, item, own) if type(item) is dict else self._of(key, item, own)
                for item in value
            ]
            if str in map(type, made):
                self._lists.append((made, self.texts[key]))
            return made
        if kind is Outcome:
            if id(value) not in self._outcomes:
                parts = {name: self._of(name, part) for name, part in _parts_of(value)}
                self._outcomes[id(value)] = _OutcomeCopy(value, self._fixed(parts))
            return self._outcomes[id(value)]
        if kind is dict or isinstance(value, Mapping):
            return self._table(key, value, own)
        if isinstance(value, (set, frozenset)):
            return self._of(key, sorted(value, key=str))
        if isinstance(value, (int, float)):
            return value
        text = str(value)
        self.texts[key][text] = text
        return text

    def _fixed(self, table: dict[str, Any]) -> dict[str, Any]:
        """A table of parts that are copied, whose keys stay."""
        places: list[_Place] = [(name, name, self.texts[name]) for name in table]
        self._tables.append((table, ((), places)))
        return table

    def _table(self, key: str, table: Mapping[str, Any], own: bool = False) -> dict[str, Any]:
        at = (key, own, *table)
        places = self._places.get(at)
        if places is None:
            places = self._places[at] = self._places_in(key, own, table)
        made: dict[str, Any] = {}
        for (name, behind, texts), item in zip(places[1], table.values(), strict=True):
            kind = type(item)
            if texts is None or kind in _PLAIN:
                made[name] = item
            elif kind is str:
                made[name] = texts[item] = item
            elif kind is dict:  # nearly all: there are half a million
                made[name] = self._table(behind, item)
            else:
                made[name] = self._of(behind, item)
        self._tables.append((made, places))
        return made

    def _places_in(self, key: str, own: bool, table: Iterable[Any]) -> _Places:
        places: list[_Place] = []
        for name in map(str, table):
            self._names[name] = name
            drawn = name == "id" and (key == "merged" or (own and key == "run"))  # by chance
            stays = own and (name in _SAME or (key == "checks" and name == "name"))
            behind = _HOST_KEY if own and key == "hosts" and name == "key" else _behind(key, name)
            places.append((name, behind, None if drawn or stays else self.texts[behind]))
        return tuple(name for name, _, _ in places), places


def _parts_of(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """(key, value) of what may hold names in an outcome."""
    yield "facts", outcome.facts
    if outcome.breadcrumbs:
        yield "breadcrumbs", tuple(outcome.breadcrumbs)  # it may be a `Trail`
    if outcome.witness:
        yield "witness", outcome.witness
    if outcome.extra:
        yield "", outcome.extra
    for name in _TEXTS:
        if text := getattr(outcome, name):
            yield name, text


def _behind(key: str, name: str) -> str:
    """The key that shows the type of the value at `name` in the table at `key`.

    `{"MASTER_ADDR": {"value": …}}` says what `{"MASTER_ADDR": …}` says, and `outputs` are paths by
    format. `sources` say of each field of the launch where it is from, in the doctor's words.
    """
    if name == "value" or key == "outputs":
        return key
    if key == "fix_steps" and name == "command":
        return ""  # a line for a shell, not our own command line
    return "" if key == "sources" else name


def _learn(text: Text, key: str, value: str) -> None:
    if is_ip(value) and not VERSION_KEYS.search(key):
        text.know_address(value)
        return
    text.learn(value)
    if _LISTED.search(key):
        for host in slurm_hosts(value):
            text.names.know_host(host)
    elif _CONTROLLER.search(key):
        text.names.know_host(value.partition(":")[2].partition(":")[0])
    elif HOST_VARIABLES.search(key):
        for each in re.split(r"[\s,;:=/]+", value):
            text.names.know_host(each)
    elif key in HOST_KEYS and is_host_name(value):
        text.names.know_host(value)


def _renamed(text: Text, names: Sequence[str]) -> dict[str, str]:
    """Keys of a table → their new forms: names of hosts, addresses, paths, words of the format;
    empty where all stay.
    """
    knows = text.names.knows_host
    sure = {name for name in names if knows(name) and name.lower() not in COMMON}
    hosts = set(names) if sure and all(map(knows, names)) else sure
    made = {}
    for name in names:
        is_text = _UNLIKE_A_WORD.search(name) or name.startswith(("/", "~"))
        new = text.names.host if name in hosts else text.replaced if is_text else str
        made[name] = new(name)
    return made if any(name != new for name, new in made.items()) else {}


def _rewritten(text: Text, replaced: Callable[..., str], key: str, value: str) -> str:
    """A text, by the key that it stands behind."""
    if not value or value == MASK:
        return value
    if _SECRET.search(key) or names_secret(key):
        return MASK
    value = masked(value)
    if key == "command":
        return re.sub(r"\S+", lambda word: _word_of_command(text, word), value)
    if key == _HOST_KEY:
        return ".".join(map(text.addresses.uuid, value.split(".")))
    if key in ID_KEYS:
        return text.ids.of(value)
    if _CONTROLLER.search(key):
        cluster, colon, rest = value.partition(":")
        host, end, more = rest.partition(":")
        at = text.addresses.ip(host) or (text.names.host(host) if host else "")
        return text.names.label(cluster) + colon + at + end + more
    if key in LABEL_KEYS or LABEL_VARIABLES.search(key):
        return value if value == "none" or value.isdecimal() else text.names.label(value)
    if SERIAL_KEYS.search(key):
        return text.serial(value)
    if _LISTED.search(key):
        return ",".join(map(text.names.host, slurm_hosts(value))) or MASK
    if key in HOST_KEYS or HOST_VARIABLES.search(key):
        named = _WITH_PORT.fullmatch(value)
        host, port = (named[1], named[2]) if named else (value, "")
        if is_host_name(host):
            return text.names.host(host) + port
    if PATH_KEYS.search(key) and _is_path(value):
        return text.paths.path(value)
    return replaced(value, is_version=bool(VERSION_KEYS.search(key)))


def _word_of_command(text: Text, match: re.Match[str]) -> str:
    """One word of our own command line, where a file may stand without any folder."""
    option, equals, value = match.group().rpartition("=")
    if "://" not in value and ("/" in value or _ENDING.fullmatch(value)):
        return option + equals + text.paths.path(value)
    return text.replaced(match.group())


def _is_path(value: str) -> bool:
    return value != "-" and "\n" not in value and (" " not in value or "/" in value)
