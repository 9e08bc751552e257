"""Collectives with exactly known results, each announced before it may block.

For a probe child, on process groups that are already formed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from nccl_doctor.model.findings import Level

SIZES = {
    Level.QUICK: (1,),
    Level.STANDARD: (1, 4096, 262_144),
    Level.FULL: (1, 4096, 262_144, 4_194_304),
}
"""Elements of int64 in the all-reduces of a group."""
MOST_S = 0.5
"""Time that a larger message may take on a slow link."""
_INT64_BYTES = 8
PATTERN = 251  # prime, so that no power-of-two shift of a buffer maps onto itself
_ASYNC_ELEMENTS = 4096
_BROADCAST_ELEMENTS = 1024


class WrongResult(TypedDict):
    """A wrong result; `contributors`: group ranks whose data was wrong, where that is known."""

    step: str
    group: str
    contributors: list[int]
    example: str


class WrongPart(WrongResult):
    """A wrong result where every member gets other data, so who else saw it shows nothing.

    `distance`: 0 where a member gets a part from every member; in a ring, how many places before it
    its one giver stands, and negative if that stands behind it.
    """

    distance: int


class ExerciseFacts(TypedDict):
    """The names of the collectives, in order, and the wrong results."""

    steps: list[str]
    wrong: list[WrongResult]


class Exercise:
    """Runs collectives on one device and records the steps and the wrong results."""

    def __init__(self, breadcrumb: Callable[..., None], device: Any) -> None:
        """`device` is the `torch.device` of the backend."""
        self._breadcrumb = breadcrumb
        self._device = device
        self.steps: list[str] = []
        self.wrong: list[WrongResult] = []

    def facts(self) -> ExerciseFacts:
        """`steps` and `wrong`, for the report."""
        return {"steps": self.steps, "wrong": self.wrong}

    def reduce(self, name: str, group: Any, rank: int, size: int, *, on_cpu: bool = False) -> None:
        """Run an all-reduce where a wrong entry shows its rank; arguments as for `alone`.

        `on_cpu`: of a tensor in the memory of the host, for a group of gloo beside NCCL.
        """
        import torch
        import torch.distributed as dist

        device = torch.device("cpu") if on_cpu else self._device
        marks = torch.zeros(size, dtype=torch.int64, device=device)
        marks[rank] = rank + 1
        self._announce("all_reduce", name, size)
        dist.all_reduce(marks, group=group)
        # Entry r comes from rank r alone.
        self._compare("all_reduce", name, marks, torch.arange(1, size + 1), giver=int)

    def alone(self, name: str, group: Any, rank: int, size: int, elements: Sequence[int]) -> None:
        """Use one group by itself: all-reduce of each size, broadcast from both ends, barrier.

        Args:
            name: of the group, for messages.
            group: a process group, or None for the default one.
            rank: this participant's rank in it.
            size: number of its ranks.
            elements: message sizes, in elements of int64.
        """
        import torch
        import torch.distributed as dist

        self.reduce(name, group, rank, size)
        for count in self._paced(elements, name, group):
            marks = pattern(count)
            data = (marks * (rank + 1)).to(self._device)
            self._announce("all_reduce", name, count)
            dist.all_reduce(data, group=group)
            self._compare("all_reduce", name, data, marks.mul_(size * (size + 1) // 2))
        for root in sorted({0, size - 1}):
            expected = pattern(_BROADCAST_ELEMENTS) + root
            data = (expected if rank == root else torch.zeros_like(expected)).to(self._device)
            source = root if group is None else dist.get_global_rank(group, root)
            self._announce(f"broadcast from {root}", name, _BROADCAST_ELEMENTS)
            dist.broadcast(data, source, group=group)
            self._compare("broadcast", name, data, expected, contributors=[root])
        self._announce("barrier", name, 0)
        dist.barrier(group=group)

    def _paced(self, elements: Sequence[int], name: str, group: Any = None) -> Iterator[int]:
        """The sizes in turn; from the third on, smaller ones where the link is slow.

        What is done with each is timed. At the speed that the last two show to the first member,
        which waits for all others, the next one takes `MOST_S` at most: the volume follows the
        link, and a slow one is not taken for a hang.
        """
        done: list[tuple[int, float]] = []
        for count in elements:
            if len(done) > 1:
                count = self._agreed(count, _fitting(count, *done[-2:]), name, group)
            began = time.monotonic()
            yield count
            done.append((count, time.monotonic() - began))

    def _agreed(self, most: int, own: int, name: str, group: Any) -> int:
        """The number of the first member. One that it cannot have said counts as `most`, which is
        right wherever the link is fast: a group that spoils data must not fail in another way.
        """
        import torch
        import torch.distributed as dist

        said = torch.tensor([own], dtype=torch.int64, device=self._device)
        self._announce("broadcast from 0", name, 1)
        source = 0 if group is None else dist.get_global_rank(group, 0)
        dist.broadcast(said, source, group=group)
        count = int(said)
        return count if 0 < count < most and count.bit_count() == 1 else most

    def together(self, groups: Mapping[str, tuple[Any, int, int]]) -> None:
        """Run one all-reduce on every group at the same time; name → (group, rank, size)."""
        import torch
        import torch.distributed as dist

        works = []
        for name, (group, rank, size) in groups.items():
            data = torch.full((_ASYNC_ELEMENTS,), rank + 1, dtype=torch.int64, device=self._device)
            self._announce("all_reduce (async)", name, _ASYNC_ELEMENTS)
            works.append((name, size, data, dist.all_reduce(data, group=group, async_op=True)))
        for name, size, data, work in works:
            self._breadcrumb("wait for all_reduce (async)", group=name)
            work.wait()
            expected = torch.full((_ASYNC_ELEMENTS,), size * (size + 1) // 2)
            self._compare("all_reduce (async)", name, data, expected)

    def _announce(self, step: str, group: str, elements: int) -> None:
        self.steps.append(step)
        self._breadcrumb(step, group=group, sequence=len(self.steps), bytes=elements * _INT64_BYTES)

    def _compare(
        self,
        step: str,
        group: str,
        got: Any,
        expected: Any,
        *,
        contributors: Sequence[int] = (),
        giver: Callable[[int], int] | None = None,
        distance: int | None = None,
    ) -> None:
        """Record a wrong result. `giver`: index of an element → the rank that it comes from;
        `distance`: as of `WrongPart`, where every member gets other data.
        """
        import torch

        got = got.cpu()
        if torch.equal(got, expected):
            return
        bad = (got != expected).nonzero().flatten().tolist()
        first = bad[0]
        wrong: WrongResult = {
            "step": step,
            "group": group,
            "contributors": sorted(set(map(giver, bad))) if giver else list(contributors),
            "example": f"element {first} is {int(got[first])}, not {int(expected[first])}",
        }
        if distance is not None:
            part: WrongPart = {**wrong, "distance": distance}
            wrong = part
        self.wrong.append(wrong)


def _fitting(most: int, before: tuple[int, float], last: tuple[int, float]) -> int:
    """Elements, `most` or a power of two, that take `MOST_S` at the speed that two sizes show, each
    with its seconds; never fewer than the last.
    """
    (less, less_s), (more, more_s) = before, last
    each_s = max(1e-12, (more_s - less_s) / max(1, more - less))
    fits = max(more, int(MOST_S / each_s))
    return most if fits >= most else 1 << fits.bit_length() - 1


def pattern(count: int) -> Any:
    """The numbers from 1 to `PATTERN` over and over, `count` of them, as a tensor of int64."""
    import torch

    return torch.arange(1, PATTERN + 1).repeat(count // PATTERN + 1)[:count]
