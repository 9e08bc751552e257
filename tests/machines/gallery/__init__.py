"""Made-up machines, one in each file: `MACHINE`. A new file is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.machines.program import Machine


def machines() -> Sequence[Machine]:
    """All of them, by title."""
    names = [info.name for info in pkgutil.iter_modules(__path__)]
    found = [importlib.import_module(f"{__name__}.{name}").MACHINE for name in names]
    return sorted(found, key=lambda machine: machine.title)
