"""A report of what one process knows so far: the coordinator's, or the own view of one host.

There is always one. A step that fails is named in it, and the verdict is then unknown.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from nccl_doctor import __version__
from nccl_doctor.gather.context import Run, time_limit
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.judge.checks import Judged, broken_sections, error_words, place_of
from nccl_doctor.judge.conclusion import EXIT_CODES, conclude
from nccl_doctor.judge.merge import merge_clusters
from nccl_doctor.judge.unread_hosts import unread_hosts
from nccl_doctor.model.cluster import Cluster, Host
from nccl_doctor.model.codec import encode
from nccl_doctor.model.findings import CheckResult, Finding, Status, Where
from nccl_doctor.model.kinds import RUN_INTERRUPTED
from nccl_doctor.model.report import Report, RunRecord
from nccl_doctor.system.masking import masked_data
from nccl_doctor.system.pauses import in_words
from nccl_doctor.toolkit.host import host_name

T = TypeVar("T")

_NOTHING: Judged = {}
_FIX = "report it with the JSON report of this run; if a plug-in is named, remove it"


def make_report(
    run: Run,
    evidence: EvidenceLog,
    *,
    complete: bool,
    alone: bool = False,
    extra: Sequence[Finding] = (),
    views: Sequence[Report] = (),
    known: Judged = _NOTHING,
) -> Report:
    """A report from the evidence so far; `alone` where no peer was ever meant to be met.

    `views` are what hosts say of themselves that did not sign in; `known` is what some checks find
    in the evidence without these.
    """
    made = _Maker(run, evidence, complete=complete, alone=alone, extra=extra, known=known)
    return made.report(views)


class _Maker:
    """Makes one report, step by step; a step that fails costs its own part only."""

    def __init__(
        self,
        run: Run,
        evidence: EvidenceLog,
        *,
        complete: bool,
        alone: bool,
        extra: Sequence[Finding],
        known: Judged,
    ) -> None:
        self._run = run
        self._evidence = evidence
        self._complete = complete
        self._alone = alone
        self._problems = [*extra, *unread_hosts(run.options.job.unread)]
        self._known = known
        self._registry = run.registry

    def report(self, views: Sequence[Report]) -> Report:
        """The report: judged, or else with what is known without judging."""
        about = self._tried("recording the run", self._record, RunRecord())
        cluster = self._tried("putting the facts together", self._cluster, self._no_facts())
        if views:
            self._known = _NOTHING
            examined = {each.name for view in views for each in view.checks}
            self._registry = self._registry.with_vital(examined)
            clusters = [cluster, *(view.cluster for view in views)]
            cluster = self._tried(
                "merging partial reports", lambda: merge_clusters(clusters), cluster
            )
        nothing: list[Finding] = []
        self._problems[:0] = self._tried(
            "naming refused messages", lambda: list(self._evidence.problems()), nothing
        )
        if self._run.config.past is not None and self._complete:
            about = self._tried(
                "comparing with earlier runs", lambda: self._compared(cluster, about), about
            )
        self._problems += self._tried(
            "asking for sections", lambda: broken_sections(cluster, self._registry.checks), []
        )
        judged = self._tried("judging", lambda: self._judged(cluster, about), None)
        return judged if judged is not None else self._unjudged(cluster, about)

    def _tried(self, step: str, work: Callable[[], T], otherwise: T) -> T:
        """Result of a step. One that fails is a problem of the report, with its place."""
        try:
            return work()
        except Exception as error:  # a mistake, of ours or of a plug-in, must not cost the report
            at = place_of(error)
            words = f"{step} failed: {error_words(error)}{f' ({at})' if at else ''}"
            where = Where(hosts=(host_name(),))
            evidence = {"step": step, "error": error_words(error), "at": at}
            self._problems.append(Finding(RUN_INTERRUPTED, words, where, evidence, fix=_FIX))
            return otherwise

    def _record(self) -> RunRecord:
        run = self._run
        return RunRecord(
            id=run.nonce or secrets.token_hex(8),
            started=run.config.started_at,
            duration_s=round(time.monotonic() - run.config.started, 3),
            launcher=run.launch.launcher,
            command=run.config.command,
            options=masked_data(encode(run.options)),
            alone=self._alone,
            extra=time_limit(run.options.timeout_s, run.more_s),
        )

    def _cluster(self) -> Cluster:
        run = self._run
        return self._evidence.cluster(
            run.options, run.backend, complete=self._complete, run_id=run.nonce
        )

    def _no_facts(self) -> Cluster:
        """Cluster of this host alone, without facts."""
        launch = self._run.launch
        return Cluster(
            world_size=launch.world_size or 1,
            nnodes=launch.nnodes or 1,
            backend=self._run.backend,
            level=self._run.options.level,
            hosts=(Host(id=0, name=host_name(), node_rank=launch.node_rank, reported=True),),
            ranks=(),
            complete=self._complete,
        )

    def _compared(self, cluster: Cluster, about: RunRecord) -> RunRecord:
        from nccl_doctor.judge.history import compare

        assert self._run.config.past is not None
        found = compare(cluster, self._registry.checks, self._run.config.past, about)
        self._problems += found.findings
        return replace(about, baseline=found.record)

    def _judged(self, cluster: Cluster, about: RunRecord) -> Report:
        run = self._run
        skipped = {
            check.name: f"needs --level {check.level.value}"
            for check in self._registry.checks
            if check.level.order > run.options.level.order
        }
        if self._alone:
            together = (check.name for check in self._registry.checks if check.together)
            skipped |= dict.fromkeys(together, "needs other hosts or ranks")
        return conclude(
            cluster,
            self._registry.checks,
            run=about,
            problems=[*self._registry.problems, *self._problems],
            skipped=skipped,
            wanted=self._registry.wanted,
            strict=run.options.strict,
            known=self._known,
        )

    def _unjudged(self, cluster: Cluster, about: RunRecord) -> Report:
        """The facts, every check unknown, and the steps that failed."""
        reason = self._problems[-1].message
        return Report(
            verdict="unknown",
            exit_code=EXIT_CODES["unknown"],
            summary=f"The examination could not be completed: {reason}",
            run=about,
            cluster=cluster,
            root_causes=tuple(self._problems),
            findings=tuple(self._problems),
            checks=tuple(
                CheckResult(check.name, check.layer, check.scope, Status.UNKNOWN, reason)
                for check in self._registry.checks
            ),
            tool={"name": "nccl-doctor", "version": __version__},
        )


# Words of a run that was stopped before its end: by a person, a scheduler or the time limit.
#
# Who had not signed in by then may have been on the way. Nobody is blamed for it.


def stopped(run: Run, evidence: EvidenceLog, signal_name: str = "") -> Finding:
    """Finding that says when the run was stopped, by which signal or else by the time limit."""
    after_s = time.monotonic() - run.config.started
    by = signal_name or f"the time limit of {run.options.timeout_s + run.more_s:g} s (--timeout)"
    words = f"stopped after {after_s:.1f} s by {by}"
    signs_in = bool(run.nonce) and run.launch.rank == 0 and not run.joined
    missing = evidence.not_here() if signs_in else ""
    if not missing:
        return Finding(RUN_INTERRUPTED, f"{words}, while {run.progress.doing}")
    fix = f"start nccl-doctor on {missing} too, and let it run until all have signed in"
    if not signal_name:
        fix += ", or give it more time"
    return Finding(RUN_INTERRUPTED, f"{words}; {missing} had not signed in yet", fix=fix)


def stood_still(evidence: EvidenceLog, seconds: float) -> Iterator[Finding]:
    """Finding on a sign-in in which rank 0 itself stood still, and not all have come."""
    if seconds:
        words = f"in the sign-in, this process {in_words(seconds)}"
        if missing := evidence.not_here():
            words += f"; {missing} had not signed in, which may come of that"
        yield Finding(RUN_INTERRUPTED, words, Where(hosts=(host_name(),)))
