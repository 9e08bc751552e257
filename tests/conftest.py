"""The order in which several workers get the tests, and how many examples a property gets."""

from __future__ import annotations

import fcntl
import gc
import marshal
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from itertools import count, groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_doctor.observe.child import BUSY_HOST
from nccl_doctor.system.helpers import leave_by
from tests.support.huge_pages import fill_holes, use_huge_pages
from tests.support.lazy import note_slow
from tests.support.priority import may_go_first

# A deadline would measure the machine. `make test-wide` looks deeper than `make test`.
settings.register_profile("quick", settings(), max_examples=30, deadline=None)
settings.register_profile("deep", settings(), max_examples=400, deadline=None)
settings.load_profile(os.environ.get("EXAMPLES", "quick"))

for _width in ("COLUMNS", "LINES"):  # those of a worker, which has no terminal
    os.environ.pop(_width, None)

if "PYTEST_XDIST_WORKER" in os.environ:
    # The signals of a terminal are for the process that was started there, which ends its workers:
    # under nohup, what they start would else die with the terminal.
    os.setsid()

for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    # `nohup make test &` starts this process with all three ignored, and what is ignored stays so
    # in every program that a test starts. What is handled does not; nor does SIGPIPE of Popen.
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

_HEAVY = ("lab", "ranks")
_TOGETHER = ("unit", "browser")
"""Folders of modules whose tests go to one worker each."""
_SHARE = 0.9
"""Heavy tests are spread over so much of the others, so that no worker begins its last one late."""
_ALONE = () if may_go_first() else ("test_cli_quick", "test_lab_links", "test_group_speed")
"""Modules that measure speed: nothing else runs beside them, where they may not run before others.
"""
_AGAIN_IF_BUSY = pytest.mark.flaky(reruns=1, only_rerun=BUSY_HOST)
"""A run that could not be completed as other tests had the processors says so: it gets another try.
"""
_TORCHES = 3
"""Workers that import torch: each spends seconds and some hundred MB on it."""
_SHARE_GPUS = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))
"""Whether tests that need a GPU are to be alone; else they are skipped."""


_LONG = 200
"""Characters of a parameter that are too many for the name of a test."""


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a long text by its begin: names go from process to process with each word of a test."""
    if isinstance(val, (str, bytes)) and len(val) > _LONG:
        return f"{val[:60]!a}..."
    return None


@cache
def _place(path: Path) -> tuple[str, str]:
    """The name of a module, and of the folder that it is in."""
    return path.stem, path.parent.name


def _is_alone(item: pytest.Item) -> bool:
    module, folder = _place(item.path)
    return module in _ALONE or (_SHARE_GPUS and folder == "gpu")


def _goes_together(item: pytest.Item) -> bool:
    """Whether a test goes to one worker with others."""
    return _place(item.path)[1] in _TOGETHER or item.get_closest_marker("xdist_group") is not None


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread the tests that start ranks and hosts, which wait more than they work, over the rest.

    Side by side they would starve each other; between modules, so that fixtures are kept. The unit
    tests of a module go to one worker, and those of one browser; those that import torch, too: each
    import costs seconds. They come first: what goes to whoever is free fills up the end. What has
    to be alone comes last.
    """
    if not hasattr(config, "workerinput"):
        return
    _spread_torch(items)
    alone = [item for item in items if _is_alone(item)]
    for item in alone:
        item.add_marker(pytest.mark.xdist_group("alone"))
    rest = [item for item in items if not _is_alone(item)]
    heavy = [item for item in rest if _place(item.path)[1] in _HEAVY]
    for item in heavy:
        item.add_marker(_AGAIN_IF_BUSY)
    light = [item for item in rest if _place(item.path)[1] not in _HEAVY]
    modules = [list(group) for _, group in groupby(light, key=lambda item: item.path)]
    modules.sort(key=lambda items: not any(map(_goes_together, items)))
    items.clear()
    given = 0
    for number, module in enumerate(modules, 1):
        due = min(len(heavy), round(len(heavy) * number / (_SHARE * len(modules))))
        items += heavy[given:due] + module
        given = due
        name, folder = _place(module[0].path)
        for item in module if folder in _TOGETHER else ():
            if not item.get_closest_marker("xdist_group"):
                item.add_marker(pytest.mark.xdist_group(name))
    items += heavy[given:] + alone


def _spread_torch(items: list[pytest.Item]) -> None:
    """Let a few workers import torch, and not one of them be the last by minutes: most of these
    tests wait.
    """
    modules: dict[Path, int] = {}
    for item in items:
        group = item.get_closest_marker("xdist_group")
        if group is not None and group.args == ("torch",):
            number = modules.setdefault(item.path, len(modules)) % _TORCHES
            item.add_marker(pytest.mark.xdist_group(f"torch{number}"))


_LOCK = "NCCL_DOCTOR_TESTS_LOCK"


def pytest_configure(config: pytest.Config) -> None:
    """Make the file of `_locked`; workers inherit its name."""
    if not hasattr(config, "workerinput"):
        handle, os.environ[_LOCK] = tempfile.mkstemp(prefix="nccl-doctor-tests-")
        os.close(handle)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the garbage collector away from the thousands of tests, which live to the end.

    It would go through all of them again and again; and copy them in each process that tests fork.
    """
    gc.disable()
    try:
        if hasattr(session.config, "workerinput") and session.config.args == ["tests"]:
            _compile_a_share(session.config)
        return (yield)
    finally:
        gc.enable()
        _make_forks_cheap()
        note_slow(session.config)


def _compile_a_share(config: pytest.Config) -> None:
    """Import some of the test modules. Every worker reads all of them, and whoever reads one first
    rewrites its asserts, which takes ten times as long as to read what that one kept.
    """
    worker = vars(config)["workerinput"]
    place, workers = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    if place == 0:
        _find_all_characters()
    for path in sorted(config.rootpath.glob("tests/**/test_*.py"))[place::workers]:
        with suppress(Exception, pytest.skip.Exception):  # whoever collects it says so
            import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


def _find_all_characters() -> None:
    """Let hypothesis find out which characters there are: it keeps that, and else each worker would
    take seconds.
    """

    @settings(max_examples=1, database=None)
    @given(st.text())
    def a_property(_text: str) -> None:
        pass

    a_property()


def _make_forks_cheap() -> None:
    """Tests that observe, or read files of the user, fork the process that runs them."""
    gc.freeze()
    fill_holes()
    use_huge_pages()


_AGAIN = 150
"""Tests after which that is done again: it takes 20 ms, and forks get dearer by a half else."""
_run = count(1)
_settled: set[str] = set()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Once torch is imported, the memory is twice that of all tests."""
    new = {"torch"} & sys.modules.keys() - _settled
    if new or next(_run) % _AGAIN == 0:
        _settled.update(new)
        _make_forks_cheap()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, Any], dict[str, bytes]]:
    """Send each of the three reports of a test as bytes: workers write and read one a word at a
    time, in Python.
    """
    data = yield
    return {"report": marshal.dumps(data)}


@pytest.hookimpl(tryfirst=True)
def pytest_report_from_serializable(
    config: pytest.Config, data: dict[str, Any]
) -> pytest.TestReport | pytest.CollectReport | None:
    if "report" not in data:
        return None
    found: pytest.TestReport | pytest.CollectReport = config.hook.pytest_report_from_serializable(
        config=config, data=marshal.loads(data["report"])
    )
    return found


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        Path(os.environ.pop(_LOCK)).unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let others run beside a test of a worker, or nobody; and forget what it was late for."""
    try:
        if not hasattr(item.config, "workerinput"):
            return (yield)
        with _locked(alone=_is_alone(item)):
            return (yield)
    finally:
        # A command that a test calls in this process says when it is to be gone: no disk would be
        # waited for after that.
        leave_by(float("inf"))


@contextmanager
def _locked(*, alone: bool) -> Iterator[None]:
    """Whoever wants to be alone shuts the door first, so that nobody comes in while it waits.

    Locks of fcntl(2) belong to one process: no child that a test leaves behind keeps them.
    """
    with Path(os.environ[_LOCK]).open("r+") as file:
        door, room = (1, 0), (1, 1)  # length and start of what is locked
        fcntl.lockf(file, fcntl.LOCK_EX, *door)
        fcntl.lockf(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, *room)
        fcntl.lockf(file, fcntl.LOCK_UN, *door)
        yield
