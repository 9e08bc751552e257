"""Did every rank sign in, once, in time, and with the same job size?

What it checks
--------------
Hosts and ranks that never signed in, late arrivals, and ranks, node ranks and local ranks that
exist twice. Whether all ranks have the same world size and node count. And whether a host took long
to reach the store though it was up, for no reason that another check found.

Why it matters
--------------
torch waits for exactly WORLD_SIZE processes with different RANKs. A missing or duplicate rank makes
*other* ranks wait, for up to 30 minutes, and the error message names a victim.

How to fix
----------
Start the same command on every host, with its own node rank and the same values for everything
else.

When it is wrong
----------------
If two hosts have two different values, it is not known which one is right: both are named. With
--nnodes=MIN:MAX only MIN hosts have to come: MAX are waited for, what is between is information;
and so is it that such a job has no restarts, which one with its own way to go on does not need. A
host that is slow to start counts as absent only if it is slower than --join-timeout. joining-slow
judges only the connection to a store that is up, and says nothing where look-ups, losses or a busy
machine explain it: what is left may be a pause of the process or of the machine. Absent hosts
are shown with the names that Slurm or Kubernetes gave to the nodes of their numbers. Why a host
could not reach the master is in that host's own report; `nccl-doctor report merge` combines the
two.

References
----------
PyTorch documentation of torchrun (rendezvous, node failures) and of torch.distributed (environment
variable initialization).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Effect,
    Finding,
    Fix,
    Host,
    Kind,
    Launch,
    Layer,
    On,
    Rank,
    Scope,
    Severity,
    Step,
    Where,
    master_host,
    place_of,
    shell,
)
from nccl_doctor.toolkit.c10d import elastic_range
from nccl_doctor.toolkit.firewall.portrules import shut_doors
from nccl_doctor.toolkit.gpu.devices import see_other_gpus
from nccl_doctor.toolkit.hosts import listens_at
from nccl_doctor.toolkit.shared_kinds import PORT_BLOCKED
from nccl_doctor.toolkit.versions import Disagreement, disagreement

from .claims import claimed_ranks, stands_for
from .kept_out import HOST_ABSENT, kept_out
from .slow_joining import SLOW, slow_joining
from .to_type import on_absent, own_numbers, same_number

LATE_INFO_S = 5.0
"""Importing torch from a cold file system takes that long; a smaller delay is not late."""
LATE_WARN_S = 20.0
"""A large part of torch's rendezvous time-out (60 s to 15 minutes, by backend). The doctor's own
--join-timeout does not count: the job does not use it."""

HOSTS_FEWER = Kind(
    "hosts-fewer-than-most",
    Layer.RANKS,
    "An elastic job starts with fewer hosts than it may have",
    "It is right for --nnodes=MIN:MAX; a host that comes later makes all ranks start again.",
    "Nothing, if the other hosts are not to take part; else start the job there too.",
    Severity.INFO,
)
NO_RESTARTS = Kind(
    "elastic-without-restarts",
    Layer.RANKS,
    "An elastic job ends with its first failure: --max-restarts is 0",
    "Where a host is lost, the ranks of the others fail, and torchrun's agents start them again, "
    "with the hosts that are left, only as often as --max-restarts says; its default is 0.",
    Fix(
        Step(shell("# --max-restarts 3"), On.EVERY, note="in the line of torchrun"),
        alternatives=["in Kubeflow: elasticPolicy.maxRestarts"],
    ),
    Severity.INFO,
)
RANK_ABSENT = Kind(
    "rank-absent",
    Layer.RANKS,
    "A rank never signed in",
    "Every other rank waits for it until the rendezvous times out.",
    "Look for its process and its log: did it start, and is it still alive?",
    effects=(Effect.LOSS,),
)
LATE = Kind(
    "rank-late",
    Layer.RANKS,
    "Ranks signed in late",
    "If the delay exceeds the rendezvous timeout the job does not start; any delay is lost time "
    "on all GPUs.",
    "Check what these hosts do before training: image pull, file system, imports.",
    Severity.WARN,
)
DUPLICATE = Kind(
    "rank-duplicate",
    Layer.RANKS,
    "Several processes claim the same rank",
    "Another rank is missing as a result, and all ranks wait for it.",
    "Start every process with its own RANK; is an old job still running?",
)
NODE_DUPLICATE = Kind(
    "node-rank-duplicate",
    Layer.RANKS,
    "Several hosts claim the same ranks",
    "The ranks that these hosts should have are missing, and the rest of the job waits for them.",
    Fix(Step(shell("# --node-rank NUMBER"), note="counted from 0, another one on each host")),
)
LOCAL_DUPLICATE = Kind(
    "local-rank-duplicate",
    Layer.RANKS,
    "Several ranks of one host have the same LOCAL_RANK",
    "LOCAL_RANK chooses the GPU: these ranks would share one, which NCCL refuses.",
    "Set LOCAL_RANK to 0, 1, 2, … on each host; torchrun does.",
)
NNODES = Kind(
    "nnodes-differs",
    Layer.RANKS,
    "The node count differs between hosts",
    "Hosts with the larger number wait for hosts that do not exist; those with the smaller one "
    "start without the rest.",
    Fix(Step(shell("# --nnodes NUMBER"), On.EVERY, note="the same on every host")),
)
WORLD_SIZE = Kind(
    "world-size-differs",
    Layer.RANKS,
    "The world size differs between ranks",
    "Ranks with the larger world size wait for ranks that do not exist; those with the smaller "
    "one start without the rest.",
    "Give every rank the same WORLD_SIZE.",
)
_OUT_OF_RANGE = "rank-out-of-range"
"""Code of a rank that is no rank of the job; the launch layer reports it."""


class Ranks(Check):
    """Compares the ranks that are expected with those that signed in."""

    name = "ranks"
    layer = Layer.RANKS
    scope = Scope.RANK
    kinds = (
        HOST_ABSENT, RANK_ABSENT, LATE, DUPLICATE, NODE_DUPLICATE, LOCAL_DUPLICATE, NNODES,
        WORLD_SIZE, HOSTS_FEWER, NO_RESTARTS, SLOW,
    )  # fmt: skip
    reads = (
        "clock", "firewall", "loss", "master_addr",
        "master_firewall", "own_name", "port", "torch_import", "uplink",
    )  # fmt: skip

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """The rank numbers and sizes that the launcher gave to this process; None if not given.

        Under torchrun also `agent`: its restarts, and its range of hosts if its job is elastic.
        """
        names = ("rank", "local_rank", "node_rank", "world_size", "local_world_size", "nnodes")
        told = {name: ctx.launch.given(name) for name in names}
        restarts = re.fullmatch("[0-9]{1,9}", ctx.env.get("TORCHELASTIC_MAX_RESTARTS", ""))
        if ctx.launch.launcher != "torchrun" or restarts is None:
            return told
        elastic = elastic_range(ctx.env, ctx.root)
        return {**told, "agent": {"elastic": elastic, "max_restarts": int(restarts[0])}}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on duplicate ranks, different sizes, absent hosts and ranks, and late ones."""
        if not cluster.complete and len(cluster.present_hosts) < 2:
            return  # only one host's own report
        duplicates, spare = _duplicates(cluster)
        yield from duplicates
        yield from _local_ranks(cluster)
        nnodes = disagreement(NNODES, "nnodes", _given(cluster, "nnodes"), of_host=True)
        world = disagreement(WORLD_SIZE, "WORLD_SIZE", _given(cluster, "world_size"), of_host=False)
        if nnodes is not None:
            odd = nnodes.finding.where.hosts
            yield nnodes.finding.replaced(fix=same_number(cluster, odd, nnodes.usual))
        if world is not None:
            # Another number of hosts makes another world size: one cause, reported once.
            there = set(nnodes.finding.where.hosts) if nnodes else set()
            same = set(world.finding.where.hosts) <= there
            yield world.finding.replaced(explained_by=NNODES.code if same else None)
        if cluster.complete and cluster.job.elastic and cluster.nnodes < cluster.job.elastic[1]:
            least, most = cluster.job.elastic
            here = len([host for host in cluster.hosts if host.joined and host.reported])
            yield Finding(
                HOSTS_FEWER,
                f"{here} host{' is' if here == 1 else 's are'} here, of {least} to {most}: no "
                f"other one signed in within {cluster.join_timeout_s:g} s",
            )
        if elastic := _without_restarts(cluster):
            least, most = elastic
            yield Finding(
                NO_RESTARTS,
                f"--nnodes={least}:{most} with --max-restarts=0: the job does not go on with fewer "
                "hosts once one is lost",
            )
        if cluster.complete:  # else hosts without a report were not waited for
            yield from _absent(cluster, _causes(cluster, spare, nnodes, world))
            yield from kept_out(cluster, spare)
        yield from _late(cluster, spare)
        yield from slow_joining(cluster)


def _without_restarts(cluster: Cluster) -> tuple[int, int] | None:
    """Fewest and most hosts of an elastic job without restarts, by the line behind `--`, or by what
    a rank knows of the agent that started it.
    """
    job = cluster.job
    if job.launcher or job.elastic:
        return job.elastic if job.max_restarts == 0 else None
    for _, facts in cluster.facts(Ranks.name):
        agent = facts.get("agent")
        if agent and agent["elastic"] and agent["max_restarts"] == 0:
            least, most = agent["elastic"]
            return least, most
    return None


def _given(cluster: Cluster, field: str) -> Iterator[tuple[Rank, Any]]:
    return ((rank, rank.launch.given(field)) for rank in cluster.present if rank.launch is not None)


def _duplicates(cluster: Cluster) -> tuple[list[Finding], Mapping[int, str]]:
    """Ranks that several processes claim; the hosts, if whole hosts claim the same ranks.

    Returns: the findings; and for participants that are no rank of the job: seat → code of the
    finding that reports it.
    """
    findings: list[Finding] = []
    spare: dict[int, str] = {}
    same: dict[frozenset[int | None], list[list[Rank]]] = defaultdict(list)
    for host in cluster.present_hosts:
        ranks = list(cluster.ranks_on(host))
        same[claimed_ranks(ranks)].append(ranks)
    reported: set[int] = set()
    for claimed, hosts in same.items():
        if len(hosts) < 2 or not claimed or None in claimed:
            continue
        seats = [rank for ranks in hosts for rank in ranks]
        reported |= {rank.seat for rank in seats}
        nodes = tuple({rank.host.node_rank for rank in seats})
        node = nodes[0] if len(nodes) == 1 else None
        claim = "the same ranks" if node is None else f"node rank {node}"
        findings.append(
            Finding(
                NODE_DUPLICATE,
                f"{len(hosts)} hosts claim {claim}",
                place_of(seats) | Where(nodes=() if node is None else (node,)),
                evidence={"claims": _claims(seats)},
                fix=own_numbers(cluster, hosts),
            )
        )
    claims: dict[int, list[Rank]] = defaultdict(list)
    for rank in cluster.present:
        if rank.rank is not None:
            claims[rank.rank].append(rank)
    left: dict[tuple[int, ...], list[Rank]] = defaultdict(list)
    for ranks in claims.values():
        if len(ranks) < 2:
            continue
        whole = {rank.seat for rank in ranks} <= reported
        spare |= {rank.seat: (NODE_DUPLICATE if whole else DUPLICATE).code for rank in ranks[1:]}
        if not whole:
            left[tuple(sorted(rank.host.id for rank in ranks))] += ranks
    for on, seats in left.items():
        text = f"claimed by {len(on)} processes" + (" of one host" if len(set(on)) == 1 else "")
        evidence = {"claims": _claims(seats)}
        findings.append(Finding(DUPLICATE, text, place_of(seats), evidence))
    for rank in cluster.present:
        for problem in rank.launch.problems if rank.launch else ():
            if problem.code == _OUT_OF_RANGE or (rank.rank is None and problem.fatal):
                spare.setdefault(rank.seat, problem.code)
    return findings, spare


def _claims(ranks: Iterable[Rank]) -> list[dict[str, Any]]:
    return [{"rank": rank.rank, "host": rank.host.label, "pid": rank.pid} for rank in ranks]


def _local_ranks(cluster: Cluster) -> Iterator[Finding]:
    """Ranks of one host that take the same GPU, unless each sees only a GPU of its own."""
    told = [
        (r.host.id, local, r) for r, local in _given(cluster, "local_rank") if local is not None
    ]
    if len({(host, local) for host, local, _ in told}) == len(told):
        return
    number = Counter(rank.rank for rank in cluster.present)
    groups: dict[tuple[int, int], list[Rank]] = defaultdict(list)
    for host, local, rank in told:
        if number[rank.rank] == 1:  # duplicate ranks are reported above
            groups[host, local].append(rank)
    for (_, local), ranks in groups.items():
        if len(ranks) > 1 and not see_other_gpus(rank.env for rank in ranks):
            yield Finding(
                LOCAL_DUPLICATE,
                f"{len(ranks)} ranks of one host have LOCAL_RANK={local}",
                place_of(ranks),
                evidence={"claims": _claims(ranks)},
                severity=Severity.FAIL if cluster.backend == "nccl" else Severity.WARN,
            )


def _causes(
    cluster: Cluster,
    spare: Mapping[int, str],
    nnodes: Disagreement | None,
    world: Disagreement | None,
) -> Mapping[int, str]:
    """Absent seat → code of the finding that explains its absence.

    If as many participants are in a wrong place as places are empty, these places are theirs. And
    a rank that only the ranks with an odd size expect is not absent. Of one whose messages were
    refused it is not known whether the job would miss it: the engine has a finding for it. Where a
    rule on rank 0's host stops every new connection, whoever signed in came before the rule.
    """
    refused = {rank.seat: rank.refused for rank in cluster.absent if rank.refused}
    absent = [rank for rank in cluster.absent if not (rank.refused or _was_kept_out(rank))]
    if absent and len(absent) <= sum(stands_for(r) for r in cluster.present if r.seat in spare):
        stands_in = Counter(spare.values()).most_common(1)[0][0]
        return {**dict.fromkeys((rank.seat for rank in absent), stands_in), **refused}
    closed = any(door.hit.get("anyone") for door in shut_doors(cluster))
    causes = dict.fromkeys((rank.seat for rank in absent), PORT_BLOCKED.code) if closed else {}
    if world is not None:  # in a tie, the smallest
        limit = world.usual or min(size for _, size in _given(cluster, "world_size") if size)
        code = (WORLD_SIZE if nnodes is None else NNODES).code
        causes |= {r.seat: code for r in absent if r.rank is not None and r.rank >= limit}
    if nnodes is not None:
        limit = nnodes.usual or min(number for _, number in _given(cluster, "nnodes") if number)
        causes |= {r.seat: NNODES.code for r in absent if (r.host.node_rank or 0) >= limit}
    return {**causes, **refused}


def _absent(cluster: Cluster, causes: Mapping[int, str]) -> Iterator[Finding]:
    """Hosts that never came, then single ranks; each with the finding that explains it, if any."""
    whole: dict[str | None, list[Rank]] = defaultdict(list)
    single: dict[str | None, list[Rank]] = defaultdict(list)
    for rank in cluster.absent:
        if _was_kept_out(rank):
            continue
        is_host = not rank.host.reported and rank.host.node_rank is not None
        (whole if is_host else single)[causes.get(rank.seat)].append(rank)
    first = next((rank.launch for rank in cluster.present if rank.launch is not None), Launch())
    door = f"{first.master_addr}:{first.master_port}"
    unheard = {rank.refused for rank in cluster.absent if rank.refused}
    total = f"of {cluster.world_size} ranks: no sign-in within {cluster.join_timeout_s:g} s"
    listens = _where_node_0_listens(cluster, first.master_port)
    for code, ranks in whole.items():
        absent = sorted(
            {(r.host.node_rank, r.host.label) for r in ranks if r.host.node_rank is not None}
        )
        nodes = [node for node, _ in absent]
        yield Finding(
            HOST_ABSENT,
            f"{len(nodes)} of {cluster.nnodes} hosts, {len(ranks)} {total}{listens}",
            place_of(ranks) | Where(nodes=tuple(nodes)),
            fix=on_absent(cluster, dict(absent), first),
            severity=Severity.WARN if code in unheard else None,
            explained_by=code,
        )
    for code, ranks in single.items():
        known = place_of(rank for rank in ranks if _has_room(cluster, rank.host))
        yield Finding(
            RANK_ABSENT,
            f"{len(ranks)} {total}",
            Where(ranks=place_of(ranks).ranks) | known,
            fix="look for its process there and the end of its log: it must start, stay alive and "
            f"reach {door}",
            severity=Severity.WARN if code in unheard else None,
            explained_by=code,
        )


def _where_node_0_listens(cluster: Cluster, port: int | None) -> str:
    """Name, address and port of the store, as a host that did not come should have called it."""
    master = master_host(cluster)
    if master is None or port is None or not (address := listens_at(cluster, master)):
        return ""
    return f"; node 0 listens on {master.label}, at {address} port {port}"


def _was_kept_out(rank: Rank) -> bool:
    """True if its host sent a report of its own, and is judged as a whole."""
    return rank.host.reported and not rank.host.joined


def _has_room(cluster: Cluster, host: Host) -> bool:
    """True if a host has fewer ranks than it should; else an absent rank is not on this host."""
    ranks = cluster.ranks_on(host)
    size = ranks[0].launch.local_world_size if ranks and ranks[0].launch else None
    return size is not None and len(ranks) < size


def _late(cluster: Cluster, spare: Mapping[int, str]) -> Iterator[Finding]:
    came = [
        (rank, rank.signed_in_s)
        for rank in cluster.present
        if rank.seat not in spare and rank.host.joined
    ]
    start = min((at_s for _, at_s in came), default=0.0)
    spread = max((at_s for _, at_s in came), default=0.0) - start
    severity = Severity.WARN if spread > LATE_WARN_S else Severity.INFO
    limit = LATE_WARN_S if severity is Severity.WARN else LATE_INFO_S
    late = [(rank, at_s - start) for rank, at_s in came if at_s - start > limit]
    if late:
        yield Finding(
            LATE,
            f"up to {spread:.1f} s after the first rank",
            place_of(rank for rank, _ in late),
            evidence={"after_s": {str(rank.rank): round(after, 1) for rank, after in late}},
            severity=severity,
        )
