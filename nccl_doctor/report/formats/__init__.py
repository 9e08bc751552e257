"""Formats that a report is written in: one file each, and a new one is one new file.

A format is a module with `render(report) -> str`, a pure function; its name is the name of the
option (`--json PATH`) and of `report show --format`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nccl_doctor.model.report import Report


def formats() -> list[str]:
    """Names of all formats, in order; none is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def renderer(name: str) -> Callable[[Report], str]:
    """The function that renders a report in one format."""
    render: Callable[[Report], str] = importlib.import_module(f"{__name__}.{name}").render
    return render
