"""Steps in which every rank gives data of its own to others, with exactly known results.

For a probe child, on a default group that is already formed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from nccl_doctor.api import Level
from nccl_doctor.toolkit.groups.exercise import Exercise, pattern

SIZES = {
    Level.STANDARD: (512, 8_192, 131_072),
    Level.FULL: (512, 8_192, 131_072, 2_097_152),
}
"""Elements of int64 that a rank sends or receives in one step: 4 and 64 KiB, 1 MiB, 16 MiB; of the
larger ones, fewer on a slow link.
"""
NEXT, PREVIOUS = "send to the next rank", "send to the previous rank"
_LACKS = re.compile(r"\b(?:Backend|ProcessGroup) ?\w+ does not support\b")
"""Torch's own words, in Backend.hpp and the process groups, for a collective that it lacks."""


class Exchange(Exercise):
    """Runs the steps on the default group; `lacking` holds step → error of those that are not in
    this backend.
    """

    def __init__(
        self, breadcrumb: Callable[..., None], device: Any, name: str, rank: int, size: int
    ) -> None:
        """`name` of the group, for messages; `rank` in it, and its `size`, at least 2."""
        super().__init__(breadcrumb, device)
        self._name, self._rank, self._size = name, rank, size
        self.lacking: dict[str, str] = {}

    def run(self, elements: Sequence[int]) -> None:
        """Run every step with each size.

        The ring comes last, as torch's flight recorder does not count its messages on every
        backend: nobody who waits in it may look like one that never came to a later collective.
        """
        counts = []
        for count in self._paced(elements, self._name):
            self._all_gather(count)
            self._reduce_scatter(count)
            self._all_to_all(count)
            counts.append(count)
        for count in counts:
            self._ring(NEXT, 1, count)
            self._ring(PREVIOUS, -1, count)

    def _all_gather(self, count: int) -> None:
        """Part r comes from rank r."""
        import torch
        import torch.distributed as dist

        part = self._part(count)
        marks, got = pattern(part), self._empty(part * self._size)
        own = (marks * (self._rank + 1)).to(self._device)
        if self._does("all_gather", got, lambda: dist.all_gather_into_tensor(got, own)):
            expected = torch.outer(torch.arange(1, self._size + 1), marks).flatten()
            self._check("all_gather", got, expected, giver=lambda at: at // part)

    def _reduce_scatter(self, count: int) -> None:
        """Element e of the whole buffer comes from rank e modulo size; all others add zero."""
        import torch
        import torch.distributed as dist

        part = self._part(count)
        giver = torch.arange(self._size).repeat(part)
        values = pattern(part * self._size) * (giver + 1)
        given = torch.where(giver == self._rank, values, 0).to(self._device)
        got, start = self._empty(part), self._rank * part
        if self._does("reduce_scatter", given, lambda: dist.reduce_scatter_tensor(got, given)):
            expected = values[start : start + part]
            self._check("reduce_scatter", got, expected, giver=lambda at: (start + at) % self._size)

    def _all_to_all(self, count: int) -> None:
        """Part r of what rank d gets is the one that rank r has for d, and for no other."""
        import torch
        import torch.distributed as dist

        part = self._part(count)
        marks, others = pattern(part), torch.arange(self._size)
        given = torch.outer(others + self._rank * self._size + 1, marks).flatten()
        given, got = given.to(self._device), self._empty(part * self._size)
        if self._does("all_to_all", given, lambda: dist.all_to_all_single(got, given)):
            expected = torch.outer(others * self._size + self._rank + 1, marks).flatten()
            self._check("all_to_all", got, expected, giver=lambda at: at // part)

    def _ring(self, step: str, distance: int, count: int) -> None:
        """Every rank sends to the one `distance` places on; the first follows the last."""
        import torch.distributed as dist

        to, source = ((self._rank + d) % self._size for d in (distance, -distance))
        marks, got = pattern(count), self._empty(count)
        own = (marks * (self._rank + 1)).to(self._device)

        def call() -> None:
            ops = [dist.P2POp(dist.isend, own, to), dist.P2POp(dist.irecv, got, source)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        if self._does(step, own, call):
            self._check(step, got, marks * (source + 1), giver=lambda _: source, distance=distance)

    def _does(self, step: str, buffer: Any, call: Callable[[], Any]) -> bool:
        """Announce a step and run it; False where this backend lacks it."""
        if step in self.lacking:
            return False
        self._announce(step, self._name, buffer.numel())
        try:
            call()
        except RuntimeError as error:
            if not _LACKS.search(str(error)):
                raise
            self.steps.pop()
            self.lacking[step] = str(error).partition("\n")[0]
            return False
        return True

    def _check(
        self,
        step: str,
        got: Any,
        expected: Any,
        *,
        giver: Callable[[int], int],
        distance: int = 0,
    ) -> None:
        self._compare(step, self._name, got, expected, giver=giver, distance=distance)

    def _part(self, count: int) -> int:
        """Elements of one part where every rank has one for each rank."""
        return max(1, count // self._size)

    def _empty(self, count: int) -> Any:
        import torch

        return torch.zeros(count, dtype=torch.int64, device=self._device)
