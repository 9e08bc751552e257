"""Records as JSON and back, by the annotations of their fields, and single values of JSON.

Every value is of the type that is asked for, or a ValueError says where in the document it is not.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import cycle
from operator import attrgetter
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

# Largest numbers that are believed, wherever they come from: variables, options, messages, files.
#
# What is larger is a mistake or an attack. Lists are made of these numbers, so they bound memory
# too.


MAX_RANKS = 131_072
"""Ranks of a job, and so its hosts."""
MAX_LOCAL_RANKS = 4096
"""Ranks of one host."""
MAX_SEATS = 2 * MAX_RANKS + 64
"""Participants of a job: latecomers and doubles, too."""
MAX_PID = 1 << 31
MAX_SECONDS = 1_000_000.0
"""Length of a time limit, eleven days: `poll` and `alarm` take no more than some weeks."""
MOST_MORE_S = 480
"""Most seconds, whole ones, by which rank 0 may put off the end of a run without --timeout."""


T = TypeVar("T")


class Node:
    """One object, with its path in the document, so that an error can say where it is."""

    def __init__(self, path: str, data: Any) -> None:
        if not isinstance(data, Mapping):
            raise ValueError(f"{path} is {_type(data)}, not an object")
        self.path = path
        self.data = data

    def get(self, key: str, what: type[T], *default: T) -> T:
        """A value of the right type; a missing one takes the default, where there is one."""
        if key not in self.data:
            if default:
                return default[0]
            raise ValueError(f'{self.path} has no "{key}"')
        kind: Any = what
        try:
            value: T = _reader(kind)(self.data[key])
        except ValueError as error:
            raise ValueError(f"{self.path}.{key}{error}") from None
        return value

    def maybe(self, key: str, what: type[T]) -> T | None:
        """Value of `get`; None for null and for absence."""
        return None if self.data.get(key) is None else self.get(key, what)

    def readable(self, key: str, what: type[T]) -> T | None:
        """Value as of `maybe`; None for another type, too."""
        try:
            return self.maybe(key, what)
        except ValueError:
            return None

    def each(self, key: str, make: Callable[[Node], T]) -> tuple[T, ...]:
        """Every item of a list of objects."""
        items = self.get(key, list)
        return tuple(make(Node(f"{self.path}.{key}[{i}]", item)) for i, item in enumerate(items))

    def beyond(self, known: Container[str]) -> dict[str, Any]:
        """The values of all other keys: of another version, to be written again as they are."""
        return {key: value for key, value in self.data.items() if key not in known}


_NAMES: Mapping[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**18 else "a number of more than 18 digits"


def _type(value: Any) -> str:
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)


# Records: dataclasses and named tuples. A field stands under its own name; keys that are no fields
# are ignored. Readers and writers are made once for each class: a large cluster has a million
# values.


class Called(NamedTuple):
    """Annotation of a field that stands under another name."""

    name: str


class Part(Enum):
    """Annotation of a field that is not simply written and read."""

    SPARSE = "left out where it is the default"
    REST = "keys that are no fields, as they are"
    APART = "not written, and given to who reads"


_Read = Callable[[Any], Any]
"""Makes a value of plain data; its ValueError begins with the place in it. As annotation of a
field: makes the value that is taken of the one that was read.
"""


def between(low: int, high: int) -> _Read:
    """Bounds of a whole number."""

    def read(number: int) -> int:
        if low <= number <= high:
            return number
        raise ValueError(f" is {_short(number)}, outside {low}–{high}")

    return read


def at_most(most: int) -> _Read:
    """Bounds of a text."""

    def read(text: str) -> str:
        if len(text) <= most:
            return text
        raise ValueError(f" has {len(text)} characters, more than {most}")

    return read


def first(most: int) -> _Read:
    """Bounds of a list, whose rest is left out."""
    return lambda values: values[:most]


def one_of(known: Iterable[Any]) -> _Read:
    """Texts that are known, or the values that they stand for."""
    values = {each.value if isinstance(each, Enum) else each: each for each in known}

    def read(text: str) -> Any:
        if text in values:
            return values[text]
        raise ValueError(f' is "{text[:40]}", not one of {", ".join(values)}')

    return read


def _time(seconds: float) -> float:
    if 0 <= seconds <= MAX_SECONDS:  # so it is a number, too
        return seconds
    raise ValueError(f" is no time from 0 to {MAX_SECONDS:.0f} s")


Seconds = Annotated[float, _time]
Number = Annotated[int, between(0, MAX_RANKS)]
"""A number of a host or rank, or the number of them."""


def encode(record: Any) -> dict[str, Any]:
    """Plain data of a record."""
    kind: Any = type(record)
    return _record_writer(kind)(record)


def decode(record: type[T], node: Node, **given: Any) -> T:
    """The record at a node; fields that are `given` are not read.

    Raises:
        ValueError: it is malformed; says where, and what is wrong.
    """
    kind: Any = record
    try:
        values = _values(kind, frozenset(given))(node.data)
    except ValueError as error:
        raise ValueError(f"{node.path}{error}") from None
    return record(**values, **given)


_UNIONS = (Union, types.UnionType)


def _is_optional(hint: Any) -> bool:
    return type(None) in get_args(get_args(hint)[0] if get_origin(hint) is Annotated else hint)


def _is_record(hint: Any) -> bool:
    return is_dataclass(hint) or hasattr(hint, "_fields")


@cache
def _fields(record: Any) -> list[tuple[str, str, Any, Any]]:
    """(name, key, annotation, `Part`) of each field."""
    found = []
    for name, hint in get_type_hints(record, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        key = next((mark.name for mark in marks if isinstance(mark, Called)), name)
        found.append((name, key, hint, next((m for m in marks if isinstance(m, Part)), None)))
    return found


def _defaults(record: Any) -> Mapping[str, Any]:
    """Name of a field → its default, where it has one."""
    if not is_dataclass(record):
        return record._field_defaults  # type: ignore[no-any-return]
    made = {f.name: f.default_factory() for f in fields(record) if callable(f.default_factory)}
    return made | {f.name: f.default for f in fields(record) if f.default is not MISSING}


@cache
def _values(record: Any, given: Set[str] = frozenset()) -> Callable[[Any], dict[str, Any]]:
    """Reader of the fields of a record, by name."""
    every, defaults = _fields(record), _defaults(record)
    read_here = [each for each in every if each[0] not in given and each[3] is not Part.REST]
    readers = [(name, key, _reader(hint)) for name, key, hint, _ in read_here]
    needed = [(n, key, _is_optional(hint)) for n, key, hint, _ in read_here if n not in defaults]
    marks = (mark for each in every for mark in getattr(each[2], "__metadata__", ()))
    known = {key for _, key, _, _ in every} | {m.name for m in marks if isinstance(m, Called)}
    rest = next((name for name, _, _, part in every if part is Part.REST), None)

    def read(data: Any) -> dict[str, Any]:
        if not isinstance(data, Mapping):
            raise ValueError(f" is {_type(data)}, not an object")
        values = {}
        try:
            for name, key, read_value in readers:
                if key in data:
                    values[name] = read_value(data[key])
        except ValueError as error:
            raise ValueError(f".{key}{error}") from None
        for name, key, is_optional in needed:
            if name not in values:
                if not is_optional:
                    raise ValueError(f' has no "{key}"')
                values[name] = None
        if rest:
            values[rest] = {key: value for key, value in data.items() if key not in known}
        return values

    return read


@cache
def _reader(hint: Any) -> _Read:
    """Reader of an annotation."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return _both(_reader(inner[0]), *(mark for mark in inner[1:] if callable(mark)))
    if origin in _UNIONS:
        return _either([_reader(each) for each in inner if each is not type(None)])
    if origin is Literal:
        return _both(_of(str), one_of(inner))
    if origin in (tuple, Sequence, Iterable):
        return _list(origin, inner)
    if origin is Mapping and inner not in ((), (str, Any)):
        return _table(*inner)
    if _is_record(hint):
        values = _values(hint)
        return lambda value: hint(**values(value))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _both(_of(str), one_of(hint))
    if isinstance(hint, type) and issubclass(hint, str) and hint is not str:
        return _both(_of(str), hint)
    return _as_it_is if hint is Any else _of(dict if origin is Mapping else origin)


def _as_it_is(value: Any) -> Any:
    return value


def _of(kind: Any) -> _Read:
    kinds = (float, int) if kind is float else kind

    def read(value: Any) -> Any:
        if type(value) is kind:  # nearly always so
            return value
        if isinstance(value, kinds) and type(value) is not bool:
            return value
        raise ValueError(f" is {_type(value)}, not {_NAMES[kind]}")

    return read


def _both(read_value: _Read, then: _Read | None = None) -> _Read:
    return (lambda value: then(read_value(value))) if then else read_value


def _either(readers: Sequence[_Read]) -> _Read:
    """Reader of null, or of the first kind that a value is of."""
    *others, last = readers

    def read(value: Any) -> Any:
        if value is None:
            return None
        for each in others:
            with contextlib.suppress(ValueError):
                return each(value)
        return last(value)

    return read


def _list(origin: Any, inner: tuple[Any, ...]) -> _Read:
    make, item, read_list = (tuple if origin is tuple else list), inner[0], _of(list)
    readers = [_reader(each) for each in inner if each is not ...]
    is_fixed = origin is tuple and len(readers) == len(inner)

    def read(value: Any) -> Any:
        if is_fixed and len(read_list(value)) != len(inner):
            raise ValueError(f" has {len(value)} values, not {len(inner)}")
        if not is_fixed and set(map(type, read_list(value))) <= {item}:
            return make(value)  # plain values: a group has thousands
        found: list[Any] = []
        try:
            for read_item, each in zip(cycle(readers), value, strict=False):
                found.append(read_item(each))
        except ValueError as error:
            place = f"[{len(found)}]" if is_fixed or _is_record(item) else "[]"
            raise ValueError(f"{place}{error}") from None
        return make(found)

    return read


def _table(key_type: Any, item: Any) -> _Read:
    read_object, read_item = _of(dict), _reader(item)

    def read(value: Any) -> Any:
        keys = list(map(_seat, read_object(value)) if key_type is int else read_object(value))
        if set(map(type, value.values())) <= {item}:
            return dict(zip(keys, value.values(), strict=True))
        found, key = {}, None
        try:
            for key, each in zip(keys, value.values(), strict=True):
                found[key] = read_item(each)
        except ValueError as error:
            raise ValueError(f".{key}{error}") from None
        return found

    return read


def _seat(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 10):
        raise ValueError(f': "{key}" is not the number of a seat')
    return int(key)


@cache
def _writer(hint: Any) -> Callable[[Any], Any] | None:
    """Writer of an annotation; None where a value stays as it is."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return _writer(inner[0])
    if origin in _UNIONS:
        kind, *others = [each for each in inner if each is not type(None)]
        write = None if others else _writer(kind)
        return write and (lambda value: None if value is None else write(value))
    if origin in (tuple, Sequence, Iterable):
        return _list_writer(_writer(inner[0]))
    if origin is Mapping:
        return _table_writer(*inner)
    if _is_record(hint):
        return _record_writer(hint)
    is_enum = isinstance(hint, type) and issubclass(hint, Enum)
    return attrgetter("value") if is_enum else None


def _list_writer(write: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return (lambda value: [write(each) for each in value]) if write else list


def _table_writer(key_type: Any, item: Any) -> Callable[[Any], Any]:
    write, name = _writer(item) or _as_it_is, str if key_type is int else _as_it_is
    if write is name:
        return dict
    return lambda value: {name(key): write(each) for key, each in value.items()}


@cache
def _record_writer(record: Any) -> Callable[[Any], dict[str, Any]]:
    every = [each for each in _fields(record) if each[3] is not Part.APART]
    keys = [key for _, key, _, _ in every]
    values_of: Callable[[Any], Any] = iter
    if is_dataclass(record):
        values_of = attrgetter(*(name for name, *_ in every), "__class__")  # of one field, too
    writers = [(key, made) for _, key, hint, _ in every if (made := _writer(hint))]
    defaults = _defaults(record)
    sparse = [(key, defaults[name]) for name, key, _, part in every if part is Part.SPARSE]
    rest = next((key for _, key, _, part in every if part is Part.REST), None)

    def write(value: Any) -> dict[str, Any]:
        data = dict(zip(keys, values_of(value), strict=False))
        for key, default in sparse:
            if data[key] == default:
                del data[key]
        for key, write_value in writers:
            if key in data:
                data[key] = write_value(data[key])
        return data | data.pop(rest) if rest else data

    return write
