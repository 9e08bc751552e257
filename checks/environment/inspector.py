"""Rules on NCCL's Inspector, the profiler plug-in that comes with NCCL since 2.28, on one rank.

Source: plugins/profiler/inspector (README.md, inspector.cc) of NCCL 2.30.7.
"""

from __future__ import annotations

from collections.abc import Iterator

from nccl_doctor.api import Severity

from .view import Problem, View, either

CONFLICT = "env-conflict"
_ENABLE, _PLUGIN = "NCCL_INSPECTOR_ENABLE", "NCCL_PROFILER_PLUGIN"
_THREAD = "NCCL_INSPECTOR_DUMP_THREAD_ENABLE"
_INTERVAL = "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"
_PROMETHEUS = "NCCL_INSPECTOR_PROM_DUMP"
_LEAST_US = 30_000_000
"""Shortest pause between two dumps for Prometheus; the Inspector raises a shorter one."""


def inspector_conflicts(view: View) -> Iterator[Problem]:
    """Problems for settings of the Inspector that have no effect."""
    plugin = (view.text(_PLUGIN) or "").lower()
    on = view.is_set(_ENABLE) and bool(view.number(_ENABLE))
    if on and plugin == "none":
        yield Problem(
            CONFLICT,
            f"{view.says(_ENABLE)} with {view.says(_PLUGIN)}: the Inspector is not loaded, so "
            "nothing is recorded",
            either(view.put(_PLUGIN, "inspector"), view.drop(_ENABLE)),
            Severity.WARN,
        )
    elif on and not plugin:
        yield Problem(
            CONFLICT,
            f"{view.says(_ENABLE)} without {_PLUGIN}: NCCL then loads libnccl-profiler.so alone, "
            "if it is there",
            either(view.put(_PLUGIN, "inspector"), view.drop(_ENABLE)),
            Severity.INFO,
        )
    elif "inspector" in plugin and not on:
        yield Problem(
            CONFLICT,
            f"{view.says(_PLUGIN)} without {_ENABLE}=1: the Inspector is loaded and records "
            "nothing",
            either(view.put(_ENABLE, "1"), view.drop(_PLUGIN)),
            Severity.INFO,
        )
    if not on or not view.is_set(_INTERVAL):
        return
    pause = view.number(_INTERVAL)
    if not view.number(_THREAD):
        yield Problem(
            CONFLICT,
            f"{view.says(_INTERVAL)} with {view.says(_THREAD)}: without the thread the pause has "
            "no effect",
            either(view.drop(_THREAD), view.drop(_INTERVAL)),
            Severity.INFO,
        )
    elif view.number(_PROMETHEUS) and pause is not None and 0 <= pause < _LEAST_US:
        yield Problem(
            CONFLICT,
            f"{view.says(_INTERVAL)} with {view.says(_PROMETHEUS)}: for Prometheus the Inspector "
            "pauses 30 s at least",
            view.put(_INTERVAL, str(_LEAST_US)),
            Severity.INFO,
        )
