"""A Python with another torch: a virtual environment that takes all else from the one of the tests.

Builds with CUDA import on a machine without a GPU, but not without NVIDIA's libraries, some 3 GB.
All releases of one CUDA share those of the newest of them, which have what older ones call.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.wheels import NoWheel, cache, download, pip

VERSIONS = ("2.4.1", "2.6.0", "2.8.0", "2.10.0", "2.13.0", "2.14.1", "2.15.0")
OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
_LIBRARIES_OF = {"cu12": "2.10.0", "cu13": "2.15.0"}
"""CUDA → the newest of its releases, whose libraries all of them take."""
_NEEDED = ("nvidia-", "cuda-")


def python_of(version: str) -> Path:
    """The Python of a release, made if it is not there: `$XDG_CACHE_HOME/nccl-doctor/torch/…`.

    Raises:
        NoWheel: the wheel, or a library that it needs, cannot be fetched.
    """
    folder = cache("torch", version)
    python = folder / "bin" / "python"
    with (folder.parent / f"{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _install(version, folder)
            (folder / "done").touch()
    return python


def _install(version: str, folder: Path) -> None:
    make = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
    subprocess.run(make, check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    needed = _unpack(version, site)
    if needed:
        cuda = "cu12" if any("cu12" in each.name for each in needed) else "cu13"
        libraries = cache("torch", f"libraries-{cuda}")
        if version != _LIBRARIES_OF[cuda]:
            python_of(_LIBRARIES_OF[cuda])
        else:
            bare = [str(each).partition(";")[0].strip() for each in needed]
            more = ["nvidia-curand"] if cuda == "cu13" else []  # torch 2.15 is without, 2.14 is not
            folder_of = ("--no-cache-dir", "--upgrade", "--target", str(libraries))
            pip("install", *folder_of, *bare, *more)
        _link(libraries, site)
    torchrun = folder / "bin" / "torchrun"
    torchrun.write_text(f"#!{folder}/bin/python\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
    ours = sysconfig.get_path("purelib")
    (site / "tests.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    asks = "import torch, sys; sys.stdout.write(torch.__version__)"
    done = subprocess.run(
        [str(folder / "bin" / "python"), "-c", asks], capture_output=True, text=True, check=False
    )
    if done.stdout.partition("+")[0] != version:
        last = (done.stderr.strip() or done.stdout).splitlines()[-1:]
        raise NoWheel(f"torch {version} does not import: {''.join(last)}", offered=True)


def _unpack(version: str, site: Path) -> list[Requirement]:
    """Put torch alone into a folder of modules. Returns: NVIDIA's libraries that it needs."""
    with tempfile.TemporaryDirectory(dir=site) as folder:
        wheel = download(f"torch=={version}", Path(folder))
        zipfile.ZipFile(wheel).extractall(site)
    (record,) = site.glob("torch-*.dist-info/METADATA")
    told = Parser().parsestr(record.read_text(encoding="utf-8")).get_all("Requires-Dist", [])
    wanted = (Requirement(each) for each in told)
    here = (each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""}))
    return [each for each in here if each.name.startswith(_NEEDED)]


def _link(libraries: Path, site: Path) -> None:
    before_nvidia = libraries / "nvidia" / "cusparselt"  # torch 2.6 looks for it outside of nvidia/
    for entry in (*libraries.iterdir(), before_nvidia):
        target = site / entry.name
        if not target.exists() and entry.name != "bin":
            target.symlink_to(entry)
