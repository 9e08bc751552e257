"""Are hosts that could share an NVLink domain in the same one, and may NCCL use it?

What it checks
--------------
Where GPUs of several hosts share an NVLink fabric (multi-node NVLink, MNNVL: GB200 NVL72 and the
like), NVML gives the domain (cluster UUID) and the clique of each GPU. The check compares them
between the hosts: a host in another clique than the others of its domain, a host in another domain
than its chassis, GPUs of one host in different places, a host in no domain. Then whether the
job has an IMEX channel on each host (/dev/nvidia-caps-imex-channels), if NCCL would use NVLink
between hosts: as it does by itself from 2.21.5 on, unless NCCL_MNNVL_ENABLE=0,
NCCL_CUMEM_ENABLE=0 or NCCL_P2P_DISABLE=1 is set.

Why it matters
--------------
Without a channel NCCL ends with an error when it forms a group: `MNNVL … is available but not
working on this system` (2.27.3), `Check the IMEX configuration` (2.25.1), or a CUDA error. Between
cliques and domains it uses the network, which is several times slower; if one GPU of the job is in
no domain, it does so between all hosts, and says nothing.

How to fix
----------
imex-channel-unusable: give the job a channel. Docker: --device
/dev/nvidia-caps-imex-channels/channel0. Kubernetes: a resource claim of a ComputeDomain (NVIDIA's
DRA driver). Slurm: SwitchType=switch/nvidia_imex. Elsewhere the option NVreg_CreateImexChannel0=1
of the module nvidia, or mknod. export NCCL_MNNVL_ENABLE=0 sends over the network instead.
nvlink-domain-split: compare `nvidia-smi -q | grep -A 6 Fabric` of the hosts. Partitions of the
NVLink domain, and the domain itself, are made by the fabric manager of its switches (NMX-C).

When it is wrong
----------------
Several domains in one job are usual (several racks), and never a finding. A domain may be divided
into partitions on purpose: a finding only where one host is apart from all others, else
information. A GPU that is not registered yet is for check `gpu_state`. If a scheduler makes the
channels for each job, run the examination inside such a job; an init container has a channel only
if it has the claim, too. Whether NVLink carries data between
hosts is not tried here but by `collectives` and `links`. NCCL_MNNVL_UUID and NCCL_MNNVL_CLIQUE_ID
replace what NVML reports: domains, or cliques, are then not compared.
Not validated on hardware: tested with a stand-in for the library and on made-up clusters; no run on
a machine with NVLink between hosts is on record yet.

References
----------
NVIDIA IMEX guide (IMEX Channels); NVIDIA Multi-Node NVLink systems, partition guide; NVIDIA
Management Library API reference (nvmlGpuFabricInfo_v2_t, nvmlPlatformInfo_v2_t); NCCL source,
src/mnnvl.cc and src/init.cc; docs.nvidia.com/deeplearning/nccl (NCCL_MNNVL_ENABLE).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Figure,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    Skip,
    Step,
    Where,
    export,
    shell,
)
from nccl_doctor.toolkit.gpu.devices import host_gpus
from nccl_doctor.toolkit.gpu.mnnvl import mnnvl_hosts
from nccl_doctor.toolkit.nccl.conf import Setting, nccl_settings

from .places import DOMAIN_SPLIT, members, splits

_WITHOUT = Fix(export(NCCL_MNNVL_ENABLE="0"))
CHANNEL_UNUSABLE = Kind(
    "imex-channel-unusable",
    Layer.DEVICE,
    "The job has no IMEX channel, and NCCL would use NVLink between hosts",
    "Without a channel CUDA refuses memory that other hosts may reach, and NCCL ends when it forms "
    "a group: `MNNVL … is available but not working on this system`.",
    Fix(
        Step(shell("# docker run --device /dev/nvidia-caps-imex-channels/channel0")),
        alternatives=[
            "in Kubernetes: a resource claim of a ComputeDomain",
            "with Slurm: SwitchType=switch/nvidia_imex",
            "elsewhere: the line 'options nvidia NVreg_CreateImexChannel0=1' in /etc/modprobe.d",
            _WITHOUT,
        ],
    ),
)
_FOLDER = "dev/nvidia-caps-imex-channels"
_CHANNEL = re.compile(r"channel\d+")
_OFF = {"NCCL_MNNVL_ENABLE": ("0",), "NCCL_CUMEM_ENABLE": ("0",), "NCCL_P2P_DISABLE": ("1",),
        "NCCL_P2P_LEVEL": ("LOC", "0")}  # fmt: skip
"""Settings with which NCCL does not look for NVLink between hosts."""
_OPEN = Fix(
    Step(shell("chmod 0666 /dev/nvidia-caps-imex-channels/*"), note="as root, on the host itself"),
    alternatives=["in a container: give it the device", _WITHOUT],
)


class MnnvlFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    channels: list[str]
    refused: dict[str, str]
    off: str
    cluster_uuid: str
    clique: str


class Mnnvl(Check):
    """NVLink between hosts: domains, cliques and IMEX channels."""

    name = "mnnvl"
    layer = Layer.DEVICE
    kinds = (CHANNEL_UNUSABLE, DOMAIN_SPLIT)
    reads = ("gpu_state",)

    def observe(self, ctx: Context) -> MnnvlFacts:
        """`channels`: IMEX channels that this process can open; `refused`: others, and why; `off`:
        the setting that keeps NCCL from NVLink between hosts, or nothing; `cluster_uuid` and
        `clique`: what NCCL is told to take in place of NVML's answers.
        """
        if not host_gpus(ctx.root)["nodes"]:
            raise Skip("no NVIDIA GPU here")
        channels, refused = [], {}
        for path in sorted((ctx.root / _FOLDER).glob("channel*")):
            if _CHANNEL.fullmatch(path.name):
                ctx.breadcrumb("open an IMEX channel", file=f"/{_FOLDER}/{path.name}")
                if error := _error(path):
                    refused[path.name] = error
                else:
                    channels.append(path.name)
        settings = nccl_settings(ctx.env, root=ctx.root)
        return {
            "channels": channels,
            "refused": refused,
            "off": _off(settings),
            "cluster_uuid": _value(settings, "NCCL_MNNVL_UUID"),
            "clique": _value(settings, "NCCL_MNNVL_CLIQUE_ID"),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Hosts without a channel, then GPUs and hosts that are not where their neighbours are."""
        seen = {rank.host.id: facts for rank, facts in cluster.facts(self.name)}
        for number, host in mnnvl_hosts(cluster).items():
            if number in seen and not seen[number]["channels"]:
                yield _no_channel(host, seen[number])
        if cluster.backend == "nccl" and not any(facts["off"] for facts in seen.values()):
            told_uuid = any(facts["cluster_uuid"] for facts in seen.values())
            told_clique = any(facts["clique"] for facts in seen.values())
            yield from splits(cluster, told_uuid=told_uuid, told_clique=told_clique)

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """The domain and clique of each host with NVLink to others."""
        for host, gpus in members(cluster):
            cliques = sorted({gpu.clique for gpu in gpus if gpu.clique})
            if cliques:
                words = "; ".join(str(clique) for clique in cliques)
                yield Figure("NVLink domain", words, Where(hosts=(host.label,)))


def _error(path: Path) -> str:
    """The reason why this process may not open a channel, as CUDA does; empty if it may."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def _off(settings: Mapping[str, Setting]) -> str:
    for name, values in _OFF.items():
        if _value(settings, name) in values:
            return f"{name}={_value(settings, name)}"
    return ""


def _value(settings: Mapping[str, Setting], name: str) -> str:
    """The value that is set; `-1` of the two that name a place means that nothing is."""
    value = settings[name].value.strip() if name in settings else ""
    return "" if value == "-1" else value


def _no_channel(host: Host, facts: Mapping[str, Any]) -> Finding:
    refused = [f"/{_FOLDER}/{name}: {error}" for name, error in facts["refused"].items()]
    return Finding(
        CHANNEL_UNUSABLE,
        "; ".join(refused) or f"no channel in /{_FOLDER}",
        Where(hosts=(host.label,)),
        {"refused": facts["refused"]},
        fix=_OPEN if refused else "",
        # What NCCL does then is known from its source, not from a run.
        confidence=Confidence.LIKELY,
    )
