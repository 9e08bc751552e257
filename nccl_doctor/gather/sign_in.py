"""First message of a participant; it crosses the store as JSON."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.launch import identity
from nccl_doctor.model.cluster import Facts, facts_to_json
from nccl_doctor.model.cluster_json import facts_from_json, launch_from_json
from nccl_doctor.model.json_node import Node
from nccl_doctor.model.launch import Launch
from nccl_doctor.toolkit.masking import masked_data
from nccl_doctor.toolkit.variables.recorded import allowed


@dataclass(frozen=True)
class SignIn:
    """One participant: its launch, its host, and the facts that it observed alone.

    `token` is random: by it a participant recognises its own sign-in. `host_key` tells machines
    apart (`identity.host_key`). The rest is as in `Rank`.
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
    facts: Facts = field(default_factory=dict)

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
            "host": {
                "name": self.host_name,
                "key": self.host_key,
                "addresses": list(self.addresses),
            },
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
        return cls(
            token=node.get("token", str),
            pid=node.get("pid", int),
            launch=launch_from_json(node),
            host_name=host.get("name", str),
            host_key=host.get("key", str),
            addresses=host.many("addresses", str),
            env=node.get("env", dict),
            device=node.maybe("device", str),
            backend=node.get("backend", str, ""),
            facts=facts_from_json(node),
        )


def introduce(launch: Launch, environ: Mapping[str, str], backend: str) -> SignIn:
    """The sign-in of this process, before it has looked at anything."""
    return SignIn(
        token=secrets.token_hex(8),
        pid=os.getpid(),
        launch=Launch.from_json(masked_data(launch.to_json())),
        host_name=identity.host_name(),
        host_key=identity.host_key(),
        addresses=identity.host_addresses(),
        env=allowed(environ),
        device="cuda" if identity.num_gpus(environ) else "cpu",
        backend=backend,
    )
