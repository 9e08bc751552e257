"""A torch that does not do what it says, for single ranks of a job."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def broken(fault: str) -> dict[str, str]:
    """Changes to the environment of a rank whose torch has a fault (see `sitecustomize`)."""
    return {"PYTHONPATH": str(FOLDER), "TEST_BREAK": fault}
