"""Formats that a report is written in: one file each, and a new one is one new file.

A format is a module with `render(report) -> str`, a pure function; its name is the name of the
option (`--json PATH`) and of `report show --format`. One that shows what checks have beside their
findings has a second parameter, `checks`; one that can be shorter or in full, `expand`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the options of the command line are made from the names alone
    from nccl_doctor.model.report import Report
    from nccl_doctor.report.story import Checks


def formats() -> list[str]:
    """Names of all formats, in order; none is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def renderer(
    name: str, checks: Checks | None = None, *, expand: bool = False
) -> Callable[[Report], str]:
    """The function that renders a report in one format, which may ask the `checks`, if given."""
    render: Callable[..., str] = importlib.import_module(f"{__name__}.{name}").render
    asks = inspect.signature(render).parameters
    given: dict[str, Any] = {"checks": checks} if checks and "checks" in asks else {}
    if expand and "expand" in asks:
        given["expand"] = expand
    return partial(render, **given) if given else render
