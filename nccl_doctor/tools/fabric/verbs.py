"""What a process needs to use RDMA devices by verbs: the library, and a file in /dev for each.

For `observe`: what is called here maps a library and opens devices. In a container the devices of
the host often stand in sysfs while their files are missing or barred.

Source: `buildIbvSymbols` in NCCL's src/misc/ibvsymbols.cc; `ibv_open_device` of rdma-core; kernel
documentation, ABI/stable/sysfs-class-infiniband (infiniband_verbs).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from nccl_doctor.tools.fabric.ports import word

IBVERBS = ("libibverbs.so", "libibverbs.so.1")
"""What NCCL tries to load, in its order."""


def ibverbs_error(libraries: Sequence[str] = IBVERBS) -> str:
    """Why none of them can be loaded, or empty."""
    said = ""
    for library in libraries:
        try:
            ctypes.CDLL(library)
        except OSError as error:
            said = str(error)
        else:
            return ""
    return said


def barred_devices(devices: Iterable[str], root: Path = Path("/")) -> dict[str, str]:
    """Device → why this process cannot open it; those that it can are left out.

    They are opened as libibverbs does, and closed again; nothing is asked of them.
    """
    files = {
        word(folder / "ibdev"): root / "dev/infiniband" / folder.name
        for folder in sorted((root / "sys/class/infiniband_verbs").glob("uverbs*"))
    }
    found = {}
    for device in dict.fromkeys(devices):
        if device not in files:
            found[device] = "no uverbs device in sysfs (module ib_uverbs)"
            continue
        try:
            os.close(os.open(files[device], os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            found[device] = f"/dev/infiniband/{files[device].name}: {error.strerror}"
    return found
