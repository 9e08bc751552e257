"""Memory of a process on huge pages and without holes, so that a fork of it is cheap."""

from __future__ import annotations

import ctypes
import sys
from itertools import repeat
from pathlib import Path

_MADV_COLLAPSE = 25  # Linux 6.1
_HUGE = 2 << 20
_PIECE = 12 << 10
"""Bytes, of which half are no hole if they lie side by side: most of a pool of the allocator."""
_MOST = 500
"""Pieces with objects of one size: where they never lie so, another allocator is in use."""
_LARGEST = 512
_filled: list[object] = []


def use_huge_pages() -> None:
    """Put this process's memory on huge pages, where the kernel can: a fork copies 512 times less.

    With torch imported a fork takes some 18 ms, and 4 ms then; every run forks dozens of times.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _, _, inode, *_ = line.split()
        if mode == "rw-p" and inode == "0":
            first, end = (int(number, 16) for number in span.split("-"))
            first, end = -(-first // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if first < end:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_COLLAPSE)


def fill_holes() -> None:
    """Take what is free between objects, so that new ones lie side by side.

    A process that has made and dropped many objects, as tests are collected, else puts each new one
    on another page: after a fork both processes copy more than a thousand pages for the first two
    thousand objects. The holes are less than a megabyte.
    """
    for size in range(16, _LARGEST + 1, 16):
        for _ in range(_MOST):
            piece = [_of_size(size) for _ in repeat(None, _PIECE // size)]
            _filled.extend(piece)
            if 0 < id(piece[-1]) - id(piece[len(piece) // 2]) < _PIECE:
                break


def _of_size(size: int) -> object:
    """A new object that takes so many bytes, a multiple of 16."""
    empty = sys.getsizeof(b"")
    if size < empty:
        return object() if size == sys.getsizeof(object()) else float(size)
    return bytes(size - empty)
