"""Access of a process to RDMA devices by verbs: the library, and a file in /dev for each.

For `observe`: these functions load a library and open devices. In a container the devices of
the host are often in sysfs while their files are missing or not permitted.

Source: `buildIbvSymbols` in NCCL's src/misc/ibvsymbols.cc; ibv_get_device_list(3),
ibv_open_device(3) and ibv_query_port(3) of rdma-core; kernel documentation,
ABI/stable/sysfs-class-infiniband (infiniband_verbs).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nccl_doctor.toolkit.fabric.ports import word

IBVERBS = ("libibverbs.so", "libibverbs.so.1")
"""Libraries that NCCL tries to load, in its order."""
_PORT_ATTR_BYTES = 256
"""Room for `struct ibv_port_attr`, which is about 50 bytes long and may grow."""
_ACTIVE_MTU_AT = 8
"""Its third field, after `state` and `max_mtu`: an enum, 1 stands for 256 bytes, 5 for 4096."""
_MTUS = {code: 128 << code for code in range(1, 6)}


def ibverbs_error(libraries: Sequence[str] = IBVERBS) -> str:
    """The reason why none of the libraries can be loaded, or empty."""
    loaded, said = _load(libraries)
    return "" if loaded else said


def barred_devices(devices: Iterable[str], root: Path = Path("/")) -> dict[str, str]:
    """Device → why this process cannot open it; devices that it can open are left out.

    They are opened as libibverbs does, and closed again; nothing else is done with them.
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


def active_mtus(ports: Iterable[str], libraries: Sequence[str] = IBVERBS) -> dict[str, int]:
    """Port (`mlx5_0:1`) → its active MTU in bytes, by verbs: that of InfiniBand is not in sysfs.

    Devices that cannot be opened or queried are left out.
    """
    wanted: dict[str, list[int]] = {}
    for port in ports:
        device, _, number = port.rpartition(":")
        wanted.setdefault(device, []).append(int(number))
    verbs, _ = _load(libraries)
    if verbs is None or not wanted:
        return {}
    try:
        return _ask(verbs, wanted)
    except AttributeError:  # a library of that name without these functions
        return {}


def _ask(verbs: ctypes.CDLL, wanted: Mapping[str, Sequence[int]]) -> dict[str, int]:
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    verbs.ibv_open_device.restype = ctypes.c_void_p
    count = ctypes.c_int()
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    found = {}
    for at in range(count.value if devices else 0):
        device = ctypes.c_void_p(devices[at])
        name = verbs.ibv_get_device_name(device).decode(errors="replace")
        if name not in wanted:
            continue
        opened = ctypes.c_void_p(verbs.ibv_open_device(device))
        if not opened:
            continue
        for port in wanted[name]:
            attributes = ctypes.create_string_buffer(_PORT_ATTR_BYTES)
            if verbs.ibv_query_port(opened, ctypes.c_uint8(port), attributes) == 0:
                code = ctypes.c_int.from_buffer(attributes, _ACTIVE_MTU_AT).value
                if code in _MTUS:
                    found[f"{name}:{port}"] = _MTUS[code]
        verbs.ibv_close_device(opened)
    if devices:
        verbs.ibv_free_device_list(devices)
    return found


def _load(libraries: Sequence[str]) -> tuple[ctypes.CDLL | None, str]:
    """The first of them that can be loaded, and why the last one cannot."""
    said = ""
    for library in libraries:
        try:
            return ctypes.CDLL(library), said
        except OSError as error:
            said = str(error)
    return None, said
