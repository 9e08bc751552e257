"""Device files of NVIDIA's driver that this process may not open.

A container whose device permissions were reloaded (`systemctl daemon-reload`), or that was given
some of the GPUs only, and a user outside the group of the files: NVML then has an UNKNOWN error,
as for a broken GPU.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from nccl_doctor.toolkit.gpu.nvml import STEP, Crumb

_REFUSED = (errno.EPERM, errno.EACCES)
_FILE = re.compile(r"nvidia(ctl|\d+)")


def refused_files(root: Path, crumb: Crumb, *, gpus: bool) -> list[str]:
    """Paths that may not be opened: of /dev/nvidiactl, and of the files of `gpus`, too.

    Opening the file of a GPU wakes it, which may hang: for a process of its own.
    """
    found = []
    for path in sorted((root / "dev").glob("nvidia*")):
        match = _FILE.fullmatch(path.name)
        if match is None or (match[1] != "ctl" and not gpus):
            continue
        crumb(STEP, call=f"open(/dev/{path.name})")
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            if error.errno in _REFUSED:
                found.append(f"/dev/{path.name}")
    return found
