"""First look of a participant, before it imports torch: what is certain at once is said at once.

A name that does not resolve, a port that another program holds, an interface that is not there: the
report says it when everybody has come, or the join time-out is over. Whoever watches stderr reads
it within seconds, and may end the run.

What was said stands: its facts are those of the report, and are not observed again. So nothing is
said that the report does not say. What gives no such finding is observed later, with torch, as if
nobody had looked.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nccl_doctor.gather import server
from nccl_doctor.gather.connect import serves_store
from nccl_doctor.gather.context import Run
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.messages import introduce
from nccl_doctor.judge.causes import certain_at_once
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import ALONE, Outcome, OutcomeStatus
from nccl_doctor.model.findings import Finding, Layer
from nccl_doctor.observe import probe
from nccl_doctor.system.shortage import shortage_of

SO_FAR = "so far: "
"""Beginning of what is said."""
STANDS_S = 2.0
"""So long after the start of this process a name may yet appear, and a port get free."""
LEAST_S = 1.0
"""Least time for that, however long the start took."""
_BRIEF_S = 0.7
"""Time for all that is not a name that may yet appear. What takes longer, such as a look-up without
an answer, is not certain, and holds the run up no longer."""
_BUSY_S = 5.0
"""Time in addition where a processor was waited for: the import of torch, which comes next, waits
longer for it."""
_AGAIN_S = 0.1
_GRACE_S = 0.1
_MOST = 3
"""Findings that are said: of each host of an srun, these lines go to one log."""


def look_first(run: Run) -> list[str]:
    """Lines to tell, after observing what needs neither torch nor time. `run` then has the facts
    that stand: `first_facts`, and `door` where the port of the store is not to be had.

    Nobody looks where nobody is told, nor where there is no process or file to be had for it.
    """
    if not run.progress.speaks:
        return []
    try:
        return _look(run)
    except (OSError, RuntimeError) as error:
        if shortage_of(error) is None:
            raise
        return []


def _look(run: Run) -> list[str]:
    refused = _refused(run, _until(run))
    if refused is not None:
        run.door = server.ServerState("self", refused)
    checks = [check for check in run.registry.checks if _is_looked_at(run, check)]
    ends = _observed(run, checks, time.monotonic() + _BRIEF_S)
    found = _certain(run, checks, ends)
    names = {finding.check for finding in found if finding.kind.layer is Layer.NAME}
    if names:
        ends |= _observed(run, [check for check in checks if check.name in names], _until(run))
        found = _certain(run, checks, ends)
    run.first_facts = {finding.check: {ALONE: ends[finding.check]} for finding in found}
    more = len(found) - _MOST
    rest = [f"{SO_FAR}{more} more (the report follows)"] if more > 0 else []
    return [*map(_in_words, found[:_MOST]), *rest]


def _until(run: Run) -> float:
    return max(run.config.started + STANDS_S, time.monotonic() + LEAST_S)


def _refused(run: Run, until: float) -> OSError | None:
    """Error of binding the port of the store here, if that stands."""
    port = run.launch.master_port
    if port is None or not serves_store(run.launch):
        return None
    while (refused := server.refusal(port)) is not None:
        if refused.errno != errno.EADDRINUSE:
            stands = refused.errno in (errno.EACCES, errno.EPERM, errno.ENOSYS)
            return refused if stands else None
        if time.monotonic() >= until:
            return refused
        time.sleep(_AGAIN_S)
    return None


def _is_looked_at(run: Run, check: Check) -> bool:
    waits = check.seeks_master and not run.door.error
    return bool(check.at_once) and check.level.order <= run.options.level.order and not waits


def _observed(run: Run, checks: Sequence[Check], until: float) -> dict[str, Outcome]:
    context = run.context()
    jobs = [probe.job_of(check, context, until, _GRACE_S, spare_s=_BUSY_S) for check in checks]
    return dict(zip((check.name for check in checks), probe.run(jobs), strict=True))


def _is_whole(outcome: Outcome) -> bool:
    return outcome.status is OutcomeStatus.OK and not outcome.reason


def _certain(run: Run, checks: Sequence[Check], ends: Mapping[str, Outcome]) -> list[Finding]:
    checks = [check for check in checks if _is_whole(ends[check.name])]
    scopes = {check.name: check.scope for check in checks}
    evidence = EvidenceLog(run.launch, scopes, run.environ)
    facts = {name: {ALONE: ends[name]} for name in scopes}
    who = introduce(run.launch, run.environ, run.options.backend)
    evidence.sign_in(0, replace(who, facts=facts), 0.0)
    cluster = evidence.cluster(run.options, run.backend, complete=False)
    return certain_at_once(cluster, checks, run.registry.wanted)


def _in_words(finding: Finding) -> str:
    hosts = ", ".join(finding.where.hosts)
    at = f" on {hosts}" if hosts else ""
    return f"{SO_FAR}{finding.code}{at}: {finding.message} (the report follows)"
