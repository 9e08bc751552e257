"""Rules of the collectives check on made-up clusters: the culprit is named, never a victim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.judge.causes import explain
from nccl_doctor.model.cluster import ALONE, Cluster, Outcome, OutcomeStatus
from nccl_doctor.model.findings import (
    Confidence,
    Finding,
    Kind,
    Layer,
    Round,
    Severity,
    Where,
)
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster

CHECK = CHECKS["collectives"]
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


def add_round(
    cluster: Cluster, name: str, by_rank: dict[int, Any], *, alone: bool = False
) -> Cluster:
    """The same cluster with the outcomes of one more round; `each-host` has a group per host,
    and `alone` is one of single ranks.
    """
    other = cluster_of(by_rank, name)
    for rank in other.ranks if alone or name == "each-host" else ():
        group = rank.seat if alone else 2 * rank.host.id
        rounds = rank.facts["collectives"]
        rounds[name] = replace(rounds[name], group=group)
    facts = {
        rank.seat: {
            "collectives": {
                **rank.facts.get("collectives", {}),
                **{k: v for k, v in twin.facts["collectives"].items() if rank.rank in by_rank},
            }
        }
        for rank, twin in zip(cluster.ranks, other.ranks, strict=True)
    }
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
    late = hung(steps=crumbs("connect to the store"))
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


HANGS = dict.fromkeys(range(4), hung())
FINE = dict.fromkeys(range(4), OK)


def last_round(cluster: Cluster) -> str:
    return CHECK.plan(cluster)[-1].name


def test_hang_between_two_hosts_blames_what_is_between_them_and_says_that_it_cannot_tell() -> None:
    for steps, code in ((FORMING, "group-init-hang"), (ENTERED, "collective-hang")):
        bad = dict.fromkeys(range(4), hung(steps=steps))
        cluster = cluster_of(bad)
        assert last_round(cluster) == "each-host"
        cluster = add_round(cluster, "each-host", FINE)
        assert last_round(cluster) == "world-again"
        cluster = add_round(cluster, "world-again", bad)
        assert last_round(cluster) == "world-again"
        (found,) = judge(cluster)
        assert found.code == code
        assert found.where.links == (("nd0", "nd1"), ("nd1", "nd0"))
        assert (found.where.hosts, found.where.ranks) == ((), ())
        assert found.confidence.value == "possible"


def test_hang_of_which_nothing_else_is_known_blames_the_group() -> None:
    (found,) = judge(cluster_of(HANGS))
    assert (found.code, found.where.ranks) == ("collective-hang", (0, 1, 2, 3))
    assert found.confidence.value == "possible"


def test_hang_is_tried_again_and_a_good_second_attempt_makes_it_a_warning() -> None:
    cluster = add_round(cluster_of(HANGS), "each-host", FINE)
    again = add_round(cluster, "world-again", FINE)
    assert last_round(again) == "world-again"
    (found,) = judge(again)
    assert (found.code, found.level) == ("collective-hang", Severity.WARN)
    assert found.kind.title == "A group failed or hung once, and worked when it was tried again"
    assert "once; it finished when tried again" in found.message


def test_one_hang_in_three_is_no_cause_of_anything() -> None:
    """A hang that came once explains no other warning, and nothing is blamed for it."""
    cluster = add_round(cluster_of(HANGS), "each-host", FINE)
    (once,) = judge(add_round(cluster, "world-again", FINE))
    assert (once.confidence.value, once.where.hosts) == ("possible", ("nd0", "nd1"))
    slow = Finding(Kind("x-slow", Layer.SPEED, "t", "w", "f", Severity.WARN), "m", once.where)
    explained = {each.code: each.explained_by for each in explain([once, slow], cluster)}
    assert explained == {"collective-hang": None, "x-slow": None}
    sure = once.replaced(confidence=Confidence.LIKELY)
    explained = {each.code: each.explained_by for each in explain([sure, slow], cluster)}
    assert explained["x-slow"] == "collective-hang"


def test_ranks_that_run_different_collectives_are_a_fault_of_the_program() -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch compares the sequence numbers of the ranks."""
    text = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank {0} is running "
        "collective: CollectiveFingerPrint(SequenceNumber={1}, OpType=ALLREDUCE, TensorShape=[8], "
        "TensorDtypes=Long, TensorDeviceTypes=TensorOptions(dtype=float (default)))"
    )
    numbers = {0: 3, 1: 3, 2: 4, 3: 4}
    (found,) = judge(cluster_of({r: raised(text.format(r, n)) for r, n in numbers.items()}))
    assert (found.code, found.where.ranks) == ("collective-failed", (0, 1, 2, 3))
    assert found.confidence.value == "possible"
    assert "a fault of the program, not of the cluster" in found.fix


def test_host_that_hangs_by_itself_is_looked_into_rank_by_rank() -> None:
    cluster = add_round(cluster_of(HANGS), "each-host", {0: OK, 1: OK, 2: hung(), 3: hung()})
    (found,) = judge(cluster)
    assert (found.code, found.where.hosts, found.where.ranks) == ("collective-hang", ("nd1",), ())
    assert CHECK.plan(cluster)[-1].groups == ((2,), (3,))
    cluster = add_round(cluster, "isolate-1", {2: OK, 3: hung()}, alone=True)
    (found,) = judge(cluster)
    assert (found.code, found.where.hosts, found.where.ranks) == (
        "collective-hang",
        ("nd1",),
        (3,),
    )
    assert found.confidence.value == "certain"


def test_group_that_had_no_time_blames_nobody() -> None:
    cluster = add_round(cluster_of(HANGS), "each-host", {0: OK, 1: OK, 2: hung(), 3: hung()})
    ended = replace(hung(), duration_s=0.4)
    (found,) = judge(add_round(cluster, "isolate-1", {2: OK, 3: ended}, alone=True))
    assert (found.code, found.where.hosts, found.where.ranks) == ("collective-hang", ("nd1",), ())


def test_rank_that_dies_in_a_smaller_group_explains_the_whole() -> None:
    cluster = add_round(cluster_of(HANGS), "each-host", {0: OK, 1: OK, 2: died(), 3: VICTIM})
    assert last_round(cluster) == "each-host"
    (found,) = judge(cluster)
    assert (found.code, found.where.ranks) == ("rank-crashed", (2,))


def test_own_error_is_blamed_and_not_the_ones_that_lost_their_peer() -> None:
    own = raised("RuntimeError: CUDA error: out of memory")
    (found,) = judge(cluster_of({0: VICTIM, 1: VICTIM, 2: own, 3: VICTIM}))
    assert (found.code, found.where.ranks) == ("collective-failed", (2,))
    assert "out of memory" in found.message
    (found,) = judge(cluster_of(dict.fromkeys(range(4), raised("ValueError: bad", steps=FORMING))))
    assert (found.code, found.where.ranks) == ("group-init-failed", (0, 1, 2, 3))


def test_rank_that_does_not_reach_the_store_is_a_link_and_no_host() -> None:
    at_the_store = crumbs("connect to the store")
    lost = raised("StoreLost: The client socket has timed out", steps=at_the_store)
    waits = hung(steps=FORMING)
    (found,) = judge(cluster_of({0: waits, 1: waits, 2: lost, 3: lost}))
    assert (found.code, found.where) == ("group-init-failed", Where(links=(("nd1", "nd0"),)))
    slow = hung(steps=at_the_store)
    (found,) = judge(cluster_of({0: waits, 1: waits, 2: slow, 3: slow}))
    assert (found.code, found.where) == ("group-init-hang", Where(links=(("nd1", "nd0"),)))
    assert found.message == "no connection to the store of group world within 20 s"


def test_rank_that_does_not_reach_the_store_of_its_own_host_is_named() -> None:
    slow = hung(steps=crumbs("connect to the store"))
    waits = hung(steps=FORMING)
    (found,) = judge(cluster_of({0: waits, 1: slow, 2: waits, 3: waits}))
    assert (found.code, found.where.ranks) == ("rank-frozen", (1,))


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
    cluster = make_cluster(("a", "b", "c"), 2)
    (world,) = CHECK.plan(cluster)
    assert world.groups == ((0, 1, 2, 3, 4, 5),)


def test_only_nccl_takes_other_ways_inside_hosts_and_across_them() -> None:
    good = make_cluster(
        ("a", "b", "c"),
        2,
        check="collectives",
        by_rank=dict.fromkeys(range(6), OK),
        round_name="world",
    )
    assert [round_.name for round_ in CHECK.plan(good)] == ["world"]
    rounds = {r.name: r for r in CHECK.plan(replace(good, backend="nccl"))}
    assert rounds["each-host"].groups == ((0, 1), (2, 3), (4, 5))
    assert rounds["across-hosts"].groups == ((0, 2, 4),)


class Held:
    """A made-up cluster whose rounds are held as the check plans them, until it wants no more."""

    def __init__(self, hosts: int, nproc: int, bad: Any, how: Outcome | None = None) -> None:
        """`bad` tells of a set of seats whether they hang; `how` is what each then leaves."""
        self.cluster = make_cluster([f"nd{i}" for i in range(hosts)], nproc)
        self.rounds: list[Round] = []
        how = how or hung()
        while due := [r for r in CHECK.plan(self.cluster) if r.name not in self.names]:
            for round_ in due:
                self.rounds.append(round_)
                for group in round_.groups:
                    status = how if bad(set(group)) else Outcome(OutcomeStatus.OK, facts=OK)
                    self._record(round_, group, status)

    @property
    def names(self) -> list[str]:
        return [r.name for r in self.rounds]

    def _record(self, round_: Round, group: tuple[int, ...], outcome: Outcome) -> None:
        ranks = []
        for rank in self.cluster.ranks:
            if rank.seat in group:
                took_s = 1.0 if outcome.status is OutcomeStatus.OK else round_.deadline_s
                done = replace(outcome, group=min(group), duration_s=took_s)
                rounds = {**rank.facts.get("collectives", {}), round_.name: done}
                rank = replace(rank, facts={"collectives": rounds})
            ranks.append(rank)
        self.cluster = replace(self.cluster, ranks=tuple(ranks))

    def only(self) -> Finding:
        (found,) = judge(self.cluster)
        return found


def test_broken_link_is_named_with_both_ends_good() -> None:
    held = Held(4, 2, lambda group: bool(group & {2, 3}) and bool(group & {4, 5}))
    found = held.only()
    assert (found.code, found.confidence.value) == ("collective-hang", "certain")
    assert found.where.links == (("nd1", "nd2"), ("nd2", "nd1"))
    assert (found.where.hosts, found.where.ranks) == ((), ())
    assert held.names == ["world", "each-host", "isolate-1", "isolate-2", "isolate-3"]
    told = {r["round"]: r for r in found.evidence["isolation"]["rounds"]}
    assert told["isolate-1"] == {"round": "isolate-1", "good": 2, "bad": 0, "ranks": []}
    assert told["isolate-3"]["ranks"] == ["2–5"]
    assert "across-hosts" not in held.names


def test_rounds_of_isolation_are_short_once_it_is_known_how_long_good_groups_take() -> None:
    held = Held(4, 2, lambda group: bool(group & {2, 3}) and bool(group & {4, 5}))
    deadlines = {r.name: r.deadline_s for r in held.rounds}
    assert deadlines["world"] == deadlines["each-host"] == 20.0
    assert deadlines["isolate-1"] == 10.0  # 5 x 1 s, and groups twice as large as the good ones
    assert deadlines["isolate-2"] == 5.0


def test_host_that_works_with_no_other_is_named() -> None:
    held = Held(5, 2, lambda group: bool(group & {6, 7}) and bool(group - {6, 7}))
    found = held.only()
    assert (found.where.hosts, found.where.links) == (("nd3",), ())
    assert found.confidence.value == "certain"


def test_ranks_of_one_host_are_told_apart() -> None:
    held = Held(1, 4, lambda group: 2 in group)
    found = held.only()
    assert (found.where.hosts, found.where.ranks) == (("nd0",), (2,))


def test_two_faults_are_both_named() -> None:
    def bad(group: set[int]) -> bool:
        return 5 in group or (bool(group & {12, 13}) and bool(group & {20, 21}))

    found = judge(Held(12, 2, bad).cluster)
    assert {f.where.ranks for f in found} == {(), (5,)}
    assert [f.where.links for f in found if f.where.links] == [(("nd10", "nd6"), ("nd6", "nd10"))]


def test_fault_of_size_blames_no_host() -> None:
    found = Held(8, 2, lambda group: len(group) > 10).only()
    assert "fails only above 10 ranks" in found.message
    assert found.where.ranks == tuple(range(16))
    assert found.confidence.value == "likely"


def test_fault_of_large_messages_is_said_to_be_one() -> None:
    stuck = hung(
        steps=(
            *FORMING,
            {"step": "all_reduce", "at_s": 1.0, "bytes": 64},
            {"step": "all_reduce", "at_s": 1.1, "bytes": 32768},
        )
    )
    cut = Held(4, 2, lambda g: bool(g & {2, 3}) and bool(g & {4, 5}), stuck).only()
    assert "64 bytes pass, 32768 do not" in cut.message


def test_victims_that_lost_their_peers_are_isolated_too() -> None:
    held = Held(4, 1, lambda group: {1, 2} <= group, VICTIM)
    found = held.only()
    assert (found.code, found.where.links) == (
        "collective-failed",
        (("nd1", "nd2"), ("nd2", "nd1")),
    )


def test_isolation_ends_when_it_took_too_long() -> None:
    held = Held(256, 1, lambda group: len(group & set(range(0, 256, 3))) > 1)
    assert sum(r.deadline_s for r in held.rounds[1:-1]) <= 3 * 20.0
    assert judge(held.cluster)


def test_plan_leaves_out_absent_ranks() -> None:
    rounds = {r.name: r for r in CHECK.plan(make_cluster(absent_nodes=[1]))}
    assert rounds["world"].groups == ((0, 1),)
    assert ALONE not in rounds
