"""All-reduce inside a host, compared with what its NVLinks give at the least. Pure; rows are data.

Hosts that are all equally slow are not outliers. The rows are in floors.toml.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nccl_doctor.api import Cluster, Confidence, Finding, Fix, Severity, Where, look, shell
from nccl_doctor.toolkit.gpu.own import OwnGpu, own_gpus
from nccl_doctor.toolkit.shared_kinds import BELOW_FLOOR
from nccl_doctor.toolkit.tables import read_table
from nccl_doctor.toolkit.units import rate_text, size_text

from .measured import Measured, Try

LEAST_BYTES = 64 << 20
"""Smaller messages do not fill NVLinks; only `--level full` has larger ones."""
_FIX = Fix(
    look(shell("nvidia-smi nvlink -s")),
    look(shell("nvidia-smi topo -m")),
    alternatives=[
        BELOW_FLOOR.fix,
        "try without NCCL_TOPO_FILE",
    ],
)


@dataclass(frozen=True)
class Floor:
    """Bus bandwidth of an all-reduce among GPUs of one model, in bytes per second."""

    links: int
    ranks: int
    usual: float
    least: float
    source: str


class Expected(NamedTuple):
    """Bus bandwidth that the ranks of a host should reach, with the NVLinks that are up."""

    model: str
    ranks: int
    least: float
    floor: Floor


def floor_of(model: str) -> Floor | None:
    """The row of a GPU by the name that torch gives; None if there is none."""
    return next((floor for name, floor in _table() if name.fullmatch(model)), None)


def below_floor(seen: Measured, tries: int) -> dict[int, tuple[Expected, Try]]:
    """Hosts whose best try is below their floor, with that try, if there were so many `tries`.

    A try while the CPU was busy with other work does not count.
    """
    all_ = seen.tries_inside(LEAST_BYTES)
    quiet = {host: [each for each in found if not each.was_busy] for host, found in all_.items()}
    enough = {host: found for host, found in quiet.items() if len(found) >= tries}
    expected = _expected(seen.cluster) if enough else {}
    low = {}
    for host, found in enough.items():
        best = max(found, key=lambda each: each.busbw)
        if host in expected and best.busbw < expected[host].least:
            low[host] = (expected[host], best)
    return low


def judge_floors(seen: Measured, blamed: Collection[int]) -> Iterator[Finding]:
    """Findings on hosts below their floor twice; all of one kind are one finding.

    Args:
        seen: the measurements.
        blamed: hosts that are outliers among equal ones, and have a finding already.
    """
    alike: dict[Expected, list[tuple[int, Try]]] = defaultdict(list)
    for host, (expected, best) in below_floor(seen, tries=2).items():
        if host not in blamed:
            alike[expected].append((host, best))
    for expected, low in alike.items():
        hosts = [host for host, _ in low]
        _, best = max(low, key=lambda each: each[1].busbw)
        floor, slowing = expected.floor, seen.slowing(hosts)
        said = (
            f"all-reduce of {size_text(best.bytes)} inside a host: at most "
            f"{rate_text(best.busbw)} bus bandwidth, measured twice; {expected.ranks} "
            f"{expected.model} with their NVLinks give at least {rate_text(expected.least)}"
        )
        if slowing:
            said += f"; {' '.join(f'{name}={value}' for name, value in slowing.items())} is set"
        yield Finding(
            BELOW_FLOOR,
            said,
            Where(hosts=tuple(seen.labels[host] for host in hosts)),
            {
                "measured": [{"host": seen.labels[h], "busbw": each.busbw} for h, each in low],
                "usual": floor.usual,
                "source": floor.source,
            },
            fix=_FIX,
            severity=Severity.INFO if slowing else None,
            confidence=Confidence.POSSIBLE if slowing else Confidence.LIKELY,
        )


def _expected(cluster: Cluster) -> dict[int, Expected]:
    """Host → what its ranks should reach; only where all of them have NVLinks of one known model.

    GPUs on boards of one kind may be joined in other ways if a job has only some of them.
    """
    read = ("backend_device", "gpu_state")
    return cluster.once(_expected, read, lambda: _expected_by_host(cluster))


def _expected_by_host(cluster: Cluster) -> dict[int, Expected]:
    own, found = own_gpus(cluster), {}
    for host in cluster.present_hosts:
        seats = [rank.seat for rank in cluster.ranks_on(host)]
        gpus = [own[seat] for seat in seats if seat in own]
        models = {gpu.model for gpu in gpus}
        floor = floor_of(next(iter(models))) if len(models) == 1 else None
        up = min((_links(gpu) for gpu in gpus), default=0)
        if floor and up and len(gpus) == len(seats) >= floor.ranks:
            least = floor.least * min(1.0, up / floor.links)
            found[host.id] = Expected(models.pop(), len(seats), least, floor)
    return found


def _links(gpu: OwnGpu) -> int:
    """Number of NVLinks that are up; 0 where the driver does not say."""
    return sum(map(bool, gpu.state.get("nvlinks") or ()))


@functools.cache
def _table() -> tuple[tuple[re.Pattern[str], Floor], ...]:
    return tuple(
        (
            re.compile(row["name"]),
            Floor(
                row["links"],
                row["ranks"],
                row["usual_gbps"] * 1e9,
                row["least_gbps"] * 1e9,
                row["source"],
            ),
        )
        for row in read_table(__package__, "floors.toml")["gpu"]
    )
