"""Files and folders that variables name, opened as their readers open them."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.system.masking import MASK
from nccl_doctor.system.shortage import shortage_of
from nccl_doctor.toolkit.nccl.release import NcclRelease, loaded_release
from nccl_doctor.toolkit.nccl.xml_files import fault_in
from nccl_doctor.toolkit.storage.worker import Desk, StorageWorker, ask, close_all
from nccl_doctor.toolkit.variables.recorded import SET
from nccl_doctor.toolkit.variables.table import Variable, table

_STEP_S = 4.0
"""A busy file server takes a second or two."""
_MOST = 4 << 20
"""Bytes of a file that are read."""


class _FileDesk(Desk):
    """Steps on the file or folder that one variable names."""

    def __init__(self, path: str, form: str, release: NcclRelease) -> None:
        self._path, self._form, self._release = path, form, release
        self.steps = {"read": self._read, "write": self._write}

    def _read(self) -> Mapping[str, Any]:
        """`digest` of what is there; `fault` and `fatal`, where its form is known and wrong."""
        handle = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EISDIR, "it is no file")
            text = file.read(_MOST)
        fault = fault_in(text, self._form, self._release) if self._form else None
        said = {"fault": fault.says, "fatal": fault.fatal} if fault else {}
        return {"digest": hashlib.sha256(text).hexdigest()[:12], **said}

    def _write(self) -> Mapping[str, Any]:
        """True if a file may be made or written there; nothing is."""
        folder = os.path.dirname(self._path) or os.curdir
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        target = self._path if os.path.lexists(self._path) else folder
        if not os.access(target, os.W_OK):
            read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise OSError(number, os.strerror(number))
        return {}


def look_at_files(settings: Mapping[str, Mapping[str, Any]], root: Path = Path("/")) -> list[Any]:
    """Facts on each file that a variable names.

    Args:
        settings: `variables` of `gather_variables`.
        root: the folder below which the host's own files are, `/` but for tests.

    Returns: `name`, the variable; `path`; `use`, see `NamedFile`; `digest`, `fault` and `fatal` of
    what was read; `error` and `hung` as of `worker.ask`.
    """
    release = loaded_release()
    found: list[dict[str, Any]] = []
    workers: dict[int, StorageWorker] = {}
    try:
        for name in sorted(settings):
            row = table().variables.get(name)
            path = _path(row, str(settings[name]["value"]), root) if row and row.file else None
            if row is None or row.file is None or path is None:
                continue
            opened = os.fspath(root / path[1:]) if path.startswith("/") else path
            desk = _FileDesk(opened, row.file.form, release)
            workers[len(found)] = StorageWorker("files", desk, 2 * _STEP_S)
            found.append({"name": name, "path": path, "use": row.file.use})
        for use in ("read", "write"):
            words: dict[int, dict[str, Any]] = {
                number: {} for number, each in enumerate(found) if each["use"] == use
            }
            for number, answer in ask(workers, use, words, _STEP_S).items():
                found[number].update(answer)
                if "hung" in answer:
                    workers[number].close(kill=True)
    except OSError as error:
        if shortage_of(error) is None:
            raise
        return []  # no process could be started: other checks report it
    finally:
        close_all(list(workers.values()))
    return found


def _path(row: Variable, text: str, root: Path) -> str | None:
    """The path that is opened; None where nothing is, or where it is not known before."""
    file = row.file
    if file is None or text in (MASK, SET) or (not text and not file.empty):
        return None
    if not text and file.empty.startswith("/") and not (root / file.empty[1:]).exists():
        return None  # the empty name hides nothing
    if file.inside:
        return os.path.join(text, file.inside)
    if file.use == "write":
        if text in ("stdout", "stderr"):
            return None
        host = platform.node()
        text = text.replace("%h", host if row.library == "ucx" else host.partition(".")[0])
        return None if "%" in os.path.dirname(text) else text
    return text
