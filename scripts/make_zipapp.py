"""Put nccl-doctor and its pure Python dependencies into one file: make_zipapp.py [FILE]

Torch is found where the file runs. What goes in is read from pyproject.toml, as for a wheel; the
dependencies are those installed beside the Python that runs this, in the versions of
constraints-dev.txt. The same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import zipapp
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path("dist", "nccl-doctor.pyz")
FOUND_THERE = {"torch"}
"""Dependencies that stay outside: they belong to the job."""
_KEPT = (".py", "py.typed", "METADATA")
_LICENCES = re.compile(r"\.dist-info/(licenses/|LICEN[CS]E|COPYING|NOTICE)")

# Read by whatever Python the file is given to, so in words that an old one understands, too.
MAIN = """\
import sys

if sys.version_info < (3, 10):
    sys.stderr.write(
        "nccl-doctor: error: Python 3.10 or newer is needed; this is %d.%d, %s\\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    sys.exit(2)

from nccl_doctor.__main__ import main

main()
"""


class Refused(Exception):
    """Why there will be no file, in one line."""


def contents(root: Path) -> dict[str, bytes]:
    """Name in the archive → bytes, of everything.

    Raises:
        Refused: a dependency is not installed, or in another version than the one pinned.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    pins = pins_of((root / "constraints-dev.txt").read_text(encoding="utf-8"))
    found = {"__main__.py": MAIN.encode(), "LICENSE": (root / "LICENSE").read_bytes()}
    for path, name in own_files(root, project["tool"]["setuptools"]):
        found[name] = path.read_bytes()
    for requirement in project["project"]["dependencies"]:
        name = re.split(r"[^\w.-]", requirement)[0]
        if name not in FOUND_THERE:
            found |= files_of(name, pins.get(name))
    return found


def own_files(root: Path, setuptools: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """(file, name in the archive) of the modules and the data that a wheel would hold."""
    for package in setuptools["packages"]:
        inside = package.replace(".", "/")
        folder = root / setuptools["package-dir"].get(package, inside)
        patterns = ["*.py", *setuptools["package-data"].get(package, ())]
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            yield path, f"{inside}/{path.relative_to(folder).as_posix()}"


def files_of(name: str, pinned: str | None) -> dict[str, bytes]:
    """Sources and licence of an installed distribution; without what was compiled for one Python.

    Raises:
        Refused: as for `contents`.
    """
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise Refused(f"{name} is not installed in {sys.prefix}") from None
    if distribution.version != pinned:
        raise Refused(
            f"{name} {distribution.version} is installed, constraints-dev.txt says {pinned}"
        )
    kept = [
        file
        for file in distribution.files or ()
        if ".." not in file.parts and (file.name.endswith(_KEPT) or _LICENCES.search(str(file)))
    ]
    if not any(file.name == "__init__.py" for file in kept):
        raise Refused(f"{name}: its sources are not known to be installed")
    return {file.as_posix(): Path(str(file.locate())).read_bytes() for file in kept}


def pins_of(constraints: str) -> dict[str, str]:
    """Distribution → version, of the lines that hold for every Python."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)$", constraints, re.MULTILINE))


def archive(files: dict[str, bytes]) -> bytes:
    """A zip file: by name, of one date, uncompressed, since compressors differ in their output."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name)  # of 1980-01-01
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            file.writestr(entry, files[name])
    return made.getvalue()


def write(files: dict[str, bytes], target: Path) -> None:
    """The whole file or nothing: another host may be reading the old one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        zipapp.create_archive(io.BytesIO(archive(files)), unfinished, "/usr/bin/env python3")
        unfinished.chmod(0o755)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    """Write the file; 2 where that is refused."""
    parser = argparse.ArgumentParser(prog="make_zipapp.py", description=__doc__)
    parser.add_argument("target", nargs="?", metavar="FILE", type=Path, default=ROOT / TARGET)
    target = parser.parse_args(arguments).target
    try:
        write(contents(ROOT), target)
    except (Refused, OSError) as error:
        sys.stderr.write(f"zipapp: {error}\n")
        return 2
    sys.stdout.write(f"wrote {target}, {target.stat().st_size / 1e6:.1f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
