"""The groups of a device mesh, the meshes that fit a world, and the hosts that groups span."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.toolkit.mesh import (
    Mesh,
    mesh_groups,
    mesh_size,
    nearest_meshes,
    order_inside,
    own_groups,
    ranks_in_words,
    spans,
)
from tests.support.rows import each_row

pytestmark = pytest.mark.xdist_group("torch")

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def mesh_of(*sizes: int) -> Mesh:
    return tuple((f"d{at}", size) for at, size in enumerate(sizes))


def ranks_of(mesh: Mesh) -> dict[str, list[list[int]]]:
    return {name: [list(g.ranks) for g in found] for name, found in mesh_groups(mesh).items()}


def test_ranks_lie_in_row_major_order():
    assert ranks_of([("dp", 2), ("sp", 2), ("tp", 2)]) == {
        "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "sp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    assert ranks_of([("dp", 3)]) == {"dp": [[0, 1, 2]]}
    assert ranks_of([("dp", 2), ("sp", 1)]) == {"dp": [[0, 1]], "sp": [[0], [1]]}


@given(SIZES)
def test_every_rank_is_in_one_group_of_each_dimension(sizes: list[int]):
    mesh = mesh_of(*sizes)
    everybody = list(range(mesh_size(mesh)))
    for (name, size), found in zip(mesh, mesh_groups(mesh).values(), strict=True):
        assert [group.index for group in found] == list(range(len(found)))
        assert {len(group.ranks) for group in found} == {size}
        assert sorted(rank for group in found for rank in group.ranks) == everybody
        for group in found:
            for rank in group.ranks:
                assert group in own_groups(mesh, rank)
        assert {group.dimension for group in found} == {name}


@given(SIZES)
def test_two_groups_of_different_dimensions_share_one_rank_at_most(sizes: list[int]):
    mesh = mesh_of(*sizes)
    for rank in range(mesh_size(mesh)):
        mine = own_groups(mesh, rank)
        for one in mine:
            for other in mine:
                if one.dimension != other.dimension:
                    assert set(one.ranks) & set(other.ranks) == {rank}


def test_torch_lays_ranks_out_the_same_way():
    torch = pytest.importorskip("torch")
    sizes = (2, 3, 4)
    grid = torch.arange(24).reshape(sizes)
    for at, found in enumerate(mesh_groups(mesh_of(*sizes)).values()):
        rows = grid.swapdims(-1, at).reshape(-1, sizes[at]).tolist()
        assert sorted(rows) == [list(group.ranks) for group in found]


NEAREST = [
    # One size changes, the outermost first.
    ("3,2", 8, "4,2"),
    ("4,4", 8, "2,4 4,2"),
    ("2,2,2", 16, "4,2,2 2,4,2 2,2,4"),
    ("2,4", 6, "2,3"),
    ("2", 7, "7"),
    # No single one will do: two, those that change least.
    ("3,3,2", 8, "2,2,2"),
    ("2,4", 7, "1,7 7,1"),
    # Nothing of it fits.
    ("3,3,3", 8, "2,2,2"),
    ("4,2", 1, "1,1"),
]


@each_row(("sizes", "world", "nearest"), NEAREST)
def test_nearest_sizes(sizes: str, world: int, nearest: str):
    found = nearest_meshes(mesh_of(*map(int, sizes.split(","))), world)
    told = [",".join(str(size) for _, size in other) for other in found]
    first = nearest.split()
    assert told[: len(first)] == first


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 5000))
def test_what_is_offered_always_fits(sizes: list[int], world: int):
    mesh = mesh_of(*sizes)
    found = nearest_meshes(mesh, world)
    assert 1 <= len(found) <= 3
    assert len(set(found)) == len(found)
    for other in found:
        assert math.prod(size for _, size in other) == world
        assert [name for name, _ in other] == [name for name, _ in mesh]
    if mesh_size(mesh) == world:
        assert found[0] == mesh


def test_no_mesh_and_no_world_have_nothing_near():
    assert nearest_meshes((), 4) == []
    assert nearest_meshes(mesh_of(2), 0) == []


def test_ranks_in_words():
    assert ranks_in_words(range(4, 8)) == "ranks 4–7"
    assert ranks_in_words(range(0, 32, 8)) == "ranks 0, 8, 16, 24"
    assert ranks_in_words(range(0, 4096, 8)) == "ranks 0, 8, …, 4088"
    assert ranks_in_words(range(3, 4)) == "rank 3"
    assert mesh_groups([("dp", 2), ("tp", 2)])["tp"][1].name == "tp[1] (ranks 2–3)"


def test_hosts_of_the_groups():
    lies = {span.dimension: span for span in spans([("dp", 2), ("tp", 2)], ["a", "a", "b", "b"])}
    assert lies["tp"].crossing == ()
    assert (lies["tp"].widest, lies["tp"].groups) == (1, 2)
    assert lies["dp"].widest == 2
    assert [hosts for _, hosts in lies["dp"].crossing] == [("a", "b"), ("a", "b")]
    uneven = spans([("dp", 2), ("tp", 3)], ["a"] * 4 + ["b"] * 2)
    assert [len(span.crossing) for span in uneven] == [2, 1]


def test_an_order_that_keeps_a_dimension_inside_hosts():
    mesh = [("tp", 2), ("dp", 4)]
    assert order_inside(mesh, "tp", ["a"] * 4 + ["b"] * 4) == (("dp", 4), ("tp", 2))
    cyclic = ["a", "b"] * 4
    assert order_inside([("dp", 4), ("tp", 2)], "tp", cyclic) == (("tp", 2), ("dp", 4))
    assert order_inside(mesh, "dp", ["a"] * 6 + ["b"] * 2) is None
