"""Garbage collection in a program that ends soon, and keeps nearly all that it makes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_RARELY = (500_000, 50, 1000)


@contextlib.contextmanager
def collected_rarely() -> Iterator[None]:
    """Look for garbage rarely meanwhile.

    What is imported, and what thousands of ranks say, lives to the end: to look for garbage in it
    takes a tenth of the time, and finds none.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
