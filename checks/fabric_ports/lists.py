"""NCCL_IB_HCA of all ranks of a host, for checks with one observation per host. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nccl_doctor.api import Cluster
from nccl_doctor.toolkit.fabric.hca import HCA, TURNS_OFF, rdma_admits, rdma_off
from nccl_doctor.toolkit.nccl.conf import Setting


def lists_of_ranks(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """Host → the values of NCCL_IB_HCA of its ranks, as check `environment` saw them; empty text
    where it is not set; ranks that may not use RDMA are left out.
    """
    found: dict[str, dict[str, None]] = {}
    for rank, facts in cluster.facts("environment"):
        variables = facts["variables"]
        settings = {
            name: Setting(each["value"], each["origin"])
            for name in (HCA, *TURNS_OFF)
            if (each := variables.get(name))
        }
        if not rdma_off(settings):
            value = settings[HCA].value if HCA in settings else ""
            found.setdefault(rank.host.label, {})[value] = None
    return {host: tuple(values) for host, values in found.items()}


def as_ranks_want(
    devices: Iterable[Mapping[str, Any]], lists: Iterable[str]
) -> list[Mapping[str, Any]]:
    """Devices as from `rdma_devices`, each port `wanted` where one of several lists admits it.

    One list, or none, changes nothing: the observing rank used the same list.
    """
    known = tuple(lists)
    if len(known) < 2:
        return list(devices)
    return [
        {
            **device,
            "ports": [
                {
                    **port,
                    "wanted": any(
                        rdma_admits(hca, port["device"], int(port["port"])) for hca in known
                    ),
                }
                for port in device["ports"]
            ],
        }
        for device in devices
    ]
