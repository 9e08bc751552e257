"""Which failures stop which groups: a link with both ends in it, or a bad member."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nccl_doctor.gather.coordinator import hung_within, longest_round
from nccl_doctor.gather.examine import SETTLE_S
from nccl_doctor.gather.rounds import CALLS_S, touches
from nccl_doctor.model.cluster import Outcome, OutcomeStatus, Rank
from nccl_doctor.model.findings import Finding, Kind, Layer, Round, Where
from tests.support.clusters import make_cluster
from tests.support.rows import each_row

KIND = Kind("some-fault", Layer.PORT, "title", "why", "fix")
CLUSTER = make_cluster(("a", "b", "c"), 2)  # seats 0 1 on a, 2 3 on b, 4 5 on c


def members(group: tuple[int, ...]) -> list[Rank]:
    return [rank for rank in CLUSTER.present if rank.seat in group]


@each_row(
    ("where", "group", "stopped"),
    [
        (Where(), (0, 1), True),  # everywhere
        (Where(hosts=("a",)), (0, 2), True),
        (Where(hosts=("a",)), (2, 4), False),
        (Where(ranks=(3,)), (2, 3), True),
        (Where(ranks=(3,), hosts=("b",)), (2, 4), False),  # the rank, not its whole host
        (Where(links=(("a", "b"),)), (0, 2, 4), True),
        (Where(links=(("a", "b"),)), (0, 1), False),  # one end only
        (Where(links=(("a", "b"),), hosts=("a",)), (0, 1), False),  # its own ranks still meet
        (Where(links=(("a", "b"),)), (0, 4), False),
        (Where(nodes=(7,)), (0, 1), False),  # a host that never came
    ],
)
def test_what_stops_a_group(where: Where, group: tuple[int, ...], stopped: bool) -> None:
    round_ = Round("all", (group,), 1.0)
    assert touches(Finding(KIND, "", where), members(group), round_) is stopped


@each_row(
    ("links", "stopped"),
    [
        ([("a", "b")], False),
        ([("b", "a"), ("c", "b")], True),
        ([("a", "nowhere")], False),
    ],
)
def test_a_link_that_no_pair_of_a_round_needs_does_not_stop_it(
    links: list[tuple[str, str]], stopped: bool
) -> None:
    round_ = Round("all", ((0, 2, 4),), 1.0, pairs=[(0, 4), (2, 4)])
    finding = Finding(KIND, "", Where(links=tuple(links)))
    assert touches(finding, members((0, 2, 4)), round_) is stopped


@pytest.mark.parametrize("left_s", [5.5, 8.0, 12.0, 20.0, 300.0])
def test_a_round_in_which_somebody_is_lost_leaves_time_to_look_again(left_s: float) -> None:
    longest = longest_round(left_s)
    assert 0 < longest <= left_s - SETTLE_S
    if left_s > 15:
        assert left_s - longest - SETTLE_S > CALLS_S


def test_no_round_is_held_without_time() -> None:
    assert longest_round(SETTLE_S) <= 0


def test_nothing_hangs_for_which_the_run_had_less_time_than_planned() -> None:
    crumbs = ({"step": "all_reduce"},)
    hung, done = Outcome(OutcomeStatus.HUNG, breadcrumbs=crumbs), Outcome(OutcomeStatus.OK)
    cut = hung_within(hung, 81.0, 38.2, 120.0)
    assert cut.status is OutcomeStatus.UNTESTED
    assert cut.reason == (
        "not done with all_reduce after 38 s: the run had no more left for it, and not 81 s: "
        "give --timeout 170 or more"
    )
    assert hung_within(hung, 8.0, 2.0, 20.0).status is OutcomeStatus.UNTESTED
    assert hung_within(hung, 81.0, 81.0, 120.0) == hung
    assert hung_within(done, 81.0, 38.2, 120.0) == done
    stopped, waits = replace(hung, state="T"), replace(hung, state="S")
    assert hung_within(stopped, 81.0, 38.2, 120.0) == stopped
    assert hung_within(waits, 81.0, 38.2, 120.0).status is OutcomeStatus.UNTESTED
