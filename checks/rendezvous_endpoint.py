"""Will exactly one host take itself for the endpoint of torchrun's c10d rendezvous?

What it checks
--------------
Where torchrun's options say `--rdzv-backend=c10d` (in the environment: PET_RDZV_BACKEND,
PET_RDZV_ENDPOINT, PET_RDZV_CONF), each host decides by torch's own rule whether the endpoint is
this machine: by its host name, and by the addresses that its own name resolves to.

Why it matters
--------------
With c10d no node rank says who serves the store: every agent decides for itself. An alias, the name
of a Kubernetes service or the address of a second interface matches no machine; then nobody serves,
and all hosts end with RendezvousConnectionError after a minute or two. An endpoint that means every
machine (localhost) makes each host wait for the others in a store of its own.

How to fix
----------
Give `--rdzv-conf is_host=true` to the host of the endpoint and is_host=false to the others, or use
the address that this host's own name resolves to. `--local-addr=ADDRESS` says under which address
the workers then find rank 0.

When it is wrong
----------------
A host of which there is no report may be the one that serves: without every host's word nothing is
said. An agent that runs in another container than this program may have another name.

References
----------
PyTorch documentation of torchrun (--rdzv-endpoint, --rdzv-conf, --local-addr);
torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py (_create_tcp_store).
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Kind,
    Layer,
    Skip,
    Where,
    likely_address,
    spans_machines,
)
from nccl_doctor.toolkit.c10d import endpoint_host, is_host_told, matches_machine
from nccl_doctor.toolkit.net.names import look_up

RDZV_ENDPOINT_UNHOSTED = Kind(
    code="rdzv-endpoint-unhosted",
    layer=Layer.NAME,
    title="No host takes itself for the rendezvous endpoint",
    why="With the c10d backend the host that recognises itself serves the store; without one, all "
    "end with RendezvousConnectionError after a minute or two.",
    fix="torchrun --rdzv-conf is_host=true on the host of the endpoint, or its address as endpoint",
)
RDZV_ENDPOINT_AMBIGUOUS = Kind(
    code="rdzv-endpoint-ambiguous",
    layer=Layer.NAME,
    title="Several hosts take themselves for the rendezvous endpoint",
    why="Each serves a store of its own and waits there for the others until the join time-out.",
    fix="torchrun --rdzv-endpoint=ADDRESS:29500, the same on every host, of one of them",
)
LOOK_UP_S = 4.0


class RendezvousEndpoint(Check):
    """Decide on every host as torch's agent will, and count."""

    name = "rendezvous_endpoint"
    layer = Layer.NAME
    cost = "seconds"
    kinds = (RDZV_ENDPOINT_UNHOSTED, RDZV_ENDPOINT_AMBIGUOUS)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """What this host makes of the endpoint."""
        endpoint = ctx.env.get("PET_RDZV_ENDPOINT", "")
        if ctx.env.get("PET_RDZV_BACKEND", "").lower() != "c10d" or not endpoint:
            raise Skip("no c10d rendezvous is asked for")
        host, own = endpoint_host(endpoint), socket.gethostname()
        told = is_host_told(ctx.env.get("PET_RDZV_CONF", ""))
        ctx.breadcrumb(f"look up {host} and {own}")
        resolved, mine = look_up(host, LOOK_UP_S), look_up(own, LOOK_UP_S)
        by_name = matches_machine(host, own, resolved.answers, mine.answers, _canonical(own))
        return {
            "endpoint": endpoint,
            "host": host,
            "own_name": own,
            "resolved": list(resolved.answers),
            "own": list(mine.answers),
            "told": told,
            "serves": by_name if told is None else told,
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Only where every host of the job has spoken."""
        seen = list(cluster.facts(self.name))
        hosts = {rank.host.id for rank, _ in seen}
        if not spans_machines(cluster) or cluster.absent or len(hosts) < cluster.nnodes:
            return
        serving = [rank.host for rank, facts in seen if facts["serves"]]
        evidence = {rank.host.label: dict(facts) for rank, facts in seen}
        endpoint, host = seen[0][1]["endpoint"], seen[0][1]["host"]
        if not serving:
            owners = [
                rank.host
                for rank, facts in seen
                if set(facts["resolved"]) & set(rank.host.addresses)
            ]
            fix = ""
            if owners:
                fix = f"on {owners[0].label}: torchrun --rdzv-conf is_host=true"
                fix += f" --local-addr={_address(owners[0].addresses)}"
            yield Finding(
                RDZV_ENDPOINT_UNHOSTED,
                f"--rdzv-endpoint={endpoint}: {host} is neither the host name of a host nor an "
                "address that its own name resolves to",
                Where(hosts=tuple(sorted(owner.label for owner in owners))),
                evidence,
                fix=fix,
                confidence=Confidence.CERTAIN if owners else Confidence.LIKELY,
            )
        elif len({owner.label for owner in serving}) > 1:
            address = _address(serving[0].addresses)
            yield Finding(
                RDZV_ENDPOINT_AMBIGUOUS,
                f"--rdzv-endpoint={endpoint}: {len(serving)} hosts would serve it",
                Where(hosts=tuple(sorted(owner.label for owner in serving))),
                evidence,
                fix=f"on every host: torchrun --rdzv-endpoint={address}:29500",
            )


def _canonical(own: str) -> str:
    """The resolver's canonical name of this host."""
    try:
        found = socket.getaddrinfo(own, None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)
    except (OSError, UnicodeError):
        return ""
    return found[0][3]


def _address(addresses: Iterable[str]) -> str:
    likely = likely_address([("", list(addresses))])
    return likely[1] if likely else "ADDRESS"
