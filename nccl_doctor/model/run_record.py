"""The run as its report records it: what the cluster does not know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.cluster_json import run_to_json
from nccl_doctor.model.json_node import Node

_TYPES: Mapping[str, type[Any]] = {
    "id": str,
    "started": str,
    "duration_s": float,
    "launcher": str,
    "command": str,
    "options": dict,
    "baseline": dict,
    "redacted_with": str,
}


@dataclass(frozen=True)
class RunRecord:
    """`run` of a report, without what its cluster knows; None where the report does not say.

    `started` is ISO 8601, in UTC. `options` and `baseline` (`Comparison.record`) are kept as JSON,
    so that a key of another version is not lost. `redacted_with` identifies the key of the
    pseudonyms. `alone` says that one host was examined by itself (`nccl-doctor env`). `extra` are
    keys that are written and never read, and those that this version does not know or cannot read.
    """

    id: str | None = None
    started: str | None = None
    duration_s: float | None = None
    launcher: str | None = None
    command: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    baseline: Mapping[str, Any] | None = None
    redacted_with: str | None = None
    alone: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def strict(self) -> bool:
        """True if warnings fail."""
        return bool(self.options.get("strict"))

    @property
    def selected(self) -> bool:
        """True if only some checks were to be run."""
        return bool(self.options.get("select"))

    def to_json(self, cluster: Cluster) -> dict[str, Any]:
        """`run` of the report, with what the cluster knows."""
        values = {name: getattr(self, name) for name in _TYPES}
        known = {name: value for name, value in values.items() if value is not None}
        extra = {name: value for name, value in self.extra.items() if name not in known}
        return {**known, **extra, **run_to_json(cluster), "alone": self.alone}

    @classmethod
    def from_json(cls, node: Node, cluster: Cluster) -> RunRecord:
        """Inverse of `to_json`. A value of another type is not known, but is written again.

        Raises:
            ValueError: `options` is not an object, so that nobody knows how to judge again.
        """
        node.get("options", dict, {})
        values = {name: node.readable(name, what) for name, what in _TYPES.items()}
        read: dict[str, Any] = {name: each for name, each in values.items() if each is not None}
        extra = node.beyond({*read, *run_to_json(cluster), "alone"})
        return cls(**read, alone=node.readable("alone", bool) is True, extra=extra)
