"""TCP ports of this host: the range the kernel assigns, the right to bind one, and its holder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from nccl_doctor.system.shortage import NET_BIND_SERVICE, has_capability
from nccl_doctor.toolkit.host import (
    LISTEN,
    ROOT,
    TIME_WAIT,
    command_line,
    program,
    socket_process,
    tcp_sockets,
)

MAX_COMMAND = 120


def port_range(root: Path = ROOT) -> tuple[int, int]:
    """Lowest and highest port that the kernel assigns by itself (net.ipv4.ip_local_port_range).

    The kernel's default if that cannot be read.
    """
    words = _setting("ip_local_port_range", root).split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else (32768, 60999)


def reserved_ports(root: Path = ROOT) -> str:
    """Value of net.ipv4.ip_local_reserved_ports: `8080,9000-9100`, or empty."""
    return _setting("ip_local_reserved_ports", root).strip()


def reserve_port(port: int, reserved: str) -> str:
    """Setting, for `sysctl -w`, that keeps a port from clients besides those that are reserved.

    Args:
        port: to be reserved.
        reserved: from `reserved_ports`.
    """
    return f"net.ipv4.ip_local_reserved_ports={reserved + ',' if reserved else ''}{port}"


def ephemeral_range(port: int, root: Path = ROOT) -> tuple[int, int] | None:
    """The range that the kernel assigns, if this port is in it and not reserved; else None."""
    for part in reserved_ports(root).split(","):
        first, _, last = part.partition("-")
        if first and int(first) <= port <= int(last or first):
            return None
    low, high = port_range(root)
    return (low, high) if low <= port <= high else None


def may_bind(port: int, root: Path = ROOT) -> bool:
    """True if this process may bind the port: it is not a low one, or the process may bind them."""
    start = _setting("ip_unprivileged_port_start", root).strip() or "1024"
    return port >= int(start) or has_capability(NET_BIND_SERVICE, root)


class PortHolder(TypedDict):
    """The socket that has a port, as `port_holder` returns it."""

    state: str
    uid: int
    pid: int | None
    command: str


def port_holder(port: int, root: Path = ROOT) -> PortHolder | None:
    """The socket that has the port, a listener before others, and its process if visible.

    Returns: `state` (`listening` or `connected`), `uid`, `pid` (None if this user cannot see it)
    and `command`, its program and script; None if no socket of this network namespace has the port.
    """
    found = [
        (one.state != LISTEN, one.uid)
        for one in tcp_sockets(root)
        if one.port == port and one.state != TIME_WAIT
    ]
    if not found:
        return None
    connected, uid = min(found)
    pid = socket_process(port, listening=not connected, root=root)
    return {
        "state": "connected" if connected else "listening",
        "uid": uid,
        "pid": pid,
        "command": "" if pid is None else program(command_line(pid, root))[:MAX_COMMAND],
    }


_MESH_PORTS = (15001, 15006, 15021)
"""Ports of Envoy as an Istio sidecar: outgoing, incoming, health."""


def mesh_proxy(env: Mapping[str, str], root: Path = ROOT) -> str:
    """The sign that a service mesh's proxy intercepts this host's connections, or empty."""
    variable = next((name for name in sorted(env) if name.startswith("ISTIO_")), "")
    if variable:
        return f"variable {variable}"
    listening = {one.port for one in tcp_sockets(root) if one.state == LISTEN}
    there = [port for port in _MESH_PORTS if port in listening]
    return f"a listener on port {there[0]}" if there else ""


def _setting(name: str, root: Path) -> str:
    try:
        return (root / "proc/sys/net/ipv4" / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
