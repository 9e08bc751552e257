"""Rules of the exchanges check on made-up clusters: the step, the culprit, and nobody else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor import registry
from nccl_doctor.api import Cluster, Confidence, Outcome, OutcomeStatus, Severity, Skip
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster
from tests.support.findings import calls, judge, only

CHECK = CHECKS["exchanges"]
COLLECTIVES = CHECKS["collectives"]
RANKS = range(4)
OK = {"steps": ["all_gather"], "wrong": [], "lacking": {}}
VICTIM = "RuntimeError: Connection closed by peer [192.168.77.2]:3000"


def held(by_rank: Mapping[int, Any], nproc: int = 2, name: str = "world") -> Cluster:
    """Two hosts; what is not OK in the round, by rank."""
    seen = {rank: by_rank.get(rank, OK) for rank in range(2 * nproc)}
    return make_cluster(nproc=nproc, check="exchanges", by_rank=seen, round_name=name)


def twice(first: Mapping[int, Any], again: Mapping[int, Any]) -> Cluster:
    """The round, and the same tried again."""
    ranks = []
    cluster, other = held(first), held(again, name="world-again")
    for rank, twin in zip(cluster.ranks, other.ranks, strict=True):
        rounds = {**rank.facts["exchanges"], **twin.facts["exchanges"]}
        ranks.append(replace(rank, facts={"exchanges": rounds}))
    return replace(cluster, ranks=tuple(ranks))


def crumbs(step: str) -> tuple[dict[str, Any], ...]:
    steps = ("connect to the store", "init_process_group", "all_gather", step)
    return tuple({"step": each, "at_s": float(at)} for at, each in enumerate(steps))


def hung(step: str, state: str = "S") -> Outcome:
    return Outcome(OutcomeStatus.HUNG, breadcrumbs=crumbs(step), state=state, duration_s=20)


def raised(step: str, text: str) -> Outcome:
    return Outcome(OutcomeStatus.RAISED, breadcrumbs=crumbs(step), reason=text)


def wrong(step: str, givers: Iterable[int], distance: int = 0) -> dict[str, Any]:
    bad = {
        "step": step,
        "group": "world",
        "contributors": sorted(givers),
        "example": "element 3 is 9, not 4",
        "distance": distance,
    }
    return {**OK, "wrong": [bad]}


def test_one_group_of_all_ranks_within_the_time_of_one_attempt() -> None:
    cluster = make_cluster(("a", "b", "c"), 2, absent_nodes=[1])
    (world,) = CHECK.plan(cluster)
    assert world.groups == ((0, 1, 4, 5),)
    assert world.deadline_s == cluster.collective_timeout_s


def test_one_rank_has_nobody_to_exchange_data_with() -> None:
    with pytest.raises(Skip, match="one rank"):
        CHECK.plan(make_cluster(("a",), 1))
    assert CHECK.plan(make_cluster(("a", "b"), 1, absent_nodes=[1])) == []


def test_it_comes_after_the_all_reduce_and_is_blocked_where_that_failed() -> None:
    names = [check.name for check in registry.load().checks]
    assert names.index("collectives") < names.index("exchanges")
    assert {kind.layer for kind in COLLECTIVES.kinds} <= set(CHECK.needs)


def test_good_steps_give_nothing_and_so_does_one_that_the_backend_lacks() -> None:
    lacking = {**OK, "lacking": {"all_to_all": "Backend gloo does not support alltoall_base"}}
    assert judge(CHECK, held({})) == []
    assert judge(CHECK, held(dict.fromkeys(RANKS, lacking))) == []


@pytest.mark.parametrize("step", ["all_gather", "all_to_all"])
def test_rank_whose_part_is_wrong_everywhere_is_named(step: str) -> None:
    seen = {taker: wrong(step, [2]) for taker in (0, 1, 3)}
    found = only(CHECK, held(seen), "collective-wrong-result", hosts=["nd1"], ranks=[2])
    assert found.message == f"{step} of group world: element 3 is 9, not 4"
    assert found.confidence is Confidence.LIKELY
    assert found.evidence["parts"] == [{"from": 2, "to": "0–1, 3"}]
    assert found.evidence["seen_by"] == [0, 1, 3]


def test_rank_that_gets_wrong_parts_from_all_others_is_named() -> None:
    found = only(
        CHECK,
        held({1: wrong("all_to_all", [0, 2, 3])}),
        "collective-wrong-result",
        hosts=["nd0"],
        ranks=[1],
    )
    assert found.confidence is Confidence.LIKELY


def test_rank_whose_own_part_is_wrong_to_itself_needs_no_others() -> None:
    seen = dict.fromkeys(range(2), wrong("reduce_scatter", [1]))
    found = only(CHECK, held(seen, 1), "collective-wrong-result", hosts=["nd1"], ranks=[1])
    assert found.confidence is Confidence.LIKELY


@pytest.mark.parametrize("nproc", [1, 2])
def test_of_one_wrong_part_both_ends_are_named(nproc: int) -> None:
    seen = {1: wrong("all_to_all", [0])}
    found = only(CHECK, held(seen, nproc), "collective-wrong-result", **ends(0, 1, nproc))
    assert found.confidence is Confidence.POSSIBLE


def ends(giver: int, taker: int, nproc: int) -> dict[str, Any]:
    hosts = dict.fromkeys(f"nd{rank // nproc}" for rank in (giver, taker))
    return {"hosts": list(hosts), "ranks": [giver, taker]}


def test_in_a_ring_only_neighbours_see_who_sends_wrong_data() -> None:
    """Its all-to-all was right: that says nothing of a ring, and blames no neighbour."""
    seen = {
        3: wrong("send to the next rank", [2], 1),
        1: wrong("send to the previous rank", [2], -1),
    }
    found = only(CHECK, held(seen), "collective-wrong-result", hosts=["nd1"], ranks=[2])
    assert found.evidence["steps"] == ["send to the previous rank", "send to the next rank"]
    one = {3: wrong("send to the next rank", [2], 1)}
    both = only(CHECK, held(one), "collective-wrong-result", hosts=["nd1"], ranks=[2, 3])
    assert both.confidence is Confidence.POSSIBLE


def test_two_ranks_whose_parts_are_wrong_are_both_named() -> None:
    seen = {taker: wrong("all_gather", {1, 6} - {taker}) for taker in range(8)}
    only(CHECK, held(seen, 4), "collective-wrong-result", hosts=["nd0", "nd1"], ranks=[1, 6])


def test_wrong_parts_among_thousands_of_ranks_cost_little() -> None:
    hosts = [f"nd{node}" for node in range(128)]
    seen = {rank: OK if rank == 7 else wrong("all_to_all", [7]) for rank in range(1024)}
    cluster = make_cluster(hosts, 8, check="exchanges", by_rank=seen, round_name="world")
    only(CHECK, cluster, "collective-wrong-result", hosts=["nd0"], ranks=[7])
    assert calls(lambda: judge(CHECK, cluster)) < 250 * len(seen)


def test_hang_in_one_step_names_the_step_and_is_tried_again() -> None:
    stuck = dict.fromkeys(RANKS, hung("all_to_all"))
    found = only(CHECK, held(stuck), "collective-hang", hosts=["nd0", "nd1"], ranks=RANKS)
    assert "no progress in all_to_all of group world within 20 s" in found.message
    assert found.confidence is Confidence.POSSIBLE
    cluster = twice(stuck, {})
    assert [round_.name for round_ in CHECK.plan(cluster)] == ["world", "world-again"]
    again = only(CHECK, cluster, "collective-hang", hosts=["nd0", "nd1"], ranks=RANKS)
    assert again.level is Severity.WARN


def test_rank_that_stops_in_one_step_is_named_and_nothing_is_tried_again() -> None:
    step = "send to the next rank"
    cluster = held({0: hung("send to the previous rank"), 2: hung(step, "T"), 3: hung(step)})
    found = only(CHECK, cluster, "rank-frozen", hosts=["nd1"], ranks=[2])
    assert found.message.startswith(f"frozen in {step} of group world")
    assert [round_.name for round_ in CHECK.plan(cluster)] == ["world"]


def test_error_in_one_step_names_the_rank_that_did_not_only_lose_another() -> None:
    seen = {rank: raised("reduce_scatter", VICTIM) for rank in RANKS}
    seen[1] = raised("reduce_scatter", "RuntimeError: CUDA error: out of memory")
    found = only(CHECK, held(seen), "collective-failed", hosts=["nd0"], ranks=[1])
    assert found.message.startswith("reduce_scatter of group world: RuntimeError: CUDA error")


def test_own_view_blames_nobody() -> None:
    cluster = held(dict.fromkeys(RANKS, hung("all_to_all")))
    assert judge(CHECK, replace(cluster, complete=False)) == []
