"""Is everybody here: every rank once, in time, and telling the same story about the job?

What it checks
--------------
What the launcher's variables say on each rank: missing, malformed, out of range, or contradicted by
another launcher. Then the roll call: hosts and ranks that never signed in, ranks and node ranks
that are there twice, late arrivals, and world size, node count, ranks per host and run id, which
must be the same everywhere. And whether two hosts go by one name.

Why it matters
--------------
torch waits for exactly WORLD_SIZE processes with different RANKs. One that is missing or there
twice makes *other* ranks wait, for up to 30 minutes, and the message names a victim.

How to fix
----------
Start the same command on every host, with its own node rank and one value for everything else.

When it is wrong
----------------
On a tie (two hosts that say two different things) nobody can tell who is right: both are named.
A host that is slow to start is absent only if it is slower than --join-timeout. A rank that is
absent because its host could not reach the master is explained in that host's own report.

References
----------
PyTorch documentation of torchrun and of torch.distributed (environment variable initialization);
srun(1), section "output environment variables"; mpirun(1), section "exported environment
variables"; machine-id(5).
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Evidence,
    Finding,
    Host,
    Kind,
    Launch,
    Layer,
    Rank,
    Scope,
    Severity,
    Where,
    number_range,
    odd_ones_out,
)

LATE_INFO_S = 5.0
"""Importing torch on a cold file system takes that long; below it nobody is late."""
LATE_WARN_S = 20.0

MISSING_VARIABLE = Kind(
    "launch-missing-variable",
    Layer.LAUNCH,
    "A launch variable is missing",
    "init_process_group raises on this rank, and every other rank waits for it.",
    "Start the processes with torchrun, or export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
)
BAD_VALUE = Kind(
    "launch-bad-value",
    Layer.LAUNCH,
    "A launch variable has an impossible value",
    "torch cannot read it, or reads something else than was meant.",
    "Correct the variable where the job is started.",
)
DISAGREE = Kind(
    "launch-sources-disagree",
    Layer.LAUNCH,
    "Two launchers tell different stories",
    "torch reads RANK and WORLD_SIZE; other libraries read the variables of Slurm or MPI.",
    "Set RANK, WORLD_SIZE and LOCAL_RANK from one launcher only.",
)
OUT_OF_RANGE = Kind(
    "rank-out-of-range",
    Layer.LAUNCH,
    "A rank is not below the world size",
    "Ranks count from 0 to WORLD_SIZE - 1; torch refuses this one and waits for another.",
    "Count ranks and node ranks from 0.",
)
LOCAL_OUT_OF_RANGE = Kind(
    "local-rank-out-of-range",
    Layer.LAUNCH,
    "A local rank is not below the local world size",
    "LOCAL_RANK chooses the GPU: this one does not exist, or is another rank's.",
    "Count local ranks from 0 on every host.",
)
RUN_ID = Kind(
    "launch-run-id-differs",
    Layer.LAUNCH,
    "Hosts belong to different torchrun jobs",
    "torchrun keeps jobs apart by --rdzv-id: hosts with different ones never meet.",
    "Give every host the same --rdzv-id.",
)
HOST_ABSENT = Kind(
    "host-absent",
    Layer.RANKS,
    "A host never signed in",
    "Every other rank waits for its ranks until the rendezvous times out.",
    "Start the job on that host, and read there what keeps it from reaching the master.",
)
RANK_ABSENT = Kind(
    "rank-absent",
    Layer.RANKS,
    "A rank never signed in",
    "Every other rank waits for it until the rendezvous times out.",
    "Look for its process and its log: did it start, and is it still alive?",
)
LATE = Kind(
    "rank-late",
    Layer.RANKS,
    "Ranks signed in late",
    "A larger spread than the rendezvous timeout keeps the job from starting; any spread is lost "
    "time on all GPUs.",
    "Look at what these hosts do before training: image pull, file system, imports.",
    Severity.WARN,
)
DUPLICATE = Kind(
    "rank-duplicate",
    Layer.RANKS,
    "One rank is claimed by several processes",
    "The rank that should have been there instead is missing: everybody waits for it.",
    "Start every process with its own RANK; is an old job still running?",
)
NODE_DUPLICATE = Kind(
    "node-rank-duplicate",
    Layer.RANKS,
    "Several hosts claim the same ranks",
    "The hosts fight for the same place, and the rest of the job waits for the ranks that nobody "
    "holds.",
    "Give each host its own --node-rank, counted from 0.",
)
LOCAL_DUPLICATE = Kind(
    "local-rank-duplicate",
    Layer.RANKS,
    "One local rank twice on a host",
    "LOCAL_RANK chooses the GPU: these ranks would share one, which NCCL refuses.",
    "Set LOCAL_RANK to 0, 1, 2, … on each host; torchrun does.",
)
NNODES = Kind(
    "nnodes-differs",
    Layer.RANKS,
    "Hosts disagree about the number of hosts",
    "The larger number waits for hosts that never come, the smaller one starts without the rest.",
    "Give every host the same --nnodes.",
)
WORLD_SIZE = Kind(
    "world-size-differs",
    Layer.RANKS,
    "Ranks disagree about the world size",
    "The larger world waits for ranks that never come, the smaller one starts without the rest.",
    "Give every rank the same WORLD_SIZE.",
)
NPROC = Kind(
    "nproc-differs",
    Layer.RANKS,
    "Hosts run different numbers of ranks",
    "torch allows it; code that takes rank // ranks-per-host for the host does not.",
    "Give every host the same --nproc-per-node, unless it is meant.",
    Severity.INFO,
)
HOSTNAME = Kind(
    "hostname-duplicate",
    Layer.NAME,
    "Different hosts go by one name",
    "torchrun and gloo publish addresses by host name, NCCL tells hosts apart by name and boot id.",
    "Give every host its own name: `hostnamectl set-hostname NAME`, or `--hostname` in containers.",
    Severity.WARN,
)
MACHINE_ID = Kind(
    "machine-id-duplicate",
    Layer.HOST,
    "Different hosts share a machine id",
    "Cloned images do: DHCP may then give both the same address, and logs mix them up.",
    "`rm /etc/machine-id && systemd-machine-id-setup` on the clones, then reboot.",
    Severity.WARN,
)
SHARED_HOST = Kind(
    "host-shared-by-nodes",
    Layer.RANKS,
    "Several node ranks on one host",
    "Legal, but a host that was meant to be another one is easily reached twice.",
    "Check that each node rank was started on the host that was meant.",
    Severity.INFO,
)

_OF_LAUNCH = (MISSING_VARIABLE, BAD_VALUE, DISAGREE, OUT_OF_RANGE, LOCAL_OUT_OF_RANGE)
_BY_CODE = {kind.code: kind for kind in _OF_LAUNCH}


class Ranks(Check):
    """Compares what launchers said and who signed in."""

    name = "ranks"
    layer = Layer.RANKS
    scope = Scope.RANK
    kinds = (
        *_OF_LAUNCH,
        RUN_ID,
        HOST_ABSENT,
        RANK_ABSENT,
        LATE,
        DUPLICATE,
        NODE_DUPLICATE,
        LOCAL_DUPLICATE,
        NNODES,
        WORLD_SIZE,
        NPROC,
        HOSTNAME,
        MACHINE_ID,
        SHARED_HOST,
    )

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Which machine this is.

        Returns: `hostname`; `machine_id`, `boot_id` (None where unreadable); `netns`, inode of the
        network namespace; `image`: whether the root file system comes from an image that many hosts
        share (a container, a diskless host); `wall_clock_s`, Unix time.
        """
        return {
            "hostname": socket.gethostname(),
            "machine_id": _line("/etc/machine-id"),
            "boot_id": _line("/proc/sys/kernel/random/boot_id"),
            "netns": _inode("/proc/self/ns/net"),
            "image": "KUBERNETES_SERVICE_HOST" in ctx.env or _root_is_an_image(),
            "wall_clock_s": time.time(),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """First what each rank says by itself, then, if all could be asked, the comparison."""
        yield from _launch_problems(cluster)
        if not cluster.complete:
            return  # one participant's own view: nobody else was asked, so nobody is absent
        machines = _Machines(cluster)
        twins = _twins(cluster)
        yield from _duplicates(cluster, twins)
        yield from _local_ranks(cluster, twins, machines)
        stories = list(_stories(cluster))
        yield from (finding for _, finding in stories)
        yield from _absent(cluster, twins, [story for story, _ in stories])
        yield from _late(cluster, twins)
        yield from _ranks_per_host(cluster, twins)
        yield from machines.findings()


def _line(path: str) -> str | None:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    return None if text in ("", "uninitialized") else text


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _root_is_an_image() -> bool:
    """A machine id in an image is the same wherever the image runs, and does no harm there."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    roots = [line.split()[2] for line in lines if line.split()[1:2] == ["/"]]
    return not roots or roots[-1] not in ("ext4", "xfs", "btrfs", "zfs", "ext3", "f2fs")


def _launch_problems(cluster: Cluster) -> Iterator[Finding]:
    for rank in cluster.present:
        for problem in rank.launch.problems if rank.launch else ():
            yield Finding(
                _BY_CODE.get(problem.code, BAD_VALUE),
                problem.message,
                Evidence.rank_place(rank),
                evidence={"variables": dict(problem.variables)},
                fix=problem.fix,
                severity=Severity.FAIL if problem.fatal else Severity.WARN,
            )


# --- who is there twice ---


class _Twins(NamedTuple):
    """Participants that share a rank: whole hosts, or single ranks. `spare` maps the seats that
    hold nobody's place to the code of the finding that says so.
    """

    hosts: tuple[tuple[Host, ...], ...]
    ranks: Mapping[int, tuple[Rank, ...]]
    spare: Mapping[int, str]


def _twins(cluster: Cluster) -> _Twins:
    claims: dict[int, list[Rank]] = defaultdict(list)
    for rank in cluster.present:
        if rank.rank is not None:
            claims[rank.rank].append(rank)
    same: dict[frozenset[int | None], list[Host]] = defaultdict(list)
    for ranks_here in _by_host(cluster).values():
        same[frozenset(rank.rank for rank in ranks_here)].append(ranks_here[0].host)
    hosts = tuple(
        tuple(group) for claimed, group in same.items() if len(group) > 1 and None not in claimed
    )
    whole = {host.id for group in hosts for host in group}
    ranks = {number: tuple(group) for number, group in claims.items() if len(group) > 1}
    spare = {}
    for group in ranks.values():
        code = NODE_DUPLICATE if all(rank.host.id in whole for rank in group) else DUPLICATE
        spare.update({rank.seat: code.code for rank in group[1:]})
    for rank in cluster.present:
        codes = [problem.code for problem in rank.launch.problems] if rank.launch else []
        if OUT_OF_RANGE.code in codes:
            spare.setdefault(rank.seat, OUT_OF_RANGE.code)
    return _Twins(hosts, ranks, spare)


def _duplicates(cluster: Cluster, twins: _Twins) -> Iterator[Finding]:
    told: set[int] = set()
    on_host = _by_host(cluster)
    for group in twins.hosts:
        seats = [rank for host in group for rank in on_host[host.id]]
        told |= {rank.seat for rank in seats}
        node = group[0].node_rank
        where = _all_places(seats)
        same_node = node is not None and all(host.node_rank == node for host in group)
        claim = f"node rank {node}" if same_node else "the same ranks"
        yield Finding(
            NODE_DUPLICATE,
            f"{len(group)} hosts claim {claim}",
            where | Where(nodes=(node,)) if same_node and node is not None else where,
            evidence={"claims": _claims(seats)},
            fix=f"give each of them its own node rank, 0 to {max(cluster.nnodes, 2) - 1}: "
            "`torchrun --node-rank=K …`, or its own RANK for each process",
        )
    left: dict[tuple[int, ...], list[Rank]] = defaultdict(list)
    for claimants in twins.ranks.values():
        if not {rank.seat for rank in claimants} <= told:
            left[tuple(sorted(rank.host.id for rank in claimants))] += claimants
    for hosts, seats in left.items():
        yield Finding(
            DUPLICATE,
            f"claimed by {len(hosts)} processes" + (" of one host" if len({*hosts}) == 1 else ""),
            _all_places(seats),
            evidence={"claims": _claims(seats)},
        )


def _claims(ranks: Iterable[Rank]) -> list[dict[str, Any]]:
    return [{"rank": rank.rank, "host": rank.host.label, "pid": rank.pid} for rank in ranks]


def _local_ranks(cluster: Cluster, twins: _Twins, machines: _Machines) -> Iterator[Finding]:
    """Ranks of one host that take the same GPU, unless each sees only a GPU of its own."""
    groups: dict[tuple[Hashable, ...], list[Rank]] = defaultdict(list)
    twice = {rank.seat for claimants in twins.ranks.values() for rank in claimants}
    for rank in cluster.present:
        if rank.launch is not None and rank.seat not in twice:
            launch = rank.launch
            key = (machines.key(rank.host), launch.told("node_rank"), launch.told("local_rank"))
            groups[key].append(rank)
    needs_gpu = cluster.backend == "nccl"
    for (_, _, local), ranks in groups.items():
        visible = [rank.env.get("CUDA_VISIBLE_DEVICES") for rank in ranks]
        apart = None not in visible and len(set(visible)) == len(visible)
        if len(ranks) < 2 or apart or (local is None and not needs_gpu):
            continue
        if local is None:
            yield Finding(
                MISSING_VARIABLE,
                f"LOCAL_RANK is not set, and {len(ranks)} ranks share a host",
                _all_places(ranks),
                fix="start with torchrun, or export LOCAL_RANK=0, 1, … on each host",
                severity=Severity.WARN,
                confidence=Confidence.LIKELY,
            )
        else:
            yield Finding(
                LOCAL_DUPLICATE,
                f"{len(ranks)} ranks of one host have LOCAL_RANK={local}",
                _all_places(ranks),
                evidence={"claims": _claims(ranks)},
                severity=Severity.FAIL if needs_gpu else Severity.WARN,
            )


# --- who tells another story ---


class _Story(NamedTuple):
    """A value that must be the same everywhere and is not; `usual` is None on a tie."""

    kind: Kind
    usual: Any


def _stories(cluster: Cluster) -> Iterator[tuple[_Story, Finding]]:
    ranks = [rank for rank in cluster.present if rank.launch is not None]
    elastic = [r for r in ranks if r.launch and r.launch.launcher in ("torchrun", "accelerate")]
    first = None
    for kind, field, name, who in (
        (RUN_ID, "run_id", "--rdzv-id", elastic),
        (NNODES, "nnodes", "nnodes", ranks),
        (WORLD_SIZE, "world_size", "WORLD_SIZE", ranks),
    ):
        values = {rank.seat: (rank, rank.launch.told(field)) for rank in who if rank.launch}
        values = {seat: item for seat, item in values.items() if item[1] is not None}
        story = _compare(kind, name, values, cluster, per_host=kind is not WORLD_SIZE)
        if story is None:
            continue
        # A different number of hosts makes a different world: one cause, told once.
        if kind is WORLD_SIZE and first is not None and set(story[1].where.hosts) <= first:
            yield story[0], story[1].replaced(explained_by=NNODES.code)
            continue
        if kind is NNODES:
            first = set(story[1].where.hosts)
        yield story


def _compare(
    kind: Kind,
    name: str,
    values: Mapping[int, tuple[Rank, Any]],
    cluster: Cluster,
    *,
    per_host: bool,
) -> tuple[_Story, Finding] | None:
    """Blame the odd hosts; where ranks of one host differ, the odd ranks."""
    by_host: dict[int, list[Any]] = defaultdict(list)
    for rank, value in values.values():
        by_host[rank.host.id].append(value)
    if all(len(set(said)) == 1 for said in by_host.values()):
        odd = odd_ones_out({host: said[0] for host, said in by_host.items()})
        seats = [rank for rank, _ in values.values() if odd and rank.host.id in odd.places]
    else:
        odd = odd_ones_out({seat: value for seat, (_, value) in values.items()})
        seats = [values[seat][0] for seat in odd.places] if odd else []
        per_host = False
    if odd is None:
        return None
    here = sorted({values[rank.seat][1] for rank in seats}, key=str)
    said = ", ".join(f"{name}={value}" for value in here)
    if odd.tie:
        message = f"{said}: as many say the one as the other, so nobody knows who is right"
        fix = f"decide which {name} is right, and set it on all of them"
    else:
        message = f"{said}, elsewhere {name}={odd.usual}"
        fix = f"set {name}={odd.usual} there, as elsewhere"
    hosts = {rank.host.id for rank in seats}
    where = _all_places(seats)
    finding = Finding(
        kind,
        message,
        Where(hosts=where.hosts) if per_host else where,
        evidence={
            "values": {
                host.label: sorted({*by_host[host.id]}, key=str)
                for host in cluster.present_hosts
                if host.id in hosts or host.id in by_host
            }
        },
        fix=fix,
        confidence=Confidence.POSSIBLE if odd.tie else Confidence.CERTAIN,
    )
    return _Story(kind, odd.usual), finding


def _ranks_per_host(cluster: Cluster, twins: _Twins) -> Iterator[Finding]:
    """Uneven hosts are legal. Numbers that do not add up to the world size are not."""
    said: dict[int, int] = {}
    wrong = []
    for ranks in _by_host(cluster).values():
        number = ranks[0].launch.told("local_world_size") if ranks[0].launch else None
        if number is None:
            return
        said[ranks[0].host.id] = number
        if number != len(ranks):
            wrong.append(ranks[0].host)
    total = sum(said.values())
    everybody = not cluster.absent and len(cluster.present) == cluster.world_size
    if everybody and not twins.spare and total != cluster.world_size:
        hosts = wrong
        message = f"LOCAL_WORLD_SIZE adds up to {total}, WORLD_SIZE is {cluster.world_size}"
        fix = "set LOCAL_WORLD_SIZE to the number of ranks on the host"
        severity = Severity.FAIL
    else:
        odd = odd_ones_out(said)
        if odd is None:
            return
        hosts = [host for host in cluster.present_hosts if host.id in odd.places]
        numbers = number_range([said[host.id] for host in hosts])
        message = f"ranks per host: {numbers}" + ("" if odd.tie else f", elsewhere {odd.usual}")
        fix, severity = "", Severity.INFO
    yield Finding(
        NPROC,
        message,
        _whole(hosts),
        evidence={"values": {host.label: said[host.id] for host in cluster.present_hosts}},
        fix=fix,
        severity=severity,
    )


# --- who is missing, who is late ---


def _absent(cluster: Cluster, twins: _Twins, stories: Sequence[_Story]) -> Iterator[Finding]:
    """Hosts that never came, then single ranks; each with the finding that explains it, if any."""
    cause = _cause(cluster, twins, stories)
    on_host = _by_host(cluster)
    whole: dict[str | None, list[Rank]] = defaultdict(list)
    single: dict[str | None, list[Rank]] = defaultdict(list)
    for rank in cluster.absent:
        is_host = not rank.host.reported and rank.host.node_rank is not None
        (whole if is_host else single)[cause.get(rank.seat)].append(rank)
    first = next((rank.launch for rank in cluster.present if rank.launch is not None), Launch())
    door = f"{first.master_addr}:{first.master_port}"
    within = f"within {cluster.join_timeout_s:g} s"
    for code, ranks in whole.items():
        hosts = {rank.host.id: rank.host for rank in ranks}
        nodes = sorted(h.node_rank for h in hosts.values() if h.node_rank is not None)
        there = f"node {number_range(nodes)}"
        start = (
            f"; if nothing runs there, `torchrun --nnodes={cluster.nnodes} "
            f"--node-rank={nodes[0]} --master-addr={first.master_addr} "
            f"--master-port={first.master_port} …`"
            if first.launcher == "torchrun"
            else ""
        )
        yield Finding(
            HOST_ABSENT,
            f"{len(hosts)} of {cluster.nnodes} hosts, {len(ranks)} of {cluster.world_size} ranks: "
            f"no sign-in {within}",
            Where(
                hosts=tuple(sorted(h.name for h in hosts.values() if h.name is not None)),
                ranks=tuple(sorted(r.rank for r in ranks if r.rank is not None)),
                nodes=tuple(nodes),
            ),
            fix=f"look at {there}: nccl-doctor says there what keeps it from {door}{start}",
            explained_by=code,
        )
    for code, ranks in single.items():
        known = [rank for rank in ranks if _has_room(rank.host, on_host)]
        yield Finding(
            RANK_ABSENT,
            f"{len(ranks)} of {cluster.world_size} ranks: no sign-in {within}",
            Where(ranks=tuple(r.rank for r in ranks if r.rank is not None)) | _all_places(known),
            fix="look for its process there and the end of its log: it must start, stay alive and "
            f"reach {door}",
            explained_by=code,
        )


def _has_room(host: Host, on_host: Mapping[int, Sequence[Rank]]) -> bool:
    """Whether a host lacks ranks of its own. A host that is full is not where an absent one is."""
    ranks = on_host.get(host.id, ())
    size = ranks[0].launch.local_world_size if ranks and ranks[0].launch else None
    return size is not None and len(ranks) < size


def _cause(cluster: Cluster, twins: _Twins, stories: Sequence[_Story]) -> Mapping[int, str]:
    """Absent seat → code of the finding that explains its absence.

    As many participants in the wrong place as there are empty places: those are theirs. And nobody
    is absent whom only the odd side expects.
    """
    absent = cluster.absent
    if absent and len(absent) <= len(twins.spare):
        codes = list(twins.spare.values())
        code = max(dict.fromkeys(codes), key=codes.count)
        return {rank.seat: code for rank in absent}
    world = next((story for story in stories if story.kind is WORLD_SIZE), None)
    if world is None:
        return {}
    code = next((story.kind for story in stories if story.kind is NNODES), WORLD_SIZE).code
    sizes = [rank.launch.world_size for rank in cluster.present if rank.launch]
    limit = (
        min((s for s in sizes if s is not None), default=0) if world.usual is None else world.usual
    )
    return {rank.seat: code for rank in absent if rank.rank is not None and rank.rank >= limit}


def _late(cluster: Cluster, twins: _Twins) -> Iterator[Finding]:
    ranks = [rank for rank in cluster.present if rank.seat not in twins.spare]
    if not ranks:
        return
    start = min(rank.signed_in_s for rank in ranks)
    spread = max(rank.signed_in_s for rank in ranks) - start
    limit = min(LATE_WARN_S, max(LATE_INFO_S, cluster.join_timeout_s / 2))
    is_warning = spread > limit
    if not is_warning:
        limit = LATE_INFO_S
    late = [rank for rank in ranks if rank.signed_in_s - start > limit]
    if late:
        yield Finding(
            LATE,
            f"up to {spread:.1f} s after the first rank",
            _all_places(late),
            evidence={"after_s": {str(r.rank): round(r.signed_in_s - start, 1) for r in late}},
            severity=Severity.WARN if is_warning else Severity.INFO,
        )


# --- which machine is which ---


class _Machines:
    """Hosts told apart by what they are, not by what they are called."""

    def __init__(self, cluster: Cluster) -> None:
        self.hosts = cluster.present_hosts
        self.facts: dict[int, Mapping[str, Any]] = {}
        for rank, facts in cluster.facts(Ranks.name):
            self.facts.setdefault(rank.host.id, facts)

    def key(self, host: Host) -> tuple[Any, ...]:
        """Boot id and network namespace; of a host that nobody looked at, its number."""
        facts = self.facts.get(host.id, {})
        if facts.get("boot_id") is None or facts.get("netns") is None:
            return (host.id,)
        return (facts["boot_id"], facts["netns"])

    def findings(self) -> Iterator[Finding]:
        names: dict[str | None, list[Host]] = defaultdict(list)
        places: dict[tuple[Any, ...], list[Host]] = defaultdict(list)
        ids: dict[str | None, list[Host]] = defaultdict(list)
        for host in self.hosts:
            if host.id in self.facts:
                names[host.name].append(host)
                places[self.key(host)].append(host)
                ids[self.facts[host.id].get("machine_id")].append(host)
        for name, hosts in names.items():
            number = len({self.key(host) for host in hosts})
            if name is not None and number > 1:
                yield Finding(HOSTNAME, f"{number} hosts call themselves {name}", _whole(hosts))
        for hosts in places.values():
            if len(hosts) > 1:
                nodes = number_range([h.node_rank for h in hosts if h.node_rank is not None])
                yield Finding(SHARED_HOST, f"node ranks {nodes} on one host", _whole(hosts))
        for machine_id, hosts in ids.items():
            # One kernel has one machine id, however many containers or namespaces it holds.
            boots = {self.facts[host.id].get("boot_id") for host in hosts} - {None}
            if machine_id is not None and len(boots) > 1:
                image = any(self.facts[host.id].get("image", True) for host in hosts)
                yield Finding(
                    MACHINE_ID,
                    f"{len(boots)} hosts have the machine id {machine_id}",
                    _whole(hosts),
                    severity=Severity.INFO if image else Severity.WARN,
                )


def _whole(hosts: Iterable[Host]) -> Where:
    return Where(hosts=tuple(sorted({host.label for host in hosts})))


def _by_host(cluster: Cluster) -> dict[int, list[Rank]]:
    """Participants that signed in, by the number of their host."""
    found: dict[int, list[Rank]] = defaultdict(list)
    for rank in cluster.present:
        found[rank.host.id].append(rank)
    return found


def _all_places(ranks: Sequence[Rank]) -> Where:
    return Where(
        hosts=tuple(sorted({rank.host.name for rank in ranks if rank.host.name is not None})),
        ranks=tuple(sorted({rank.rank for rank in ranks if rank.rank is not None})),
    )
