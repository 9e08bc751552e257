"""Launch record of one process: its place in the job, and what is wrong with it. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nccl_doctor.model.codec import MAX_LOCAL_RANKS, MAX_RANKS, Node

OWN = "nccl-doctor"
"""`Launch.launcher` of what the own launcher started."""
MALFORMED = frozenset(
    ("launch-missing-variable", "launch-bad-value", "rank-out-of-range", "local-rank-out-of-range")
)
"""Problems that no cluster can cure: the launch itself is a configuration error."""

_DASHED = {
    name: f"--{name.replace('_', '-')}"
    for name in ("nnodes", "node_rank", "master_addr", "master_port")
}
OPTIONS: Mapping[str, Mapping[str, str]] = {
    OWN: _DASHED,
    "torchrun": _DASHED,
    "accelerate": {
        "nnodes": "--num_machines",
        "node_rank": "--machine_rank",
        "master_addr": "--main_process_ip",
        "master_port": "--main_process_port",
    },
    "deepspeed": {
        "node_rank": "--node_rank",
        "master_addr": "--master_addr",
        "master_port": "--master_port",
    },
    "vllm": _DASHED,
    "sglang": {
        "nnodes": "--nnodes",
        "node_rank": "--node-rank",
        "master_addr": "--dist-init-addr",
        "master_port": "--dist-init-addr",
    },
    "fabric": {
        "nnodes": "--num-nodes",
        "node_rank": "--node-rank",
        "master_addr": "--main-address",
        "master_port": "--main-port",
    },
}
"""Launcher → field of a `Launch` → the option by which it takes it. They read no variables for
these, and set those that their ranks have."""
ENDPOINT = "--rdzv-endpoint"
"""Option of torchrun that has address and port together, where ranks meet by c10d."""
PER_HOST = frozenset(("kubeflow", "pai", "vertex", "mosaicml"))
"""Launchers that start one process on each host and give it its node rank only."""
DERIVED = "derived from "
_MANY = 1_000_000_000
_RANGES = {  # of the numbers of a record
    "rank": (0, MAX_RANKS),
    "world_size": (0, MAX_RANKS),
    "local_rank": (0, MAX_LOCAL_RANKS - 1),
    "local_world_size": (0, MAX_LOCAL_RANKS),
    "node_rank": (0, MAX_RANKS),
    "nnodes": (0, MAX_RANKS),
    "master_port": (0, 65535),
}


@dataclass(frozen=True)
class LaunchProblem:
    """Error in the values of the launcher; becomes a finding of the same code.

    `variables` maps the names involved to their values as found (None: not set). `fatal` is False
    where torch would start all the same, and only other readers of the environment are misled.
    `fix` is one line, as `toolkit.advice` reads it.
    """

    code: str
    message: str
    variables: Mapping[str, str | None] = field(default_factory=dict)
    fix: str = ""
    fatal: bool = True

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "code": self.code,
            "message": self.message,
            "variables": dict(self.variables),
            "fix": self.fix,
            "fatal": self.fatal,
        }


@dataclass(frozen=True)
class Launch:
    """Rank, world size and address of this process in the job, and the variable of each value.

    A field is None if nothing gives it, or gives it wrongly. `sources` maps field name → variable
    name, `--option`, `default`, or `derived from …`. `agent_store` is True where the launcher
    serves the store: torchrun's agent, or the worker of rank 0 of Ray Train.
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

    def is_complete(self) -> bool:
        """True if all four values of torch's env:// rendezvous are known."""
        return None not in (self.rank, self.world_size, self.master_addr, self.master_port)

    @property
    def per_host(self) -> bool:
        """True if one process was started per host and has its node rank only: the local ranks have
        yet to be started.
        """
        return self.launcher in PER_HOST

    def given(self, name: str) -> Any:
        """Value of a field if a variable gave it; None if it was only derived."""
        return None if self.sources.get(name, "").startswith(DERIVED) else getattr(self, name)

    def to_json(self) -> dict[str, Any]:
        """Plain data, every field present."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            **data,
            "sources": dict(self.sources),
            "problems": [problem.to_json() for problem in self.problems],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Launch:
        """Inverse of `to_json`; unknown keys, from a newer version, are ignored.

        Raises:
            ValueError: a value is of another type, or larger than any job's; says which.
        """
        node = Node("launch", data)
        texts: dict[str, Any] = {name: node.maybe(name, str) for name in ("master_addr", "run_id")}
        numbers: dict[str, Any] = {
            name: node.number(name, low, high) for name, (low, high) in _RANGES.items()
        }
        sources = node.get("sources", dict, {})
        return cls(
            launcher=node.get("launcher", str, "none"),
            **numbers,
            **texts,
            restart_count=node.number("restart_count", 0, _MANY) or 0,
            agent_store=node.get("agent_store", bool, False),
            sources={name: Node("launch.sources", sources).get(name, str) for name in sources},
            problems=node.each("problems", _problem) if "problems" in node.data else (),
        )


def _problem(node: Node) -> LaunchProblem:
    variables = Node(f"{node.path}.variables", node.get("variables", dict, {}))
    return LaunchProblem(
        node.get("code", str),
        node.get("message", str),
        {name: variables.maybe(name, str) for name in variables.data},
        node.get("fix", str, ""),
        node.get("fatal", bool, True),
    )
