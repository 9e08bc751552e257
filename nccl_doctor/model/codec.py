"""Reads JSON from elsewhere: every value is of the type that is asked for, or there is an error."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

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
E = TypeVar("E", bound=Enum)


class Node:
    """One object, with its path in the document, so that an error can say where it is."""

    def __init__(self, path: str, data: Any) -> None:
        if not isinstance(data, Mapping):
            raise ValueError(f"{path} is {_type(data)}, not an object")
        self.path = path
        self.data = data

    def get(self, key: str, what: type[T], *default: T) -> T:
        """A value of the right type; a missing one takes the default, where there is one."""
        if key not in self.data and default:
            return default[0]
        value = self._value(key)
        if what is float and isinstance(value, int) and not isinstance(value, bool):
            return value  # type: ignore[return-value]
        if not isinstance(value, what) or (what is int and isinstance(value, bool)):
            raise ValueError(f"{self.path}.{key} is {_type(value)}, not {_NAMES[what]}")
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

    def text(self, key: str, most: int) -> str:
        """A text of at most that many characters."""
        value = self.get(key, str)
        if len(value) > most:
            raise ValueError(f"{self.path}.{key} has {len(value)} characters, more than {most}")
        return value

    def one_of(self, key: str, known: Sequence[str], *default: str) -> str:
        """One of the texts that are known."""
        value = self.get(key, str, *default)
        if value not in known:
            raise ValueError(f'{self.path}.{key} is "{value[:40]}", not one of {", ".join(known)}')
        return value

    def seconds(self, key: str) -> float:
        """A time limit."""
        value = self.get(key, float)
        if not 0 <= value <= MAX_SECONDS:  # so it is a number, too
            raise ValueError(f"{self.path}.{key} is no time from 0 to {MAX_SECONDS:.0f} s")
        return value

    def number(self, key: str, low: int, high: int) -> int | None:
        """A whole number in that range; null and absence are None."""
        value = self.maybe(key, int)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{self.path}.{key} is {_short(value)}, outside {low}–{high}")
        return value

    def choice(self, key: str, what: type[E]) -> E:
        """A member of an enumeration of strings."""
        value = self.get(key, str)
        try:
            return what(value)
        except ValueError:
            known = ", ".join(str(item.value) for item in what)
            raise ValueError(f'{self.path}.{key} is "{value}", not one of {known}') from None

    def each(self, key: str, make: Callable[[Node], T]) -> tuple[T, ...]:
        """Every item of a list of objects."""
        items = self.get(key, list)
        return tuple(make(Node(f"{self.path}.{key}[{i}]", item)) for i, item in enumerate(items))

    def many(self, key: str, what: type[T]) -> tuple[T, ...]:
        """A list of plain values of one type; absence is the empty one."""
        items: Sequence[Any] = self.get(key, list, [])
        if all(type(item) is what for item in items):  # as almost always; a group has thousands
            return tuple(items)
        return tuple(Node(self.path, {f"{key}[]": item}).get(f"{key}[]", what) for item in items)

    def beyond(self, known: Container[str]) -> dict[str, Any]:
        """The values of all other keys: of another version, to be written again as they are."""
        return {key: value for key, value in self.data.items() if key not in known}

    def _value(self, key: str) -> Any:
        if key not in self.data:
            raise ValueError(f'{self.path} has no "{key}"')
        return self.data[key]


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
