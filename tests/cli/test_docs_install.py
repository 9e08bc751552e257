"""docs/install.md: its lines for pip, typed where torch is and nothing may be fetched."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nccl_doctor import __version__, registry
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
COMMANDS = sorted({line.split(maxsplit=1)[0] for line in PIP})
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


@pytest.fixture(scope="module")
def wheel(place: Place) -> Path:
    line = "python -m pip wheel --no-deps --wheel-dir wheels ."
    done = place.type_in(line, OFFLINE)
    assert done.returncode == 0, done
    (file,) = (place.tree / "wheels").iterdir()
    return file


def test_the_wheel_holds_every_check_and_all_data(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    engine = ROOT / "nccl_doctor"
    for path in (
        *engine.rglob("*.py"),
        *engine.rglob("*.json"),
        *engine.rglob("*.toml"),
        *engine.rglob("*.md"),
        *(engine / "report").rglob("*.[cj]s*"),
        engine / "py.typed",
    ):
        assert str(path.relative_to(ROOT)) in names
    held = {name for name in names if name.startswith("nccl_doctor/checks/")}
    here = [path for end in ("*.py", "*.toml") for path in (ROOT / "checks").rglob(end)]
    assert held == {f"nccl_doctor/{path.relative_to(ROOT)}" for path in here}
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"nccl_doctor"}


def test_from_a_folder_of_wheels_and_away_again(place: Place, wheel: Path) -> None:
    before = place.has()
    line = f"python -m pip install --no-index --find-links {wheel.parent.name} nccl-doctor"
    done = place.type_in(line, "--no-compile")
    assert done.returncode == 0, done
    shutil.rmtree(place.tree / "nccl_doctor")  # -m looks into the working directory first
    said = place.type_in("python -m nccl_doctor --version")
    assert said.stdout == f"nccl-doctor {__version__}\n", said
    own = run(place.python, "-m", "nccl_doctor", "--version", "-v", cwd=Path("/")).stdout
    (site,) = place.python.parents[1].glob("lib/python*/site-packages")
    assert own.startswith(f"nccl-doctor {__version__} (package: {site / 'nccl_doctor'})\n")
    env = place.type_in("python -m nccl_doctor env", "--select software")
    assert str(place.python) in env.stdout
    runs_from_anywhere(place.python)
    assert place.type_in("python -m pip uninstall --yes nccl-doctor").returncode == 0
    assert place.type_in("python -m nccl_doctor --version").returncode == 1
    assert place.has() == before != ""


def runs_from_anywhere(python: Path) -> None:
    there = "import nccl_doctor.checks; print(nccl_doctor.checks.__file__)"
    path = Path(run(python, "-c", there, cwd=Path("/")).stdout.strip())
    assert path.is_relative_to(python.parents[1])
    assert path.parts[-3:] == ("nccl_doctor", "checks", "__init__.py")
    table = run(python, "-m", "nccl_doctor", "checks", cwd=Path("/"), env={"COLUMNS": "200"}).stdout
    found = registry.load()
    for check in found.checks:
        if found.origins[check.name] == "nccl-doctor":
            assert re.search(rf"  {check.name}  ", table), check.name
            for kind in check.kinds:
                assert kind.code in table


HELP = """
import json, sys
from pip._internal.commands import create_command
print(json.dumps({each: create_command(each).parser.format_help() for each in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def pip_options() -> dict[str, set[str]]:
    """Command of pip → its options, as --help lists them; one pip says it of all."""
    done = run(sys.executable, "-c", HELP, *COMMANDS)
    texts = json.loads(done.stdout)
    return {each: set(re.findall(r"--[a-z-]+", text)) for each, text in texts.items()}


@pytest.mark.parametrize("command", COMMANDS)
def test_pip_has_these_options(command: str, pip_options: dict[str, set[str]]) -> None:
    lines = [line for line in PIP if line.startswith(command)]
    given = {option for line in lines for option in re.findall(r"--[a-z-]+", line)}
    assert given <= pip_options[command]
    assert "--help" in pip_options[command]


def test_the_doctor_has_these_commands() -> None:
    called = list(doctor(PAGE.replace('"$SHARED/nccl-doctor.pyz"', "nccl-doctor")))
    assert {"run", "env", "explain"} <= {words[0] for words in called}
    for words in called:
        own = words[: words.index("--")] if "--" in words else words
        if own[0] in cli.commands:
            given = {word for word in own if word.startswith("--")}
            assert given <= options(cli.commands[own[0]], hidden=False)
