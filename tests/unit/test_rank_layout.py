"""Which ranks run where, from what the hosts claim."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.model.layout import Claim, HostPlace, agree, backend_of_all, elastic_size, lay_out
from tests.support.rows import each_row


def claims(*told: tuple[int | None, int], nnodes: int | None = None) -> list[Claim]:
    """Claims of hosts in order of seat, each (node rank, number of ranks)."""
    size = len(told) if nnodes is None else nnodes
    return [Claim(seat, node, size, nproc) for seat, (node, nproc) in enumerate(told)]


def test_uneven_hosts_are_numbered_in_order_of_node_rank() -> None:
    layout = lay_out(claims((0, 2), (2, 4), (1, 1)), 3)
    assert layout.world_size == 7
    assert layout.seats == {
        0: HostPlace(0, 0, 2, 7),
        2: HostPlace(1, 2, 1, 7),
        1: HostPlace(2, 3, 4, 7),
    }
    assert layout.home_of(4) == (2, 1)
    assert layout.home_of(7) == (None, None)


def test_an_absent_host_is_taken_to_be_like_most_others() -> None:
    layout = lay_out(claims((0, 8), (1, 4), (3, 8), nnodes=4), 4)
    assert [place.first_rank for place in layout.nodes] == [0, 8, 12, 20]
    assert layout.nodes[2].nproc == 8
    assert layout.ranks_here == {*range(12), *range(20, 28)}


def test_hosts_without_a_node_rank_take_what_is_free() -> None:
    layout = lay_out(claims((0, 1), (None, 1), (2, 1), (None, 1)), 4)
    assert {seat: place.node_rank for seat, place in layout.seats.items()} == {
        0: 0,
        1: 1,
        2: 2,
        3: 3,
    }


def test_hosts_that_claim_one_node_share_its_place() -> None:
    both = claims((0, 2), (0, 2))
    layout = lay_out(both, 2)
    assert layout.seats[0] == layout.seats[1] == HostPlace(0, 0, 2, 4)
    assert not agree(both, 2)


def test_what_cannot_be_one_job() -> None:
    assert agree(claims((0, 1), (1, 8)), 2)
    assert agree(claims((0, 1), nnodes=2), 2)
    assert not agree(claims((0, 1), (2, 1)), 2)
    assert not agree([Claim(0, 0, 2, 1), Claim(1, 1, 3, 1)], 2)
    assert not agree(claims((0, 1), (None, 1), (None, 1), nnodes=2), 2)
    assert lay_out([Claim(0, 0, 2, 1), Claim(1, 2, 3, 1)], 2).nodes[2].nproc == 1


def of_elastic(*nodes: int | None, nnodes: int = 4) -> list[Claim]:
    return [Claim(seat, node, nnodes, 2) for seat, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("claims", "refused", "size"),
    [
        (of_elastic(0, None, None, None), 0, 0),  # all
        (of_elastic(0, None, None), 0, 3),  # enough
        (of_elastic(0), 0, 2),  # one of the least number is missing
        (of_elastic(0, None, None), 1, 0),  # was that the fourth?
        (of_elastic(0, 3), 0, 0),  # its number says that there are four
        ([*of_elastic(0), *of_elastic(None, nnodes=8)], 0, 0),  # they contradict each other
    ],
)
def test_an_elastic_job_has_the_hosts_that_are_here(
    claims: list[Claim], refused: int, size: int
) -> None:
    assert elastic_size(claims, 4, 2, refused) == size
    layout = lay_out(claims, 4, size)
    assert len(layout.nodes) == (size or 4)
    assert {place.nnodes for place in layout.nodes} == {size}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_every_rank_has_exactly_one_home(sizes: list[int], random: object) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    layout = lay_out(
        [Claim(seat, node, len(sizes), sizes[node]) for seat, node in enumerate(order)], len(sizes)
    )
    homes = [layout.home_of(rank) for rank in range(layout.world_size)]
    assert homes == [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    assert layout.ranks_here == set(range(sum(sizes)))


@each_row(
    ("told", "own", "backend"),
    [
        ([("auto", "cpu"), ("auto", "cuda")], "gloo", "nccl"),  # the host that decides lacks GPUs
        ([("auto", "cuda"), ("auto", "cpu"), ("auto", "cpu")], "nccl", "nccl"),
        ([("auto", "cpu"), ("auto", "cpu")], "gloo", "gloo"),
        ([("gloo", "cpu"), ("auto", "cuda"), ("auto", "cuda")], "gloo", "gloo"),
        ([("auto", "cpu"), ("nccl", "cpu")], "gloo", "nccl"),
        ([("gloo", "cuda"), ("nccl", "cuda"), ("nccl", "cuda")], "gloo", "nccl"),
        ([("gloo", "cuda"), ("nccl", "cuda")], "gloo", "gloo"),
        ([("nccl", "cuda"), ("gloo", "cuda")], "nccl", "nccl"),
        ([("", "cuda"), ("", "cpu")], "gloo", "gloo"),  # of an older version
        ([("", "cuda"), ("auto", None)], "nccl", "nccl"),
        ([], "nccl", "nccl"),
    ],
)
def test_the_backend_of_all(told: list[tuple[str, str | None]], own: str, backend: str) -> None:
    assert backend_of_all(told, own) == backend
