"""A report with pseudonyms in place of names, addresses and paths. Pure.

First every name is gathered that the report is known to hold, then everything is rewritten. By the
key that a value stands behind it is known to be a host, a path or a version; anything else is free
text. A key of a table that is a host's name is one, unless it may be a word of the format; where
all keys of a table are names of hosts, none is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
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
)
from nccl_doctor.report.redaction.text import Text
from nccl_doctor.system.masking import MASK, masked, names_secret
from nccl_doctor.toolkit.slurm import slurm_hosts

_SAME = frozenset(
    {
        *("schema_version", "tool", "verdict", "exit_code", "code", "check", "layer", "severity"),
        *(
            "title",
            "why",
            "confidence",
            "explained_by",
            "explained_why",
            "scope",
            "status",
            "started",
            "backend",
        ),
        *("level", "launcher"),
    }
)
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
_OWN_PARTS = ("run", "findings", "root_causes", "checks", "hosts", "ranks")


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
    plain = report.to_json(_as_they_are)
    data = _Writer(_known_in(plain, book)).report(plain)
    data["run"]["redacted_with"] = book.fingerprint
    return Report.from_json({**data, "redacted": True}), book


def known_of(report: Report, book: Book) -> Text:
    """Text replacer for any text that belongs to a report, such as a log of the same run."""
    return _known_in(report.to_json(_as_they_are), book)


def _as_they_are(facts: Facts) -> Facts:
    """Facts in which outcomes stay what they are: as JSON, a large job would have a million."""
    return facts


def _known_in(data: Mapping[str, Any], book: Book) -> Text:
    text, texts = Text(book), _Texts()
    texts.gather("", data)
    for key, values in texts.found.items():
        for value in values:
            _learn(text, key, value)
    return text


class _Texts:
    """Every text, once, with those of the key that it stands behind: ranks say much the same."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, None]] = defaultdict(dict)
        self._keys = lru_cache(maxsize=65536)(self._gathered_keys)
        self._seen: set[int] = set()
        """Identities of outcomes: half of those of a large job are shared."""

    def gather(self, key: str, value: Any) -> None:
        """Add the texts of a value. Keys of tables are texts too."""
        left = [(key, value)]
        while left:  # a call for each of a million tables would take a third of the time
            key, value = left.pop()
            kind = type(value)
            if kind is str:
                self.found[key][value] = None
            elif isinstance(value, (list, tuple, set, frozenset)):
                for item in value:
                    if type(item) is str:
                        self.found[key][item] = None
                    elif type(item) not in _PLAIN:
                        left.append((key, item))
            elif kind is Outcome:
                if id(value) not in self._seen:
                    self._seen.add(id(value))
                    left += _parts_of(value)
            elif kind is dict or isinstance(value, Mapping):
                keys = self._keys(key, tuple(value))
                for (behind, texts), item in zip(keys, value.values(), strict=True):
                    kind = type(item)
                    if kind is str:
                        texts[item] = None
                    elif kind not in _PLAIN:
                        left.append((behind, item))
            elif isinstance(value, str):
                self.found[key][value] = None

    def _gathered_keys(self, key: str, table: Sequence[Any]) -> list[tuple[str, dict[str, None]]]:
        """The key behind which each value of a table stands, and the texts behind that key."""
        names = [str(name) for name in table]
        self.found[""].update(dict.fromkeys(names))
        behind = [_behind(key, name) for name in names]
        return [(after, self.found[after]) for after in behind]


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


class _Strings(dict[str, str]):
    """Strings behind one key → their new forms, each made once: ranks say much the same."""

    def __init__(self, make: Callable[[str], str]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, value: str) -> str:
        made = self[value] = self._make(value)
        return made


class _Writer:
    """Rewrites JSON data."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._outcomes: dict[int, Outcome] = {}
        self._strings: dict[str, _Strings] = {}
        self._keys = lru_cache(maxsize=65536)(self._made_keys)
        self._replaced = cache(text.replaced)  # one address stands behind many keys

    def report(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The whole report; keys that a newer version adds are rewritten as free text."""
        return {
            name: item if name in _SAME else self._any(name, item, own=name in _OWN_PARTS)
            for name, item in data.items()
        }

    def _any(self, key: str, value: Any, *, own: bool = False) -> Any:
        """`own`: a table of the report's own, whose keys are part of its format."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is str or isinstance(value, str):
            return self._strings_of(key)[value]
        if isinstance(value, (list, tuple)):
            return self._items(key, value, own=own)
        if kind is Outcome:
            return self._outcome(value)
        if kind is dict or isinstance(value, Mapping):
            if own or key == "merged":
                return self._table(key, value, own=own)
            return self._free_table(key, value)
        if isinstance(value, (set, frozenset)):
            return sorted((self._any(key, item) for item in value), key=str)
        if isinstance(value, (int, float)):
            return value
        return self._strings_of(key)[str(value)]

    def _items(self, key: str, values: Sequence[Any], *, own: bool) -> list[Any]:
        strings, of_free_tables = self._strings_of(key), not (own or key == "merged")
        made: list[Any] = []
        for item in values:
            kind = type(item)
            if kind is str:
                made.append(strings[item])
            elif kind is dict and of_free_tables:
                made.append(self._free_table(key, item))
            else:
                made.append(self._any(key, item, own=own))
        return made

    def _free_table(self, key: str, table: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        pairs = zip(self._keys(key, tuple(table)), table.values(), strict=True)
        for (name, behind, strings), item in pairs:
            kind = type(item)
            if kind is str:
                made[name] = strings[item]
            elif kind in _PLAIN:
                made[name] = item
            elif kind is dict and behind != "merged":  # nearly all: there are half a million
                made[name] = self._free_table(behind, item)
            else:
                made[name] = self._any(behind, item)
        return made

    def _outcome(self, outcome: Outcome) -> Outcome:
        """The outcome; what several hosts or ranks share is one object again."""
        if id(outcome) not in self._outcomes:
            made = {key: self._any(key, value) for key, value in _parts_of(outcome)}
            if outcome.breadcrumbs:
                made["breadcrumbs"] = tuple(made["breadcrumbs"])
            if outcome.extra:
                made["extra"] = made.pop("")
            self._outcomes[id(outcome)] = Outcome(
                outcome.status,
                exit_code=outcome.exit_code,
                duration_s=outcome.duration_s,
                group=outcome.group,
                **made,
            )
        return self._outcomes[id(outcome)]

    def _made_keys(self, key: str, table: Sequence[Any]) -> list[tuple[str, str, _Strings]]:
        """Each key of a table in its new form, the key behind which its value stands, and the
        strings behind that key.
        """
        names = [str(name) for name in table]
        hosts, behind = self._hosts_among(names), [_behind(key, name) for name in names]
        return [
            (self._key(name, name in hosts), after, self._strings_of(after))
            for name, after in zip(names, behind, strict=True)
        ]

    def _hosts_among(self, names: Sequence[str]) -> set[str]:
        knows = self._text.names.knows_host
        sure = {name for name in names if knows(name) and name.lower() not in COMMON}
        return set(names) if sure and all(map(knows, names)) else sure

    def _table(self, key: str, table: Mapping[str, Any], *, own: bool) -> dict[str, Any]:
        hosts = self._hosts_among([str(name) for name in table])
        made = {}
        for name, item in table.items():
            name = str(name)
            if own and (name in _SAME or (key == "checks" and name == "name")):
                made[name] = item
            elif name == "id" and ((own and key == "run") or key == "merged"):
                made[name] = item  # drawn by chance: it names nobody
            elif own and key == "hosts" and name == "key" and item:
                parts = str(item).split(".")  # the machine, and its network
                made[name] = ".".join(map(self._text.addresses.uuid, parts))
            else:
                made[self._key(name, name in hosts)] = self._any(_behind(key, name), item)
        return made

    def _key(self, name: str, is_host: bool) -> str:
        """A key: a name, an address, a path, or a word of the format."""
        if is_host:
            return self._text.names.host(name)
        if _UNLIKE_A_WORD.search(name) or name.startswith(("/", "~")):
            return self._text.replaced(name)
        return name

    def _strings_of(self, key: str) -> _Strings:
        if key not in self._strings:
            self._strings[key] = _Strings(partial(self._made_string, key))
        return self._strings[key]

    def _made_string(self, key: str, value: str) -> str:
        text = self._text
        if not value or value == MASK:
            return value
        if _SECRET.search(key) or names_secret(key):
            return MASK
        value = masked(value)
        if key == "command":
            return re.sub(r"\S+", self._word_of_command, value)
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
        return self._replaced(value, is_version=bool(VERSION_KEYS.search(key)))

    def _word_of_command(self, match: re.Match[str]) -> str:
        """One word of our own command line, where a file may stand without any folder."""
        option, equals, value = match.group().rpartition("=")
        if "://" not in value and ("/" in value or _ENDING.fullmatch(value)):
            return option + equals + self._text.paths.path(value)
        return self._text.replaced(match.group())


def _is_path(value: str) -> bool:
    return value != "-" and "\n" not in value and (" " not in value or "/" in value)
