"""The one file, and an environment that has torch and nothing else."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.cli.program import CLEAN
from tests.support.forkserver import quick_python_path

ROOT = Path(__file__).resolve().parents[2]
BARE = {name: value for name, value in CLEAN.items() if not name.startswith("PYTHON")}
TORCHRUN = """\
#!/bin/sh
PYTHON_EXEC={python} exec {quick} -m torch.distributed.run "$@"
"""
"""Starts the ranks with the Python of the environment. Itself it is not what is tested here."""


def make_zipapp(target: Path) -> subprocess.CompletedProcess[str]:
    """Run the script of `make zipapp`."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_zipapp.py"), str(target)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def build(target: Path) -> Path:
    done = make_zipapp(target)
    assert done.returncode == 0, done
    return target


@functools.cache
def _built() -> tuple[bytes, int]:
    """Contents and mode of the one file, built once for all modules of a worker."""
    with tempfile.TemporaryDirectory() as folder:
        file = build(Path(folder, "nccl-doctor.pyz"))
        return file.read_bytes(), file.stat().st_mode & 0o777


def built(target: Path) -> Path:
    """The one file, alone in a new folder."""
    target.parent.mkdir()
    content, mode = _built()
    target.write_bytes(content)
    target.chmod(mode)
    return target


def run(
    *command: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command without the variables of the tests' own Python."""
    return subprocess.run(
        [str(word) for word in command],
        env={**BARE, "CUDA_VISIBLE_DEVICES": "", **(env or {})},
        cwd=cwd,
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
    )


def make_venv(folder: Path, distributions: Sequence[str] = ()) -> Path:
    """An environment with these distributions of ours, and what they require; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    links = folder / "links"
    links.mkdir()
    seen: set[str] = set()
    for top in {top for name in distributions for top in _tops(name, seen)}:
        (links / top.name).symlink_to(top)
    (site / "links.pth").write_text(f"{links}\n")
    return python


def add_torchrun(python: Path) -> None:
    """A torchrun beside the Python of an environment with torch."""
    torchrun = python.with_name("torchrun")
    torchrun.write_text(TORCHRUN.format(python=python, quick=quick_python_path()))
    torchrun.chmod(0o755)


def _tops(name: str, seen: set[str]) -> Iterator[Path]:
    """Files and folders in site-packages of a distribution and all that it requires."""
    if name in seen:
        return
    seen.add(name)
    distribution = metadata.distribution(name)
    for file in distribution.files or ():
        if file.parts[0] not in ("..", "__pycache__"):
            yield Path(str(distribution.locate_file(file.parts[0])))
    for text in distribution.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            # A torch of tests/torches is without triton, which only its compiler imports.
            with suppress(metadata.PackageNotFoundError):
                yield from _tops(requirement.name, seen)
