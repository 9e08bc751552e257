"""Is every GPU in order: present, error-free, at full speed, alone, and like its peers?

What it checks
--------------
Each GPU of each host, through NVIDIA's management library (NVML): whether it answers; errors of its
memory (ECC, remapped rows, retired pages); what the driver asks for; Xids in the kernel log; why
its clocks are held down, and whether somebody limited them; PCIe lanes; NVLinks and their errors;
whether the NVLink fabric is set up; which processes use it. Each is asked by a process of its own:
one that never answers is named, and the others are examined all the same. Then what is between
them: which reach each other's memory, fatal errors of NVSwitches (SXid) in the kernel log, whether
the fabric manager runs and fits the driver. Then whether GPUs of one host, and hosts, have the same
memory, ECC and MIG mode, power limit, clocks, VBIOS, driver and bus topology; the minority is
named.

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
In a container, processes of others cannot be seen, and the kernel log often cannot be read: what is
not seen is not judged. An Xid or SXid may be older than the last reset: of a GPU that answers, and
of an NVSwitch, it is only a warning. Clocks that are locked cannot be read back: a GPU is only
blamed for them where most of its like are free. GPUs that do not reach each other's memory count
only where most pairs that are as near do. A GPU that is idle may lower its PCIe generation; that
counts only against its peers. Bridges may join some GPUs of a host on purpose: a GPU without any
NVLink is then only possibly wrong. A power limit that all GPUs share is taken to be meant. AMD GPUs
are not examined: the check is skipped there. NVSwitches of HGX B200 write no SXids, and show no
device files.
Not validated on hardware: tested with a stand-in for the library and on made-up clusters; no run on
a GPU is on record yet.

References
----------
NVIDIA Management Library API reference; NVIDIA, Analyzing Xid Errors with the Xid Catalog; NVIDIA
GPU Memory Error Management; NVIDIA Fabric Manager user guide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    GPU_STATE_KINDS,
    Check,
    Cluster,
    Context,
    Figure,
    Finding,
    Layer,
    Where,
    gather_gpus,
    judge_gpus,
)


class GpuState(Check):
    """The state of every GPU, once per host."""

    name = "gpu_state"
    layer = Layer.DEVICE
    cost = "seconds"
    kinds = GPU_STATE_KINDS
    deadline_s = 45.0  # eight GPUs without persistence mode need about 20 s to wake

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """The facts of `nccl_doctor.tools.gpu.gather`; every call to the driver leaves a
        breadcrumb.
        """
        return gather_gpus(ctx.breadcrumb, left=ctx.left)

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """Which GPU is in which slot, and how it is set."""
        for rank, facts in cluster.facts(self.name):
            for gpu in facts["gpus"]:
                if gpu.get("bus_id"):
                    where = Where(hosts=(rank.host.label,))
                    yield Figure(f"GPU {gpu['bus_id']}", _in_words(gpu), where)

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """By the rules of `nccl_doctor.tools.gpu.judging`."""
        yield from judge_gpus(cluster)


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
