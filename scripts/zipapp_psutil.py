"""In the one file: finds psutil, where the Python that runs the file has none.

Its modules are read out of the archive. What is compiled cannot be: a copy of it is loaded from
memory, or, where the system refuses that, from a private temporary folder that is gone a moment
later. So nothing is left behind, however this process ends, and children have it by the fork.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

FOLDER = "carried"
"""In the archive: psutil, and a folder of its compiled part for each processor."""
_NAME = "psutil._psutil_linux"
_FILE = "_psutil_linux.abi3.so"


def carry() -> None:
    """Let psutil be imported: the one that is installed here, else the one in the archive."""
    here = f"{os.path.dirname(__file__)}/{FOLDER}"
    try:
        data = __loader__.get_data(f"{here}/{platform.machine()}/{_FILE}")
    except OSError:  # none for this processor
        return
    if "t" in sys.abiflags:  # a Python without a global lock has another interface
        return
    sys.path.append(here)
    sys.meta_path.append(_Finder(here, data))


class _Finder(MetaPathFinder):
    """Asked after all others: nothing else finds the compiled part in an archive."""

    def __init__(self, here: str, data: bytes) -> None:
        self._here, self._data = here, data

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME or list(path or ()) != [f"{self._here}/psutil"]:
            return None
        loader = _Loader(fullname, f"{self._here}/{_FILE}", self._data)
        return spec_from_file_location(fullname, loader.path, loader=loader)


class _Loader(ExtensionFileLoader):
    def __init__(self, name: str, path: str, data: bytes) -> None:
        super().__init__(name, path)
        self._data = data

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            return self._create(spec, _in_memory)
        except (OSError, ImportError):
            return self._create(spec, _in_a_folder)

    def _create(
        self, spec: ModuleSpec, place: Callable[[bytes], AbstractContextManager[str]]
    ) -> ModuleType:
        with place(self._data) as spec.origin:
            return super().create_module(spec)


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Path of a file that has no name."""
    with open(os.memfd_create("psutil"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


@contextmanager
def _in_a_folder(data: bytes) -> Iterator[str]:
    """Path of a file that only this user can reach."""
    with tempfile.TemporaryDirectory(prefix="nccl-doctor-") as folder:  # mode 0700
        path = f"{folder}/{_FILE}"
        with open(path, "wb") as file:
            file.write(data)
        yield path
