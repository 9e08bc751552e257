"""Modules that are imported when a test first uses them, not as tests are collected.

Every worker collects all tests; importing torch there costs each of them two seconds.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

SLOW_AT_COLLECTION = pytest.StashKey[list[str]]()
"""Large modules that are imported when all tests are collected; there should be none."""
_SLOW = ("deepspeed", "numpy", "torch")


def note_slow(config: pytest.Config) -> None:
    """Keep in `config` which large modules are imported by now."""
    config.stash[SLOW_AT_COLLECTION] = [name for name in _SLOW if name in sys.modules]


class Lazy:
    """Module that is imported when something in it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name == "_mock_name" or name.startswith("__"):  # pytest asks all that it collects
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
