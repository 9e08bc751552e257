"""A torch that does not do what it says, for single ranks of a job."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

FOLDER = Path(__file__).parent


def broken(fault: str) -> dict[str, str]:
    """Changes to the environment of a rank whose torch has a fault (see `sitecustomize`)."""
    return {**_path(), "TEST_BREAK": fault}


def clock_ahead(seconds: int) -> dict[str, str]:
    """Changes to the environment of a host whose clock is so many seconds ahead."""
    return {**_path(), "TEST_CLOCK": str(seconds)}


def is_broken(env: Collection[str]) -> bool:
    """Whether an environment has any of these changes."""
    return "TEST_BREAK" in env or "TEST_CLOCK" in env


def _path() -> dict[str, str]:
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(FOLDER), before)))}
