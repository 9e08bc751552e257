"""Who is to blame when attempts of groups fail or hang, and who is only a victim. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nccl_doctor.cluster import Evidence, Outcome
from nccl_doctor.model import Confidence, Finding, Round, Severity, Where
from nccl_doctor.tools.groups.attempts import FORMING, Attempt
from nccl_doctor.tools.groups.doing import error_of, error_text, step_of, what_they_did
from nccl_doctor.tools.groups.errors import meaning_of
from nccl_doctor.tools.groups.kinds import (
    CRASHED,
    FAILED,
    FROZEN,
    HANG,
    INIT_FAILED,
    INIT_HANG,
    WRONG,
)

AGAIN = "-again"
"""End of the name of a round in which a hang of another round is tried once more."""

_VICTIM_WORDS = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "remote process",
    "ncclremoteerror",
    "ncclsystemerror",
)


def judge_groups(attempts: Mapping[str, Sequence[Attempt]]) -> Iterator[Finding]:
    """Per round and group: the culprits, if any can be told from the victims.

    Args:
        attempts: round → its groups, in the order in which they were held. A round called `x-again`
            repeats groups of round `x`.
    """
    firsts = [a for name, found in attempts.items() if not name.endswith(AGAIN) for a in found]
    blamed: set[tuple[str, Where]] = set()
    for attempt in firsts:
        for finding in (*_culprits(attempt), *_wrong(attempt)):
            if (finding.code, finding.where) not in blamed:  # in an earlier group already
                blamed.add((finding.code, finding.where))
                yield finding
    seconds = {a.seats: a for n, found in attempts.items() if n.endswith(AGAIN) for a in found}
    open_ = [a for a in firsts if a.is_unexplained or a.is_failed]
    for attempt in open_:
        # A group that contains a smaller one that fails by itself says nothing new.
        if not any(set(other.seats) < set(attempt.seats) for other in open_):
            yield _group_finding(attempt, seconds.get(attempt.seats))


def rounds_again(attempts: Mapping[str, Sequence[Attempt]], deadline_s: float) -> Iterator[Round]:
    """Confirm before blaming: a hang that nobody in particular caused is tried once more."""
    for name, found in attempts.items():
        groups = tuple(attempt.seats for attempt in found if attempt.is_unexplained)
        if groups and not name.endswith(AGAIN):
            yield Round(name + AGAIN, groups, deadline_s)


def place_of_all(members: Sequence[Evidence]) -> Where:
    """Hosts and ranks of some members together."""
    where = Where()
    for member in members:
        where |= member.where
    return where


def _culprits(attempt: Attempt) -> Iterator[Finding]:
    """The dead, the stopped, those that never came: all others of the group are victims."""
    for member in attempt.dead:
        how = member.outcome.signal or f"exit code {member.outcome.exit_code}"
        words = f"died by {how} in {step_of(member.outcome)} of group {attempt.name}"
        yield Finding(CRASHED, words, member.where, what_they_did(attempt))
    stopped = attempt.stopped
    for member in stopped or attempt.never_came or attempt.lagging:
        outcome = member.outcome
        words = (
            f"stood still in {step_of(outcome)} of group {attempt.name} (process state "
            f"{outcome.state}, kernel wait {outcome.wchan or 'none'})"
        )
        if attempt.lagging:
            words += "; it never entered the collective that the others wait in"
        sure = Confidence.CERTAIN if stopped else Confidence.LIKELY
        yield Finding(FROZEN, words, member.where, what_they_did(attempt), confidence=sure)


def _group_finding(attempt: Attempt, again: Attempt | None) -> Finding:
    """A group that fails or hangs while no member is to blame more than the others."""
    if attempt.raised:
        own = [m for m in attempt.raised if not _is_victim(m.outcome)] or attempt.raised
        few = len(own) < len(attempt.members)
        meaning = meaning_of(error_text(own[0].outcome))
        words = f"{step_of(own[0].outcome)} of group {attempt.name}: {error_of(own[0].outcome)}"
        return Finding(
            INIT_FAILED if own[0].outcome.last_step in FORMING else FAILED,
            f"{words}; this means: {meaning.means}" if meaning else words,
            place_of_all(own),
            what_they_did(attempt),
            fix=meaning.ask if meaning else "",
            confidence=Confidence.LIKELY if few else Confidence.POSSIBLE,
        )
    flaky = again is not None and again.is_good
    first = attempt.stuck[0].outcome
    words = f"no progress in {step_of(first)} of group {attempt.name} "
    words += f"within {first.duration_s:.0f} s"
    words += "; it finished when tried again" if flaky else "; all members had entered"
    return Finding(
        INIT_HANG if all(m.outcome.last_step in FORMING for m in attempt.stuck) else HANG,
        words,
        place_of_all(attempt.members),
        what_they_did(attempt),
        severity=Severity.WARN if flaky else Severity.FAIL,
        confidence=Confidence.POSSIBLE,
    )


def _wrong(attempt: Attempt) -> Iterator[Finding]:
    """One finding for all who saw a wrong result. Where everybody saw it, whoever gave the wrong
    part is named, if that can be told; where only some did, they are: the others got the same data.
    """
    seen = [(m, bad) for m in attempt.members for bad in m.outcome.facts.get("wrong", ())]
    if not seen:
        return
    # Contributors are group ranks of the round's own group; members stand in order of rank.
    own = {
        giver for _, bad in seen for giver in bad["contributors"] if bad["group"] == attempt.name
    }
    seers = [m for m in attempt.members if m.outcome.facts.get("wrong")]
    shared = len(seers) == len(attempt.members)
    givers = [m for at, m in enumerate(attempt.members) if shared and at in own]
    few = 2 * len(seers) < len(attempt.members)
    first = seen[0][1]
    yield Finding(
        WRONG,
        f"{first['step']} of group {first['group']}: {first['example']}",
        place_of_all(givers or seers),
        {"round": attempt.name, "seen_by": sorted(m.rank.rank or 0 for m in seers)},
        confidence=Confidence.LIKELY if givers or few else Confidence.POSSIBLE,
    )


def _is_victim(outcome: Outcome) -> bool:
    return any(word in outcome.reason.lower() for word in _VICTIM_WORDS)
