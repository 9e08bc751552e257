"""Rules of the collectives check on made-up clusters: the culprit is named, never a victim."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_doctor import registry
from nccl_doctor.cluster import ALONE, Cluster, Outcome, OutcomeStatus
from nccl_doctor.model import Finding, Severity
from tests.clusters import make_cluster

CHECK = next(c for c in registry.load().checks if c.name == "collectives")
OK = {"steps": ["all_reduce"], "wrong": []}


def crumbs(*steps: str) -> tuple[dict[str, Any], ...]:
    return tuple({"step": step, "at_s": float(i)} for i, step in enumerate(steps))


ENTERED = crumbs("connect to the store", "init_process_group", "all_reduce")
FORMING = crumbs("connect to the store", "init_process_group")


def hung(state: str = "S", steps: tuple[dict[str, Any], ...] = ENTERED) -> Outcome:
    return Outcome(
        OutcomeStatus.HUNG, breadcrumbs=steps, state=state, wchan="ep_poll", duration_s=20
    )


def raised(text: str, steps: tuple[dict[str, Any], ...] = ENTERED) -> Outcome:
    return Outcome(OutcomeStatus.RAISED, reason=text, breadcrumbs=steps)


def died(signal: str = "SIGKILL") -> Outcome:
    return Outcome(OutcomeStatus.DIED, signal=signal, breadcrumbs=ENTERED)


VICTIM = raised("RuntimeError: Connection closed by peer [192.168.77.2]:3000")


def cluster_of(by_rank: dict[int, Any], round_name: str = "world", **kwargs: Any) -> Cluster:
    return make_cluster(
        check="collectives",
        by_rank={rank: by_rank.get(rank, OK) for rank in range(4)},
        round_name=round_name,
        **kwargs,
    )


def add_round(cluster: Cluster, name: str, by_rank: dict[int, Any]) -> Cluster:
    """The same cluster with the outcomes of one more round; `each-host` has a group per host."""
    other = cluster_of(by_rank, name)
    if name == "each-host":
        for rank in other.ranks:
            rank.facts["collectives"][name]["group"] = 2 * rank.host.id
    facts = {
        rank.seat: {
            "collectives": {
                **rank.facts.get("collectives", {}),
                **{k: v for k, v in twin.facts["collectives"].items() if rank.rank in by_rank},
            }
        }
        for rank, twin in zip(cluster.ranks, other.ranks, strict=True)
    }
    from dataclasses import replace

    return replace(
        cluster, ranks=tuple(replace(rank, facts=facts[rank.seat]) for rank in cluster.ranks)
    )


def judge(cluster: Cluster) -> list[Finding]:
    return list(CHECK.judge(cluster))


def test_good_collectives_give_nothing() -> None:
    assert judge(cluster_of({})) == []


def test_dead_rank_is_blamed_and_not_its_victims() -> None:
    (found,) = judge(cluster_of({0: VICTIM, 1: VICTIM, 2: died("SIGSEGV"), 3: hung()}))
    assert (found.code, found.where.ranks, found.where.hosts) == ("rank-crashed", (2,), ("nd1",))
    assert "SIGSEGV" in found.message
    assert [each["ranks"] for each in found.evidence["doing"]] == ["0–1", "2", "3"]


@pytest.mark.parametrize("state", ["T", "D"])
def test_stopped_rank_is_blamed_and_not_those_that_wait(state: str) -> None:
    (found,) = judge(cluster_of({0: hung(), 1: hung(state), 2: hung(), 3: hung()}))
    assert (found.code, found.where.ranks) == ("rank-frozen", (1,))


def test_rank_that_never_came_is_blamed() -> None:
    late = hung(steps=crumbs("set device cuda:1"))
    waiting = hung(steps=FORMING)
    (found,) = judge(cluster_of({0: waiting, 1: late, 2: waiting, 3: waiting}))
    assert (found.code, found.where.ranks) == ("rank-frozen", (1,))
    assert found.confidence.value == "likely"
    assert found.evidence["never_came"] == "1"


def test_silent_rank_is_the_engines_finding_and_its_victims_nobodys() -> None:
    silent = Outcome(OutcomeStatus.SILENT, reason="no word")
    assert judge(cluster_of({0: VICTIM, 1: hung(), 2: silent, 3: hung()})) == []


def test_those_who_waited_for_one_that_took_no_part_are_not_blamed() -> None:
    lacks = Outcome(OutcomeStatus.UNTESTED, reason="this participant has no check collectives")
    assert judge(cluster_of({0: hung(), 1: lacks, 2: hung(), 3: VICTIM})) == []


def test_hang_of_all_blames_the_group_and_says_that_it_cannot_tell() -> None:
    (found,) = judge(cluster_of(dict.fromkeys(range(4), hung(steps=FORMING))))
    assert found.code == "group-init-hang"
    assert found.where.ranks == (0, 1, 2, 3)
    assert found.confidence.value == "possible"
    (found,) = judge(cluster_of(dict.fromkeys(range(4), hung())))
    assert found.code == "collective-hang"


def test_hang_is_tried_again_and_a_good_second_attempt_makes_it_a_warning() -> None:
    cluster = cluster_of(dict.fromkeys(range(4), hung()))
    assert [r.name for r in CHECK.plan(cluster)][-1] == "world-again"
    again = add_round(cluster, "world-again", dict.fromkeys(range(4), OK))
    (found,) = judge(again)
    assert (found.code, found.level) == ("collective-hang", Severity.WARN)
    assert "tried again" in found.message
    bad = add_round(cluster, "world-again", dict.fromkeys(range(4), hung()))
    (found,) = judge(bad)
    assert found.level is Severity.FAIL
    assert "world-again-again" not in [r.name for r in CHECK.plan(bad)]


def test_smaller_group_that_hangs_by_itself_narrows_the_blame() -> None:
    cluster = cluster_of(dict.fromkeys(range(4), hung()))
    cluster = add_round(cluster, "each-host", {0: OK, 1: OK, 2: hung(), 3: hung()})
    (found,) = judge(cluster)
    assert (found.code, found.where.hosts) == ("collective-hang", ("nd1",))


def test_own_error_is_blamed_and_not_the_ones_that_lost_their_peer() -> None:
    own = raised("RuntimeError: CUDA error: out of memory")
    (found,) = judge(cluster_of({0: VICTIM, 1: VICTIM, 2: own, 3: VICTIM}))
    assert (found.code, found.where.ranks) == ("collective-failed", (2,))
    assert "out of memory" in found.message
    (found,) = judge(cluster_of(dict.fromkeys(range(4), raised("ValueError: bad", steps=FORMING))))
    assert (found.code, found.where.ranks) == ("group-init-failed", (0, 1, 2, 3))


def test_wrong_result_names_the_rank_that_gave_it() -> None:
    bad = {
        "steps": ["all_reduce"],
        "wrong": [
            {
                "step": "all_reduce",
                "group": "world",
                "contributors": [3],
                "example": "element 3 is 9, not 4",
            }
        ],
    }
    (found,) = judge(cluster_of(dict.fromkeys(range(4), bad)))
    assert (found.code, found.where.ranks, found.where.hosts) == (
        "collective-wrong-result",
        (3,),
        ("nd1",),
    )
    assert "element 3 is 9, not 4" in found.message
    assert found.evidence["seen_by"] == [0, 1, 2, 3]


def test_same_culprit_in_several_rounds_is_one_finding() -> None:
    cluster = cluster_of({2: died(), 0: hung(), 1: hung(), 3: VICTIM})
    cluster = add_round(cluster, "each-host", {0: OK, 1: OK, 2: died(), 3: VICTIM})
    (found,) = judge(cluster)
    assert found.where.ranks == (2,)


def test_own_view_blames_nobody() -> None:
    assert judge(cluster_of({0: hung()}, complete=False)) == []


def test_plan_covers_every_present_rank() -> None:
    rounds = {r.name: r for r in CHECK.plan(make_cluster(("a", "b", "c"), 2))}
    assert rounds["world"].groups == ((0, 1, 2, 3, 4, 5),)
    assert rounds["each-host"].groups == ((0, 1), (2, 3), (4, 5))
    assert rounds["across-hosts"].groups == ((0, 2, 4),)


def test_plan_leaves_out_absent_ranks() -> None:
    rounds = {r.name: r for r in CHECK.plan(make_cluster(absent_nodes=[1]))}
    assert rounds["world"].groups == ((0, 1),)
    assert ALONE not in rounds
