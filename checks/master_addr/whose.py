"""Rules of check master_addr: whose address MASTER_ADDR is, if not that of rank 0's host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Cluster, Confidence, Effect, Finding, Fix, On, Severity
from nccl_doctor.toolkit.containers import alike, network_for
from nccl_doctor.toolkit.hosts import everybody_came_in
from nccl_doctor.toolkit.relaunch import endpoint_of, start_with
from nccl_doctor.toolkit.slurm import place_of_host

from .answers import ADDR_NOT_ON_MASTER, View, host_of_rank_0

SEE_NODE_0 = "see node 0's report"
_NODE_DUPLICATE = "node-rank-duplicate"
"""Code of the finding on several hosts with one node rank, which node 0 has."""


def not_on_master(
    cluster: Cluster, views: Sequence[View], bridged: Mapping[int, Mapping[str, Any]]
) -> Iterator[Finding]:
    """Findings on a MASTER_ADDR that leads to a host other than rank 0's.

    `bridged`: seat → facts of `duplicate_address` on a container behind a bridge.
    """
    master = host_of_rank_0(views)
    if master is None and len(views) == 1:
        view = views[0]
        answered = (view.road.get("last") or {}).get("answer") == "store"
        leads_here = view.leads_somewhere and all(map(view.owns, view.answers))
        # Where a store answers here, another node rank of this machine is node 0.
        if leads_here and view.is_elsewhere() and not answered:
            yield _leads_here(view, bridged.get(view.rank.seat))
    if master and master.leads_somewhere and not any(map(master.owns, master.answers)):
        alone = len(cluster.present_hosts) == 1
        yield (alone and _no_node_0(master)) or _leads_away(cluster, views, master)


def _leads_here(view: View, behind: Mapping[str, Any] | None) -> Finding:
    """Finding of a host that knows only itself: MASTER_ADDR leads to it, and it is not node 0."""
    env = view.rank.env
    place = place_of_host(env, view.host.label) or place_of_host(env, view.name)
    said, confidence, fix = "rank 0 is on another", Confidence.POSSIBLE, ""
    steps = start_with([view.rank], "master_addr", "ADDRESS", On.EVERY)
    steps = tuple(replace(step, note="of the host that runs rank 0") for step in steps)
    # Rank 0 is in such a container too: each of them takes the address for its own.
    same = behind is not None and behind["likely"][1] in view.answers
    runtime = behind["container"] if behind is not None and same else ""
    if place is not None and place[0] == 0:
        said = f"node 0 of Slurm's list, but its node rank is {_node(view)}"
        fix, confidence = Fix(*start_with([view.rank], "node_rank", 0)), Confidence.LIKELY
    elif place is not None and place[0] == _node(view):
        said = f"node {place[0]} of Slurm's list; rank 0 is on the first, {place[1][0]}"
        steps = start_with([view.rank], "master_addr", place[1][0], On.EVERY)
        fix, confidence = Fix(*steps), Confidence.CERTAIN
    elif runtime:
        said += f"; {alike(runtime)} have the same addresses"
        fix, confidence = network_for(runtime), Confidence.LIKELY
    else:
        said += f"; {SEE_NODE_0}"
        fix = Fix(*steps, alternatives=["start rank 0 on the host that MASTER_ADDR names"])
    words = "but " if said.startswith("rank") else ""
    return Finding(
        ADDR_NOT_ON_MASTER,
        f"{view.shown}, which is this host, {words}{said}",
        view.where,
        fix=fix,
        confidence=confidence,
    )


def _no_node_0(view: View) -> Finding | None:
    """Finding of a host that takes itself for node 0, and knows only itself, where another host may
    be: it does not propose its own address, with which the job would be split.
    """
    launch = view.rank.launch
    if launch is None or launch.agent_store or endpoint_of(launch):
        return None  # it follows from another number who is node 0
    place = place_of_host(view.rank.env, view.host.label)
    is_other = place is not None and place[0] != 0
    if not (view.meets or is_other):
        return None
    met = ", where a store answers: another host is node 0 too" if view.meets else ""
    said = f"; by Slurm it is node {place[0]}" if place is not None and is_other else ""
    number = place[0] if place is not None and is_other else "NUMBER"
    steps = start_with([view.rank], "node_rank", number)
    if not is_other:
        steps = tuple(replace(step, note="this host's own, counted from 0") for step in steps)
    sure = Confidence.CERTAIN if met else Confidence.LIKELY
    return Finding(
        ADDR_NOT_ON_MASTER,
        f"{view.shown}{met}, and this host has node rank {_node(view)}{said}; {SEE_NODE_0}",
        view.where,
        fix=Fix(*steps),
        confidence=sure if said else Confidence.POSSIBLE,
        explained_by=_NODE_DUPLICATE,
        effects=(Effect.SHUTS_OUT,),
    )


def _node(view: View) -> int | None:
    return view.rank.launch.node_rank if view.rank.launch else None


def _leads_away(cluster: Cluster, views: Sequence[View], master: View) -> Finding:
    """Finding on a MASTER_ADDR that rank 0's host does not have."""
    owners = [v.host.label for v in views if any(map(v.owns, master.answers))]
    severity = Severity.FAIL
    if any(view.got_in for view in views):  # address translation, or a service name
        severity = Severity.INFO if everybody_came_in(cluster) else Severity.WARN
    owned = f"belongs to {', '.join(owners)}" if owners else "is on no interface of rank 0's host"
    certain = owners and severity is Severity.FAIL
    address, fix = master.address(), ""
    if address:
        other = f"start rank 0 on {master.name}"
        steps = start_with([master.rank], "master_addr", address, On.EVERY)
        fix = Fix(*steps, alternatives=[Fix(text=other)])
    return Finding(
        ADDR_NOT_ON_MASTER,
        f"{master.shown}, which {owned}",
        master.where,
        {"owners": owners, "rank_0_host": list(master.host.addresses)},
        fix=fix,
        severity=severity,
        confidence=Confidence.CERTAIN if certain else Confidence.LIKELY,
        effects=(Effect.SHUTS_OUT,),
    )
