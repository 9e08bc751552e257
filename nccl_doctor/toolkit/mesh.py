"""The groups of a device mesh, the hosts they span, and the meshes that fit a world. Pure.

A mesh is (name, size) of each dimension, outermost first. Ranks are in row-major order, as
`torch.distributed.init_device_mesh` places them: the innermost dimension joins neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from nccl_doctor.model.findings import number_range

Mesh = Sequence[tuple[str, int]]

_MOST_RANKS = 4
"""Most ranks of a group with gaps that are all listed."""
_NEAREST = 3
"""Most meshes that are proposed."""


@dataclass(frozen=True)
class MeshGroup:
    """A group of a dimension; `index` counts the groups by their lowest rank."""

    dimension: str
    index: int
    ranks: range

    @property
    def name(self) -> str:
        """Name of the group: `tp[2] (ranks 4–5)`."""
        return f"{self.dimension}[{self.index}] ({ranks_in_words(self.ranks)})"


@dataclass(frozen=True)
class Span:
    """Placement of the groups of one dimension on the hosts.

    `widest` is the number of hosts of the group that spans most, `crossing` the groups that span
    more than one, each with its hosts in order of rank.
    """

    dimension: str
    size: int
    groups: int
    widest: int
    crossing: tuple[tuple[MeshGroup, tuple[str, ...]], ...]


def mesh_in_words(mesh: Mesh) -> str:
    """The mesh as on the command line: `dp=2,tp=4`."""
    return ",".join(f"{name}={size}" for name, size in mesh)


def ranks_in_words(ranks: range) -> str:
    """Ranks in words: `ranks 4–7`, or `ranks 0, 8, …, 56` for a long group with gaps."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks.step == 1 or len(ranks) <= _MOST_RANKS:
        return f"ranks {number_range(ranks)}"
    return f"ranks {ranks[0]}, {ranks[1]}, …, {ranks[-1]}"


def mesh_size(mesh: Mesh) -> int:
    """Number of ranks that the mesh needs."""
    return math.prod(size for _, size in mesh)


def own_groups(mesh: Mesh, rank: int) -> list[MeshGroup]:
    """The group of each dimension that a rank is in, outermost dimension first."""
    return [_group(mesh, at, rank) for at in range(len(mesh))]


def mesh_groups(mesh: Mesh) -> dict[str, list[MeshGroup]]:
    """Dimension → its groups, in order of their lowest rank; each rank is in exactly one."""
    groups: dict[str, list[MeshGroup]] = {}
    for at, (name, size) in enumerate(mesh):
        stride = mesh_size(mesh[at + 1 :])
        firsts = (
            base + offset
            for base in range(0, mesh_size(mesh), stride * size)
            for offset in range(stride)
        )
        groups[name] = [_group(mesh, at, first) for first in firsts]
    return groups


def nearest_meshes(mesh: Mesh, world: int) -> list[tuple[tuple[str, int], ...]]:
    """Meshes with the same names whose sizes multiply to `world` ranks, the nearest first.

    Nearer means: fewer sizes change, then outer sizes rather than inner ones, then smaller changes.
    """
    if world < 1 or not mesh:
        return []
    sizes = tuple(size for _, size in mesh)
    divisors = _divisors(world)
    found = {*_changed(sizes, world, divisors), _inside_first(sizes, world, divisors)}

    def distance(other: tuple[int, ...]) -> tuple[int, tuple[int, ...], float, tuple[int, ...]]:
        changed = tuple(at for at, size in enumerate(sizes) if other[at] != size)
        # Rounded: 1→2 and 2→1 are equally far, whatever the last bit of a logarithm says.
        far = sum(abs(math.log(b / a)) for a, b in zip(sizes, other, strict=True))
        return len(changed), changed, round(far, 9), other

    names = [name for name, _ in mesh]
    nearest = sorted(found, key=distance)[:_NEAREST]
    return [tuple(zip(names, other, strict=True)) for other in nearest]


def spans(mesh: Mesh, hosts: Sequence[str]) -> list[Span]:
    """Placement of each dimension on the hosts; `hosts` names the host of every rank, by rank."""
    out = []
    for (name, size), groups in zip(mesh, mesh_groups(mesh).values(), strict=True):
        on = [
            (group, tuple(dict.fromkeys(hosts[rank] for rank in group.ranks))) for group in groups
        ]
        crossing = tuple(item for item in on if len(item[1]) > 1)
        widest = max(len(there) for _, there in on)
        out.append(Span(name, size, len(groups), widest, crossing))
    return out


def order_inside(
    mesh: Mesh, dimension: str, hosts: Sequence[str]
) -> tuple[tuple[str, int], ...] | None:
    """The mesh with this dimension moved so that none of its groups crosses hosts.

    Returns: the first order that fits, tried from the innermost place outwards; None if none does.
    """
    moved = next(item for item in mesh if item[0] == dimension)
    rest = [item for item in mesh if item[0] != dimension]
    for at in range(len(rest), -1, -1):
        order = (*rest[:at], moved, *rest[at:])
        groups = mesh_groups(order)[dimension]
        if all(len({hosts[rank] for rank in group.ranks}) == 1 for group in groups):
            return order
    return None


def _group(mesh: Mesh, at: int, rank: int) -> MeshGroup:
    name, size = mesh[at]
    stride = mesh_size(mesh[at + 1 :])
    block, offset = rank // (stride * size), rank % stride
    first = block * stride * size + offset
    ranks = range(first, first + stride * size, stride)
    return MeshGroup(name, block * stride + offset, ranks)


def _changed(
    sizes: tuple[int, ...], world: int, divisors: Iterable[int]
) -> Iterator[tuple[int, ...]]:
    """All sizes that fit, with one or two sizes changed."""
    for at, _ in enumerate(sizes):
        kept = math.prod(sizes[:at] + sizes[at + 1 :])
        if world % kept == 0:
            yield (*sizes[:at], world // kept, *sizes[at + 1 :])
    for one, other in combinations(range(len(sizes)), 2):
        kept = math.prod(size for at, size in enumerate(sizes) if at not in (one, other))
        left = world // kept
        for size in divisors if world % kept == 0 else ():
            if left % size == 0:
                changed = list(sizes)
                changed[one], changed[other] = size, left // size
                yield tuple(changed)


def _inside_first(sizes: tuple[int, ...], world: int, divisors: list[int]) -> tuple[int, ...]:
    """Sizes that always fit: from the inside, the largest size up to the given one that divides the
    rest; the outermost takes what is left.
    """
    left = world
    out: list[int] = []
    for size in reversed(sizes[1:]):
        out.append(max(d for d in divisors if d <= size and left % d == 0))
        left //= out[-1]
    return (left, *reversed(out))


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})
