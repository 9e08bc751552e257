"""Time for the start of GPUs and communicators, which a run without --timeout gets in addition.

Each round with groups of the backend starts them anew, in processes of its own. What that may have
taken so far, and what the next round may need for it, counts beyond the default of --timeout; only
as far as the round would lack time, and never for a backend without GPUs.
"""

from __future__ import annotations

import math
from typing import Any

from nccl_doctor.gather.run_state import Run
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.findings import Round
from nccl_doctor.model.limits import MOST_MORE_S
from nccl_doctor.toolkit.groups.attempts import driver_start_s, driver_starts

WHY = "the start of GPUs and communicators"


class StartTime:
    """Account of one run, on the coordinator."""

    def __init__(self, run: Run) -> None:
        """Nothing was started yet."""
        self._run = run
        self._seen_s = 0.0

    def signed_in(self, cluster: Cluster) -> None:
        """Take note of the time that driver and context took before the sign-in, if a GPU is used.

        It was measured while the hosts examined themselves, so it was a part of the run's time.
        """
        if driver_starts(cluster):
            self._seen_s += driver_start_s(cluster)

    def make_room(self, check: Check, round_: Round, needs_s: float) -> None:
        """Put the end of the run off, if a round lacks time; `needs_s`: with all that follows it.

        Everybody else learns of it with the order of the round.
        """
        run = self._run
        starts_s = self.of(check, round_)
        lacks_s = needs_s - run.left()
        if not (run.options.timeout_grows and starts_s > 0 and lacks_s > 0):
            return
        seconds = more_s(run.more_s, lacks_s, self._seen_s + starts_s)
        if seconds > run.more_s:
            run.put_off(seconds)
            run.progress.tell(in_words(run.options.timeout_s, seconds))

    def note(self, check: Check, round_: Round, took_s: float) -> None:
        """Take note of a round that was held: so much of it may have been the start."""
        self._seen_s += min(took_s, self.of(check, round_))

    def of(self, check: Check, round_: Round) -> float:
        """Seconds of a round that are for the start of GPUs and communicators."""
        if self._run.backend != "nccl" or not check.forms_groups:
            return 0.0
        return max(0.0, round_.deadline_s - self._run.options.collective_timeout_s)


def more_s(given_s: int, lacks_s: float, starts_s: float) -> int:
    """Seconds in all beyond the default of --timeout: those of before, and what is lacking now, but
    no more of that than starts account for.
    """
    return max(given_s, min(math.ceil(given_s + lacks_s), int(starts_s), MOST_MORE_S))


def in_words(default_s: float, seconds: int) -> str:
    """The new time limit, for the log."""
    return (
        f"time limit of the run: {default_s + seconds:.0f} s, {seconds} s more than the default, "
        f"for {WHY} (--timeout sets another one)"
    )


def time_limit(default_s: float, seconds: int) -> dict[str, Any]:
    """The new time limit, for `run` of the report; nothing where it is the one of the options."""
    if not seconds:
        return {}
    limit = {"seconds": default_s + seconds, "default_s": default_s, "why": WHY}
    return {"time_limit": limit}
