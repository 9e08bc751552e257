"""Formats that a report is written in: one file each, and a new one is one new file.

A format is a module with `render(report) -> str`, a pure function; its name is the name of the
option (`--json PATH`) and of `report show --format`, and its first line says what `--help` says of
it: `The report as WORDS: …`. One that shows what checks have beside their findings has a second
parameter, `checks`. A large one has `pieces(report)` too: the same, as an iterator of texts.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the options of the command line are made from the names alone
    from nccl_doctor.model.report import Report
    from nccl_doctor.report.story import Checks


def formats() -> list[str]:
    """Names of all formats, in order; none is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def about(name: str) -> str:
    """Words of the first line of a format's file, which is not imported."""
    first = (pkgutil.get_data(__name__, f"{name}.py") or b"").decode().partition("\n")[0]
    return first.removeprefix('"""The report as ').partition(":")[0].rstrip('."') or name


def renderer(name: str, checks: Checks | None = None) -> Callable[[Report], str]:
    """The function that renders a report in one format, which may ask the `checks`, if given."""
    render: Callable[..., str] = importlib.import_module(f"{__name__}.{name}").render
    asks = bool(checks) and "checks" in inspect.signature(render).parameters
    return partial(render, checks=checks) if asks else render


def pieces(name: str, checks: Checks | None = None) -> Callable[[Report], Iterable[str]]:
    """Function that renders in pieces: all of a large report at once would need much memory."""
    made = getattr(importlib.import_module(f"{__name__}.{name}"), "pieces", None)
    return made or (lambda report: [renderer(name, checks)(report)])
