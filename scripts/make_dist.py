"""Write what can be installed into a folder: make_dist.py [FOLDER]

A wheel, a source archive, the one file, and `Containerfile`, whose context is that folder. Needs
Python, pip and setuptools. They are built from a copy, so that nothing of earlier builds gets in.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import make_zipapp  # beside this one

ROOT = make_zipapp.ROOT
RECIPE = Path("docs", "examples", "container", "Containerfile")
SOURCES = ("nccl_doctor", "checks", "pyproject.toml", "README.md", "LICENSE")
BUILD = """
from setuptools import build_meta
build_meta.build_sdist("made")
build_meta.build_wheel("made")
"""
_FIRST_S = "315532800"
"""1980, the first that a zip file can tell: the same sources give the same wheel."""


def build(folder: Path) -> None:
    """Write wheel and source archive in place of those of other versions.

    Raises:
        Refused: setuptools did not build them.
    """
    with tempfile.TemporaryDirectory() as place:
        made = Path(place, "made")
        made.mkdir()
        for name in SOURCES:
            if (ROOT / name).is_dir():
                skip = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, Path(place, name), ignore=skip)
            else:
                shutil.copy(ROOT / name, place)
        done = subprocess.run(
            [sys.executable, "-c", BUILD],
            cwd=place,
            env={"SOURCE_DATE_EPOCH": _FIRST_S, **os.environ},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise make_zipapp.Refused(done.stderr.strip().splitlines()[-1])
        for old in (*folder.glob("nccl_doctor-*.whl"), *folder.glob("nccl_doctor-*.tar.gz")):
            old.unlink()
        for file in made.iterdir():
            shutil.copy(file, folder)


def main(arguments: list[str]) -> int:
    """Write all four; 2 where one of them is refused."""
    parser = argparse.ArgumentParser(prog="make_dist.py", description=__doc__)
    parser.add_argument("folder", nargs="?", metavar="FOLDER", type=Path, default=ROOT / "dist")
    folder = parser.parse_args(arguments).folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        build(folder)
        shutil.copy(ROOT / RECIPE, folder)
    except (make_zipapp.Refused, OSError) as error:
        sys.stderr.write(f"dist: {error}\n")
        return 2
    for path in (*sorted(folder.glob("nccl_doctor-*")), folder / RECIPE.name):
        sys.stdout.write(f"wrote {path}\n")
    return make_zipapp.main([str(folder / make_zipapp.TARGET.name)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
