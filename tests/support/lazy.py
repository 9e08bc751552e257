"""Modules that are imported when a test first uses them, not as tests are collected.

Every worker collects all tests; importing torch there costs each of them two seconds.
"""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Module that is imported when something in it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
