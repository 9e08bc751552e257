"""Import of torch, which may raise anything, and does so only once."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from nccl_doctor.system.helpers import send_foreign
from nccl_doctor.system.shortage import NO_MEMORY, soft_limit

TORCH_MISSING = "torch-missing"
"""Code of the finding on a rank that cannot import torch."""
_PATIENCE_S = 60.0
"""Time for a cold import from a network file system."""
_DEBUG_LEVELS = ("OFF", "INFO", "DETAIL")
_NAMES = ("torch", "torch.distributed")


class _NoSecondImport(MetaPathFinder):
    """Refuses to import torch again: a second attempt finds parts of the first, and says something
    else.
    """

    def __init__(self, words: str) -> None:
        self.words = words

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Raises: ImportError for torch."""
        if name in _NAMES:
            raise ImportError(f"torch cannot be imported: {self.words}")


def import_torch() -> None:
    """Import torch before any fork, so that no child has to do it again. A check reports a missing
    torch.

    On a file system that hangs this may take for ever: only under a watchdog. A debug level at
    which torch refuses to import is taken out of this process; a check finds it in the job's
    environment.
    """
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() not in _DEBUG_LEVELS:
        del os.environ["TORCH_DISTRIBUTED_DEBUG"]
    # Collecting garbage meanwhile takes a tenth of the time, and frees next to no memory.
    gc.disable()
    try:
        load_torch()
    finally:
        gc.enable()
    gc.freeze()  # no child needs to go through what is imported, and so to copy it


def load_torch() -> str:
    """Import torch. Once that has failed, it raises ImportError everywhere in this process.

    Returns: type and words of what the first attempt raised; the empty string if nothing.
    """
    words = torch_error()
    if not words and (words := _tried_apart() or _tried()):
        sys.meta_path.insert(0, _NoSecondImport(words))
    return words


def _tried() -> str:
    try:
        import torch.distributed  # noqa: F401
    except BaseException as error:  # a package built for another numpy, a module that calls exit
        return f"{type(error).__name__}: {error}"
    return ""


def _tried_apart() -> str:
    """Try it in a child, where addresses are limited: a library that gets none may end its process
    (OpenBLAS does, with exit code 1).
    """
    if soft_limit(resource.RLIMIT_AS) is None:
        return ""
    try:
        return send_foreign("torch", lambda: _tried().encode(), _PATIENCE_S).decode()
    except TimeoutError:
        return ""
    except ChildProcessError as error:
        return f"{NO_MEMORY}: the import of torch {error.strerror}"


def torch_error() -> str:
    """Answer of `load_torch` in this process, or in the one that it was forked from."""
    return next((each.words for each in sys.meta_path if isinstance(each, _NoSecondImport)), "")
