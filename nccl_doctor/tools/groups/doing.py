"""What the members of an attempt were doing when it did not end. Pure."""

from __future__ import annotations

from typing import Any

from nccl_doctor.cluster import Outcome, OutcomeStatus
from nccl_doctor.model import number_range
from nccl_doctor.tools.groups.attempts import Attempt, has_entered


def what_they_did(attempt: Attempt) -> dict[str, Any]:
    """Who entered, who finished, who never came, and what each that did not finish was doing."""
    ranks = {m.rank.rank or 0: m.outcome for m in attempt.members}
    done = [rank for rank, outcome in ranks.items() if outcome.status is OutcomeStatus.OK]
    started = [rank for rank, outcome in ranks.items() if has_entered(outcome)]
    return {
        "round": attempt.name,
        "entered": number_range(sorted({*started, *done})),
        "finished": number_range(done),
        "never_came": number_range(sorted(set(ranks) - set(started) - set(done))),
        "doing": {
            str(rank): {
                "status": outcome.status.value,
                "step": outcome.last_step,
                "state": outcome.state,
                "stack": outcome.stack[:1500],
                "error": error_of(outcome) if outcome.reason else "",
            }
            for rank, outcome in ranks.items()
            if outcome.status is not OutcomeStatus.OK
        },
    }


def step_of(outcome: Outcome) -> str:
    """The last thing that a member announced."""
    return outcome.last_step or "start"


def error_of(outcome: Outcome) -> str:
    """The last line of an exception."""
    lines = [line for line in outcome.reason.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no error text"
