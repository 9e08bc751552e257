"""DeepSpeed's configuration: a table of its keys, and the rules for them.

The table is data, in keys.toml beside this file, which describes it. The rules were taken
from DeepSpeed's source, and say what DeepSpeed does: refuse to start, or ignore.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.api import Confidence, Severity
from nccl_doctor.toolkit.tables import read_table

KINDS = ("batch", "int", "number", "bool", "word", "text", "section", "any")
AUTO = "auto"
"""A value that a framework (Transformers, Accelerate) fills in before DeepSpeed sees it."""

BATCH, WORLD = "batch-does-not-divide", "world-size-config-mismatch"
UNKNOWN_KEY, OLD_KEY = "deepspeed-config-unknown-key", "deepspeed-config-deprecated-key"
BAD_VALUE, CONFLICT = "deepspeed-config-bad-value", "deepspeed-config-conflict"


@dataclass(frozen=True)
class Problem:
    """A problem of a configuration; becomes a finding of the same code."""

    code: str
    message: str
    fix: str
    severity: Severity = Severity.FAIL
    confidence: Confidence = Confidence.CERTAIN


@dataclass(frozen=True)
class Key:
    """One key of a section; see keys.toml for what the fields mean."""

    kind: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    values: tuple[str, ...] = ()
    cased: bool = False
    empty: bool = False
    instead: str = ""
    gone: str = ""
    why: str = ""


@dataclass(frozen=True)
class Section:
    """The keys of one object. `refuses`: first version known to end with an error at others."""

    keys: Mapping[str, Key] = field(default_factory=dict)
    refuses: str = ""
    free: bool = False


@dataclass(frozen=True)
class KeyTable:
    """All sections by dotted path; `top` is the outermost."""

    known_to: str
    sections: Mapping[str, Section]
    optimizers: Mapping[str, tuple[str, ...]]
    schedulers: Mapping[str, tuple[str, ...]]


@functools.cache
def table() -> KeyTable:
    """The whole table, read once."""
    data = read_table(__package__, "keys.toml")
    return KeyTable(
        data["known_to"],
        {path: _section(rows) for path, rows in data["sections"].items()},
        {name: tuple(names) for name, names in data["optimizers"].items()},
        {name: tuple(names) for name, names in data["schedulers"].items()},
    )


def _section(rows: Mapping[str, Any]) -> Section:
    keys = {name: _key(row) for name, row in rows.get("keys", {}).items()}
    return Section(keys, rows.get("refuses", ""), rows.get("free", False))


def _key(row: Mapping[str, Any]) -> Key:
    return Key(**{**row, "values": tuple(row.get("values", ()))})


class Settings:
    """A configuration as DeepSpeed reads it: missing or wrongly shaped values are None."""

    def __init__(self, config: Mapping[str, Any], versions: frozenset[str] = frozenset()) -> None:
        """`versions`: of DeepSpeed, on the hosts that have it."""
        self.config = config
        self._versions = sorted(map(version_tuple, versions))

    def get(self, path: str) -> Any:
        """The value at a dotted path, or None."""
        value: Any = self.config
        for name in path.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(name)
        return value

    def is_on(self, path: str) -> bool:
        """True if a switch is on; values that a framework fills in count as off."""
        value = self.get(path)
        return value is True or (type(value) is int and value == 1) or _says_yes(value)

    @property
    def stage(self) -> int | None:
        """The stage of ZeRO, 0 where there is none; None where it is unknown."""
        zero = self.get("zero_optimization")
        if zero is None or isinstance(zero, bool):
            return int(bool(zero))
        stage = self.get("zero_optimization.stage")
        if stage is None:
            return 0
        return whole(stage)

    def offload(self, what: str) -> str:
        """The device that `param` or `optimizer` go to: `cpu`, `nvme` or the empty string."""
        device = self.get(f"zero_optimization.offload_{what}.device")
        if device in ("cpu", "nvme"):
            return str(device)
        old = {"param": "cpu_offload_param", "optimizer": "cpu_offload"}[what]
        return "cpu" if self.is_on(f"zero_optimization.{old}") else ""

    def reaches(self, version: str) -> bool | None:
        """True if DeepSpeed is this version or newer, on all hosts; None where none has it."""
        return self._versions[0] >= version_tuple(version) if self._versions else None

    def outdates(self, version: str) -> bool:
        """True if a host's DeepSpeed is newer than this version."""
        return bool(self._versions) and self._versions[-1] > version_tuple(version)


def version_tuple(text: str) -> tuple[int, ...]:
    """The numbers of a version: `"0.16.4+cu12"` gives (0, 16, 4)."""
    return tuple(map(int, re.findall(r"\d+", text.split("+", maxsplit=1)[0])[:3]))


def whole(value: Any) -> int | None:
    """The whole number that a value is, as pydantic reads it; None for anything else."""
    if isinstance(value, (bool, int)):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,400}(\.0*)?\s*", value):
        return int(value.split(".")[0])
    return None


def _says_yes(value: Any) -> bool:
    return isinstance(value, str) and value.lower() in ("true", "on", "yes", "t", "y", "1")
