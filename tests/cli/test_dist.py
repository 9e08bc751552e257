"""What `make dist` writes, each tried where only torch is."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from nccl_doctor import __version__
from tests.support.zipapp import ROOT, make_venv, run

pytestmark = pytest.mark.xdist_group("docs_install")
HOME = "/opt/nccl-doctor"
"""The environment in the image, as the pages name it."""
LIMIT_S = 200.0
"""Longest time of a first start, which compiles all modules, on a busy machine."""
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(ROOT / "build" / "wheels")}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    (folder / "nccl_doctor-0.0.1-py3-none-any.whl").touch()  # of an earlier version
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_dist.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    assert sorted(path.name for path in folder.iterdir()) == [
        "Containerfile",
        "nccl-doctor.pyz",
        f"nccl_doctor-{__version__}-py3-none-any.whl",
        f"nccl_doctor-{__version__}.tar.gz",
    ]
    assert all(f"wrote {path}" in done.stdout for path in folder.iterdir())
    return folder


def works(python: Path, *command: str | Path) -> None:
    """It starts, and reads tables, checks and the psutil that it brings; far from the sources."""
    said = run(python, *command, "--version", cwd=Path("/"), timeout_s=LIMIT_S)
    assert said.stdout == f"nccl-doctor {__version__}\n", said
    words = ("env", "--select", "software,interfaces")
    env = run(python, *command, *words, cwd=Path("/"), timeout_s=LIMIT_S)
    assert env.returncode == 0, env
    assert "check-" not in env.stdout


def test_the_one_file(dist: Path, tmp_path: Path) -> None:
    works(make_venv(tmp_path / "venv", ["torch"]), dist / "nccl-doctor.pyz")


def test_the_source_archive(dist: Path, tmp_path: Path) -> None:
    """With the setuptools that would be fetched to build it."""
    (file,) = dist.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {Path(name).parts[1] for name in archive.getnames() if "/" in name}
    assert {"nccl_doctor", "checks", "pyproject.toml", "LICENSE"} <= names
    python = make_venv(tmp_path / "venv", ["torch", "pip", "setuptools"])
    done = run(
        *(python, "-m", "pip", "install", "--quiet", "--no-build-isolation", file),
        cwd=tmp_path,
        env=OFFLINE,
        timeout_s=100,
    )
    assert done.returncode == 0, done
    works(python, "-m", "nccl_doctor")


def test_the_wheel_by_the_steps_of_the_recipe(dist: Path, tmp_path: Path) -> None:
    """All but the packages of Debian; torch is there, as nothing is fetched."""
    recipe = (dist / "Containerfile").read_text("utf-8")
    lines = [line for line in recipe.splitlines() if line[0] != "#"]
    kept = {word: [line for line in lines if line.startswith(word)] for word in ("FROM", "COPY")}
    assert kept["FROM"] == ["FROM debian:trixie-slim"]
    (copied,) = (shlex.split(line)[1] for line in kept["COPY"])
    (wheel,) = dist.glob(copied)
    packages, venv, *steps = (line[4:] for line in lines if line.startswith("RUN "))
    assert re.match(r"apt-get update && apt-get install .* python3-venv ", packages)
    assert venv == f"python3 -m venv {HOME}"
    python = make_venv(tmp_path / "venv", ["torch", "pip"])
    for step in steps:
        assert step.startswith(f"{HOME}/bin/python -m pip install ")
        here = step.replace(" /tmp/", f" {dist}/").replace(HOME, str(tmp_path / "venv"))
        done = run("bash", "-c", here, env={**OFFLINE, "TORCH": "torch"}, timeout_s=100)
        assert done.returncode == 0, done
        assert wheel.name in here or "already satisfied: torch" in done.stdout
    works(python, "-m", "nccl_doctor")
    assert f"ENV PATH={HOME}/bin:" in recipe
    program = run(tmp_path / "venv" / "bin" / "nccl-doctor", "--version", cwd=Path("/"))
    assert program.stdout == f"nccl-doctor {__version__}\n"
    assert 'ENTRYPOINT ["nccl-doctor"]' in lines


def test_make_needs_no_tools_for_tests_or_documents() -> None:
    done = run(
        "make", "--dry-run", "--no-print-directory", "-C", ROOT, "VENV=/dev/null/venv", "dist"
    )
    assert done.returncode == 0, done
    _, _, tools, built = done.stdout.splitlines()
    assert tools.endswith(" install -c constraints-dev.txt setuptools")
    assert built == "/dev/null/venv/bin/python scripts/make_dist.py"


def test_make_doctor_says_where_the_command_is_and_what_comes_next() -> None:
    done = run("make", "--dry-run", "--no-print-directory", "-C", ROOT, "VENV=/x/venv", "doctor")
    assert "make: the command is /x/venv/bin/nccl-doctor; next" in done.stdout
    assert "  /x/venv/bin/nccl-doctor run -- torchrun …" in done.stdout
