"""Is the driver of GDRCopy there, where GDRCopy is asked for?

What it checks
--------------
With NCCL, on hosts with NVIDIA GPUs, if NCCL_GDRCOPY_ENABLE=1 in the environment or in a
configuration file of NCCL: whether the device file /dev/gdrdrv is there and may be opened, and
whether the kernel module gdrdrv is loaded. Nothing is opened or copied.

Why it matters
--------------
With GDRCopy the CPU writes small data into the memory of the GPU directly. NCCL opens /dev/gdrdrv
when it starts; if that fails it goes on without GDRCopy and prints no warning. The job runs, but
the setting has no effect, and a host without the driver has a higher latency than the others.

How to fix
----------
On the host: install gdrdrv-dkms (GDRCopy), then modprobe gdrdrv. In a container, also pass the
device: docker run --device /dev/gdrdrv; with NVIDIA's GPU operator: gdrcopy.enabled=true. Or
unset NCCL_GDRCOPY_ENABLE.

When it is wrong
----------------
NCCL also needs the library libgdrapi.so.2 or newer, and GDRCopy 2.1 or newer; neither is looked
for. A control group may forbid a device whose file is there. From 2.31 on, NCCL can do without
gdrdrv (NCCL_GDRCOPY_USE_INTERNAL_DMABUF): then nothing is said.
Not validated on hardware: tested on made-up clusters and made-up hosts.

References
----------
NCCL src/init.cc (`initGdrCopy`), src/include/gdrwrap.h (`ncclGdrInit`) and src/misc/gdrwrap.cc;
NVIDIA/gdrcopy on GitHub, README.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Skip,
    Step,
    Where,
    shell,
)
from nccl_doctor.toolkit.gpu.devices import host_gpus
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.variables.values import as_strtoll
from nccl_doctor.toolkit.versions import loaded_nccl, release

MISSING = Kind(
    "gdrcopy-missing",
    Layer.SPEED,  # it explains no slow link: what it saves is latency
    "GDRCopy is asked for, and its driver is not there",
    "NCCL silently goes on without GDRCopy: the setting has no effect.",
    Fix(
        Step(shell("modprobe gdrdrv"), note="on the host itself; install gdrdrv-dkms before"),
        alternatives=[Fix(Step(shell("unset NCCL_GDRCOPY_ENABLE")))],
    ),
    Severity.WARN,
)
UNUSABLE = MISSING.variant(
    title="GDRCopy is asked for, and this process cannot open its device",
)

_ENABLE = "NCCL_GDRCOPY_ENABLE"
_INTERNAL = "NCCL_GDRCOPY_USE_INTERNAL_DMABUF"
_SINCE_INTERNAL = (2, 31)
_DEVICE = "dev/gdrdrv"
_WITHOUT = Fix(Step(shell("unset NCCL_GDRCOPY_ENABLE")))
_TO_A_CONTAINER = Fix(Step(shell("# docker run --device /dev/gdrdrv")), alternatives=[_WITHOUT])
_OPEN = Fix(
    Step(shell("chmod 0666 /dev/gdrdrv"), note="on the host itself, as root"),
    alternatives=[_WITHOUT],
)


class GdrCopy(Check):
    """Looks for the device file and the module of GDRCopy."""

    name = "gdrcopy"
    layer = Layer.DEVICE
    kinds = (MISSING,)
    reads = ("nccl_library",)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`asked`: the setting and where it is; `internal`: whether NCCL may use a way of its own;
        `device`: whether the device file is there; `opens`: whether this process may open it;
        `module`: whether the module is loaded, None if that cannot be read.
        """
        if ctx.backend != "nccl":
            raise Skip("the job does not use NCCL")
        gpus = host_gpus(ctx.root)
        if not (gpus["nodes"] or gpus["proc"]):
            raise Skip("no NVIDIA GPU here")
        settings = nccl_settings(ctx.env, root=ctx.root)
        asked = settings.get(_ENABLE)
        if asked is None or as_strtoll(asked.value) != 1:
            raise Skip(f"{_ENABLE} is not 1")
        internal = settings.get(_INTERNAL)
        return {
            "asked": f"{_ENABLE}={asked.value} (by {asked.origin})",
            "internal": internal is not None and as_strtoll(internal.value) != 0,
            "device": (ctx.root / _DEVICE).exists(),
            "opens": os.access(ctx.root / _DEVICE, os.R_OK | os.W_OK),
            "module": _is_loaded(ctx),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """A warning for each host where GDRCopy is asked for and NCCL cannot open it."""
        versions = loaded_nccl(cluster)
        for rank, facts in cluster.facts(self.name):
            mine = [release(versions.get(each.seat)) for each in cluster.ranks_on(rank.host)]
            newest = max(mine, default=())
            # A release that is not known may have a way of its own.
            own_way = facts["internal"] and (not newest or newest >= _SINCE_INTERNAL)
            if facts["opens"] or own_way:
                continue
            yield Finding(
                UNUSABLE if facts["device"] or facts["module"] else MISSING,
                f"{facts['asked']}, but {_fault(facts)}",
                Where(hosts=(rank.host.label,)),
                {name: facts[name] for name in ("device", "opens", "module")},
                fix=_fix(facts),
            )


def _is_loaded(ctx: Context) -> bool | None:
    try:
        lines = (ctx.root / "proc/modules").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return any(line.split(maxsplit=1)[:1] == ["gdrdrv"] for line in lines)


def _fault(facts: Mapping[str, Any]) -> str:
    if facts["device"]:
        return "/dev/gdrdrv may not be opened for reading and writing by this user"
    if facts["module"]:
        return "/dev/gdrdrv is not here, though the module gdrdrv is loaded"
    return "/dev/gdrdrv is not here" + (
        "" if facts["module"] is None else ", and the module gdrdrv is not loaded"
    )


def _fix(facts: Mapping[str, Any]) -> str:
    if facts["device"]:
        return _OPEN
    return _TO_A_CONTAINER if facts["module"] else ""
