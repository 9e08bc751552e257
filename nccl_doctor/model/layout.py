"""Placement of ranks on hosts, and the backend, after all hosts have signed in. Pure.

As torchrun lays them out: in order of node rank, as many on each host as it asked for, so that
hosts may be uneven.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from nccl_doctor.model.codec import MAX_LOCAL_RANKS, Number, Part, between

Address = tuple[str, int]
"""Host name or numeric address, and port."""


@dataclass(frozen=True)
class Claim:
    """Values that one host signs in with: its node rank (None: any), the number of nodes, and its
    number of ranks.
    """

    seat: int
    node_rank: int | None
    nnodes: int
    nproc: int


@dataclass(frozen=True)
class HostPlace:
    """The ranks of one host: `nproc` of them from `first_rank` on. `nnodes` is the number of hosts,
    where it is not the one that the hosts were started with; else 0.
    """

    node_rank: Number
    first_rank: Number
    nproc: Annotated[int, between(0, MAX_LOCAL_RANKS)]
    world_size: Number
    nnodes: Annotated[Number, Part.SPARSE] = 0

    @property
    def ranks(self) -> range:
        """Ranks of the host."""
        return range(self.first_rank, self.first_rank + self.nproc)


@dataclass(frozen=True)
class Layout:
    """Placement of all ranks: `nodes` are all places in order of node rank, also of absent hosts;
    `seats` maps the seat of each present host to its place. Hosts with the same node rank share its
    place.
    """

    nodes: tuple[HostPlace, ...]
    seats: Mapping[int, HostPlace]

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes."""
        return sum(node.nproc for node in self.nodes)

    @property
    def ranks_here(self) -> set[int]:
        """Ranks of the hosts that are here."""
        return {rank for place in self.seats.values() for rank in place.ranks}

    def home_of(self, rank: int) -> tuple[int | None, int | None]:
        """(node rank, local rank) of a rank; (None, None) for one beyond the world."""
        at = bisect_right(self.nodes, rank, key=lambda node: node.first_rank) - 1
        if at < 0 or rank not in self.nodes[at].ranks:
            return None, None
        return self.nodes[at].node_rank, rank - self.nodes[at].first_rank


def agree(claims: Sequence[Claim], nnodes: int) -> bool:
    """True if the claims can all be true of one job of `nnodes` hosts."""
    claimed = [claim.node_rank for claim in claims if claim.node_rank is not None]
    return (
        len(claims) <= nnodes
        and len(set(claimed)) == len(claimed)
        and all(node < nnodes for node in claimed)
        and all(claim.nnodes == nnodes for claim in claims)
    )


def backend_of_all(asked: Sequence[tuple[str, str | None]], own: str) -> str:
    """Backend of a job, from the options of all participants.

    The backend that most name; else nccl as soon as one of them has a GPU: a host without is then
    seen to lack one, whichever host it is.

    Args:
        asked: of each participant, `auto`, `nccl` or `gloo` (empty: unknown), and its device.
        own: that of whoever decides, which counts on a tie, and where some said nothing.
    """
    named = Counter(backend for backend, _ in asked if backend in ("nccl", "gloo"))
    if named:
        return max(named, key=lambda backend: (named[backend], backend == own))
    if not asked or any(backend == "" for backend, _ in asked):
        return own
    return "nccl" if any(device == "cuda" for _, device in asked) else "gloo"


def elastic_size(claims: Sequence[Claim], nnodes: int, least: int, refused: int) -> int:
    """Number of hosts of an elastic job of `least` to `nnodes`, by those that are here; 0 if it is
    `nnodes`.

    Where too few are here, the others of the least number are missing. If a host was refused, or
    they contradict each other, it is not known how many there are: then all are missing.
    """
    here = max(len(claims), least)
    odd = any(claim.nnodes != nnodes or (claim.node_rank or 0) >= here for claim in claims)
    return 0 if here >= nnodes or odd or refused else here


def lay_out(claims: Sequence[Claim], nnodes: int, elastic: int = 0) -> Layout:
    """Lay ranks out over the hosts that are here and the ones that are not.

    Args:
        claims: at least one; the first is the coordinator's, which takes node 0 if it has
            none. Others without a node rank take the free ones in order.
        nnodes: as the coordinator says. A host that claims a node beyond has a place all the same,
            so that it can be compared with the others.
        elastic: the number of hosts in place of `nnodes`, unless it is 0.

    Hosts that are not here are taken to start as many ranks as most of the others.
    """
    nnodes = elastic or nnodes
    claimed = {claim.node_rank for claim in claims if claim.node_rank is not None}
    free = (node for node in range(nnodes + len(claims)) if node not in claimed)
    nodes = {
        claim.seat: claim.node_rank if claim.node_rank is not None else next(free)
        for claim in claims
    }
    nproc: dict[int, int] = {}
    for claim in claims:
        nproc.setdefault(nodes[claim.seat], claim.nproc)
    usual = Counter(nproc.values()).most_common(1)[0][0]
    sizes = [nproc.get(node, usual) for node in range(max(nnodes, max(nproc) + 1))]
    firsts = [0, *accumulate(sizes)]
    places = tuple(
        HostPlace(node, firsts[node], size, firsts[-1], elastic) for node, size in enumerate(sizes)
    )
    return Layout(places, {seat: places[node] for seat, node in nodes.items()})
