"""Culprits and victims of attempts of groups that fail or hang. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from nccl_doctor.model.cluster import Evidence, OutcomeStatus
from nccl_doctor.model.findings import (
    Confidence,
    Effect,
    Finding,
    Round,
    Severity,
    Where,
    number_range,
)
from nccl_doctor.toolkit.blame import blame_links
from nccl_doctor.toolkit.groups.attempts import FORMING, Attempt, is_victim, ran_out_of_time
from nccl_doctor.toolkit.groups.doing import (
    MOST_ENTRIES,
    error_of,
    error_text,
    step_of,
    what_they_did,
)
from nccl_doctor.toolkit.groups.errors import meaning_of
from nccl_doctor.toolkit.groups.kinds import (
    CRASHED,
    FAILED,
    FROZEN,
    HANG,
    INIT_FAILED,
    INIT_HANG,
    KILLED,
    NOT_STARTED,
    ONCE,
    WRONG,
)
from nccl_doctor.toolkit.groups.mixups import odd_collectives, was_cut_off
from nccl_doctor.toolkit.groups.strays import what_was_made

AGAIN = "-again"
"""Suffix of the name of a round that repeats a hang of another round."""
COMPARED = "-compared"
"""The same suffix where torch compares what each rank is about to run."""
_PROGRAM = (
    "compare the code, and the version of torch, of these ranks with those of the others: ranks "
    "that run different collectives are a fault of the program, not of the cluster"
)


def judge_groups(attempts: Mapping[str, Sequence[Attempt]]) -> Iterator[Finding]:
    """Findings on the culprits of each round and group, where they differ from the victims.

    Args:
        attempts: round → its groups, in the order in which they were held. A round called `x-again`
            or `x-compared` repeats groups of round `x`.
    """
    tried = {n: [a for a in found if not a.is_untried] for n, found in attempts.items()}
    firsts = [(n, a) for n, found in tried.items() if is_first(n) for a in found]
    repeats = {(n, a.seats): a for n, found in tried.items() if not is_first(n) for a in found}
    compared = {seats: a for (name, seats), a in repeats.items() if name.endswith(COMPARED)}
    blamed: set[tuple[str, Where]] = set()
    for _, attempt in firsts:
        for finding in (*_culprits(attempt), *_wrong_results(attempt)):
            if (finding.code, finding.where) not in blamed:  # in an earlier group already
                blamed.add((finding.code, finding.where))
                yield finding
    open_ = [(name, a) for name, a in firsts if is_open(a)]
    for name, attempt in open_:
        # A group that contains a smaller failing group shows nothing new.
        if any(set(other.seats) < set(attempt.seats) for _, other in open_):
            continue
        again = repeats.get((name + AGAIN, attempt.seats))
        yield _mixed_up(attempt, compared.get(attempt.seats)) or _group_finding(attempt, again)


def is_first(name: str) -> bool:
    """True if a round of this name repeats no other."""
    return not name.endswith((AGAIN, COMPARED))


def is_open(attempt: Attempt) -> bool:
    """True if an attempt failed or hung, and no member of it is seen to be to blame."""
    return attempt.is_unexplained or attempt.is_failed or attempt.is_mixed_up


def rounds_again(
    attempts: Mapping[str, Sequence[Attempt]],
    deadline_s: float,
    params: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Round]:
    """Rounds that repeat every hang without a visible culprit, to confirm it before blaming.

    Args:
        attempts: as for `judge_groups`.
        deadline_s: of each round.
        params: round → its parameters, used again.
    """
    for name, found in attempts.items():
        groups = tuple(attempt.seats for attempt in found if attempt.is_unexplained)
        if groups and is_first(name):
            yield Round(name + AGAIN, groups, deadline_s, (params or {}).get(name, {}))


def round_compared(
    attempts: Mapping[str, Sequence[Attempt]],
    deadline_s: float,
    params: Mapping[str, Mapping[str, Any]],
) -> Iterator[Round]:
    """One round, or none, in which torch compares the ranks: for the first round that is unclear.

    That is where the backend aborted because of what another rank sent, where connections broke
    though no rank died, and where a collective hung twice. Its parameters have `compare` set.
    """
    for name, found in attempts.items():
        again = {a.seats: a for a in attempts.get(name + AGAIN, ())}
        groups = tuple(
            a.seats for a in found if is_open(a) and _says_too_little(a, again.get(a.seats))
        )
        if groups and is_first(name):
            yield Round(
                name + COMPARED, groups, deadline_s, {**params.get(name, {}), "compare": True}
            )
            return


def place_of_all(members: Sequence[Evidence]) -> Where:
    """Hosts and ranks of some members together."""
    return Where.union(member.where for member in members)


def _culprits(attempt: Attempt) -> Iterator[Finding]:
    """Findings on dead and stopped members and those that never came; all others are victims."""
    if attempt.is_good and not attempt.astray:
        return
    for member in attempt.dead:
        how = member.outcome.signal or f"exit code {member.outcome.exit_code}"
        words = f"died by {how} in {step_of(member.outcome)} of group {attempt.name}"
        kind = KILLED if member.outcome.signal == "SIGKILL" else CRASHED
        yield Finding(kind, words, member.where, what_they_did(attempt))
    astray = [member for member in attempt.members if member.rank.seat in attempt.astray]
    if astray:
        made = {**what_they_did(attempt), "made": what_was_made(attempt.members)}
        for member in astray:
            words, sure = attempt.astray[member.rank.seat]
            yield Finding(
                INIT_HANG if attempt.stuck else INIT_FAILED,
                f"{words} (round {attempt.name})",
                member.where,
                made,
                confidence=Confidence.CERTAIN if sure else Confidence.LIKELY,
            )
    if attempt.starting:
        yield _not_started(attempt)
    stopped = attempt.stopped
    waits = stopped or attempt.never_came or attempt.lagging
    far = [] if stopped else attempt.unconnected(waits)
    if far:
        yield _not_connected(attempt, far)
    for member in (m for m in waits if m not in far):
        outcome = member.outcome
        words = (
            f"frozen in {step_of(outcome)} of group {attempt.name} (process state "
            f"{outcome.state}, kernel wait {outcome.wchan or 'none'})"
        )
        if attempt.lagging:
            words += "; it never entered the collective that the others wait in"
        trust = Confidence.CERTAIN if stopped else Confidence.LIKELY
        yield Finding(FROZEN, words, member.where, what_they_did(attempt), confidence=trust)


def _not_connected(attempt: Attempt, far: Sequence[Evidence]) -> Finding:
    """The finding on members that do not reach the store of the group."""
    first = far[0].outcome
    words = f"no connection to the store of group {attempt.name} within {first.duration_s:.0f} s"
    where = _roads(attempt, far)
    return Finding(INIT_HANG, words, where, what_they_did(attempt), confidence=Confidence.LIKELY)


def _roads(attempt: Attempt, members: Sequence[Evidence]) -> Where:
    """Links from the hosts of some members to the store of the group."""
    return Where.union(attempt.roads[member.rank.seat] for member in members)


def _not_started(attempt: Attempt) -> Finding:
    """The finding on members that have no GPU yet: frozen or only slow, which is unknown."""
    first = attempt.starting[0].outcome
    where = f", kernel wait {first.wchan}" if first.wchan not in ("", "0") else ""
    return Finding(
        NOT_STARTED,
        f"no end of {step_of(first)} for group {attempt.name} within {first.duration_s:.0f} s "
        f"(process state {first.state or 'unknown'}{where})",
        place_of_all(attempt.starting),
        what_they_did(attempt),
        confidence=Confidence.LIKELY,
    )


def _says_too_little(attempt: Attempt, again: Attempt | None) -> bool:
    if attempt.is_mixed_up:
        return not odd_collectives(attempt.members)
    if attempt.is_failed:
        return all(is_victim(m.outcome) for m in attempt.raised)
    formed = any(m.outcome.last_step not in FORMING for m in attempt.stuck)
    return formed and again is not None and not again.is_good


def _mixed_up(attempt: Attempt, compared: Attempt | None) -> Finding | None:
    """The finding on ranks that ran different collectives; None where nothing shows that."""
    for shown in (attempt, compared):
        odd = odd_collectives(shown.members) if shown is not None else {}
        if shown is None or not odd:
            continue
        culprits = [m for m in shown.members if m.rank.seat in odd]
        words = f"{step_of(culprits[0].outcome)} of group {attempt.name}: it ran "
        return Finding(
            HANG if attempt.is_unexplained else FAILED,
            words + odd[culprits[0].rank.seat],
            place_of_all(culprits),
            {**what_they_did(attempt), "compared": what_they_did(shown)["doing"]},
            fix=_PROGRAM,
            confidence=Confidence.LIKELY,
        )
    if not attempt.is_mixed_up:
        return None
    cut = next((m for m in attempt.members if was_cut_off(m.outcome)), None)
    words = "the backend received a message of another size than expected"
    return Finding(
        FAILED,
        f"{step_of((cut or attempt.members[0]).outcome)} of group {attempt.name}: "
        + (words if cut else "the ranks ran different collectives"),
        place_of_all(attempt.members),
        what_they_did(attempt),
        fix="" if cut else _PROGRAM,
        confidence=Confidence.POSSIBLE,
    )


def _group_finding(attempt: Attempt, again: Attempt | None) -> Finding:
    """The finding on a group that fails or hangs while no member is more to blame than others."""
    if attempt.is_failed:
        own = [m for m in attempt.raised if not is_victim(m.outcome)] or attempt.raised
        few = len(own) < len(attempt.members)
        meaning = meaning_of(error_text(own[0].outcome))
        words = f"{step_of(own[0].outcome)} of group {attempt.name}: {error_of(own[0].outcome)}"
        far = attempt.unconnected(own)
        bad = [m for m in attempt.members if m.outcome.status is not OutcomeStatus.OK]
        others = [m for m in bad if m not in own]
        named = others if meaning and meaning.of_another and others else own
        return Finding(
            INIT_FAILED if own[0].outcome.last_step in FORMING else FAILED,
            f"{words}; this means: {meaning.means}" if meaning else words,
            _roads(attempt, far) if far else place_of_all(named),
            what_they_did(attempt),
            fix=meaning.ask if meaning else "",
            confidence=Confidence.LIKELY if few else Confidence.POSSIBLE,
            effects=(Effect.TIMED_OUT,) if all(ran_out_of_time(m.outcome) for m in own) else (),
        )
    flaky = again is not None and again.is_good
    first = attempt.stuck[0].outcome
    words = f"no progress in {step_of(first)} of group {attempt.name} "
    words += f"within {first.duration_s:.0f} s"
    words += ", once; it finished when tried again" if flaky else "; all members had entered"
    kind = INIT_HANG if all(m.outcome.last_step in FORMING for m in attempt.stuck) else HANG
    return Finding(
        kind.variant(**ONCE) if flaky else kind,
        words,
        place_of_all(attempt.members),
        what_they_did(attempt),
        severity=Severity.WARN if flaky else Severity.FAIL,
        confidence=Confidence.POSSIBLE,
    )


def _wrong_results(attempt: Attempt) -> Iterator[Finding]:
    """Findings on wrong results; those of a wrong group are the same fault."""
    if any(map(_wrong_of, attempt.members)) and not attempt.astray:
        yield from _wrong(attempt)
        yield from _wrong_parts(attempt)


def _wrong(attempt: Attempt) -> Iterator[Finding]:
    """One finding for all members that saw a wrong result. If all saw it, the members that gave the
    wrong part are named, if known; if only some saw it, these are named: all got the same data.
    """
    seen = [(m, b) for m in attempt.members for b in _wrong_of(m) if "distance" not in b]
    if not seen:
        return
    own: set[int] = set()
    for _, bad in seen:
        whole = range(len(attempt.members)) if bad["group"] == attempt.name else ()
        inside = bad.get("members", whole)  # members of the attempt stand in order of rank
        if len({m.rank.seat for m, b in seen if b["group"] == bad["group"]}) == len(inside):
            own |= {inside[giver] for giver in bad["contributors"]}
    seers = [m for m in attempt.members if _wrong_of(m)]
    givers = [m for at, m in enumerate(attempt.members) if at in own]
    few = 2 * len(seers) < len(attempt.members)
    first = seen[0][1]
    yield Finding(
        WRONG,
        f"{first['step']} of group {first['group']}: {first['example']}",
        place_of_all(givers or seers),
        {"round": attempt.name, "seen_by": sorted(m.rank.rank or 0 for m in seers)},
        confidence=Confidence.LIKELY if givers or few else Confidence.POSSIBLE,
    )


def _wrong_parts(attempt: Attempt) -> Iterator[Finding]:
    """One finding for all wrong results of steps in which every member gets other data.

    It names the fewest members whose sending or receiving explains them, and both ends of a pair
    where neither end is seen to be the cause.
    """
    seen = [(i, b) for i, m in enumerate(attempt.members) for b in _wrong_of(m) if "distance" in b]
    if not seen:
        return
    size = len(attempt.members)
    failed = {(giver, taker) for taker, bad in seen for giver in bad["contributors"]}
    own = {giver for giver, taker in failed if giver == taker}  # nobody else sent that
    open_ = {pair for pair in failed if not own & set(pair)}
    takers = [i for i, m in enumerate(attempt.members) if m.outcome.status is OutcomeStatus.OK]
    distances = {int(bad["distance"]) for _, bad in seen}
    right = {pair for d in distances for pair in _some_right(size, takers, d, failed)}
    blame = blame_links(right, open_)
    unclear = {end for link in blame.links for end in link}
    named = own | set(blame.hosts) | unclear
    ranks = [m.rank.rank or 0 for m in attempt.members]
    first = seen[0][1]
    parts = [
        {"from": ranks[giver], "to": number_range([ranks[t] for g, t in failed if g == giver])}
        for giver in sorted({giver for giver, _ in failed})[:MOST_ENTRIES]
    ]
    yield Finding(
        WRONG,
        f"{first['step']} of group {first['group']}: {first['example']}",
        place_of_all([m for i, m in enumerate(attempt.members) if i in named]),
        {
            "round": attempt.name,
            "seen_by": [ranks[i] for i in sorted({taker for taker, _ in seen})],
            "steps": list(dict.fromkeys(bad["step"] for _, bad in seen)),
            "parts": parts,
        },
        confidence=Confidence.POSSIBLE if unclear or len(failed) == 1 else Confidence.LIKELY,
    )


def _wrong_of(member: Evidence) -> Sequence[Mapping[str, Any]]:
    wrong: Sequence[Mapping[str, Any]] = member.outcome.facts.get("wrong", ())
    return wrong


def _some_right(
    size: int, takers: Sequence[int], distance: int, failed: Collection[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Pairs (giver, taker) of a step whose data was right: in a ring all of them, else one for each
    giver and one for each taker, as the pairs of thousands of ranks would be too many.
    """

    def right(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        return (pair for pair in pairs if pair[0] != pair[1] and pair not in failed)

    if distance:
        yield from right(((taker - distance) % size, taker) for taker in takers)
        return
    for giver in range(size):
        yield from islice(right((giver, taker) for taker in takers), 1)
    for taker in takers:
        yield from islice(right((giver, taker) for giver in range(size)), 1)
