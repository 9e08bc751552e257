"""A process that keeps the GPUs of this host awake while a run lasts.

Without persistence mode the driver starts a GPU for the first process that opens its device file,
and stops it with the last one that closes it: every attempt with a group, in processes of its own,
would wait for that again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nccl_doctor.system import forks

_GPU = re.compile(r"nvidia\d+")


def keep_awake(root: Path = Path("/")) -> int | None:
    """Start a process that holds the device file of every NVIDIA GPU open until it is killed.

    It makes no context and takes no memory of a GPU, so it keeps nobody out.

    Args:
        root: folder in which `dev` lies.

    Returns: its process id, registered in `forks.living`; None where there is no such file, or no
        process can be started.
    """
    files = sorted(path for path in (root / "dev").glob("nvidia*") if _GPU.fullmatch(path.name))
    if not files:
        return None
    try:
        return forks.fork_service("awake", partial(_hold, files))
    except OSError:
        return None  # the limit is named by a check; the run only takes longer


def _hold(files: Sequence[Path]) -> None:
    for path in files:
        with contextlib.suppress(OSError):  # of a container that was not given this GPU
            os.open(path, os.O_RDWR | os.O_CLOEXEC)  # returns when the GPU has started
    while True:
        signal.pause()
