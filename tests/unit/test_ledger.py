"""What a coordinator makes of the letters of hosts of the own launcher."""

from __future__ import annotations

from typing import Any

from nccl_doctor.gather.evidence import Ledger
from nccl_doctor.launch.host_launch import host_launch
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.layout import Claim, lay_out
from nccl_doctor.model.options import Flags, Options


def letter(node: int, nproc: int, **facts: Any) -> dict[str, Any]:
    flags = Flags(nnodes=3, node_rank=node, master_addr="nd0", nproc_per_node=str(nproc))
    return {
        "token": f"token of {node}",
        "pid": 100 + node,
        "launch": host_launch(flags, nproc).to_json(),
        "env": {},
        "device": "cpu",
        "host": {"name": f"nd{node}", "key": f"key {node}", "addresses": []},
        "facts": facts,
    }


def called(*came: tuple[int, int]) -> Ledger:
    """A roll call that was closed when these hosts (node rank, ranks) had come."""
    first = letter(*came[0])
    flags = Flags(nnodes=3, node_rank=0, master_addr="nd0")
    ledger = Ledger(host_launch(flags, came[0][1]), {}, {})
    claims = []
    for seat, (node, nproc) in enumerate(came):
        ledger.sign_in(seat, letter(node, nproc) if seat else first, float(seat))
        claims.append(Claim(seat, node, 3, nproc))
    ledger.lay_out(lay_out(claims, 3))
    return ledger


def ranks_of(cluster: Cluster) -> list[tuple[int | None, str, bool]]:
    return [(rank.rank, rank.host.label, rank.reported) for rank in cluster.ranks]


def test_absent_ranks_are_those_of_absent_hosts_and_of_siblings() -> None:
    ledger = called((0, 2), (2, 2))
    assert ledger.ranks_here() == {0, 4}
    assert ranks_of(ledger.cluster(Options(), "gloo")) == [
        (0, "nd0", True),
        (4, "nd2", True),
        (1, "nd0", False),
        (2, "node 1", False),
        (3, "node 1", False),
        (5, "nd2", False),
    ]


def test_a_host_that_comes_after_the_places_were_given_does_not_join() -> None:
    ledger = called((0, 2), (2, 2))
    ledger.sign_in(7, letter(1, 2), 61.0)
    assert ledger.knows(7)
    assert ledger.seats == (0, 1)
    cluster = ledger.cluster(Options(), "gloo")
    assert {host.name: host.joined for host in cluster.hosts} == {
        "nd0": True,
        "nd1": False,
        "nd2": True,
    }
    # Its ranks have the numbers that its place would have given them.
    assert [(rank.rank, rank.reported) for rank in cluster.ranks if rank.host.name == "nd1"] == [
        (2, True),
        (3, False),
    ]


def test_ranks_that_a_host_forked_came_with_their_host() -> None:
    ledger = called((0, 2), (1, 2), (2, 2))
    sibling = letter(1, 2)
    sibling["launch"] = {**sibling["launch"], "rank": 3, "local_rank": 1}
    ledger.sign_in(3, sibling, 9.5)
    cluster = ledger.cluster(Options(), "gloo")
    came = {rank.rank: rank.signed_in_s for rank in cluster.present}
    assert came == {0: 0.0, 2: 1.0, 3: 1.0, 4: 2.0}
