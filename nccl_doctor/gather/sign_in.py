"""First message of a participant; it crosses the store as JSON."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.launch import identity
from nccl_doctor.model.cluster import Facts, facts_to_json
from nccl_doctor.model.cluster_json import (
    facts_from_json,
    joining_from_json,
    launch_from_json,
)
from nccl_doctor.model.json_node import Node
from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.model.limits import MAX_PID, MAX_RANKS
from nccl_doctor.toolkit.host import host_name
from nccl_doctor.toolkit.masking import masked_data
from nccl_doctor.toolkit.variables.recorded import allowed

SIGN_IN_MAX = 4 << 20
"""Largest sign-in, in bytes of JSON: some forty times that of a host of eight GPUs."""
_TEXT_MAX = 1024
_BACKENDS = ("", "auto", "nccl", "gloo")


@dataclass(frozen=True)
class Claimant:
    """Sender as a message names it, where the message itself cannot be taken."""

    host: str = ""
    rank: int | None = None
    node_rank: int | None = None
    is_host: bool = False

    @property
    def is_known(self) -> bool:
        """True if it says which place in the job it claims."""
        return self.rank is not None or self.node_rank is not None

    def may_be(self, rank: int | None, node: int | None) -> bool:
        """True if it claims this rank, or speaks for all ranks of this node."""
        if self.is_host:
            return node is not None and self.node_rank == node
        return rank is not None and self.rank == rank

    def in_words(self) -> str:
        """Sender in words, as the beginning of a sentence."""
        rank = "" if self.rank is None or self.is_host else f"rank {self.rank}"
        names = " on ".join(word for word in (rank, self.host) if word)
        return f"somebody who says to be {names}: " if names else ""

    @classmethod
    def of(cls, data: Any) -> Claimant:
        """Sender of a sign-in of any version, where it can be read."""
        try:
            node = Node("sign-in", data)
            host, launch = (Node(name, node.data.get(name, {})) for name in ("host", "launch"))
        except ValueError:
            return cls()
        name = host.readable("name", str) or ""
        return cls(
            name if name.isprintable() and len(name) <= _TEXT_MAX else "",
            _readable_number(launch, "rank"),
            _readable_number(launch, "node_rank"),
            launch.data.get("launcher") == OWN and launch.data.get("local_rank") == 0,
        )


def _readable_number(node: Node, key: str) -> int | None:
    try:
        return node.number(key, 0, MAX_RANKS)
    except ValueError:
        return None


@dataclass(frozen=True)
class SignIn:
    """One participant: its launch, its host, and the facts that it observed alone.

    `token` is random: by it a participant recognises its own sign-in. `host_key` tells machines
    apart (`identity.host_key`). `alone` is from `alone_as`. The rest is as in `Rank`.
    """

    token: str
    pid: int
    launch: Launch
    host_name: str
    host_key: str
    addresses: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    backend: str = ""
    joining: Mapping[str, float] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    alone: str = ""

    @property
    def host(self) -> tuple[str, int | None]:
        """Key of a host of the job: the same for all its participants.

        Two node ranks on one machine are two hosts to the job (and a finding to the judge); but a
        node rank that was only derived may be wrong, and must not split a machine.
        """
        return self.host_key, self.launch.given("node_rank")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "token": self.token,
            "pid": self.pid,
            "launch": self.launch.to_json(),
            "env": dict(self.env),
            "device": self.device,
            "backend": self.backend,
            "alone": self.alone,
            "host": {
                "name": self.host_name,
                "key": self.host_key,
                "addresses": list(self.addresses),
            },
            "joining": dict(self.joining),
            "facts": facts_to_json(self.facts),
        }

    @classmethod
    def from_json(cls, seat: int, data: Any) -> SignIn:
        """Inverse of `to_json`; unknown keys, from a newer version, are ignored.

        Raises:
            ValueError: it is malformed; names the seat that sent it, and the place in it.
        """
        node = Node(f"seat {seat}: sign-in", data)
        host = Node(f"{node.path}.host", node.get("host", dict))
        env = Node(f"{node.path}.env", node.get("env", dict))
        return cls(
            token=node.text("token", _TEXT_MAX),
            pid=node.number("pid", 0, MAX_PID) or 0,
            launch=launch_from_json(node),
            host_name=host.text("name", _TEXT_MAX),
            host_key=host.text("key", _TEXT_MAX),
            addresses=host.many("addresses", str),
            env={name: env.get(name, str) for name in env.data},
            device=None if node.data.get("device") is None else node.text("device", _TEXT_MAX),
            backend=node.one_of("backend", _BACKENDS, ""),
            joining=joining_from_json(node),
            facts=facts_from_json(node),
            alone=node.get("alone", str, ""),
        )


def introduce(launch: Launch, environ: Mapping[str, str], backend: str) -> SignIn:
    """The sign-in of this process, before it has looked at anything."""
    return SignIn(
        token=secrets.token_hex(8),
        pid=os.getpid(),
        launch=Launch.from_json(masked_data(launch.to_json())),
        host_name=host_name(),
        host_key=identity.host_key(),
        addresses=identity.host_addresses(),
        env=allowed(environ),
        device="cuda" if identity.num_gpus(environ) else "cpu",
        backend=backend,
    )
