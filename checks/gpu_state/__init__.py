"""Is every GPU in order: present, error-free, at full speed, alone, and like its peers?

What it checks
--------------
Each GPU of each host, through NVIDIA's management library (NVML): whether it answers; errors of its
memory and caches (ECC, remapped rows and rows to spare, retired pages); what the driver asks for;
Xids in the kernel log; temperature, why its clocks are held down, and whether its clocks or its
power are limited by hand; PCIe lanes; NVLinks and their errors; links to the CPU (NVLink-C2C);
whether the NVLink fabric is set up and healthy; which processes use it. Each GPU is read in its own
process: one that never answers is named, and the others are still examined. Then the connections
between GPUs: which GPUs reach each other's memory, and which should not (GeForce RTX 40 and 50 over
PCIe), fatal errors of NVSwitches (SXid) in the kernel log, whether the fabric manager runs and fits
the driver. Then whether GPUs of one host, and hosts, have the same memory, ECC and MIG mode, power
limit, clocks, VBIOS, driver and bus topology, and GSP firmware on or off; the minority is named.
What could not be read is reported (`gpu-state-unread`).

Why it matters
--------------
One faulty GPU stops or slows a job of thousands: all ranks wait for it in every collective. A GPU
that fell off the bus can keep CUDA from starting on its whole host.

How to fix
----------
As each finding says: end foreign processes, reset the GPU, reboot the host, or have it repaired.
`nvidia-smi -q` and `nvidia-smi topo -m` show the same values. Where GPUs are, but NVIDIA's bindings
are not installed (as after `pip install --no-deps`), the check is unknown: python -m pip install
nvidia-ml-py.

When it is wrong
----------------
A GPU that no rank uses belongs to another job: a fault of it is information, unless it does not
answer. This is known once every rank of the host has reported its GPU; until then the job may use
any of them. In a container, processes of others cannot be seen, and the kernel log often cannot be
read (nor by a user where kernel.dmesg_restrict=1): then no Xid is judged, and the report says so. A
process whose name cannot be read may belong to this examination. In a container NVML may give
process ids of the host, also for our own processes: such a process is not blamed. Memory that no
visible process uses counts only above what check `gpu_work` may hold; where neither is known, the
check is no pass. With MIG on, processes of other tenants are listed too, so none is judged. An Xid
or SXid may be older than the last reset: for a GPU that answers it is only a warning, and for an
NVSwitch too unless the NVLink fabric now gives a GPU less than it should. A GPU whose driver does
not answer is certainly lost only if the process that asked sleeps uninterruptibly (state D) or died
of a fault signal, twice; one that is merely slow is likely lost. If somebody stopped or killed that
process (the kernel for lack of memory, a scheduler), the state of the GPU is not known, and the
check is no pass. While a GPU is reset or tested, or a driver is installed, nothing is certain; in a
container such a program is not seen. The NVLink fabric is certainly not set up only on a host with
NVSwitches and no fabric manager, ten minutes after its start.
Locked clocks cannot be read back: a GPU is
blamed for them only where most GPUs of its model have free clocks; drivers from CUDA 14 on have no
applications clocks. GPUs that do not reach each other's memory count only where most equally near
pairs do. A patched driver that lets GeForce boards reach each other may work: it is information
where the data that check `gpu_work` sent arrived. An idle GPU may lower its PCIe generation; that
counts only against its peers. Bridges may join only some GPUs of a host on purpose: a GPU without
any NVLink is then only possibly a fault. Links that are down on all GPUs alike count as the design
of the model. Error counts of NVLinks start when the driver starts. A power limit that all GPUs
share counts as intended. AMD GPUs are examined by check `amd_gpus`. NVSwitches of HGX B200 write no
SXids, and show no device files.
Not validated on hardware: tested with a stand-in for the library and on made-up clusters; no run on
a GPU is on record yet.

References
----------
NVIDIA Management Library API reference (with its list of what is deprecated); NVIDIA, Analyzing Xid
Errors with the Xid Catalog; NVIDIA GPU Memory Error Management; NVIDIA Driver Persistence; NVIDIA
Fabric Manager user guide; boards without P2P: checks/gpu_state/p2p.toml, with sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import Check, Cluster, Context, Figure, Finding, Layer, Untested, Where
from nccl_doctor.toolkit.gpu.unread import why_unread
from nccl_doctor.toolkit.nccl.conf import nccl_settings

from .gather import GpuStates, gather_gpus
from .rules import GPU_STATE_KINDS, judge_gpus
from .users import why_users_unknown


class GpuStateFacts(GpuStates):
    """Facts that `observe` returns; other checks read them."""

    p2p_off: bool


class GpuState(Check):
    """The state of every GPU, once per host."""

    name = "gpu_state"
    layer = Layer.DEVICE
    cost = "seconds"
    instant_without_gpu = True
    kinds = GPU_STATE_KINDS
    reads = ("backend_device", "gpu_affinity", "gpu_direct", "gpu_work")
    deadline_s = 45.0  # eight GPUs without persistence mode need about 20 s to wake

    def observe(self, ctx: Context) -> GpuStateFacts:
        """The facts of `gather_gpus`, and `p2p_off`: whether NCCL is set not to copy directly
        between GPUs. Every call to the driver leaves a breadcrumb.

        Raises:
            Untested: with these facts, the process that read a GPU was stopped or killed.
        """
        found = gather_gpus(ctx.breadcrumb, ctx.root, ctx.left)
        p2p_off = _is_p2p_off(nccl_settings(ctx.env, root=ctx.root))
        facts: GpuStateFacts = {**found, "p2p_off": p2p_off}
        if reasons := [*why_unread(facts), *why_users_unknown(facts)]:
            raise Untested("; ".join(reasons), facts)
        return facts

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """The GPU in each slot, and its settings."""
        for rank, facts in cluster.facts(self.name):
            for gpu in facts["gpus"]:
                if gpu.get("bus_id"):
                    where = Where(hosts=(rank.host.label,))
                    yield Figure(f"GPU {gpu['bus_id']}", _in_words(gpu), where)

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings by the rules of `nccl_doctor.checks.gpu_state.rules`."""
        yield from judge_gpus(cluster)


def _is_p2p_off(settings: Mapping[str, Any]) -> bool:
    """True if NCCL is set not to copy directly: level LOC or 0 means NCCL_P2P_DISABLE=1."""
    disable, level = settings.get("NCCL_P2P_DISABLE"), settings.get("NCCL_P2P_LEVEL")
    return bool(disable and disable.value == "1") or bool(level and level.value in ("LOC", "0"))


def _in_words(gpu: Mapping[str, Any]) -> str:
    """The GPU, its VBIOS and its settings as one text, which changes only if one of these does."""
    limit, modes = gpu.get("power_limit_mw"), (("ECC", gpu.get("ecc")), ("MIG", gpu.get("mig")))
    said = [
        gpu.get("name"),
        gpu.get("uuid"),
        f"VBIOS {gpu['vbios']}" if gpu.get("vbios") else None,
        *(f"{name} {'on' if mode[0] else 'off'}" for name, mode in modes if mode),
        f"power limit {limit / 1000:g} W" if limit else None,
    ]
    return ", ".join(str(each) for each in said if each)
