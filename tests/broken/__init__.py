"""A torch that does not do what it says, for single ranks of a job."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent


def broken(fault: str) -> dict[str, str]:
    """Changes to the environment of a rank whose torch has a fault (see `sitecustomize`)."""
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (str(FOLDER), before)))
    return {"PYTHONPATH": path, "TEST_BREAK": fault}
