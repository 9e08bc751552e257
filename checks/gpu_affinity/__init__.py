"""Does each rank run near its GPU, and is a NIC near it, too?

What it checks
--------------
On every rank: the CPUs that it may run on, the NUMA node of the GPU that it would take (LOCAL_RANK
modulo the visible ones), the CPUs beside that GPU, and how near the host's network devices are to
it. With -v the nearest ones are shown as a table. For InfiniBand and RoCE ports: whether NCCL may
use the one beside the GPU (it is up, and NCCL_IB_HCA allows it), whether the port of a rank is
farther away than those of most ranks of its host, and whether local ranks of all hosts are beside
the same ports, in NCCL's order.

Why it matters
--------------
A rank that is bound to the CPUs of another socket reaches its GPU over the link between the
sockets: copies to the GPU, NCCL's proxy threads, its buffers in host memory and data from the
network all cross it. Nothing fails; each step is slower, on some ranks only. The same is true where
the NIC beside a GPU cannot be used: its traffic then shares the NIC of another rank.

How to fix
----------
Bind each rank to the node of its GPU: torchrun --numa-binding=node (where torchrun has it), srun
--gpu-bind=closest, numactl --cpunodebind=N --preferred=N, or no binding at all. Bring up the NIC
that is named, or allow it in NCCL_IB_HCA; set the same CUDA_VISIBLE_DEVICES on all hosts.

When it is wrong
----------------
A program that binds its ranks later by itself is not seen. There is no finding for a rank that may
run both near its GPU and far from it, nor where the firmware or a virtual machine does not report
nodes. A job that hardly uses the CPU may not be slower. Hosts of one kind may be wired differently
on purpose; those with another number of ranks or ports are not compared.
Not validated on hardware: tested with made-up folders of sysfs; no run on a GPU is on record yet.

References
----------
Kernel documentation, ABI/testing/sysfs-bus-pci (numa_node, local_cpulist); sched_setaffinity(2);
CUDA driver API (cuDeviceGetPCIBusId); numactl(8); PyTorch documentation, torchrun; NCCL user guide
(NCCL_IB_HCA, NCCL_CROSS_NIC).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Scope,
    Severity,
    Skip,
    Step,
    Untested,
    Where,
    number_range,
    place_of,
    shell,
)
from nccl_doctor.toolkit.fabric.down import ports_down, seen_by_rdma
from nccl_doctor.toolkit.fabric.rails import rails_of
from nccl_doctor.toolkit.gpu.devices import index_of_own, see_gpus, torch_build
from nccl_doctor.toolkit.nccl.conf import nccl_settings

from .gpu_places import pci_address, place_on_host
from .nic_places import HOW_NEAR, NIC_FAR, NIC_PAIRS, NicsBeside, judge_nics, nics_beside

_NEAR = Fix(
    Step(shell("# torchrun --numa-binding=node"), On.EVERY),
    alternatives=[Fix(Step(shell("# srun --gpu-bind=closest"), On.EVERY)), "bind no ranks to CPUs"],
)
FAR = Kind(
    "rank-far-from-gpu",
    Layer.DEVICE,
    "A rank is bound to CPUs far from its GPU",
    "Copies to the GPU and NCCL's own threads and buffers cross the link between the sockets: "
    "every step of this rank, and so of the whole job, is slower.",
    _NEAR,
    Severity.WARN,
)


def _on_node(node: int) -> Fix:
    """The fix that starts a rank on the CPUs of a NUMA node."""
    line = shell("# numactl --cpunodebind={} --preferred={}", node, node)
    return Fix(Step(line, note="before the program of this rank"), alternatives=[_NEAR])


_DOWN = {False: "rdma-port-down", True: "rdma-port-unconfigured"}
"""True if a port waits for a subnet manager → code by which check `rdma` names it."""


class GpuAffinityFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    uuid: str | None
    address: str
    numa: int | None
    cpus: str
    beside: str
    shared: int
    places: dict[str, Any]
    rdma: NicsBeside | None


class GpuAffinity(Check):
    """The CPUs of every rank compared with those beside its GPU."""

    name = "gpu_affinity"
    layer = Layer.DEVICE
    scope = Scope.RANK
    cost = "seconds"
    instant_without_gpu = True
    kinds = (FAR, NIC_FAR, NIC_PAIRS)
    reads = ("rdma",)
    deadline_s = 45.0  # as long as a driver may take to start

    def observe(self, ctx: Context) -> GpuAffinityFacts:
        """The place of this rank's GPU; see `look`."""
        if ctx.backend != "nccl":
            raise Skip(f"the backend is {ctx.backend}: the job's collectives use no GPU")
        ctx.breadcrumb("importing torch")
        build = torch_build()
        if not build["cuda"]:
            raise Skip(f"torch {build['torch']} is built without CUDA")
        seen = see_gpus(build, lambda call: ctx.breadcrumb("starting the GPU driver", call=call))
        if seen["driver_error"] or not seen["devices"]:
            raise Untested("torch sees no GPU")
        own = seen["devices"][index_of_own(ctx.launch.local_rank, len(seen["devices"]))]
        address = pci_address(own["index"])
        if address is None:
            raise Untested("the driver does not report the PCI address of the GPU")
        return self.look(own["uuid"], address, os.sched_getaffinity(0), ctx)

    def look(
        self, uuid: str | None, address: str, mine: set[int], ctx: Context
    ) -> GpuAffinityFacts:
        """Look up what is near the GPU at this PCI address.

        Returns: `uuid`, `address`; `numa`: node of the GPU, or None; `cpus`, `beside`: the CPUs of
        the rank and those beside the GPU, as text (`0–31, 64–95`); `shared`: how many are in both;
        `places`: the same with the nearest network devices, as a table; `rdma`: from `nics_beside`.
        """
        place = place_on_host(address, ctx.root)
        nearest = [nic for nic in place["nics"] if nic["near"] == place["nics"][0]["near"]]
        near = nearest[0]["near"] if nearest else None
        cpus, beside = number_range(sorted(mine)), number_range(place["cpus"])
        row = [
            address,
            place["numa"],
            beside or None,
            cpus,
            ", ".join(nic["name"] for nic in nearest) or None,
            None if near is None else HOW_NEAR[near],
        ]
        columns = ["GPU", "NUMA node", "CPUs beside it", "CPUs of the rank", "nearest NIC", "how"]
        return {
            "uuid": uuid,
            "address": address,
            "numa": place["numa"],
            "cpus": cpus,
            "beside": beside,
            "shared": len(mine & set(place["cpus"])),
            "places": {"columns": columns, "rows": [row]},
            "rdma": nics_beside(place, rails_of(nccl_settings(ctx.env, root=ctx.root), ctx.root)),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on ranks without a CPU beside their GPU; then on GPUs and NICs."""
        for rank, facts in cluster.facts(self.name):
            if facts["shared"] or not facts["beside"]:
                continue
            node, fix = facts["numa"], ""
            at = "" if node is None else f" of NUMA node {node}"
            if node is not None:
                fix = _on_node(node)
            yield Finding(
                FAR,
                f"may run on CPUs {facts['cpus']}; its GPU is beside CPUs {facts['beside']}{at}",
                place_of([rank]) | Where(devices=(facts["uuid"],) if facts["uuid"] else ()),
                {"cpus": facts["cpus"], "beside": facts["beside"], "numa": node},
                fix=fix,
            )
        nics = list(judge_nics(cluster.facts(self.name)))
        ports = ports_down(seen_by_rdma(cluster)) if nics else ()
        down = {port.host: _DOWN[port.unconfigured] for port in ports}
        for found in nics:
            own = found.evidence.get("own") or {}
            if found.kind is NIC_FAR and "down" in own.values():
                found = found.replaced(explained_by=down.get(found.where.hosts[0]))
            yield found
