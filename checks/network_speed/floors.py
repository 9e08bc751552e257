"""The bandwidth of each NIC, compared with what its rate gives at the least. Pure; rows are data.

NICs that are all equally slow do not stand out. The rows are in floors.toml.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from nccl_doctor.api import Cluster, Confidence, Finding, Fix, Severity, Where, look, shell
from nccl_doctor.toolkit.gpu.own import OwnGpu, own_gpus
from nccl_doctor.toolkit.gpu.tables import pcie_rate
from nccl_doctor.toolkit.outliers import Edge
from nccl_doctor.toolkit.shared_kinds import BELOW_FLOOR
from nccl_doctor.toolkit.tables import read_table
from nccl_doctor.toolkit.units import rate_text

from .rails import RAILS, Measured, RailLane, Rails

_OF_PCIE = 0.5
"""Share of a PCIe link that a NIC and a GPU beside it reach at the least."""
_NEAR = (0, 1)
"""Same PCIe switch, or same root complex: data for the NIC does not cross the host."""
_DRIVER = "mlx5_core"
"""The driver of the NICs whose measurements are in the table."""
_LEAST_BYTES = 16 << 20
_SLOT = look(
    shell("lspci -vv | grep -e Mellanox -e LnkCap: -e LnkSta:"), "the PCIe slot of the NIC"
)
_FIX = Fix(
    _SLOT,
    alternatives=[
        "ib_write_bw between two of the hosts shows whether NCCL or the fabric is slow",
        "look at GPUDirect RDMA (check gpu_direct), switch ports, and for RoCE priority flow "
        "control",
    ],
)
_FIX_WRITES = Fix(
    _SLOT,
    alternatives=[
        "no GPU and no NCCL took part: look at its cable, switch ports, and for RoCE priority flow "
        "control"
    ],
)
WRITES_SLOW = BELOW_FLOOR.variant(
    title="RDMA writes are slower than this hardware gives at the least",
)
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5}
"""Speed of a PCIe link in GT/s → generation."""
_TOYS = "GeForce"
"""Part of the name of GPUs that have no GPUDirect RDMA."""


class Floor(NamedTuple):
    """Bus bandwidth of a NIC of one rate, in bytes per second."""

    gbps: float
    usual: float
    least: float
    source: str


Nic = tuple[int, str]
"""Host and NIC, as `mlx5_0:1`."""


def low_lanes(cluster: Cluster, rails: Rails) -> set[tuple[Edge, int]]:
    """Pair of hosts and rail of lanes that are below the floor of both ends in the first try."""
    limits = _Limits(cluster, rails)
    return {
        (edge, number)
        for number, here in rails.measured(RAILS).items()
        for edge, lane in here.items()
        if limits.is_below(lane)
    }


def judge_floors(
    cluster: Cluster, check: str, rails: Rails, blamed: Collection[Nic]
) -> Iterator[Finding]:
    """Findings on NICs that are below their floor with every partner, and twice; those of one rate
    are one finding.

    Args:
        cluster: for GPUs, and the settings of ranks.
        check: name of the check that held the rounds.
        rails: with both tries.
        blamed: NICs that are slower than others, and have a finding already.
    """
    limits = _Limits(cluster, rails)
    lanes = _lanes_of(rails.best())
    again = _lanes_of(rails.again())
    alike: dict[tuple[Floor, str], list[Nic]] = defaultdict(list)
    for nic, mine in lanes.items():
        floor = floor_of((rails.ports.get(nic) or {}).get("gbps"))
        low = all(limits.is_below(lane) for lane in mine) and len(again.get(nic, ())) >= len(mine)
        if floor and low and nic not in blamed:
            alike[floor, mine[0].by].append(nic)
    for (floor, by), nics in alike.items():
        rates = {
            (rails.lanes.labels[host], nic): max(lane.lane.busbw for lane in lanes[host, nic])
            for host, nic in nics
        }
        least = max(limits.least(lane) or 0.0 for nic in nics for lane in lanes[nic])
        slowing = {} if by else _slowing(cluster, check)
        yield _finding(floor, by, rates, least, slowing)


def _finding(
    floor: Floor,
    by: str,
    rates: Mapping[tuple[str, str], float],
    least: float,
    slowing: Mapping[str, str],
) -> Finding:
    what = f"RDMA writes ({by})" if by else "all-reduce"
    said = (
        f"{what} through one NIC of {floor.gbps:g} Gb/s alone: at most "
        f"{rate_text(max(rates.values()))} bus bandwidth, measured twice; such a NIC gives at "
        f"least {rate_text(least)} here"
    )
    if slowing:
        said += f"; {' '.join(f'{name}={value}' for name, value in slowing.items())} is set"
    return Finding(
        WRITES_SLOW if by else BELOW_FLOOR,
        said,
        Where(
            hosts=tuple(dict.fromkeys(host for host, _ in rates)),
            interfaces=tuple(sorted({nic for _, nic in rates})),
        ),
        {
            "measured": [
                {"host": host, "nic": nic, "busbw": rate} for (host, nic), rate in rates.items()
            ],
            "usual": floor.usual,
            "source": floor.source,
        },
        fix=_FIX_WRITES if by else _FIX,
        severity=Severity.INFO if slowing else None,
        confidence=Confidence.POSSIBLE if slowing else Confidence.LIKELY,
    )


def floor_of(gbps: float | None) -> Floor | None:
    """The row of a NIC by the rate of its port; None if there is none."""
    return next((floor for floor in _table() if floor.gbps == gbps), None)


class _Limits:
    """Limits of a NIC besides its rate: its slot, the GPU beside it, and the way to that."""

    def __init__(self, cluster: Cluster, rails: Rails) -> None:
        self._rails = rails
        self._own = own_gpus(cluster)
        self._direct = {rank.host.id: facts for rank, facts in cluster.facts("gpu_direct")}

    def is_below(self, lane: RailLane) -> bool:
        """True if a lane is below what it gives at the least; False where that is not known."""
        least = self.least(lane)
        big = lane.lane.bytes >= _LEAST_BYTES and not lane.lane.was_busy
        return big and least is not None and lane.lane.busbw < least

    def least(self, lane: RailLane) -> float | None:
        """Bytes per second that a lane gives at the least, the smaller one of its ends; None where
        that of an end is not known.
        """
        ends = [self._of_end(host, nic, lane) for host, nic in lane.nics.items()]
        known = [least for least in ends if least is not None]
        return min(known) if len(known) == len(ends) else None

    def _of_end(self, host: int, nic: str, lane: RailLane) -> float | None:
        rails = self._rails
        port = rails.ports.get((host, nic))
        if not port or (direct := self._direct.get(host)) is None or direct["virtual"]:
            return None
        floor, device = floor_of(port["gbps"]), port["device"]
        if floor is None or device["driver"] != _DRIVER:
            return None
        pci = device["pci"]
        of_nic = pcie_rate(_GENERATIONS.get(pci["speed"] or 0.0), _whole(pci["width"]))
        of_gpu = math.inf if lane.by else self._of_gpu(host, nic, lane.local)
        if of_nic is None or of_gpu is None:  # a virtual function, for one
            return None
        return min(floor.least, _OF_PCIE * of_nic / _sharing(rails, host, pci), _OF_PCIE * of_gpu)

    def _of_gpu(self, host: int, nic: str, local: int) -> float | None:
        """Bytes per second of the PCIe link of the GPU beside a NIC; None where NCCL's data may go
        another way.
        """
        near = self._rails.near.get((host, local))
        gpu = self._own.get(self._rails.lanes.seats[host][local])
        if gpu is None or not near or not self._reaches_memory(host, gpu):
            return None
        if near["near"] not in _NEAR or nic not in near["names"]:
            return None
        return pcie_rate(gpu.state.get("max_pcie_generation"), gpu.state.get("max_pcie_width"))

    def _reaches_memory(self, host: int, gpu: OwnGpu) -> bool:
        """True if NICs reach the memory of a GPU directly, and by the PCIe of the host itself."""
        if self._direct[host]["road"] == "none":
            return False
        return not gpu.is_passed_through and _TOYS not in gpu.model


def _sharing(rails: Rails, host: int, pci: Mapping[str, Any]) -> int:
    """Number of NICs that share a slot: the functions of one adapter with several ports."""
    slot = str(pci["address"]).rpartition(".")[0]
    mine = {rail["name"] for rail in rails.of[host] if rail["pci"].rpartition(".")[0] == slot}
    return max(1, len(mine))


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def _lanes_of(seen: Measured) -> dict[Nic, list[RailLane]]:
    found: dict[Nic, list[RailLane]] = defaultdict(list)
    for here in seen.values():
        for lane in here.values():
            for host, nic in lane.nics.items():
                found[host, nic].append(lane)
    return found


def _slowing(cluster: Cluster, check: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in cluster.evidence(check):
        found |= item.outcome.facts.get("slowing") or {}
    return dict(sorted(found.items()))


@functools.cache
def _table() -> tuple[Floor, ...]:
    return tuple(
        Floor(
            float(row["gbps"]),
            row["usual_gbps"] * 1e9,
            row["least_gbps"] * 1e9,
            row["source"],
        )
        for row in read_table(__package__, "floors.toml")["nic"]
    )
