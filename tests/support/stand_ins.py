"""Observation with a made-up library of a vendor loaded."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.model.cluster import Outcome
from nccl_doctor.observe import probe

Look = Callable[[Callable[..., None]], Mapping[str, Any]]


def observe_with(
    library: Path, settings: Mapping[str, str], check: str, look: Look, deadline_s: float
) -> Outcome:
    """`look`, with a child's breadcrumb, in a real probe child that has the library loaded, and
    its `settings` in the environment.
    """

    def work(line: probe.Line) -> Mapping[str, Any]:
        # Loaded by its path first: the same soname then leads to it.
        ctypes.CDLL(str(library))
        os.environ.update(settings)
        return look(line.breadcrumb)

    (outcome,) = probe.run([probe.ProbeJob(check, work, time.monotonic() + deadline_s)])
    return Outcome.from_json(outcome.to_json())
