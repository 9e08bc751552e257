"""docs/install.md: its lines for pip, typed where torch is and nothing may be fetched."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nccl_doctor import __version__
from nccl_doctor.cli import cli
from tests.support.zipapp import BARE, ROOT, make_venv, run
from tests.unit.test_readme import doctor, options

pytestmark = pytest.mark.xdist_group("docs_install")  # one environment, one copy of the tree
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
LINES = [
    line
    for block in re.findall(r"^```(?:sh|dockerfile)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
PIP = [re.sub(r".*python3? -m pip ", "", line) for line in LINES if " -m pip " in line]
OFFLINE = "--no-index --no-build-isolation"
WHO = "from importlib.metadata import version as v; print(v('torch'), v('click'))"


class Place:
    """A copy of the source tree, and an environment with torch, pip and what we require."""

    def __init__(self, folder: Path) -> None:
        has = ["torch", "click", "psutil", "tabulate", "tomli", "nvidia-ml-py", "pip", "setuptools"]
        self.python = make_venv(folder / "venv", has)
        self.tree = folder / "tree"
        skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
        for name in ("nccl_doctor", "checks"):
            shutil.copytree(ROOT / name, self.tree / name, ignore=skip)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.tree)

    def type_in(self, line: str, more: str = "") -> subprocess.CompletedProcess[str]:
        assert line in LINES
        path = {"PATH": f"{self.python.parent}:{BARE['PATH']}"}
        return run("bash", "-c", f"{line} {more}", cwd=self.tree, env=path, timeout_s=100)

    def has(self) -> str:
        """The versions of torch and click."""
        return run(self.python, "-c", WHO).stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


def test_a_dry_run_names_the_doctor_alone(place: Place) -> None:
    done = place.type_in("python -m pip install --dry-run .", OFFLINE)
    assert done.returncode == 0, done
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("Would install"))
    assert line == f"Would install nccl-doctor-{__version__}"


def test_from_a_folder_of_wheels_and_away_again(place: Place) -> None:
    before = place.has()
    for line, more in (
        ("python -m pip wheel --no-deps --wheel-dir wheels .", OFFLINE),
        ("python -m pip install --no-index --find-links wheels nccl-doctor", "--no-compile"),
    ):
        done = place.type_in(line, more)
        assert done.returncode == 0, done
    (wheel,) = (place.tree / "wheels").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    shutil.rmtree(place.tree / "nccl_doctor")  # -m looks into the working directory first
    said = place.type_in("python -m nccl_doctor --version")
    assert said.stdout == f"nccl-doctor {__version__}\n", said
    env = place.type_in("python -m nccl_doctor env", "--select torch_import")
    assert str(place.python) in env.stdout
    assert place.type_in("python -m pip uninstall --yes nccl-doctor").returncode == 0
    assert place.type_in("python -m nccl_doctor --version").returncode == 1
    assert place.has() == before != ""


@pytest.mark.parametrize("command", sorted({line.split(maxsplit=1)[0] for line in PIP}))
def test_pip_has_these_options(command: str) -> None:
    told = set(re.findall(r"--[a-z-]+", run(sys.executable, "-m", "pip", command, "--help").stdout))
    lines = [line for line in PIP if line.startswith(command)]
    assert {option for line in lines for option in re.findall(r"--[a-z-]+", line)} <= told


def test_the_doctor_has_these_commands() -> None:
    called = list(doctor(PAGE.replace('"$SHARED/nccl-doctor.pyz"', "nccl-doctor")))
    assert {"run", "env", "explain"} <= {words[0] for words in called}
    for words in called:
        own = words[: words.index("--")] if "--" in words else words
        if own[0] in cli.commands:
            given = {word for word in own if word.startswith("--")}
            assert given <= options(cli.commands[own[0]], hidden=False)
