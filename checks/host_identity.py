"""Is every host one machine, with its own name?

What it checks
--------------
Whether machines with different kernel boots or network namespaces have the same host name, whether
machines that booted separately have the same machine id, and whether several node ranks run on one
machine.

Why it matters
--------------
torchrun and gloo publish addresses by host name, and NCCL tells hosts apart by name and boot id:
with one name for two hosts, ranks connect to the wrong one, or try shared memory across machines.

How to fix
----------
Give every host its own name, and cloned machines a new machine id.

When it is wrong
----------------
Containers of one machine that share its network are one host here, as they are to NCCL. The machine
id of an image (of a container or a diskless host) is the same wherever the image runs; that does no
harm and is reported as information.

References
----------
hostname(7); machine-id(5); random(4): boot_id; network_namespaces(7).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    Severity,
    Step,
    Where,
    number_range,
    shell,
)
from nccl_doctor.toolkit.host import mounts, text_of
from nccl_doctor.toolkit.hosts import is_namesake, published_address

HOSTNAME = Kind(
    "hostname-duplicate",
    Layer.NAME,
    "Different hosts have the same name",
    "torchrun and gloo publish addresses by host name, NCCL tells hosts apart by name and boot "
    "id: ranks may connect to the wrong host.",
    Fix(
        Step(
            shell("# hostnamectl set-hostname NAME"), note="each host needs its own", persists=True
        ),
        alternatives=[Fix(Step(shell("# docker run --hostname NAME"), note="in containers"))],
    ),
    Severity.WARN,
)
MACHINE_ID = Kind(
    "machine-id-duplicate",
    Layer.HOST,
    "Different hosts have the same machine id",
    "Cloned images cause this: DHCP may give both the same address, and logs mix them up.",
    Fix(
        Step(
            shell("rm /etc/machine-id && systemd-machine-id-setup"),
            note="on the clones; then reboot",
            persists=True,
        )
    ),
    Severity.WARN,
)
IN_IMAGE = MACHINE_ID.variant(
    why="An image has one machine id wherever it runs. That does no harm to a job; programs that "
    "tell hosts apart by it mix them up.",
    fix="nothing for this job; in the image: empty /etc/machine-id, so that each host gets its own",
)
SHARED_HOST = Kind(
    "host-shared-by-nodes",
    Layer.RANKS,
    "Several node ranks on one host",
    "This is allowed, but it often means that one host was started twice in place of another.",
    "Check that each node rank was started on the intended host.",
    Severity.INFO,
)

_DISK = ("ext4", "xfs", "btrfs", "zfs", "ext3", "f2fs")


class HostIdentity(Check):
    """The machines of the cluster compared with their names."""

    name = "host_identity"
    layer = Layer.NAME
    kinds = (HOSTNAME, MACHINE_ID, SHARED_HOST)
    reads = ("own_name",)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Read what identifies this machine.

        Returns: `machine_id`, `boot_id` (None where unreadable); `netns`, inode of the network
        namespace; `image`: whether the root file system comes from an image that many hosts share
        (a container, a diskless host).
        """
        return {
            "machine_id": _line(ctx.root / "etc/machine-id"),
            "boot_id": _line(ctx.root / "proc/sys/kernel/random/boot_id"),
            "netns": _inode(ctx.root / "proc/self/ns/net"),
            "image": "KUBERNETES_SERVICE_HOST" in ctx.env or _root_is_an_image(ctx.root),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on hosts with one name, on one machine, or with one machine id."""
        seen = {rank.host.id: (rank.host, facts) for rank, facts in cluster.facts(self.name)}
        rank = {rank.host.id: rank for rank, _ in cluster.facts(self.name)}
        names: dict[str, list[Host]] = defaultdict(list)
        machines: dict[tuple[Any, ...], list[Host]] = defaultdict(list)
        ids: dict[str, list[Host]] = defaultdict(list)
        astray = {
            rank.host.id
            for rank, facts in cluster.facts("own_name")
            if cluster.backend == "gloo" and not published_address(rank, facts)
        }
        key = {}
        for host, facts in seen.values():
            place = (facts["boot_id"], facts["netns"])
            key[host.id] = (host.id,) if None in place else place
            names[host.label].append(host)
            machines[key[host.id]].append(host)
            if facts["machine_id"] is not None:
                ids[facts["machine_id"]].append(host)
        for name, hosts in names.items():
            number = len({key[host.id] for host in hosts})
            if number > 1:
                # One of them leads MASTER_ADDR to itself, and never came in; or gloo takes the
                # address of the other one for its own, and then 127.0.0.1.
                lost = any(is_namesake(rank[host.id]) and not host.joined for host in hosts)
                lost = lost or any(host.id in astray for host in hosts)
                yield Finding(
                    HOSTNAME,
                    f"{number} hosts have the name {name}",
                    _place(hosts),
                    severity=Severity.FAIL if lost else None,
                )
        for hosts in machines.values():
            if len(hosts) > 1:
                nodes = number_range([h.node_rank for h in hosts if h.node_rank is not None])
                yield Finding(SHARED_HOST, f"node ranks {nodes} on one host", _place(hosts))
        for machine_id, hosts in ids.items():
            facts_of = [seen[host.id][1] for host in hosts]
            # One kernel has one machine id, with any number of containers or namespaces.
            boots = {facts["boot_id"] for facts in facts_of} - {None}
            if len(boots) > 1:
                harmless = any(facts["image"] for facts in facts_of)
                yield Finding(
                    IN_IMAGE if harmless else MACHINE_ID,
                    f"{len(boots)} hosts have the machine id {machine_id}",
                    _place(hosts),
                    severity=Severity.INFO if harmless else Severity.WARN,
                )


def _place(hosts: Iterable[Host]) -> Where:
    return Where(hosts=tuple(sorted({host.label for host in hosts})))


def _line(path: Path) -> str | None:
    text = text_of(path)
    return None if text in ("", "uninitialized") else text


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _root_is_an_image(root: Path) -> bool:
    """Whether the root file system is an image: its machine id is the same on every host."""
    try:
        roots = [mount.kind for mount in mounts(root) if mount.folder == "/"]
    except OSError:
        return True
    return not roots or roots[-1] not in _DISK
