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
Several node ranks on one machine are right for a test, or where each has GPUs of its own. Where
srun or mpirun has started a launcher in each task it is a warning, and with nccl a failure: they
would share GPUs. Containers of one machine that share its network are one host here, as they are to
NCCL. The machine id of an image (of a container or a diskless host) is the same wherever the image
runs; that does no harm and is reported as information.

References
----------
hostname(7); machine-id(5); random(4): boot_id; network_namespaces(7).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    On,
    Rank,
    Severity,
    Step,
    Where,
    number_range,
    shell,
)
from nccl_doctor.toolkit.gpu.devices import see_other_gpus
from nccl_doctor.toolkit.host import mounts, text_of
from nccl_doctor.toolkit.hosts import is_namesake, published_address
from nccl_doctor.toolkit.relaunch import ONE_LAUNCHER

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
_EACH_TASK = SHARED_HOST.variant(
    why="Each task has started a launcher, which counts as a node. A launcher starts all ranks of "
    "its host: two of them take the same GPUs, and count LOCAL_RANK from 0 each."
)
_TASKS = {
    "SLURM_PROCID": (
        "srun",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        Fix(
            ONE_LAUNCHER,
            Step(shell("# --node-rank $SLURM_NODEID"), On.EVERY, note="in its line"),
        ),
    ),
    "OMPI_COMM_WORLD_RANK": (
        "mpirun",
        ("OMPI_COMM_WORLD_SIZE",),
        Fix(Step(shell("# mpirun --map-by ppr:1:node"), On.EVERY, note="one launcher on each")),
    ),
}
"""Variable that numbers tasks → what starts them, the variables that all tasks of one start share,
and the fix where each has started a launcher."""

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
                yield _shared(cluster, hosts, [rank[host.id] for host in hosts])
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


def _shared(cluster: Cluster, hosts: Sequence[Host], ranks: Sequence[Rank]) -> Finding:
    """The finding on several node ranks of one machine: a launcher in each task, or something else.

    `ranks`: one of each.
    """
    nodes = number_range([host.node_rank for host in hosts if host.node_rank is not None])
    found = Finding(SHARED_HOST, f"node ranks {nodes} on one host", _place(hosts))
    own_gpus = see_other_gpus(rank.env for rank in ranks)
    for variable, (starter, common, fix) in _TASKS.items():
        numbers = {rank.env.get(variable, "") for rank in ranks}
        starts = {tuple(rank.env.get(name) for name in common) for rank in ranks}
        if "" in numbers or len(numbers) < len(ranks) or len(starts) > 1 or own_gpus:
            continue
        return found.replaced(
            kind=_EACH_TASK,
            message=f"{found.message}: one for each of {len(ranks)} tasks that {starter} started",
            fix=fix,
            severity=Severity.FAIL if cluster.backend == "nccl" else Severity.WARN,
        )
    return found


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
    """True if the root file system is an image: its machine id is the same on every host."""
    try:
        roots = [mount.kind for mount in mounts(root) if mount.folder == "/"]
    except OSError:
        return True
    return not roots or roots[-1] not in _DISK
