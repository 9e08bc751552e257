"""Launch record of one process: its place in the job, and what is wrong with it. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from nccl_doctor.model.codec import MAX_LOCAL_RANKS, Number, between

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


@dataclass(frozen=True)
class Launch:
    """Rank, world size and address of this process in the job, and the variable of each value.

    A field is None if nothing gives it, or gives it wrongly. `sources` maps field name → variable
    name, `--option`, `default`, or `derived from …`. `agent_store` is True where the launcher
    serves the store: torchrun's agent, or the worker of rank 0 of Ray Train.
    """

    launcher: str = "none"
    rank: Number | None = None
    world_size: Number | None = None
    local_rank: Annotated[int, between(0, MAX_LOCAL_RANKS - 1)] | None = None
    local_world_size: Annotated[int, between(0, MAX_LOCAL_RANKS)] | None = None
    node_rank: Number | None = None
    nnodes: Number | None = None
    master_addr: str | None = None
    master_port: Annotated[int, between(0, 65535)] | None = None
    run_id: str | None = None
    restart_count: Annotated[int, between(0, 1_000_000_000)] = 0
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
