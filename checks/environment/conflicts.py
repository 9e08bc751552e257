"""Rules on variables that contradict each other, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from nccl_doctor.api import Severity
from nccl_doctor.toolkit.variables.table import table

from .inspector import CONFLICT, inspector_conflicts
from .view import Problem, View, either

_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_ASYNC = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_DESYNC = "TORCH_NCCL_DESYNC_DEBUG"
_DUMP = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_SPELLINGS = (
    _DUMP,
    ("TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"),
)
"""Two names of one setting, both current: the first wins if torch knows it."""
_MOST_SOCKETS = 64


def conflicts(view: View) -> Iterator[Problem]:
    """Problems for variables that contradict each other."""
    yield from _watchdog(view)
    yield from _spellings(view)
    yield from _nccl(view)
    yield from inspector_conflicts(view)
    if view.is_set("NCCL_ENV_PLUGIN") and view.text("NCCL_ENV_PLUGIN") not in ("", "none"):
        yield Problem(
            CONFLICT,
            f"{view.says('NCCL_ENV_PLUGIN')} replaces the environment for NCCL, so other findings "
            "on NCCL_ variables may be wrong",
            view.drop("NCCL_ENV_PLUGIN"),
            Severity.INFO,
        )


def _set_variable(view: View, new: str) -> tuple[str, str] | None:
    """(name that is set, its meaning) of a variable with old names; None if it is not set."""
    for name in (new, *_old_names(new)):
        text = view.text(name)
        if text is not None:
            return name, view.meaning(name) or text
    return None


@cache
def _old_names(new: str) -> tuple[str, ...]:
    return tuple(row.name for row in table().variables.values() if row.deprecated_by == new)


def _watchdog(view: View) -> Iterator[Problem]:
    blocking, handling = _set_variable(view, _BLOCKING), _set_variable(view, _ASYNC)
    desync = _set_variable(view, _DESYNC)
    dumps = [dump for dump in (_set_variable(view, name) for name in _DUMP) if dump is not None]
    if blocking is not None and blocking[1] == "1":
        lost = [each for each in (*dumps, desync) if each is not None and each[1] == "1"]
        # torchrun always sets 1.
        if handling is not None and handling[1] in ("1", "2", "3"):
            by_hand = view.launcher not in ("torchrun", "accelerate") or handling[1] != "1"
            lost += [handling] if by_hand else []
        if lost:
            names = ", ".join(view.says(name) for name, _ in lost)
            yield Problem(
                CONFLICT,
                f"{view.says(blocking[0])} starts no watchdog, so {names} has no effect",
                view.drop(blocking[0]),
                Severity.WARN,
            )
    if handling is not None and handling[1] == "0" and desync is not None and desync[1] == "1":
        yield Problem(
            CONFLICT,
            f"{view.says(handling[0])} with {view.says(desync[0])}: torch uses 3 instead of 0",
            either(view.drop(handling[0]), view.drop(desync[0])),
            Severity.WARN,
        )
    size = _set_variable(view, "TORCH_FR_BUFFER_SIZE")
    asked = [dump for dump in dumps if dump[1] == "1"]
    if size is not None and size[1] == "0" and asked:
        yield Problem(
            CONFLICT,
            f"{view.says(asked[0][0])} with {view.says(size[0])}: nothing is recorded, so there "
            "is nothing to dump",
            either(view.drop(size[0]), view.drop(asked[0][0])),
            Severity.WARN,
        )


def _spellings(view: View) -> Iterator[Problem]:
    for first, second in _SPELLINGS:
        both_set = view.text(first) is not None and view.text(second) is not None
        if both_set and view.meaning(first) != view.meaning(second):
            yield Problem(
                CONFLICT,
                f"{view.says(first)} but {view.says(second)}: two names of one setting",
                either(view.drop(second), "set both to the same value"),
                Severity.WARN,
            )


def _nccl(view: View) -> Iterator[Problem]:
    number, text = view.number, view.text
    if number("NCCL_P2P_DISABLE") == 1 and text("NCCL_P2P_LEVEL") not in (None, "", "LOC", "0"):
        yield _pair(view, "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "the level is ignored")
    if (text("NCCL_NET") or "").lower() == "ib" and number("NCCL_IB_DISABLE"):
        message = "the requested network is turned off, and NCCL finds none"
        yield _pair(view, "NCCL_NET", "NCCL_IB_DISABLE", message, Severity.FAIL)
    if number("NCCL_CUMEM_ENABLE") == 0 and number("NCCL_NVLS_ENABLE") == 1:
        message = "NVLink SHARP needs cuMem, so it is off"
        yield _pair(view, "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", message)
    threads, sockets = number("NCCL_SOCKET_NTHREADS"), number("NCCL_NSOCKS_PERTHREAD")
    if threads and sockets and threads > 0 and sockets > 0 and threads * sockets > _MOST_SOCKETS:
        message = f"{threads} x {sockets} is more than {_MOST_SOCKETS} sockets, so NCCL uses fewer"
        yield _pair(view, "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", message)
    for what in ("NCHANNELS", "CTAS", "P2P_NCHANNELS"):
        least, most = f"NCCL_MIN_{what}", f"NCCL_MAX_{what}"
        low, high = (number(name) if text(name) else None for name in (least, most))
        if low is not None and high is not None and 0 < high < low:
            yield _pair(view, least, most, "the minimum is greater than the maximum")


def _pair(
    view: View, first: str, second: str, message: str, severity: Severity = Severity.WARN
) -> Problem:
    return Problem(
        CONFLICT,
        f"{view.says(first)} with {view.says(second)}: {message}",
        either(view.drop(second), view.drop(first)),
        view.bounded(table().variables[first], severity),
    )
