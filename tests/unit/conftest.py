"""Folders of the unit tests: in memory, where there is room.

They make some hundred thousand small files, of made-up /sys and /proc. On a disk each takes the
kernel 0.2 ms, in memory a tenth of that.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.foreign_words import Watch

_MEMORY = Path("/dev/shm")
_ROOM = 1 << 30


def _has_room() -> bool:
    """Whether files may be made and run there. Containers often have 64 MiB, or may run nothing."""
    try:
        here = os.statvfs(_MEMORY)
    except OSError:
        return False
    free, runs = here.f_bavail * here.f_frsize, not here.f_flag & os.ST_NOEXEC
    return free >= _ROOM and runs and os.access(_MEMORY, os.W_OK)


WATCH = Watch()


@pytest.fixture(autouse=True)
def _no_words_of_others_run() -> Iterator[None]:
    """No command of a rule runs a word of the facts which a test gives to the rule."""
    WATCH.watch_all()
    yield
    running = dict(WATCH.running)
    WATCH.running.clear()
    assert running == {}


@pytest.fixture(scope="session")
def tmp_path_factory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[pytest.TempPathFactory]:
    """Pytest's own in another place; folders of failed tests stay there."""
    option = request.config.option
    chosen = option.basetemp and not hasattr(request.config, "workerinput")
    if chosen or not _has_room():
        yield tmp_path_factory
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
        patch.setattr(option, "basetemp", None)  # each worker has been given one
        made = pytest.TempPathFactory.from_config(request.config, _ispytest=True)
        folder = made.getbasetemp()
    yield made
    if not request.session.testsfailed:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def umask() -> Iterator[None]:
    """The usual one, whatever that of the test run is; a test may set another."""
    before = os.umask(0o022)
    yield
    os.umask(before)
