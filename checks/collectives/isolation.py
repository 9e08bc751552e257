"""Rounds of isolation and their findings, from attempts of groups. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Effect,
    Evidence,
    Finding,
    Kind,
    Outcome,
    OutcomeStatus,
    Rank,
    Round,
    Severity,
    Where,
    number_range,
)
from nccl_doctor.toolkit.groups.attempts import (
    FORMING,
    WORLD,
    Attempt,
    attempt_deadline,
    is_victim,
    ran_out_of_time,
)
from nccl_doctor.toolkit.groups.culprits import AGAIN, place_of_all
from nccl_doctor.toolkit.groups.doing import error_of, step_of, what_they_did
from nccl_doctor.toolkit.groups.kinds import FAILED, HANG, INIT_FAILED, INIT_HANG, ONCE

from .bisection import Result, Units
from .planner import Culprit, Held, Plan, Seen, Verdict, next_round, verdict_so_far

EACH_HOST = "each-host"
ISOLATE = "isolate-"

_LEAST_S = 3.0
"""Least seconds of a round: a busy machine may need them to start its processes."""
_PATIENCE = 5.0
"""A group may take this many times longer than good groups."""
_TOTAL_S = 30.0
"""Limit for all rounds of isolation; three times the time of one attempt, if that is more."""
_MOST_TOLD = 8
_ONLY_IN_MANY = "; a broken link that NCCL uses only with that many ranks would look the same"

Attempts = Mapping[str, Sequence[Attempt]]


def is_isolated(cluster: Cluster, attempts: Attempts) -> bool:
    """True if the group of all ranks failed so that only smaller groups can show the reason."""
    found = attempts.get(WORLD, ())
    if not cluster.complete or len(found) != 1 or len(found[0].members) < 2:
        return False
    world = found[0]
    own = [member for member in world.raised if not is_victim(member.outcome)]
    few = 0 < len(own) < len(world.members)  # their own errors show the culprits
    return world.is_unexplained or (world.is_failed and not few)


def rounds_of_isolation(cluster: Cluster, attempts: Attempts) -> Iterator[Round]:
    """The finished rounds, and the next one, if another is needed.

    The first is `each-host`, then `isolate-1` and so on; `world-again` tries the whole again.
    """
    limit_s = attempt_deadline(cluster)
    held = [name for name in _in_order(attempts) if name != WORLD]
    for name in held:
        yield Round(name, tuple(attempt.seats for attempt in attempts[name]), limit_s)
    spent_s = sum(max(map(_seconds, attempts[name])) for name in held)
    if spent_s > max(_TOTAL_S, 3 * limit_s) or _to_blame(attempts):
        return
    hosts = _hosts(cluster)
    plan = next_round(hosts, _history(attempts))
    if isinstance(plan, Plan):
        order = [seat for host in hosts for seat in host]
        place = {seat: at for at, seat in enumerate(order)}
        groups = tuple(tuple(sorted(group, key=place.__getitem__)) for group in plan.groups)
        yield Round(_name(plan, hosts, held), groups, _deadline(attempts, groups, limit_s))


def judge_isolation(cluster: Cluster, attempts: Attempts) -> tuple[Attempts, list[Finding]]:
    """Findings of isolation.

    Returns: the attempts that isolation does not explain, and the findings about the others.
    """
    if blamed := _to_blame(attempts):  # a smaller group shows what the whole did not
        rest = {
            name: [a for a in found if not _is_open(a) or blamed.isdisjoint(a.seats)]
            for name, found in attempts.items()
        }
        return rest, []
    history = _history(attempts)
    hosts = _hosts(cluster)
    verdict = next_round(hosts, history)
    if isinstance(verdict, Plan):
        verdict = verdict_so_far(hosts, history)
    findings = list(_findings(cluster, attempts, verdict))
    if not findings:
        return attempts, []
    closed = {name: [a for a in found if not _is_open(a)] for name, found in attempts.items()}
    return closed, findings


# -- rounds -------------------------------------------------------------------------------------


def _hosts(cluster: Cluster) -> list[tuple[int, ...]]:
    """Seats of each host, hosts and seats in order of rank."""
    by_host: dict[int, list[int]] = {}
    for rank in cluster.present:
        by_host.setdefault(rank.host.id, []).append(rank.seat)
    return [tuple(seats) for seats in by_host.values()]


def _in_order(attempts: Attempts) -> list[str]:
    """Names of the rounds that isolation uses, in a possible order."""
    fixed = [name for name in (WORLD, EACH_HOST, WORLD + AGAIN) if name in attempts]
    numbers = [name.removeprefix(ISOLATE) for name in attempts if name.startswith(ISOLATE)]
    return fixed + [f"{ISOLATE}{n}" for n in sorted(int(n) for n in numbers if n.isdigit())]


def _history(attempts: Attempts) -> list[Held]:
    return [
        {frozenset(attempt.seats): _seen(attempt) for attempt in attempts[name]}
        for name in _in_order(attempts)
    ]


def _seen(attempt: Attempt) -> Seen:
    took_part = (OutcomeStatus.OK, OutcomeStatus.DIED, OutcomeStatus.HUNG, OutcomeStatus.RAISED)
    if attempt.is_good:
        return Seen(Result.GOOD)
    absent = any(member.outcome.status not in took_part for member in attempt.members)
    if absent or attempt.is_cut_short:
        return Seen(Result.UNTESTED)
    sizes = [_sizes(m.outcome) for m in attempt.members if m.outcome.status not in took_part[:1]]
    passed, failed = (min(column) for column in zip(*sizes, strict=True))
    return Seen(Result.BAD, passed if passed < failed else 0)


def _sizes(outcome: Outcome) -> tuple[int, int]:
    """Bytes of the largest all-reduce that a member finished, and of the one it was stuck in."""
    crumbs = [c for c in outcome.breadcrumbs if c.get("step") == "all_reduce"]
    if not crumbs or outcome.last_step != "all_reduce":
        return 0, 0
    *done, last = (int(crumb.get("bytes", 0)) for crumb in crumbs)
    return max(done, default=0), last


def _seconds(attempt: Attempt) -> float:
    return max(member.outcome.duration_s for member in attempt.members)


def _deadline(attempts: Attempts, groups: Sequence[Sequence[int]], limit_s: float) -> float:
    """Deadline: several times what good groups needed, and more for a larger group."""
    good = [a for found in attempts.values() for a in found if a.is_good]
    if not good:
        return limit_s
    growth = max(map(len, groups)) / max(len(a.members) for a in good)
    needed = _PATIENCE * max(map(_seconds, good)) * max(1.0, growth)
    return min(limit_s, max(_LEAST_S, needed))


def _name(plan: Plan, hosts: Sequence[Sequence[int]], held: Sequence[str]) -> str:
    groups = set(plan.groups)
    if groups == {frozenset(seat for host in hosts for seat in host)} and WORLD + AGAIN not in held:
        return WORLD + AGAIN
    if groups == set(map(frozenset, hosts)) and EACH_HOST not in held:
        return EACH_HOST
    return f"{ISOLATE}{1 + sum(name.startswith(ISOLATE) for name in held)}"


def _is_open(attempt: Attempt) -> bool:
    return attempt.is_unexplained or attempt.is_failed


def _to_blame(attempts: Attempts) -> set[int]:
    """Seats of members that are more to blame than the others, in any of the groups."""
    return {
        member.rank.seat
        for found in attempts.values()
        for a in found
        for member in (*a.dead, *a.stopped, *a.never_came, *a.starting)
    }


# -- findings -----------------------------------------------------------------------------------


def _findings(cluster: Cluster, attempts: Attempts, verdict: Verdict) -> Iterator[Finding]:
    (world,) = attempts[WORLD]
    ranks = {rank.seat: rank for rank in cluster.present}
    held = _results_of_rounds(attempts)
    if verdict.untold:
        held["not_told"] = _rank_range(ranks, verdict.untold)
    if verdict.flaky:
        yield Finding(
            _kind(world).variant(**ONCE),
            f"{_what(world)}, once; it finished when tried again, and so did every smaller group",
            place_of_all(world.members),
            {**what_they_did(world), "isolation": held},
            severity=Severity.WARN,
            confidence=Confidence.POSSIBLE,
        )
    for culprit in verdict.culprits:
        attempt = _attempt(attempts, culprit.group) or world
        words = f"{_what(attempt)}; {_how(culprit)}"
        if culprit.above_bytes:
            sizes = [_sizes(m.outcome)[1] for m in attempt.members]
            words += f"; {culprit.above_bytes} bytes pass, {max(sizes)} do not"
        if verdict.rest_is_good:
            words += "; without it all others finish"
        yield Finding(
            _kind(attempt),
            words,
            _where(culprit, ranks),
            {**what_they_did(attempt), "isolation": held},
            confidence=culprit.confidence,
            effects=(Effect.TIMED_OUT,) if _timed_out(attempt) else (),
        )
    if verdict.size is not None:
        good, bad = map(len, verdict.size)
        yield Finding(
            _kind(world),
            f"{_what(world)}; it fails only above {good} ranks: smaller groups finish, groups of "
            f"{bad} ranks or more do not{_ONLY_IN_MANY if cluster.backend == 'nccl' else ''}",
            place_of_all(world.members),
            {**what_they_did(world), "isolation": held},
            confidence=Confidence.LIKELY,
            effects=(Effect.TIMED_OUT,) if _timed_out(world) else (),
        )
    elif verdict.untold and not verdict.culprits and not verdict.flaky:
        members = [m for m in world.members if m.rank.seat in verdict.untold]
        yield Finding(
            _kind(world),
            f"{_what(world)}; which of these ranks is the cause is unknown",
            place_of_all(members),
            {**what_they_did(world), "isolation": held},
            confidence=Confidence.POSSIBLE,
            effects=(Effect.TIMED_OUT,) if _timed_out(world) else (),
        )


def _timed_out(attempt: Attempt) -> bool:
    """True if each error of a failed attempt only shows that something took too long."""
    return attempt.is_failed and all(ran_out_of_time(m.outcome) for m in attempt.raised)


def _kind(attempt: Attempt) -> Kind:
    shown: list[Evidence] = attempt.raised if attempt.is_failed else attempt.stuck
    forming = all(member.outcome.last_step in FORMING for member in shown)
    if attempt.is_failed:
        return INIT_FAILED if forming else FAILED
    return INIT_HANG if forming else HANG


def _what(attempt: Attempt) -> str:
    first = (attempt.raised if attempt.is_failed else attempt.stuck)[0].outcome
    if attempt.is_failed:
        return f"{step_of(first)} of group {attempt.name}: {error_of(first)}"
    words = f"no progress in {step_of(first)} of group {attempt.name}"
    return f"{words} within {first.duration_s:.0f} s"


def _how(culprit: Culprit) -> str:
    """Result of the tests for a place, in words."""
    if culprit.alone:
        return f"it fails alone, with no other {'rank' if culprit.is_rank else 'host'} in the group"
    if not culprit.is_link:
        return "it fails with every partner that was tried, and these finish with others"
    return {
        Confidence.CERTAIN: "these two fail together, and each of them finishes with others",
        Confidence.LIKELY: "these two fail together, and one of them finishes with others",
        Confidence.POSSIBLE: "these two fail together, and there is no other to try them with",
    }[culprit.confidence]


def _where(culprit: Culprit, ranks: Mapping[int, Rank]) -> Where:
    members = [ranks[seat] for place in culprit.places for seat in sorted(place)]
    if culprit.is_rank:
        place = Where()
        for rank in members:
            place |= Evidence.rank_place(rank)
        return place
    if not culprit.is_link:
        host = members[0].host
        if host.name is not None:
            return Where(hosts=(host.name,))
        return Where(nodes=() if host.node_rank is None else (host.node_rank,))
    one, other = (ranks[min(place)].host.label for place in culprit.places)
    return Where(links=tuple(sorted({(one, other), (other, one)})))


def _attempt(attempts: Attempts, group: Units) -> Attempt | None:
    for found in attempts.values():
        for attempt in found:
            if _is_open(attempt) and frozenset(attempt.seats) == group:
                return attempt
    return None


def _results_of_rounds(attempts: Attempts) -> dict[str, Any]:
    """Results of each round, as evidence: number of good groups, and the bad ones."""
    rounds = []
    for name in _in_order(attempts):
        bad = [a for a in attempts[name] if not a.is_good]
        ranks = [number_range([m.rank.rank or 0 for m in a.members]) for a in bad]
        good = len(attempts[name]) - len(bad)
        rounds.append({"round": name, "good": good, "bad": len(bad), "ranks": ranks[:_MOST_TOLD]})
    return {"rounds": rounds}


def _rank_range(ranks: Mapping[int, Rank], seats: Iterable[int]) -> str:
    return number_range([ranks[seat].rank or 0 for seat in seats])
