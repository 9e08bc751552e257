"""RDMA ports that NCCL should use and cannot, from the facts of check `rdma`. Pure.

Source: InfiniBand architecture specification, volume 1, port states: a port whose link is up stays
in INIT until a subnet manager gives it a LID and arms it; `ncclIbInitDevices` in NCCL's
src/transport/net_ib/init.cc leaves out all that are not ACTIVE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.toolkit.blame import odd_ones_out
from nccl_doctor.toolkit.fabric.hca import rdma_off
from nccl_doctor.toolkit.fabric.road import port_name
from nccl_doctor.toolkit.nccl.conf import Setting

CHECK = "rdma"
"""The check whose facts these are."""
Seen = Mapping[str, Mapping[str, Any]]
"""Host → facts of check `rdma`."""


@dataclass(frozen=True)
class PortDown:
    """A port that is not ACTIVE on a host.

    `up` is the number of hosts where the port of this name is ACTIVE; `tie`: it is down on as many.
    `unconfigured`: it has a link, and waits for a subnet manager.
    """

    host: str
    port: Mapping[str, Any]
    up: int
    tie: bool = False
    unconfigured: bool = False

    @property
    def name(self) -> str:
        """Name of the port, as `mlx5_0:1`."""
        return port_name(self.port)


def seen_by_rdma(cluster: Cluster) -> dict[str, Mapping[str, Any]]:
    """Host → facts of check `rdma`."""
    return {rank.host.label: facts for rank, facts in cluster.facts(CHECK)}


def ports_down(seen: Seen) -> list[PortDown]:
    """Ports that wait for a subnet manager, on any host; then ports that are down for another
    reason, where the same port is ACTIVE on at least as many other hosts that use verbs.
    """
    found = list(_unconfigured(seen))
    known = {(each.host, each.name) for each in found}
    return found + [each for each in _alone(seen) if (each.host, each.name) not in known]


def _unconfigured(seen: Seen) -> Iterator[PortDown]:
    waiting = [
        (host, port)
        for host, facts in seen.items()
        for port in facts["ports"]
        if port["state"] in ("INIT", "ARMED") and port["wanted"] and _is_linked(port)
        if not _needs_no_port(facts)
    ]
    active = Counter(
        port_name(port)
        for facts in (seen.values() if waiting else ())
        for port in facts["ports"]
        if port["state"] == "ACTIVE"
    )
    for host, port in waiting:
        yield PortDown(host, port, active[port_name(port)], unconfigured=True)


def _is_linked(port: Mapping[str, Any]) -> bool:
    """True if an InfiniBand port has a link."""
    return bool(port["link"] == "InfiniBand" and port["physical"] == "LinkUp")


def _needs_no_port(facts: Mapping[str, Any]) -> bool:
    """True if NCCL goes another way on a host, or may not use RDMA."""
    settings = {name: Setting(*each) for name, each in facts["settings"].items()}
    return facts["road"] in ("plugin", "efa") or bool(rdma_off(settings))


def _alone(seen: Seen) -> Iterator[PortDown]:
    wanted = (port for facts in seen.values() for port in facts["ports"] if port["wanted"])
    if all(port["state"] == "ACTIVE" for port in wanted):
        return
    ports: dict[str, dict[str, Mapping[str, Any]]] = {}
    for host, facts in seen.items():
        for port in facts["ports"]:
            if port["wanted"] and facts["road"] == "infiniband":
                ports.setdefault(port_name(port), {})[host] = port
    for by_host in ports.values():
        active = {host: port["state"] == "ACTIVE" for host, port in by_host.items()}
        odd = odd_ones_out(active)
        # Down on most hosts: the cluster does not use this port.
        if odd is None or odd.usual is False:
            continue
        for host, is_up in active.items():
            if not is_up:
                yield PortDown(host, by_host[host], sum(active.values()), tie=odd.tie)
