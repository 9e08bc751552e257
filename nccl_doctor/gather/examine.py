"""Observation by one participant: alone before it signs in, and together with others after.

Every `observe` runs in a probe child; what comes back is an outcome, however the child ended.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nccl_doctor.gather.control_store import ControlStore, RoundPeers
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.progress import Progress
from nccl_doctor.gather.store_server import Door
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.judge.history import Past, compare
from nccl_doctor.judge.merge_clusters import unite
from nccl_doctor.launch.host_launch import become, placed
from nccl_doctor.model.check import Check, Context
from nccl_doctor.model.cluster import ALONE, Facts, Outcome
from nccl_doctor.model.findings import Finding, Round, Scope
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.layout import Address, Place
from nccl_doctor.model.options import Options
from nccl_doctor.model.report import Report
from nccl_doctor.observe import probe
from nccl_doctor.registry import Registry

PROTOCOL = "nccl-doctor/1"
SETTLE_S = 5.0
"""Time after a deadline for a participant to examine a stuck child, kill it and post the result."""
GRACE_S = 2.0
"""Allowed delay of a check that keeps to its own deadline, on a busy processor: dozens of checks
run at once.
"""
LEAST_ROAD_S = 3.0
"""Least time to try the network path, however long the start of this participant took."""
RESERVE_S = 2.0
"""Part of the run's time that is reserved for judging and writing the report."""


@dataclass
class Run:
    """Data that every part of one participant's run needs; times are `time.monotonic()`.

    `start_siblings` starts the other ranks of a host of the own launcher, once it has its place;
    `meeting` is the store's address for one of them. `past` is what the coordinator holds the
    cluster against, if anything.
    """

    options: Options
    launch: Launch
    environ: Mapping[str, str]
    registry: Registry
    backend: str
    started: float
    deadline: float
    command: str
    started_at: str
    progress: Progress
    door: Door = field(default_factory=lambda: Door("other"))
    start_siblings: Callable[[Place, Address], None] = field(default=lambda place, meeting: None)
    meeting: Address | None = None
    nonce: str = ""
    seat: int = 0
    past: Past | None = None

    def left(self) -> float:
        """Seconds until the report has to be written."""
        return max(0.0, self.deadline - RESERVE_S - time.monotonic())

    def context(self) -> Context:
        """Context of an `observe` of this participant, outside of rounds."""
        return Context(
            launch=self.launch,
            env=self.environ,
            backend=self.backend,
            level=self.options.level,
            join_timeout_s=self.options.join_timeout_s,
            collective_timeout_s=self.options.collective_timeout_s,
            door=self.door.facts,
            job=self.options.job,
        )

    def describe(self) -> dict[str, Any]:
        """Facts about the run that the cluster does not hold."""
        return {
            "id": self.nonce or secrets.token_hex(8),
            "started": self.started_at,
            "duration_s": round(time.monotonic() - self.started, 3),
            "launcher": self.launch.launcher,
            "command": self.command,
            "options": self.options.to_json(),
        }

    def judge(
        self,
        evidence: EvidenceLog,
        *,
        complete: bool,
        alone: bool = False,
        extra: Sequence[Finding] = (),
        views: Sequence[Report] = (),
    ) -> Report:
        """Report from the evidence so far; `alone`: no other participant was expected.

        `views` are what hosts say of themselves that did not sign in.
        """
        cluster = evidence.cluster(self.options, self.backend, complete=complete)
        if views:
            cluster = unite([cluster, *(view.cluster for view in views)])
        skipped = {
            check.name: f"needs --level {check.level.value}"
            for check in self.registry.checks
            if check.level.order > self.options.level.order
        }
        if alone:
            skipped |= {
                c.name: "needs other hosts or ranks" for c in self.registry.checks if c.together
            }
        about, problems = self.describe(), [*self.registry.problems, *extra]
        if self.past is not None and complete:
            found = compare(cluster, self.registry.checks, self.past, about)
            about["baseline"] = dict(found.record)
            problems += found.findings
        return conclude(
            cluster,
            self.registry.checks,
            run=about,
            problems=problems,
            skipped=skipped,
            wanted=self.registry.wanted,
            strict=self.options.strict,
            alone=alone,
        )


def examine_alone(run: Run) -> Facts:
    """Observe all that needs no peer, at once."""
    speaks_for_host = run.launch.local_rank in (0, None)
    checks = [
        check
        for check in run.registry.checks
        if not check.together
        and check.level.order <= run.options.level.order
        and (speaks_for_host or check.scope is Scope.RANK)
    ]
    waited = time.monotonic() - run.started
    patience = max(run.options.join_timeout_s - waited, LEAST_ROAD_S)
    context = replace(run.context(), join_timeout_s=patience)
    jobs = [
        observing(
            check,
            context,
            time.monotonic() + min(_patience(check, context), run.left()),
            grace_s=GRACE_S,
        )
        for check in checks
    ]
    run.progress.say(f"examining this host: {', '.join(check.name for check in checks)}")
    for job in jobs:
        job.heard = run.progress.hear
    outcomes = probe.run(jobs, run.progress.tick)
    return {check.name: {ALONE: end} for check, end in zip(checks, outcomes, strict=True)}


def _patience(check: Check, context: Context) -> float:
    try:
        return float(check.deadline(context))
    except Exception:  # a plug-in's mistake must not stop the others
        return check.deadline_s


def observing(check: Check, context: Context, deadline: float, grace_s: float = 0.0) -> probe.Job:
    """Job of one `observe`; it is killed `grace_s` after the deadline given to it."""

    def work(line: probe.Line) -> Mapping[str, Any]:
        told = replace(context, breadcrumb=line.breadcrumb, witness=line.witness, deadline=deadline)
        return check.observe(told)

    return probe.Job(check.name, work, deadline + grace_s, shared=check.cost == "instant")


def take_place(run: Run, place: Place, box: ControlStore) -> None:
    """Become the first rank of a host that has been given its place, and start the others.

    They sign in where this one did.
    """
    run.launch = placed(run.launch, place)
    run.environ = become(run.launch, run.environ)
    run.start_siblings(place, (box.host, box.port))


def round_from(order: Mapping[str, Any]) -> Round:
    """The round that an order is about."""
    groups = tuple(tuple(group) for group in order["groups"])
    return Round(order["round"], groups, order["deadline_s"], order["params"])


def hold(run: Run, box: ControlStore, check: Check, round_: Round) -> Outcome:
    """Take part in one round, in a child, and return how it ended."""
    group = next(group for group in round_.groups if run.seat in group)
    name = f"{PROTOCOL}/{run.nonce}/{check.name}/{round_.name}/{min(group)}/"
    context = replace(
        run.context(),
        round=round_.name,
        group=group,
        seat=run.seat,
        params=round_.params,
        peers=RoundPeers(box.host, box.port, name, group, run.seat),
    )
    run.progress.say(f"{check.name}: {round_.name} ({len(group)} together)")
    deadline = time.monotonic() + min(round_.deadline_s, run.left())
    return probe.run([observing(check, context, deadline)], run.progress.tick)[0]
