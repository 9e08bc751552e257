"""Has the loaded release of NCCL a known fault that this job may meet?

What it checks
--------------
The version of NCCL that each rank loads, and of the driver (of libcuda, if an image brings a newer
one in a `compat` folder: NCCL goes by that), against a table of releases with known
faults, and whether the host has what the fault needs: an RDMA port, GPUs that do not reach each
other's memory, or NCCL_COMM_ID. Nothing is said where a variable is set that prevents the fault.

Why it matters
--------------
Such a fault looks like one of the cluster: an error in the search for the topology, the wrong
interface, `Cuda failure 217`. An upgrade or one variable ends it.

How to fix
----------
As the finding says: install the release that has the repair, or set the variable on every rank.

When it is wrong
----------------
The table says what was reported and mended; a host may have the release and never meet the fault,
so the confidence is `possible`, and where collectives of all ranks worked here it is information.
RCCL is not judged. A custom build may differ from its release.
Not validated on hardware: tested on made-up clusters.

References
----------
nccl_doctor/toolkit/releases.toml, with a reference for each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Kind,
    Layer,
    Rank,
    Severity,
    Skip,
    place_of,
)
from nccl_doctor.toolkit.gpu.devices import host_gpus
from nccl_doctor.toolkit.gpu.driver import driver_branch
from nccl_doctor.toolkit.hosts import collectives_worked
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.releases import COMM_ID, NO_P2P, RDMA, KnownFault, known_faults

FAULTY = Kind(
    "nccl-known-bug",
    Layer.ENV,
    "This release of NCCL has a known fault",
    "A fault of the release looks like one of the cluster, and an upgrade or one variable ends it.",
    "install a release of NCCL that has the repair",
    Severity.WARN,
)
_RDMA_ROADS = ("infiniband", "efa")


class KnownReleases(Check):
    """Compares the loaded NCCL with releases that have known faults."""

    name = "known_releases"
    layer = Layer.ENV
    kinds = (FAULTY,)
    reads = ("collectives", "driver_libraries", "gpu_state", "nccl_library", "rdma")

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`driver`: version of the kernel module; `comm_id`: whether NCCL_COMM_ID is set;
        `prevented`: the variables of the table that are set so that a fault cannot happen.
        """
        if ctx.backend != "nccl":
            raise Skip("the job does not use NCCL")
        settings = nccl_settings(ctx.env, root=ctx.root)
        prevented = set()
        for name, value in (known.unless for known in known_faults("nccl")):
            if name in settings and settings[name].value and value in ("*", settings[name].value):
                prevented.add(name)
        return {
            "driver": host_gpus(ctx.root)["driver"],
            "comm_id": bool("NCCL_COMM_ID" in settings and settings["NCCL_COMM_ID"].value),
            "prevented": sorted(prevented),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on the ranks of a host whose NCCL has a fault that this host can meet."""
        hosts = {rank.host.id: facts for rank, facts in cluster.facts(self.name)}
        alike: dict[tuple[int, str], list[Rank]] = {}
        for rank, library in cluster.facts("nccl_library"):
            version = (library["loaded"] or {}).get("version")
            # RCCL has a history of its own.
            if rank.host.id in hosts and version and library["cuda"]:
                alike.setdefault((rank.host.id, version), []).append(rank)
        for (host, version), ranks in alike.items():
            for known in known_faults("nccl"):
                if known.has(version) and _meets(cluster, ranks[0], hosts[host], known):
                    worked = collectives_worked(cluster, ranks[0].host)
                    yield Finding(
                        FAULTY,
                        f"NCCL {version}: {known.symptom} ({known.reference.partition(';')[0]})",
                        place_of(ranks),
                        fix=known.fix,
                        severity=Severity.INFO if worked else known.severity,
                        confidence=Confidence.POSSIBLE,
                    )


def _meets(cluster: Cluster, rank: Rank, facts: Mapping[str, Any], known: KnownFault) -> bool:
    if known.unless[0] in facts["prevented"]:
        return False
    branch = driver_branch(cluster, rank.host, facts["driver"])
    if known.driver and not (branch and known.driver[0] <= branch < known.driver[1]):
        return False
    if known.condition == COMM_ID:
        return bool(facts["comm_id"])
    if known.condition == RDMA:
        roads = [each["road"] for _, each in cluster.facts_on("rdma", rank.host)]
        return any(road in _RDMA_ROADS for road in roads)
    if known.condition == NO_P2P:
        return len(cluster.ranks_on(rank.host)) > 1 and any(
            pairs
            for _, each in cluster.facts_on("gpu_state", rank.host)
            for why, pairs in (each.get("p2p") or {}).items()
            if why != "OK"
        )
    return False  # what it needs cannot be seen before the job runs
