"""The oldest and the newest torch, each from its own wheel; `make test-torch` has those between.

Wide, as the wheels and their libraries are some 9 GB: `make test ARGS=tests/torches`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.wheels import NoWheel, leave
from tests.torches.forms import run, start
from tests.torches.installs import NEWEST, OLDEST, python_of

TWO_HOSTS = "tests/lab/test_lab_healthy.py::test_two_hosts_under_torchrun"

pytestmark = pytest.mark.wide


@pytest.fixture(params=[OLDEST, NEWEST])
def python(request: pytest.FixtureRequest) -> Path:
    """The Python of one release; a skip only where the index has no such wheel."""
    try:
        return python_of(request.param)
    except NoWheel as error:
        leave(error)


@pytest.mark.parametrize(("form", "port"), [("alone", 28500), ("under torchrun", 28510)])
def test_a_healthy_machine_passes(python: Path, form: str, port: int) -> None:
    assert start(form, python, port).startswith("pass ")


def test_two_healthy_hosts_pass(python: Path) -> None:
    code, told = run([str(python), "-m", "pytest", "-q", "-n", "0", TWO_HOSTS])
    assert code == 0, told
