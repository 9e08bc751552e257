"""Does the IMEX service run on hosts that share an NVLink domain, with one list of hosts?

What it checks
--------------
Only where NCCL would use NVLink between hosts of the job (check `mnnvl` says where that is): that
nvidia-imex runs on each of them, that its list of hosts (IMEX_NODE_CONFIG_FILE, by default
/etc/nvidia-imex/nodes_config.cfg) is the same on all of them, and that each of them is in it.

Why it matters
--------------
The service exports and imports GPU memory between hosts. Where it does not run, or does not know a
host, NCCL ends when it forms a group: `MNNVL … is available but not working on this system. Check
the IMEX configuration`, or `cuMemImportFromShareableHandle … invalid resource handle`. Services
with different lists refuse each other.

How to fix
----------
Write the addresses of the hosts into the list, the same list on all hosts, then systemctl restart
nvidia-imex on all of them; `nvidia-imex-ctl -N` shows who is connected to whom. The service reads
its list only when it starts. export NCCL_MNNVL_ENABLE=0 sends over the network instead.

When it is wrong
----------------
Where Kubernetes runs the service (a ComputeDomain of NVIDIA's DRA driver has a daemon of its own in
a pod, and the one of the host must then be off), the check is skipped: in a pod, on a host with
that driver, and where no service runs on a node of Kubernetes. It is skipped, too, in a container
from which the processes of the host cannot be seen, and outside of a Slurm job where no service
runs, because a Prolog may start it. A list that was changed after the service had started is not
the one that the service uses. A list with names is not searched for a host that it names otherwise;
the order of a list is not compared.
Not validated on hardware: tested on made-up clusters and a made-up /proc; no run on a machine with
NVLink between hosts is on record yet.

References
----------
NVIDIA IMEX guide (Deployment Models, Config Options); github.com/kubernetes-sigs/
dra-driver-nvidia-gpu, issue 524 (the service of the host and the driver's daemon exclude each
other); NCCL source, src/mnnvl.cc.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    On,
    Skip,
    Step,
    Where,
    export,
    look,
    odd_ones_out,
    shell,
)
from nccl_doctor.toolkit.gpu.devices import host_gpus
from nccl_doctor.toolkit.gpu.mnnvl import neighbours
from nccl_doctor.toolkit.hosts import WHO, who_has_what

from .daemon import ImexFacts, read_daemon

_RESTART = "then systemctl restart nvidia-imex on all of them; nvidia-imex-ctl -N shows the result"
NOT_RUNNING = Kind(
    "imex-not-running",
    Layer.DEVICE,
    "The IMEX service does not run, and NCCL would use NVLink between hosts",
    "Memory of GPUs cannot be exported to other hosts: NCCL ends when it forms a group.",
    Fix(
        Step(shell("systemctl start nvidia-imex"), undo=shell("systemctl stop nvidia-imex")),
        look(shell("systemctl status nvidia-imex"), "if it ends"),
        alternatives=[Fix(export(NCCL_MNNVL_ENABLE="0"))],
    ),
)
NODES_DIFFER = Kind(
    "imex-nodes-differ",
    Layer.DEVICE,
    "IMEX services of one NVLink domain have different lists of hosts",
    "Services whose lists differ refuse each other: NCCL ends when it forms a group.",
    Fix(
        Step(
            shell("systemctl restart nvidia-imex"),
            On.EVERY,
            note="after the same list of addresses was written on all hosts",
            persists=True,
        ),
        look(shell("nvidia-imex-ctl -N"), "the result"),
    ),
    effects=(Effect.DIFFERENCE,),
)
HOST_MISSING = Kind(
    "imex-host-missing",
    Layer.DEVICE,
    "A host is missing in the list of the IMEX services",
    "The services do not accept a host that is not in their list: NCCL ends when it forms a group.",
    Fix(
        Step(
            shell("systemctl restart nvidia-imex"),
            On.EVERY,
            note="after its address was added to the list on all hosts",
            persists=True,
        ),
        look(shell("nvidia-imex-ctl -N"), "the result"),
    ),
)


class ImexService(Check):
    """The IMEX service of each host, and its list of hosts."""

    name = "imex_service"
    layer = Layer.DEVICE
    kinds = (NOT_RUNNING, NODES_DIFFER, HOST_MISSING)
    reads = ("gpu_state", "mnnvl")

    def observe(self, ctx: Context) -> ImexFacts:
        """The facts of `read_daemon`."""
        if not host_gpus(ctx.root)["nodes"]:
            raise Skip("no NVIDIA GPU here")
        return read_daemon(ctx.root, ctx.env, ctx.breadcrumb)

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on the hosts of each clique that NCCL would join by NVLink."""
        seen = {rank.host.id: facts for rank, facts in cluster.facts(self.name)}
        for hosts in neighbours(cluster).values():
            for host in hosts:
                if host.id in seen and not seen[host.id]["running"]:
                    yield Finding(
                        NOT_RUNNING,
                        "no process nvidia-imex",
                        Where(hosts=(host.label,)),
                        confidence=Confidence.LIKELY,
                    )
            yield from _lists(hosts, seen)


def _lists(hosts: Sequence[Host], seen: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    lists = {
        host.id: frozenset(_plain(entry) for entry in facts["nodes"])
        for host in hosts
        if (facts := seen.get(host.id)) and facts["nodes"] is not None
    }
    if not lists:
        return
    odd = odd_ones_out(lists)
    if odd is not None and odd.tie:
        yield Finding(
            NODES_DIFFER,
            f"{len(set(lists.values()))} different lists, equally many hosts have each",
            Where(hosts=tuple(sorted(host.label for host in hosts if host.id in lists))),
            {"lists": {host.label: sorted(lists.get(host.id, ())) for host in hosts}},
            confidence=Confidence.LIKELY,
        )
        return
    who = who_has_what(
        (host.label, ", ".join(sorted(lists[host.id]))) for host in hosts if host.id in lists
    )
    usual = next(iter(lists.values())) if odd is None or odd.usual is None else odd.usual
    for host in hosts:
        if odd is not None and host.id in odd.places:
            yield Finding(
                NODES_DIFFER,
                _difference(lists[host.id], usual, seen[host.id]["file"]),
                Where(hosts=(host.label,)),
                {"nodes": sorted(lists[host.id]), "elsewhere": sorted(usual), WHO: who},
                confidence=Confidence.LIKELY,
            )
        elif _is_missing(host, usual):
            yield Finding(
                HOST_MISSING,
                f"none of its addresses ({', '.join(host.addresses)}) is among the {len(usual)} "
                "in the list",
                Where(hosts=(host.label,)),
                {"nodes": sorted(usual)},
                confidence=Confidence.LIKELY,
            )


def _difference(mine: frozenset[str], usual: frozenset[str], file: str) -> str:
    sides = (("lacks", usual - mine), ("has also", mine - usual))
    words = [f"{verb} {_some(sorted(entries))}" for verb, entries in sides if entries]
    return f"{file} {' and '.join(words)}, compared with the other hosts"


def _some(entries: Sequence[str], most: int = 4) -> str:
    more = len(entries) - most
    return ", ".join(entries[:most]) + (f" and {more} more" if more > 0 else "")


def _plain(entry: str) -> str:
    """An address in its one form, or a name in small letters, without its domain."""
    try:
        return str(ipaddress.ip_address(entry))
    except ValueError:
        return entry.lower().partition(".")[0]


def _is_missing(host: Host, entries: frozenset[str]) -> bool:
    """True if a list of addresses has none of this host; with names it cannot be known."""
    if not host.addresses or any(not _is_address(entry) for entry in entries):
        return False
    return entries.isdisjoint(_plain(address) for address in host.addresses)


def _is_address(entry: str) -> bool:
    try:
        ipaddress.ip_address(entry)
    except ValueError:
        return False
    return True
