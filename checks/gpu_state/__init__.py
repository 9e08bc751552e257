"""Is every GPU in order: present, error-free, at full speed, alone, and like its peers?

What it checks
--------------
Each GPU of each host, through NVIDIA's management library (NVML): whether it answers; errors of its
memory and caches (ECC, remapped rows and rows to spare, retired pages); what the driver asks for;
Xids in the kernel log; heat, why its clocks are held down, and whether somebody limited them or its
power; PCIe lanes; NVLinks and their errors; whether the NVLink fabric is set up and healthy; which
processes use it. Each is asked by a process of its own: one that never answers is named, and the
others are examined all the same. Then what is between them: which reach each other's memory, and
which should not (GeForce RTX 40 and 50 over PCIe), fatal errors of NVSwitches (SXid) in the kernel
log, whether the fabric manager runs and fits the driver. Then whether GPUs of one host, and hosts,
have the same memory, ECC and MIG mode, power limit, clocks, VBIOS, driver and bus topology; the
minority is named. What could not be read is said (`gpu-state-unread`).

Why it matters
--------------
One sick GPU ends or slows a job of thousands: all ranks wait for it in every collective. A GPU that
fell off the bus can keep CUDA from starting on its whole host.

How to fix
----------
As each finding says: end foreign processes, reset the GPU, reboot the host, or have it repaired.
`nvidia-smi -q` and `nvidia-smi topo -m` show the same values. Install NVIDIA's bindings where the
check is skipped: pip install nvidia-ml-py.

When it is wrong
----------------
A GPU that no rank takes is a neighbour's: what is wrong with it is information, unless it does not
answer. That counts once every rank of the host has said its own; until then every GPU may be ours.
In a container, processes of others cannot be seen, and the kernel log often cannot be read, nor by
a user where kernel.dmesg_restrict=1: then no Xid is judged, and the report says so. A process whose
name cannot be read may have been one of ours. Memory in use by no visible process counts beyond
what check `gpu_work` may hold. With MIG on, other tenants' processes are listed too, so none is
judged. An Xid or SXid may be older than the last reset: of a GPU that answers, and of an NVSwitch,
it is only a warning. Clocks that are locked cannot be read back: a GPU is only blamed for them
where most of its like are free; drivers from CUDA 14 on know no applications clocks any more. GPUs
that do not reach each other's memory count only where most pairs that are as near do. A patched
driver that lets GeForce boards reach each other may well work: that is information where what check
`gpu_work` sent arrived. A GPU that is idle may lower its PCIe generation; that counts only against
its peers. Bridges may join some GPUs of a host on purpose: a GPU without any NVLink is then only
possibly wrong. Links that are down on all GPUs alike are taken for how the model is made. Error
counts of NVLinks are as old as the driver's start. A power limit that all GPUs share is taken to be
meant. AMD GPUs are not examined: the check is skipped there. NVSwitches of HGX B200 write no SXids,
and show no device files.
Not validated on hardware: tested with a stand-in for the library and on made-up clusters; no run on
a GPU is on record yet.

References
----------
NVIDIA Management Library API reference (with its list of what is deprecated); NVIDIA, Analyzing Xid
Errors with the Xid Catalog; NVIDIA GPU Memory Error Management; NVIDIA Driver Persistence; NVIDIA
Fabric Manager user guide; boards without P2P: nccl_doctor/tools/gpu/p2p.toml, with sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import Check, Cluster, Context, Figure, Finding, Layer, Where
from nccl_doctor.toolkit.nccl.conf import nccl_settings

from .gather import gather_gpus
from .rules import GPU_STATE_KINDS, judge_gpus


class GpuState(Check):
    """The state of every GPU, once per host."""

    name = "gpu_state"
    layer = Layer.DEVICE
    cost = "seconds"
    kinds = GPU_STATE_KINDS
    deadline_s = 45.0  # eight GPUs without persistence mode need about 20 s to wake

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """The facts of `gather_gpus`, and `p2p_off`: whether NCCL is told not to copy directly
        between GPUs. Every call to the driver leaves a breadcrumb.
        """
        found = gather_gpus(ctx.breadcrumb, left=ctx.left)
        return {**found, "p2p_off": _is_p2p_off(nccl_settings(ctx.env))}

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """Which GPU is in which slot, and how it is set."""
        for rank, facts in cluster.facts(self.name):
            for gpu in facts["gpus"]:
                if gpu.get("bus_id"):
                    where = Where(hosts=(rank.host.label,))
                    yield Figure(f"GPU {gpu['bus_id']}", _in_words(gpu), where)

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """By the rules of `judge_gpus`."""
        yield from judge_gpus(cluster)


def _is_p2p_off(settings: Mapping[str, Any]) -> bool:
    """As NCCL reads it: a level of LOC, or of 0, means the same as NCCL_P2P_DISABLE=1."""
    disable, level = settings.get("NCCL_P2P_DISABLE"), settings.get("NCCL_P2P_LEVEL")
    return bool(disable and disable.value == "1") or bool(level and level.value in ("LOC", "0"))


def _in_words(gpu: Mapping[str, Any]) -> str:
    """What somebody has to change before it is another one: the GPU itself, VBIOS and settings."""
    limit, modes = gpu.get("power_limit_mw"), (("ECC", gpu.get("ecc")), ("MIG", gpu.get("mig")))
    said = [
        gpu.get("name"),
        gpu.get("uuid"),
        f"VBIOS {gpu['vbios']}" if gpu.get("vbios") else None,
        *(f"{name} {'on' if mode[0] else 'off'}" for name, mode in modes if mode),
        f"power limit {limit / 1000:g} W" if limit else None,
    ]
    return ", ".join(str(each) for each in said if each)
