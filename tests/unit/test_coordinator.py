"""Which failures stop which groups: a link with both ends in it, or a bad member."""

from __future__ import annotations

import pytest

from nccl_doctor.gather.coordinator import touches
from nccl_doctor.model.findings import Finding, Kind, Layer, Where
from tests.support.clusters import make_cluster

KIND = Kind("some-fault", Layer.PORT, "title", "why", "fix")
CLUSTER = make_cluster(("a", "b", "c"), 2)  # seats 0 1 on a, 2 3 on b, 4 5 on c


@pytest.mark.parametrize(
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
    assert touches(Finding(KIND, "", where), CLUSTER, group) is stopped
