"""Words of a run that was stopped before its end: by a person, a scheduler or the time limit.

Who had not signed in by then may have been on the way. Nobody is blamed for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.pauses import in_words
from nccl_doctor.gather.run_state import Run
from nccl_doctor.model.findings import Finding, Where
from nccl_doctor.model.kinds import RUN_INTERRUPTED
from nccl_doctor.toolkit.host import host_name


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
