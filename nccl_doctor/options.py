"""What a run was asked to do: one record, the same for every participant.

Filled by the command line and the configuration file; travels from the coordinator as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nccl_doctor.model import Level


@dataclass(frozen=True)
class Options:
    """Options of `run` that matter after parsing; times in seconds.

    `select` and `ignore` hold check names and finding codes. `expected` and `thresholds` come from
    the configuration file.
    """

    backend: str = "auto"
    level: Level = Level.STANDARD
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    timeout_s: float = 120.0
    join_timeout_s: float = 60.0
    collective_timeout_s: float = 20.0
    strict: bool = False
    json_path: str | None = None
    verbosity: int = 0
    quiet: bool = False
    expected: Mapping[str, Any] = field(default_factory=dict)
    thresholds: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "level": self.level.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Options:
        """Inverse of `to_json`; unknown keys, from a newer version, are ignored."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        known["level"] = Level(known.get("level", "standard"))
        for name in ("select", "ignore"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)
