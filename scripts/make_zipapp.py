"""Put nccl-doctor and its dependencies into one file: make_zipapp.py [FILE]

Torch is found where the file runs. What goes in is read from pyproject.toml, as for a wheel. The
dependencies come as wheels from the package index, once, into build/wheels, in the versions of
constraints-dev.txt; of psutil, which is compiled, one for each processor. Needs Python and pip. The
same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
import zipapp
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path("dist", "nccl-doctor.pyz")
FOUND_THERE = {"torch"}
"""Dependencies that stay outside: they belong to the job."""
WHEELS = Path("build", "wheels")
ANY = "any"
SHA256 = {
    ("click", ANY): "8bb5376d2006950386f8c6427613334a2acadc5f559cb80e638d00b4df957e37",
    ("nvidia-ml-py", ANY): "959bf4adf6fe1308e4bd739e722236b0d1ec8392e2cefad33ff70c311380b9b6",
    ("psutil", "aarch64"): "b0726cecd84f9474419d67252add4ac0cd9811b04d61123054b9fb6f57df6e9e",
    ("psutil", "x86_64"): "076a2d2f923fd4821644f5ba89f059523da90dc9014e85f8e45a5774ca5bc6f9",
    ("tabulate", ANY): "f0b0622e567335c8fabaaa659f1b33bcb6ddfe2e496071b743aa113f8774f2d3",
    ("tomli", ANY): "32a7b79ac57a2e83670ce329ccf675798bc5a2094783a63676866b70503f2e2b",
}
"""Distribution and processor, as `platform.machine` names it → SHA-256 of the wheel, of the version
pinned. What is compiled of psutil serves every Python from 3.6 on (stable ABI).
"""
FINDER = Path("scripts", "zipapp_psutil.py")
IMPORTER = Path("scripts", "zipapp_once.py")
_KEPT = (".py", "py.typed")
_EXAMPLE = "example.py"
"""Beside the one module of nvidia-ml-py, and nothing of its."""
_LICENCE = re.compile(r"\.dist-info/(?:licenses/)?((?:LICEN[CS]E|COPYING|NOTICE)[^/]*)$")
_LICENCES = "licences"

# Read by whatever Python the file is given to, so in words that an old one understands, too.
MAIN = """\
import sys

if sys.version_info < (3, 10):
    sys.stderr.write(
        "nccl-doctor: error: Python 3.10 or newer is needed; this is %d.%d, %s\\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    sys.exit(2)

from zipapp_once import compile_once

compile_once()

from zipapp_psutil import carry

carry()

from nccl_doctor.__main__ import main

main()
"""


class Refused(Exception):
    """Why there will be no file, in one line."""


def contents(root: Path) -> dict[str, bytes]:
    """Name in the archive → bytes, of everything.

    Raises:
        Refused: a dependency cannot be had, or is not the one that is known.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    pins = pins_of((root / "constraints-dev.txt").read_text(encoding="utf-8"))
    found = {"__main__.py": MAIN.encode(), "LICENSE": (root / "LICENSE").read_bytes()}
    found[IMPORTER.name] = (root / IMPORTER).read_bytes()
    for path, name in own_files(root, project["tool"]["setuptools"]):
        found[name] = path.read_bytes()
    for requirement in project["project"]["dependencies"]:
        name = re.split(r"[^\w.-]", requirement)[0]
        if name in FOUND_THERE:
            continue
        if name not in pins:
            raise Refused(f"{name}: constraints-dev.txt has no version of it")
        if name == "psutil":
            found[FINDER.name] = (root / FINDER).read_bytes()
        found |= files_of(root / WHEELS, name, pins[name])
    return found


def own_files(root: Path, setuptools: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """(file, name in the archive) of the modules and the data that a wheel would hold."""
    for package in setuptools["packages"]:
        inside = package.replace(".", "/")
        folder = root / inside
        for name, moved in setuptools["package-dir"].items():
            if f"{package}.".startswith(f"{name}."):
                folder = root / moved / package[len(name) + 1 :].replace(".", "/")
        patterns = ["*.py", *setuptools["package-data"].get(package, ())]
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            yield path, f"{inside}/{path.relative_to(folder).as_posix()}"


def files_of(folder: Path, name: str, version: str) -> dict[str, bytes]:
    """Modules and licence of a distribution, and from each of its wheels what is compiled; without
    examples. What has something compiled lies apart, as another one may be installed. No metadata:
    Python would keep the archive open to read it, which no forked process survives.

    Raises:
        Refused: as for `contents`.
    """
    found = {}
    for machine in (machine for each, machine in SHA256 if each == name):
        apart = "" if machine == ANY else "carried/"
        with zipfile.ZipFile(wheel_of(folder, name, version, machine)) as wheel:
            for file in wheel.namelist():
                if file.endswith(".so"):
                    found[f"{apart}{machine}/{Path(file).name}"] = wheel.read(file)
                elif licence := _LICENCE.search(file):
                    found[f"{_LICENCES}/{name}-{version}/{licence[1]}"] = wheel.read(file)
                elif file != _EXAMPLE and file.endswith(_KEPT):
                    found[f"{apart}{file}"] = wheel.read(file)
    if not found:
        raise Refused(f"{name}: make_zipapp.py has no SHA-256 of it")
    return found


def wheel_of(folder: Path, name: str, version: str, machine: str) -> Path:
    """The wheel in the folder, fetched by pip where it is not there yet.

    Raises:
        Refused: as for `contents`.
    """
    begin = f"{name.replace('-', '_')}-{version}-"
    there = sorted(folder.glob(f"{begin}*{machine}.whl"))
    if not there:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            kind = (ANY, "none") if machine == ANY else (f"manylinux2014_{machine}", "abi3")
            command += ["--platform", kind[0], "--abi", kind[1]]
            command += ["--dest", fresh, f"{name}=={version}"]
            done = subprocess.run(
                [sys.executable, "-m", "pip", "--disable-pip-version-check", *command],
                capture_output=True,
                text=True,
                check=False,
            )
            wheels = list(Path(fresh).iterdir())
            if not wheels:
                last = (done.stderr.strip().splitlines() or ["nothing was fetched"])[-1]
                raise Refused(f"{name} {version} for {machine}: {last}")
            there = [wheels[0].replace(folder / wheels[0].name)]
    found, known = hashlib.sha256(there[0].read_bytes()).hexdigest(), SHA256[name, machine]
    if found != known:
        raise Refused(f"{there[0]}: SHA-256 {found}, make_zipapp.py says {known}")
    return there[0]


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
