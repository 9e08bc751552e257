"""Outcomes of a cluster by check and round, found in one pass: ten thousand ranks have a million.
Pure data.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nccl_doctor.model.outcome import Facts, Outcome, OutcomeStatus

if TYPE_CHECKING:
    from nccl_doctor.model.cluster import Rank


class Held:
    """Outcomes of one round of one check; observers in order of rank.

    Attributes:
        ranks: the observers whose outcome is `ok`.
        facts: what each of these saw.
        unlike: (observer, outcome) where it is not `ok`, or says that a part is missing.
        took_s: the longest time of any, in seconds.
    """

    __slots__ = ("facts", "ranks", "took_s", "unlike")

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.facts: list[Mapping[str, Any]] = []
        self.unlike: list[tuple[Rank, Outcome]] = []
        self.took_s = 0.0


class Seen:
    """Outcomes of one check: `rounds[i]` are those of `ranks[i]`; `held`: round → the same."""

    __slots__ = ("held", "ranks", "rounds")

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.rounds: list[Mapping[str, Outcome]] = []
        self.held: dict[str, Held] = {}


def index_of(
    observed: Iterable[tuple[Rank, Facts]], besides: Container[str] = ()
) -> dict[str, Seen]:
    """Check → its outcomes, of (observer, facts) in order of rank; not of checks in `besides`."""
    good = OutcomeStatus.OK
    index: dict[str, Seen] = {}
    for rank, facts in observed:
        for check, rounds in facts.items():
            if check in besides:
                continue
            seen = index.get(check)
            if seen is None:
                seen = index[check] = Seen()
            seen.ranks.append(rank)
            seen.rounds.append(rounds)
            for name, outcome in rounds.items():
                held = seen.held.get(name)
                if held is None:
                    held = seen.held[name] = Held()
                if outcome.duration_s > held.took_s:  # noqa: PLR1730 - `max` takes twice as long
                    held.took_s = outcome.duration_s
                if outcome.status is good:
                    held.ranks.append(rank)
                    held.facts.append(outcome.facts)
                    if not outcome.reason:
                        continue
                held.unlike.append((rank, outcome))
    return index
