"""Observation by one participant: alone before it signs in, and together with others after.

Every `observe` runs in a probe child; what comes back is an outcome, however the child ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from nccl_doctor.gather.context import Run
from nccl_doctor.gather.opening import prefix_of
from nccl_doctor.gather.peers import RoundPeers, say_left
from nccl_doctor.gather.progress import Phase, phase_of
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.launch.ranks import placed, set_rank_env
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import ALONE, Facts, Outcome, OutcomeStatus
from nccl_doctor.model.findings import Round, Scope
from nccl_doctor.model.launch import OWN
from nccl_doctor.model.layout import HostPlace
from nccl_doctor.observe import probe
from nccl_doctor.system.pauses import Pauses, in_words

SETTLE_S = 5.0
"""Time after a deadline for a participant to examine a stuck child, kill it and post the result."""
GRACE_S = 2.0
"""Allowed delay of a check that keeps to its own deadline, on a busy processor: dozens of checks
run at once.
"""
_LOOK_S = 0.4
_MANY = 1024
LEAST_ROAD_S = 3.0
"""Least time to try the network path, however long the start of this participant took."""
SIGN_IN_S = GRACE_S + 2.0
"""Time to end a check that hangs, and to sign in."""
LEAST_ALONE_S = 30.0
"""Least time for a check where a launcher started the ranks: GPUs may need 20 s to wake."""


def examine_alone(run: Run) -> Facts:
    """Observe all that needs no peer, at once; what the first look found is not asked again."""
    speaks_for_host = run.launch.local_rank in (0, None)
    checks = [
        check
        for check in run.registry.checks
        if not check.together
        and check.name not in run.first_facts
        and check.level.order <= run.options.level.order
        and (speaks_for_host or check.scope is Scope.RANK)
    ]
    waited = time.monotonic() - run.config.started
    patience = max(run.options.join_timeout_s - waited, LEAST_ROAD_S)
    context = replace(run.context(), join_timeout_s=patience)
    # Whatever hangs is not to cost this host its place among the others, and be called absent. A
    # launcher's rank 0 waits from the end of its own examination: if that is slow, so is theirs.
    least = LEAST_ROAD_S if run.launch.launcher == OWN else LEAST_ALONE_S
    most = max(patience - SIGN_IN_S, least)

    def limit(check: Check) -> float:
        asked = probe.patience(check, context)
        return min(asked if check.seeks_master else min(asked, most), run.left())

    begun = time.monotonic()
    limits = {check: limit(check) for check in checks}
    jobs = [
        probe.job_of(check, context, begun + limit_s, GRACE_S, spare_s=max(0.0, most - limit_s))
        for check, limit_s in limits.items()
    ]
    run.progress.say(f"examining this host ({len(checks)} checks)", Phase.THIS_HOST)
    seeking = {check.name for check in checks if check.seeks_master}
    address = f"{run.launch.master_addr}:{run.launch.master_port}"

    def left(names: Collection[str]) -> None:
        if seeking.issuperset(names):
            doing = f"waiting for rank 0 to answer at {address}"
            run.progress.say(doing, Phase.THIS_HOST, begun + patience)

    for job in jobs:
        job.heard = run.progress.hear
    outcomes = probe.run(jobs, run.progress.tick, wait_for_stopped=False, left=left)
    seen = {check.name: {ALONE: end} for check, end in zip(checks, outcomes, strict=True)}
    return {**run.first_facts, **seen}


def take_place(run: Run, place: HostPlace, box: ControlStore) -> None:
    """Become the first rank of a host that has been given its place, and start the others.

    They sign in where this one did.
    """
    run.launch = placed(run.launch, place)
    run.environ = set_rank_env(run.launch, run.environ)
    run.config.start_siblings(place, (box.host, box.port))


def over_key(number: int, group: Sequence[int]) -> str:
    """Key that says that a round is over for a group, as one of its members has died."""
    return f"over/{number}/{min(group)}"


def below_round(check: Check, round_: Round, group: Sequence[int]) -> str:
    """Prefix, below the run's own, of what the members of a group post in a round."""
    return f"{check.name}/{round_.name}/{min(group)}/"


def hold(
    run: Run,
    box: ControlStore,
    check: Check,
    round_: Round,
    *,
    number: int,
    tick: Callable[[], object] = lambda: None,
) -> Outcome:
    """Take part in a round, the run's `number`th, in a child. Returns how it ended.

    Where one member of a process group dies, no other is left to wait for it. `tick` is called
    several times a second.
    """
    group = next(group for group in round_.groups if run.seat in group)
    over = over_key(number, group)
    is_over = now_and_then(lambda: bool(box.wait([over], 0.0)), run.launch.world_size)
    below = below_round(check, round_, group)
    name = prefix_of(run.nonce) + below
    context = replace(
        run.context(),
        round=round_.name,
        group=group,
        seat=run.seat,
        params=round_.params,
        peers=RoundPeers(
            box.host,
            box.port,
            name,
            group,
            run.seat,
            seal=box.seal,
            forms_groups=check.forms_groups,
        ),
        handoff=run.handoff(check.name) if check.keeps_sockets else None,
    )
    limit_s = min(round_.deadline_s, run.left())
    deadline = time.monotonic() + limit_s
    doing = f"{check.name}: {round_.name} ({len(group)} together)"
    run.progress.say(doing, phase_of(check.layer), deadline)
    job = probe.job_of(check, context, deadline)
    stopped = False

    def look() -> None:
        nonlocal stopped
        run.progress.tick()
        tick()
        if not stopped and is_over():
            stopped, job.deadline = True, time.monotonic()

    mark = Pauses.now()
    (outcome,) = probe.run([job], look)
    if outcome.status is OutcomeStatus.HUNG and (stood_s := run.pauses.since(mark)):
        words = f"not done in time, but this process {in_words(stood_s)}"
        outcome = replace(outcome, status=OutcomeStatus.UNTESTED, reason=words)
    if outcome.status is OutcomeStatus.DIED and check.forms_groups:
        box.put(over, True)
    if outcome.status is not OutcomeStatus.OK:
        say_left(box, below, run.seat)  # nobody is to wait for what it would have said
    if stopped and outcome.status in (OutcomeStatus.HUNG, OutcomeStatus.UNTESTED):
        # It waited for a peer that is no more, and not as long as it may.
        return Outcome(
            OutcomeStatus.UNTESTED,
            reason="ended early: another member of the group died",
            breadcrumbs=outcome.breadcrumbs,
            duration_s=outcome.duration_s,
        )
    return outcome


def pause_between_looks(ranks: int | None) -> float:
    """Seconds between two looks into the store of one of so many ranks: together they are to keep
    it no busier than a thousand.
    """
    return _LOOK_S * max(1.0, (ranks or 1) / _MANY)


def now_and_then(look: Callable[[], bool], ranks: int | None = None) -> Callable[[], bool]:
    """The same question, which is asked only some times a second; else the answer is no. Where that
    many `ranks` do so, each asks less often.
    """
    next_s, pause_s = 0.0, pause_between_looks(ranks)

    def ask() -> bool:
        nonlocal next_s
        if time.monotonic() < next_s:
            return False
        next_s = time.monotonic() + pause_s
        return look()

    return ask
