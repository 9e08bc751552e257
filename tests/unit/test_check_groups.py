"""Rules of the groups check on made-up clusters."""

from __future__ import annotations

from nccl_doctor.checks.groups import Groups
from tests.clusters import make_cluster

CHECK = Groups()


def test_every_further_group_is_named_by_the_ranks_of_the_default_one() -> None:
    (round_,) = CHECK.plan(make_cluster(("nd0", "nd1"), 2))
    assert round_.groups == ((0, 1, 2, 3),)
    assert round_.params["groups"] == {
        "world": [0, 1, 2, 3],
        "evens": [0, 2],
        "odds": [1, 3],
        "across-hosts": [0, 2],
    }
