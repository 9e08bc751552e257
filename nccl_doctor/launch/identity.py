"""Identity of this participant: the data with which it signs in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from nccl_doctor.toolkit.gpu.devices import count_gpus, host_gpus
from nccl_doctor.toolkit.host import host_name
from nccl_doctor.toolkit.net.interfaces import interfaces, is_link_local, is_loopback
from nccl_doctor.toolkit.net.names import look_up

LOOK_UP_S = 4.0


def host_key() -> str:
    """Key of this host, also if two hosts share a name: kernel boot and network namespace.

    Containers that share one network are one host to the network; network namespaces of one kernel
    are several.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        boot = host_name()
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        namespace = 0
    return f"{host_name()}|{boot}|{namespace}"


def host_addresses() -> tuple[str, ...]:
    """Numeric addresses that another host could use for this one."""
    return tuple(
        address
        for interface in interfaces()
        for address in interface.addresses
        if not is_loopback(address) and not is_link_local(address)
    )


def is_this_host(name: str) -> bool:
    """True if a name or address leads to this host; False for one that does not resolve in 4 s."""
    found = look_up(name, LOOK_UP_S)
    mine = host_addresses()
    return any(is_loopback(address) or address in mine for address in found.answers)


def num_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that this process may use, counted without touching CUDA.

    A participant must never initialise CUDA: its children could not use it after the fork.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", environ.get("HIP_VISIBLE_DEVICES"))
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return 0
    present = count_gpus(host_gpus())
    if visible is None:
        return present
    return min(present, len([entry for entry in visible.split(",") if entry.strip()]))


def resolve_backend(wanted: str, environ: Mapping[str, str]) -> str:
    """`auto` is nccl where there is a GPU, else gloo."""
    if wanted != "auto":
        return wanted
    return "nccl" if num_gpus(environ) else "gloo"
