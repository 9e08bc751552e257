"""Types of command-line parameters, each with its own error messages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from nccl_doctor.model.codec import MAX_LOCAL_RANKS, MAX_SECONDS

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]  # generic for the type checker; a plain class before 8.2
else:
    _ParamType = click.ParamType


class OneWord(_ParamType):
    """Type of a parameter that is one word."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Value of a word, or a usage error."""
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def _read(self, value: Any) -> Any:
        """Value of a word; raises ValueError with the reason for a bad one."""
        raise NotImplementedError


class Seconds(OneWord):
    """Time in seconds: above zero, and no more than the system's timers take."""

    name = "seconds"

    def _read(self, value: Any) -> float:
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"{value!r} is not a positive number of seconds")
        if seconds > MAX_SECONDS:
            raise ValueError(f"{value!r} is more than {MAX_SECONDS:.0f} seconds")
        return seconds


class Number(OneWord):
    """Type of an option: a whole number from `low` to `high`; `most` is what is examined."""

    name = "number"

    def __init__(self, low: int, high: int | None = None, *, most: int | None = None) -> None:
        self._low = low
        self._high = high
        self._most = most

    def _read(self, value: Any) -> int:
        text = str(value).strip()
        bound = f"at least {self._low}" if self._high is None else f"{self._low} to {self._high}"
        # isdecimal() as well: int() would take "1_000" and Arabic digits.
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
        if number is None or number < self._low or (self._high and number > self._high):
            elastic = (
                " (a range of nodes is not supported; run -- torchrun … reads one)"
                if ":" in text
                else ""
            )
            raise ValueError(f"{text!r} is not a whole number, {bound}{elastic}")
        if self._most is not None and number > self._most:
            raise ValueError(f"{text!r} is more than {self._most}")
        return number


class LocalRanks(OneWord):
    """Number of ranks to start: a number from 1, or a word of torchrun."""

    name = "auto|gpu|cpu|number"

    def _read(self, value: Any) -> str:
        text = str(value)
        if text in ("auto", "gpu", "cpu"):
            return text
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 7 else 0
        if not 0 < number <= MAX_LOCAL_RANKS:
            raise ValueError(
                f"{text!r} is not auto, gpu, cpu or a whole number from 1 to {MAX_LOCAL_RANKS}"
            )
        return str(number)


class Code(OneWord):
    """Finding code or check, by name."""

    name = "code"

    def _read(self, value: Any) -> str:
        return str(value)

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem[Any]]:
        """Codes and checks that begin like this."""
        return list(_items(incomplete))


class NameList(OneWord):
    """Names of checks and codes, comma-separated; a list in the configuration file."""

    name = "names"

    def _read(self, value: Any) -> tuple[str, ...]:
        items = value.split(",") if isinstance(value, str) else list(value)
        names = tuple(dict.fromkeys(item.strip() for item in items))
        if "" in names:
            raise ValueError(f"{value!r} contains an empty name")
        return names

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem[Any]]:
        """The last name completed, behind those that are whole."""
        before, comma, last = incomplete.rpartition(",")
        return list(_items(last, before + comma))


class FileName(OneWord):
    """File, by name; what may be wrong with it is found later."""

    name = "path"

    def _read(self, value: Any) -> Any:
        return value

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem[Any]]:
        """The shell knows its files."""
        return [CompletionItem(incomplete, type="file")]


def _items(begin: str, before: str = "") -> Iterator[CompletionItem[Any]]:
    """Codes and checks that begin like this, each behind the text that stands before it."""
    from nccl_doctor import registry

    found = registry.load()
    about = {code: kind.title for code, (kind, _) in found.kinds.items()}
    about |= {check.name: registry.question(check) for check in found.checks}
    for name in sorted(about):
        if name.startswith(begin):
            yield CompletionItem(f"{before}{name}", help=about[name])


class Mesh(OneWord):
    """Dimensions of a device mesh, outermost first: `dp=2,tp=4`."""

    name = "name=size,…"

    def _read(self, value: Any) -> tuple[tuple[str, int], ...]:
        if not isinstance(value, str):
            return tuple(value)  # already read
        found: dict[str, int] = {}
        for part in value.split(","):
            name, equals, size = (word.strip() for word in part.partition("="))
            if not (equals and name.isidentifier()):
                raise ValueError(f"{part!r} is not name=size, as in dp=2,tp=4")
            if name in found:
                raise ValueError(f"{value!r} names the dimension {name} twice")
            if not (size.isascii() and size.isdecimal() and len(size) < 8 and int(size) > 0):
                raise ValueError(f"{name}={size}: the size is not a whole number from 1")
            found[name] = int(size)
        return tuple(found.items())


class HostName(OneWord):
    """Host name or address, by its form only: a check tests whether it resolves."""

    name = "host"

    def _read(self, value: Any) -> str:
        text = str(value)
        if not text or any(char.isspace() or not char.isprintable() for char in text):
            raise ValueError(f"{text!r} is not a host name or address")
        return text
