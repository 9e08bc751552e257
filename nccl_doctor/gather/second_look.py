"""A second look after a loss or a hang: what changed on this host, who of the job still answers.

A cut cable is seen at both of its ends, and means something else there: who takes the look, whom
to call and for how long is decided here; what is looked at is up to the checks that look again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from nccl_doctor.gather.run_state import Run
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import AFTER_LOSS, Cluster, Host, Outcome
from nccl_doctor.model.findings import Round
from nccl_doctor.observe import probe

LOOK_S = 4.0
CALLS_S = 2.5
"""Least time to call others; with less, this host looks at itself alone."""
QUICK_S = 0.6
"""For that, where the time is over: out of what is kept for the report."""
WITNESSES = 4
"""Hosts that are told to everybody, and that look again: enough to tell a host from a link."""
_MOST_LOST = 8


def checks_that_look_again(run: Run) -> list[Check]:
    """The checks of this run that look again."""
    level = run.options.level.order
    return [
        check
        for check in run.registry.checks
        if check.looks_again and not check.together and check.level.order <= level
    ]


def look_alone(run: Run, hosts: Mapping[str, Sequence[str]]) -> dict[str, Outcome]:
    """Check → what it saw, on a participant that has lost the others.

    Args:
        run: of this participant.
        hosts: name → addresses of hosts of the job, as far as they are known.
    """
    deadline = time.monotonic() + min(LOOK_S, max(QUICK_S, run.left()))
    called = dict(hosts) if run.left() > CALLS_S else {}
    context = replace(run.context(), round=AFTER_LOSS, params={"hosts": called})
    checks = checks_that_look_again(run)
    jobs = [probe.job_of(check, context, deadline) for check in checks]
    run.progress.say("looking again after a loss", until=time.monotonic() + LOOK_S)
    ends = probe.run(jobs, run.progress.tick)
    return {check.name: end for check, end in zip(checks, ends, strict=True)}


def look_together(
    cluster: Cluster, silent: set[int], own_seat: int, hung: Set[int] = frozenset()
) -> Round | None:
    """Round in which seats look again, each alone but at the same time; None if no seat was lost,
    and none hung.

    Args:
        cluster: what the coordinator has.
        silent: seats that stopped responding.
        own_seat: the coordinator's.
        hung: seats that hung in a round: the path between two of their hosts may be gone.
    """
    stuck = [h for h in cluster.present_hosts if any(r.seat in hung for r in cluster.ranks_on(h))]
    if len(cluster.hosts) < 2 or not (silent or cluster.absent or len(stuck) > 1):
        return None
    left: dict[int, int] = {}
    lost: list[Host] = []
    in_doubt: list[Host] = []
    """Hosts with a silent rank: the others were not asked since, and may be lost as well."""
    for host in cluster.present_hosts:
        seats = [rank.seat for rank in cluster.ranks_on(host)]
        answering = [seat for seat in seats if seat not in silent]
        if own_seat in seats:
            left[host.id] = own_seat
        elif answering:
            left[host.id] = answering[0]
            in_doubt += [host] if len(answering) < len(seats) else []
        else:
            lost.append(host)
    if not (lost or in_doubt) and len(stuck) > 1:
        some = stuck[:_MOST_LOST]
        hosts = {host.label: list(host.addresses) for host in some}
        groups = tuple((left[host.id],) for host in some)
        return Round(AFTER_LOSS, groups, LOOK_S, {"hosts": hosts}, may_shrink=True)
    if not (lost or in_doubt):
        return Round(AFTER_LOSS, ((own_seat,),), LOOK_S, {"hosts": {}}, may_shrink=True)
    doubtful = {host.id for host in in_doubt}
    in_order = sorted(left, key=lambda i: (left[i] != own_seat, i not in doubtful))[:WITNESSES]
    witnesses = [h for h in cluster.present_hosts if h.id in in_order and h.id not in doubtful]
    called = [*[*lost, *in_doubt][:_MOST_LOST], *witnesses]
    hosts = {host.label: list(host.addresses) for host in called}
    groups = tuple((left[number],) for number in in_order)
    return Round(AFTER_LOSS, groups, LOOK_S, {"hosts": hosts}, may_shrink=True)
