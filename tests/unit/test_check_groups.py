"""Rules of the groups check on made-up clusters: which variant, which rank, and nobody else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.checks.groups import Groups
from nccl_doctor.model.cluster import Cluster, Outcome, OutcomeStatus
from nccl_doctor.model.findings import Confidence, Effect, Finding, Severity
from nccl_doctor.model.job import Job
from nccl_doctor.toolkit.groups.spans import from_span
from nccl_doctor.toolkit.groups.strays import MADE, MAKING
from tests.support.clusters import make_cluster
from tests.support.findings import judge

CHECK = Groups()
OK = {"steps": ["all_reduce"], "wrong": []}
EVENS, ODDS = "0, 2", "1, 3"
CUT = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail"
    " at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 1344 vs 8. Received data"
    " size doesn't match expected size. Is there a distributed collective mismatch in your code?"
)
LOST = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:905: Connection reset by peer."


def crumbs(*steps: str | Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    before = ("connect to the store", "init_process_group")
    return tuple(
        {"at_s": float(i), **({"step": step} if isinstance(step, str) else step)}
        for i, step in enumerate((*before, *steps))
    )


def made(group: str, expected: str, ranks: str, count: int | None) -> dict[str, Any]:
    return {"step": MADE, "group": group, "expected": expected, "ranks": ranks, "count": count}


REDUCE = {"step": "all_reduce", "group": "evens", "bytes": 32, "sequence": 1}


def hung(*steps: str | Mapping[str, Any], **fields: Any) -> Outcome:
    return Outcome(
        OutcomeStatus.HUNG,
        breadcrumbs=crumbs(*(steps or (REDUCE,))),
        state=fields.pop("state", "S"),
        duration_s=20,
        **fields,
    )


def raised(text: str, **fields: Any) -> Outcome:
    return Outcome(OutcomeStatus.RAISED, reason=text, breadcrumbs=crumbs(REDUCE), **fields)


def compared(own: int, other: int) -> Outcome:
    text = "CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[{}])"
    words = "Rank 9 is running collective: {}, but Rank 8 is running collective: {}."
    return raised(
        "RuntimeError: Detected mismatch between collectives on ranks. "
        + words.format(text.format(own), text.format(other))
    )


def rounds(backend: str = "gloo", **outcomes: Mapping[int, Any]) -> Cluster:
    """Four ranks on two hosts; variant (with _ for -) → what is not OK in it, by rank."""
    cluster = make_cluster(backend=backend)
    facts: dict[int, dict[str, Any]] = {rank: {} for rank in range(4)}
    for name, by_rank in outcomes.items():
        held = make_cluster(
            check="groups", by_rank={rank: by_rank.get(rank, OK) for rank in range(4)}
        )
        for rank in held.ranks:
            facts[rank.seat][name.replace("_", "-")] = rank.facts["groups"]["alone"]
    return replace(
        cluster,
        ranks=tuple(replace(r, facts={"groups": facts[r.seat]}) for r in cluster.ranks),
    )


def found(cluster: Cluster) -> Finding:
    (finding,) = judge(CHECK, cluster)
    return finding


ALL_HUNG = dict.fromkeys(range(4), hung())


def test_every_further_group_is_named_by_the_ranks_of_the_default_one() -> None:
    for round_ in CHECK.plan(make_cluster(("nd0", "nd1"), 2)):
        assert round_.groups == ((0, 1, 2, 3),)
        assert round_.params["groups"] == {
            "world": [0, 1, 2, 3],
            "evens": [0, 2],
            "odds": [1, 3],
            "across-hosts": [0, 2],
        }


def test_the_groups_of_many_ranks_are_told_in_a_few_bytes() -> None:
    cluster = make_cluster([f"nd{node}" for node in range(128)], 8)
    assert all(len(json.dumps(round_.params)) < 400 for round_ in CHECK.plan(cluster))


def test_only_nccl_has_variants_with_a_bound_default_group() -> None:
    plain = ["in-order", "in-turn", "at-once"]
    rounds_ = CHECK.plan(make_cluster(backend="nccl"))
    assert [r.name for r in rounds_] == [*plain, *(f"{name}-bound" for name in plain)]
    assert [r.params["bind"] for r in rounds_] == [False] * 3 + [True] * 3


GOOD: dict[str, Any] = {"in_order": {}, "in_turn": {}, "at_once": {}}


def planned(cluster: Cluster) -> list[str]:
    return [round_.name for round_ in CHECK.plan(cluster)]


def test_gloo_has_one_round_of_every_use_and_variants_only_to_explain_a_hang() -> None:
    variants = ["in-order", "in-turn", "at-once"]
    frozen = {**ALL_HUNG, 2: hung(state="T")}
    assert planned(make_cluster()) == ["every-use"]
    assert planned(rounds(every_use={})) == ["every-use"]
    assert planned(rounds(every_use=frozen)) == ["every-use"]
    assert planned(rounds(every_use=ALL_HUNG)) == ["every-use", *variants]
    found_in = rounds(every_use=ALL_HUNG, **{**GOOD, "at_once": ALL_HUNG})
    assert planned(found_in) == ["every-use", *variants, "at-once-again"]
    assert planned(rounds(every_use=ALL_HUNG, **GOOD)) == [
        "every-use",
        *variants,
        "every-use-again",
    ]


def test_the_variants_say_what_hangs_and_the_round_of_every_use_only_if_they_are_good() -> None:
    finding = found(rounds(every_use=ALL_HUNG, **{**GOOD, "at_once": ALL_HUNG}))
    assert "only when the groups are used at the same time" in finding.message
    assert "every-use" not in json.dumps(finding.evidence) + finding.message
    twice = found(rounds(every_use=ALL_HUNG, **GOOD, every_use_again=ALL_HUNG))
    assert (twice.code, twice.level) == ("collective-hang", Severity.FAIL)
    assert "only with all uses in one process, one after the other" in twice.message
    once = found(rounds(every_use=ALL_HUNG, **GOOD, every_use_again={}))
    assert once.level is Severity.WARN


def test_hang_of_every_use_stands_where_no_time_was_left_for_the_variants() -> None:
    untested = Outcome(OutcomeStatus.UNTESTED, reason="no time was left")
    finding = found(rounds(every_use=ALL_HUNG, in_order=dict.fromkeys(range(4), untested)))
    assert (finding.code, finding.level) == ("collective-hang", Severity.FAIL)


def test_frozen_rank_is_named_by_the_round_of_every_use_alone() -> None:
    finding = found(rounds(every_use={**ALL_HUNG, 2: hung(state="T")}))
    assert (finding.code, finding.where.ranks) == ("rank-frozen", (2,))


def test_groups_of_gloo_beside_nccl_only_where_the_job_forms_several() -> None:
    many = Job(groups="many")
    last = CHECK.plan(make_cluster(backend="nccl", job=many))[-1]
    assert (last.name, last.params["bind"]) == ("beside-gloo", False)
    names = {r.name for r in CHECK.plan(make_cluster(backend="gloo", job=many))}
    names |= {r.name for r in CHECK.plan(make_cluster(backend="nccl"))}
    assert "beside-gloo" not in names


def test_what_is_bad_beside_gloo_alone_is_a_warning_that_says_so() -> None:
    good: dict[str, Any] = {"in_order": {}, "in_turn": {}, "at_once": {}}
    finding = found(rounds("nccl", **good, beside_gloo=ALL_HUNG))
    assert (finding.code, finding.level) == ("collective-hang", Severity.WARN)
    assert finding.where.ranks == (0, 1, 2, 3)
    assert "only with gloo groups beside NCCL; NCCL's own groups are good" in finding.message
    loopback = raised("RuntimeError: Gloo connectFullMesh failed, remote=[127.0.1.1]:4211")
    finding = found(rounds("nccl", **good, beside_gloo={2: loopback}))
    assert (finding.code, finding.where.ranks) == ("collective-failed", (2,))
    assert (finding.level, "GLOO_SOCKET_IFNAME" in finding.fix) == (Severity.WARN, True)
    both = rounds("nccl", in_order=ALL_HUNG, in_turn={}, at_once={}, beside_gloo={})
    assert found(both).level is Severity.FAIL


def test_who_published_a_loopback_address_is_named_and_not_who_was_sent_to_itself() -> None:
    loopback = raised("RuntimeError: Gloo connectFullMesh failed, remote=[127.0.0.1]:4211")
    bad = {0: loopback, 1: loopback, 2: hung(), 3: hung()}
    finding = found(rounds(in_order=bad, in_turn={}, at_once={}))
    assert (finding.where.ranks, finding.where.hosts) == ((2, 3), ("nd1",))
    everybody = dict.fromkeys(range(4), loopback)
    assert found(rounds(in_order=everybody, in_turn={}, at_once={})).where.ranks == (0, 1, 2, 3)


def test_a_rank_that_finds_no_free_port_may_have_been_too_early() -> None:
    """Ports in TIME_WAIT come free again: what delays a job explains it."""
    text = "RuntimeError: Unable to find address for nd1; bind(2) for [192.168.77.2] failed with: "
    busy = raised(text + "Address already in use")
    finding = found(rounds(in_order={3: busy}, in_turn={}, at_once={}))
    assert (finding.where.ranks, finding.has(Effect.TIMED_OUT)) == ((3,), True)
    assert "no free port on this host" in finding.message


def test_good_variants_give_nothing() -> None:
    assert judge(CHECK, rounds(in_order={}, in_turn={}, at_once={})) == []


def test_hang_only_at_once_says_so() -> None:
    finding = found(rounds(in_order={}, in_turn={}, at_once=ALL_HUNG))
    assert (finding.code, finding.where.ranks) == ("collective-hang", (0, 1, 2, 3))
    assert "when the groups are used at the same time; in turn they are good" in finding.message
    assert finding.confidence is Confidence.POSSIBLE


def test_hang_only_of_bound_variants_says_so_once_for_all_of_them() -> None:
    bad = {"in_order_bound": ALL_HUNG, "in_turn_bound": ALL_HUNG, "at_once_bound": ALL_HUNG}
    finding = found(rounds("nccl", in_order={}, in_turn={}, at_once={}, **bad))
    assert "only if the default group is bound to a device" in finding.message
    assert finding.evidence["variants"]["at-once"] == "good"
    assert finding.evidence["variants"]["at-once-bound"] == "hangs"


def test_hang_once_all_groups_are_formed_says_so() -> None:
    finding = found(rounds(in_order={}, in_turn=ALL_HUNG, at_once=ALL_HUNG))
    assert "only after all groups are formed" in finding.message


def test_hang_of_every_variant_names_them_all() -> None:
    finding = found(rounds(in_order=ALL_HUNG, in_turn=ALL_HUNG, at_once=ALL_HUNG))
    assert "in every variant that was tried (in-order, in-turn, at-once)" in finding.message


def test_variant_that_was_not_held_is_not_called_good() -> None:
    untested = Outcome(OutcomeStatus.UNTESTED, reason="no time was left")
    finding = found(rounds(in_order=ALL_HUNG, in_turn=dict.fromkeys(range(4), untested)))
    assert "in every variant that was tried (in-order)" in finding.message


def test_hang_is_tried_again_as_it_was_held_and_then_compared() -> None:
    cluster = rounds(every_use=ALL_HUNG, in_order={}, in_turn={}, at_once=ALL_HUNG)
    again = CHECK.plan(cluster)[-1]
    assert (again.name, again.params["use"]) == ("at-once-again", "at-once")
    twice = rounds(
        every_use=ALL_HUNG, in_order={}, in_turn={}, at_once=ALL_HUNG, at_once_again=ALL_HUNG
    )
    last = CHECK.plan(twice)[-1]
    assert (last.name, last.params["use"], last.params["compare"]) == (
        "at-once-compared",
        "at-once",
        True,
    )


def test_hang_that_does_not_come_again_is_a_warning_for_that_variant_only() -> None:
    cluster = rounds(
        in_order=ALL_HUNG, in_order_again={}, in_turn={}, at_once=ALL_HUNG, at_once_again=ALL_HUNG
    )
    levels = {f.evidence["round"]: f.level for f in judge(CHECK, cluster)}
    assert levels == {"in-order": Severity.WARN, "at-once": Severity.FAIL}


def test_frozen_rank_is_named_once_for_all_variants() -> None:
    bad = {0: hung(), 2: hung(state="T")}
    finding = found(rounds(in_order=bad, in_turn=bad, at_once=bad))
    assert (finding.code, finding.where.ranks) == ("rank-frozen", (2,))


@pytest.mark.parametrize("ranks", [EVENS, "none"])
def test_rank_that_made_another_group_than_asked_is_named(ranks: str) -> None:
    bad = {1: hung(made("odds", ODDS, ranks, 5), REDUCE), 3: hung(made("odds", ODDS, ODDS, 4))}
    finding = found(rounds(in_order=bad))
    assert (finding.code, finding.where.ranks) == ("group-init-hang", (1,))
    assert f"made a group of ranks {ranks}, not 1, 3" in finding.message
    assert finding.confidence is Confidence.CERTAIN


def test_ranks_that_share_their_steps_are_told_apart_by_what_they_still_do() -> None:
    shared = hung(made("odds", ODDS, ODDS, 4))
    making = {MAKING: {"group": "evens", "expected": EVENS, "ranks": ODDS, "count": 5}}
    finding = found(
        rounds(in_order={0: shared, 1: replace(shared, witness=making), 2: shared, 3: shared})
    )
    assert (finding.code, finding.where.ranks) == ("group-init-hang", (1,))


def test_rank_that_is_stuck_making_another_group_is_named_by_its_own_frame() -> None:
    making = {MAKING: {"group": "evens", "expected": EVENS, "ranks": ODDS, "count": 3}}
    waits = {MAKING: {"group": "evens", "expected": EVENS, "ranks": EVENS, "count": 3}}
    stuck = crumbs("new_group")[-1]
    finding = found(rounds(in_order={1: hung(stuck, witness=making), 0: hung(witness=waits)}))
    assert (finding.code, finding.where.ranks) == ("group-init-hang", (1,))


def test_rank_whose_torch_has_counted_otherwise_is_named() -> None:
    def after(rank: int, count: int) -> Outcome:
        mine = EVENS if rank in (0, 2) else "none"
        return hung(made("evens", mine, mine, count))

    bad = {rank: after(rank, 2 if rank == 3 else 3) for rank in range(4)}
    finding = found(rounds(in_order=bad))
    assert (finding.code, finding.where.ranks) == ("group-init-hang", (3,))
    assert finding.confidence is Confidence.LIKELY
    tie = {rank: after(rank, 2 if rank > 1 else 3) for rank in range(4)}
    finding = found(rounds(in_order=tie))
    assert (finding.where.ranks, finding.confidence) == ((0, 1, 2, 3), Confidence.POSSIBLE)
    silent = {rank: hung(made("evens", EVENS, EVENS, None)) for rank in (0, 2)}
    assert found(rounds(in_order=silent)).confidence is Confidence.POSSIBLE


def test_other_count_of_groups_is_no_fault_where_all_is_good() -> None:
    def after(count: int) -> Outcome:
        seen = crumbs(made("evens", EVENS, EVENS, count))
        return Outcome(OutcomeStatus.OK, facts=OK, breadcrumbs=seen)

    assert judge(CHECK, rounds(in_order={r: after(9 if r else 3) for r in range(4)})) == []


ABORTED = {
    0: Outcome(OutcomeStatus.DIED, signal="SIGABRT", log_tail=CUT, breadcrumbs=crumbs(REDUCE)),
    **dict.fromkeys((1, 2, 3), raised(LOST)),
}


def test_rank_that_gloo_aborts_for_a_message_of_wrong_size_is_not_blamed_by_itself() -> None:
    cluster = rounds(every_use=ABORTED, in_order=ABORTED, in_turn={}, at_once={})
    finding = found(cluster)
    assert (finding.code, finding.where.ranks) == ("collective-failed", (0, 1, 2, 3))
    assert finding.confidence is Confidence.POSSIBLE
    assert CHECK.plan(cluster)[-1].name == "in-order-compared"


def test_rank_that_runs_another_collective_is_named_by_the_comparison() -> None:
    shown = {rank: compared(*((1004, 4) if rank == 1 else (4, 1004))) for rank in range(4)}
    cluster = rounds(
        every_use=ABORTED,
        in_order=ABORTED,
        in_turn=ABORTED,
        at_once=ABORTED,
        in_order_compared=shown,
    )
    finding = found(cluster)
    assert (finding.code, finding.where.ranks) == ("collective-failed", (1,))
    assert "allreduce of shape [1004] where 4 elements were requested" in finding.message
    assert [r.name for r in CHECK.plan(cluster)][-1] == "in-order-compared"
    assert found(rounds(in_order=shown)).where.ranks == (1,)  # torch compared from the start


def test_comparison_that_shows_nothing_blames_all() -> None:
    cluster = rounds(in_order=ABORTED, in_order_compared=ABORTED)
    assert found(cluster).where.ranks == (0, 1, 2, 3)
    odd = {0: raised("Rank 0 is running collective: CollectiveFingerPrint(")}
    assert found(rounds(in_order=odd)).code == "collective-failed"


def test_wrong_entry_names_the_giver_inside_a_further_group() -> None:
    bad = {
        "step": "all_reduce",
        "group": "odds",
        "members": [1, 3],
        "contributors": [1],
        "example": "element 1 is 9, not 2",
    }
    facts = {"steps": [], "wrong": [bad]}
    finding = found(rounds(in_order={1: facts, 3: facts}))
    assert (finding.code, finding.where.ranks) == ("collective-wrong-result", (3,))
    finding = found(rounds(in_order={1: facts}))
    assert finding.where.ranks == (1,)  # the others got the same data


def test_own_view_blames_nobody() -> None:
    assert judge(CHECK, replace(rounds(in_order=ALL_HUNG), complete=False)) == []


class Compared(int):
    """A seat that counts how often seats are compared."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_a_plan_looks_each_rank_up_without_a_search_through_all() -> None:
    cluster = make_cluster([f"nd{node}" for node in range(64)])
    ranks = tuple(replace(rank, seat=Compared(2 * rank.seat)) for rank in cluster.ranks)
    groups = CHECK.plan(replace(cluster, ranks=ranks))[0].params["groups"]
    assert from_span(groups["odds"]) == list(range(1, 128, 2))
    assert from_span(groups["across-hosts"]) == list(range(0, 128, 2))
    assert Compared.count < 1000  # 128 ranks; a search each is 16,000
