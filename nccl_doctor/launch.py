"""Who am I: one record from whatever started this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LaunchProblem:
    """Something wrong with what the launcher said; becomes a finding of the same code.

    `variables` maps the names involved to their values as found (None: not set).
    """

    code: str
    message: str
    variables: Mapping[str, str | None] = field(default_factory=dict)
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "code": self.code,
            "message": self.message,
            "variables": dict(self.variables),
            "fix": self.fix,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LaunchProblem:
        """Inverse of `to_json`."""
        return cls(data["code"], data["message"], data.get("variables", {}), data.get("fix", ""))


@dataclass(frozen=True)
class Launch:
    """Who this process is in the job, and which variable said so.

    A field that nothing told, or told wrongly, is None. `sources` maps field name → variable name,
    `--option` or `default`. `agent_store` is True where torchrun's agent serves the store.
    """

    launcher: str = "none"
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    nnodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str | None = None
    restart_count: int = 0
    agent_store: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[LaunchProblem, ...] = ()
