"""Rules of the side group on made-up clusters: ranks 0–2 train, rank 3 is the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Job, Level, Outcome, OutcomeStatus, Severity, Skip
from nccl_doctor.checks.side_group import SideGroup
from nccl_doctor.judge.status import check_results
from nccl_doctor.model.findings import Status
from nccl_doctor.toolkit.groups.side_group import serving_address
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only

CHECK = SideGroup()
WEIGHT_SYNC = Job(groups="weight-sync")
TORCH = "2.10.0+cu128"


def good(
    role: str = "trainer", bound: str | None = None, torch: str = TORCH, **facts: Any
) -> Outcome:
    said = {"role": role, "torch": torch, "deepspeed": None, "bound_device_id": bound}
    return Outcome(OutcomeStatus.OK, {**said, "steps": [], "wrong": [], **facts})


def stuck(
    step: str, group: str, bound: str | None = None, torch: str = TORCH, state: str = "S"
) -> Outcome:
    steps = ("init_process_group", step)
    return Outcome(
        OutcomeStatus.HUNG,
        breadcrumbs=tuple({"step": each, "at_s": 1.0, "group": group} for each in steps),
        witness={"default_group": {"bound_device_id": bound, "torch": torch, "deepspeed": None}},
        state=state,
        duration_s=20.0,
    )


def side_hangs(variant: str, bound: str | None = None, torch: str = TORCH) -> dict[int, Outcome]:
    """Rank 0 waits in the side group, the engine with it, and the other trainers for rank 0."""
    step = "all_reduce"
    waits = stuck(step, f"trainers ({variant})", bound, torch)
    side = stuck(step, f"side ({variant})", bound, torch)
    engine = replace(stuck("init_process_group", f"side ({variant})"), witness={})
    return {0: side, 1: waits, 2: waits, 3: engine}


def all_good(bound: str | None = None, torch: str = TORCH) -> dict[int, Outcome]:
    engine = good("engine", None, torch)
    return {**{rank: good(bound=bound, torch=torch) for rank in range(3)}, 3: engine}


def cluster(*, backend: str = "nccl", **rounds: dict[int, Outcome]) -> Cluster:
    """Two hosts of two ranks; `rounds` are outcomes by rank, `x_again` those of `x-again`."""
    made = make_cluster(backend=backend, job=WEIGHT_SYNC)
    for rank in made.ranks:
        held = {
            name.replace("_", "-"): outcome(replace(by_rank[rank.seat], group=0))
            for name, by_rank in rounds.items()
        }
        made = change_rank(made, rank.seat, facts={CHECK.name: held} if held else {})
    return made


def rounds(made: Cluster) -> list[str]:
    return [each.name for each in CHECK.plan(made)]


# --- plan ---


def test_all_ranks_take_part_once_with_gloo_and_once_more_bound_with_nccl() -> None:
    assert rounds(cluster()) == ["unbound", "bound"]
    (only_one,) = CHECK.plan(cluster(backend="gloo"))
    assert (only_one.name, only_one.groups) == ("unbound", ((0, 1, 2, 3),))
    assert only_one.params == {"one_host": False, "engine_addresses": ["192.168.77.2"]}
    (together,) = CHECK.plan(make_cluster(["nd0"], 2, job=WEIGHT_SYNC))
    assert together.params["one_host"]


def test_it_is_asked_for_by_the_job_or_by_the_level() -> None:
    for job in (Job(), Job(groups="many"), Job(groups="one"), Job(mesh=(("dp", 4),))):
        with pytest.raises(Skip, match="--groups weight-sync"):
            CHECK.plan(make_cluster(job=job))
    assert rounds(make_cluster(level=Level.FULL)) == ["unbound"]


def test_one_rank_cannot_be_a_trainer_and_an_engine() -> None:
    with pytest.raises(Skip, match="there is one"):
        CHECK.plan(make_cluster(["nd0"], 1, job=WEIGHT_SYNC))
    assert CHECK.plan(make_cluster(["nd0", "nd1"], 1, absent_nodes=[1], job=WEIGHT_SYNC)) == []


def test_a_check_that_was_not_asked_for_is_skipped_and_says_so() -> None:
    (result,) = check_results(make_cluster(), [CHECK], [])
    assert result.status is Status.SKIPPED
    assert "--groups weight-sync" in result.reason


def test_a_hang_is_tried_again_with_the_same_parameters() -> None:
    made = cluster(unbound=all_good(), bound=side_hangs("bound", "cuda:0"))
    assert rounds(made) == ["unbound", "bound", "bound-again"]
    assert all(each.params["engine_addresses"] for each in CHECK.plan(made))


def test_a_torch_that_binds_by_itself_is_tried_with_the_binding_taken_away() -> None:
    hang = side_hangs("unbound", "cuda:0", "2.15.0")
    made = cluster(unbound=hang, bound=side_hangs("bound", "cuda:0", "2.15.0"))
    assert "cleared" in rounds(made)
    assert "cleared" not in rounds(cluster(unbound=side_hangs("unbound")))
    assert "cleared" not in rounds(cluster(unbound=all_good("cuda:0", "2.15.0")))


# --- judge ---


def test_what_finishes_is_no_finding() -> None:
    assert judge(CHECK, cluster()) == []
    assert judge(CHECK, cluster(unbound=all_good(), bound=all_good("cuda:0"))) == []
    self_bound = all_good("cuda:0", "2.15.0")
    assert judge(CHECK, cluster(unbound=self_bound, bound=self_bound)) == []


def test_a_hang_of_the_bound_variant_alone_is_due_to_the_binding() -> None:
    hang = side_hangs("bound", "cuda:0")
    made = cluster(unbound=all_good(), bound=hang, bound_again=hang)
    found = only(CHECK, made, "device-id-multi-group-hang", hosts=["nd0", "nd1"], ranks=[0, 3])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert "all_reduce of group side (bound)" in found.message
    assert "without device_id it finishes" in found.message
    assert found.evidence["default_group"]["bound_device_id"] == "cuda:0"


@pytest.mark.parametrize(
    ("deepspeed", "words"),
    [
        (None, "form the default group without device_id"),
        ("0.17.2", "form the default group without device_id"),
        ("0.18.2", "before deepspeed.init_distributed()"),
    ],
)
def test_the_advice_is_that_for_the_versions(deepspeed: str | None, words: str) -> None:
    hang = side_hangs("bound", "cuda:0")
    said = {"bound_device_id": "cuda:0", "torch": TORCH, "deepspeed": deepspeed}
    for rank in range(3):
        hang[rank] = replace(hang[rank], witness={"default_group": said})
    (found,) = judge(CHECK, cluster(unbound=all_good(), bound=hang))
    assert words in found.to_json()["fix"]


def test_a_hang_that_does_not_come_again_is_a_warning() -> None:
    made = cluster(
        unbound=all_good(), bound=side_hangs("bound", "cuda:0"), bound_again=all_good("cuda:0")
    )
    found = only(CHECK, made, "device-id-multi-group-hang", hosts=["nd0", "nd1"], ranks=[0, 3])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.POSSIBLE)


def test_the_worse_of_two_variants_is_told() -> None:
    made = cluster(
        unbound=side_hangs("unbound"),
        unbound_again=all_good(),
        bound=side_hangs("bound", "cuda:0"),
        bound_again=side_hangs("bound-again", "cuda:0"),
    )
    found = only(CHECK, made, "collective-hang", hosts=["nd0", "nd1"], ranks=[0, 3])
    assert found.level is Severity.FAIL
    assert "side (bound)" in found.message


def test_a_bound_variant_that_raises_says_that_the_other_finishes() -> None:
    hang = side_hangs("bound", "cuda:0")
    first = Outcome(
        OutcomeStatus.RAISED,
        reason="RuntimeError: torch made no group",
        breadcrumbs=stuck("init_process_group", "side (bound)").breadcrumbs,
    )
    made = cluster(unbound=all_good(), bound={**hang, 0: first})
    found = only(CHECK, made, "group-init-failed", hosts=["nd0"], ranks=[0])
    assert "torch made no group; without device_id it finishes" in found.message


def test_where_both_hang_the_binding_is_not_blamed() -> None:
    made = cluster(unbound=side_hangs("unbound"), bound=side_hangs("bound", "cuda:0"))
    found = only(CHECK, made, "collective-hang", hosts=["nd0", "nd1"], ranks=[0, 3])
    assert "device_id" not in found.message


def test_a_torch_that_binds_by_itself_is_blamed_by_taking_the_binding_away() -> None:
    hang, torch = side_hangs("unbound", "cuda:0", "2.15.0"), "2.15.0"
    bound = side_hangs("bound", "cuda:0", torch)
    made = cluster(unbound=hang, bound=bound, cleared=all_good("cuda:0", torch))
    found = only(CHECK, made, "device-id-multi-group-hang", hosts=["nd0", "nd1"], ranks=[0, 3])
    assert "no device_id was passed: torch 2.15.0 itself bound the default group to cuda:0" in (
        found.message
    )
    assert "with that binding removed it finishes" in found.message
    assert "torch 2.15.0 binds by itself, so leaving out device_id is not enough" in found.fix


def test_a_torch_that_binds_by_itself_is_not_blamed_where_that_changes_nothing() -> None:
    hang = side_hangs("unbound", "cuda:0", "2.15.0")
    cleared = side_hangs("cleared", "cuda:0", "2.15.0")
    for made in (cluster(unbound=hang, cleared=cleared), cluster(unbound=hang)):
        found = only(CHECK, made, "collective-hang", hosts=["nd0", "nd1"], ranks=[0, 3])
        assert "no device_id was passed" in found.message


def test_a_side_group_that_never_forms_blames_its_two_ends_and_no_other_trainer() -> None:
    side = stuck("init_process_group", "side (unbound)")
    waits = stuck("all_reduce", "trainers (unbound)")
    made = cluster(backend="gloo", unbound={0: side, 1: waits, 2: waits, 3: side})
    only(CHECK, made, "group-init-hang", hosts=["nd0", "nd1"], ranks=[0, 3])


@pytest.mark.parametrize("lost", [(1,), (2,), (1, 2), (0, 1, 2)])
def test_trainers_that_lose_rank_0_at_the_deadline_are_not_blamed(lost: tuple[int, ...]) -> None:
    """Rank 0 waits in the side group; where it is killed first, a trainer loses its connection."""
    side = stuck("init_process_group", "side (unbound)")
    waits = stuck("all_reduce", "trainers (unbound)")
    ended = {0: side, 1: waits, 2: waits, 3: side}
    for rank in lost:
        words = "RuntimeError: Connection closed by peer [127.0.0.1]:42105"
        ended[rank] = replace(ended[rank], status=OutcomeStatus.RAISED, reason=words)
    made = cluster(backend="gloo", unbound=ended)
    only(CHECK, made, "group-init-hang", hosts=["nd0", "nd1"], ranks=[0, 3])


def test_trainers_that_hang_among_themselves_leave_the_engine_alone() -> None:
    """It waits to be told where the store is; that is no fault of its own."""
    trainer = stuck("init_process_group", "trainers (unbound)")
    engine = stuck("connect to the store", "side (unbound)")
    made = cluster(backend="gloo", unbound={0: trainer, 1: trainer, 2: trainer, 3: engine})
    only(CHECK, made, "group-init-hang", hosts=["nd0", "nd1"], ranks=[0, 1, 2])


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_whoever_freezes_or_dies_is_named_whatever_its_role(rank: int) -> None:
    host = ["nd0"] if rank < 2 else ["nd1"]
    waits = side_hangs("unbound")
    frozen = {**waits, rank: replace(waits[rank], state="T")}
    only(CHECK, cluster(unbound=frozen), "rank-frozen", hosts=host, ranks=[rank])
    both = cluster(unbound=frozen, bound=frozen)
    only(CHECK, both, "rank-frozen", hosts=host, ranks=[rank])
    died = Outcome(OutcomeStatus.DIED, signal="SIGSEGV", breadcrumbs=waits[rank].breadcrumbs)
    dead = cluster(unbound=all_good(), bound={**side_hangs("bound", "cuda:0"), rank: died})
    only(CHECK, dead, "rank-crashed", hosts=host, ranks=[rank])


def test_an_engine_that_cannot_reach_the_store_is_named_with_the_address() -> None:
    words = "Traceback …\nRuntimeError: cannot reach the trainer's store at 10.0.0.1:4000: dropped"
    engine = Outcome(
        OutcomeStatus.RAISED,
        reason=words,
        breadcrumbs=stuck("connect to the store", "side (unbound)").breadcrumbs,
    )
    made = cluster(backend="gloo", unbound={**side_hangs("unbound"), 3: engine})
    found = only(CHECK, made, "group-init-failed", hosts=["nd1"], ranks=[3])
    assert "10.0.0.1:4000: dropped" in found.message


def test_wrong_data_is_blamed_on_whoever_gave_it_in_its_own_group() -> None:
    def seen(group: str, giver: int) -> dict[str, Any]:
        return {
            "step": "all_reduce",
            "group": group,
            "contributors": [giver],
            "example": "element 1 is 3, not 2",
        }

    side = [seen("side (unbound)", 1)]
    engine = {**all_good(), 0: good(wrong=side), 3: good("engine", wrong=side)}
    made = cluster(backend="gloo", unbound=engine)
    only(CHECK, made, "collective-wrong-result", hosts=["nd1"], ranks=[3])
    ours = [seen("trainers (unbound)", 1)]
    trainer = {**all_good(), **{rank: good(wrong=ours) for rank in range(3)}}
    made = cluster(backend="gloo", unbound=trainer)
    only(CHECK, made, "collective-wrong-result", hosts=["nd0"], ranks=[1])


def test_a_rank_that_never_came_is_named_and_those_that_waited_are_not() -> None:
    gone = Outcome(
        OutcomeStatus.HUNG,
        breadcrumbs=({"step": "connect to the store", "at_s": 0.1},),
        state="S",
        duration_s=20.0,
    )
    forming = stuck("init_process_group", "trainers (unbound)")
    made = cluster(unbound={0: forming, 1: forming, 2: gone, 3: side_hangs("unbound")[3]})
    only(CHECK, made, "rank-frozen", hosts=["nd1"], ranks=[2])


def test_a_hang_without_any_breadcrumb_is_one_of_all() -> None:
    mute = Outcome(OutcomeStatus.HUNG, state="S", duration_s=20.0)
    made = cluster(backend="gloo", unbound=dict.fromkeys(range(4), mute))
    (found,) = judge(CHECK, made)
    assert found.where.ranks == (0, 1, 2, 3)


def test_half_a_cluster_is_not_judged() -> None:
    made = replace(cluster(unbound=side_hangs("unbound")), complete=False)
    assert judge(CHECK, made) == []


# --- where the store is served ---


def test_the_store_is_served_where_the_master_address_leads_if_that_is_here() -> None:
    own = lambda: ("127.0.0.1", "192.0.2.7")  # noqa: E731
    assert serving_address("192.0.2.7", (), loopback=False, own=own) == "192.0.2.7"
    assert serving_address("127.0.0.1", (), loopback=True, own=own) == "127.0.0.1"


def test_else_at_the_address_that_this_host_sends_from() -> None:
    found = serving_address("192.0.2.9", ["127.0.0.1"], loopback=True, own=lambda: ("127.0.0.1",))
    assert found == "127.0.0.1"


def test_a_loopback_address_is_given_to_no_other_host() -> None:
    with pytest.raises(RuntimeError, match=r"MASTER_ADDR 127\.0\.0\.1 resolves to 127\.0\.0\.1"):
        serving_address("127.0.0.1", (), loopback=False, own=lambda: ("127.0.0.1",))
    with pytest.raises(RuntimeError, match=r"MASTER_ADDR \(unset\) resolves to nothing"):
        serving_address("", (), loopback=True, own=tuple)
