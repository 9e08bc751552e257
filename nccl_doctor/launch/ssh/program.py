"""Command that starts this program again: here, or on a host with the same files."""

from __future__ import annotations

import os
import sys
import zipfile


def own_words() -> tuple[str, ...]:
    """The Python that runs this and what it is given: `-m nccl_doctor`, or the one file."""
    started = sys.argv[0]
    if zipfile.is_zipfile(started):
        return sys.executable, os.path.abspath(started)
    return sys.executable, "-m", "nccl_doctor"
