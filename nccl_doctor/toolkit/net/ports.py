"""TCP ports of this host: the range the kernel assigns, the right to bind one, and its holder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_COMMAND = 120
_CAP_NET_BIND_SERVICE = 10
_LISTEN, _TIME_WAIT = "0A", "06"


def port_range() -> tuple[int, int]:
    """Lowest and highest port that the kernel assigns by itself (net.ipv4.ip_local_port_range).

    The kernel's default if that cannot be read.
    """
    words = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else (32768, 60999)


def ephemeral_range(port: int) -> tuple[int, int] | None:
    """The range that the kernel assigns, if this port is in it and not reserved; else None."""
    for part in _read("/proc/sys/net/ipv4/ip_local_reserved_ports").strip().split(","):
        first, _, last = part.partition("-")
        if first and int(first) <= port <= int(last or first):
            return None
    low, high = port_range()
    return (low, high) if low <= port <= high else None


def may_bind(port: int) -> bool:
    """Whether this process may bind the port: it is not a low one, or the process may bind them."""
    start = _read("/proc/sys/net/ipv4/ip_unprivileged_port_start").strip() or "1024"
    status = dict(
        line.split(":\t", 1) for line in _read("/proc/self/status").splitlines() if ":\t" in line
    )
    capable = int(status.get("CapEff", "0"), 16) >> _CAP_NET_BIND_SERVICE & 1
    return port >= int(start) or bool(capable)


def port_holder(port: int) -> dict[str, Any] | None:
    """The socket that has the port, a listener before others, and its process if visible.

    Returns: `state` (`listening` or `connected`), `uid`, `pid` (None if this user cannot see it)
    and `command`; None if no socket of this network namespace has the port.
    """
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in (line.split() for line in _read(table).splitlines()[1:]):
            if int(row[1].rpartition(":")[2], 16) == port and row[3] != _TIME_WAIT:
                found.append((row[3] != _LISTEN, row[7], row[9]))
    if not found:
        return None
    connected, uid, inode = min(found)
    held = {"state": "connected" if connected else "listening", "uid": int(uid)}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = any(os.readlink(fd) == f"socket:[{inode}]" for fd in (process / "fd").iterdir())
        except OSError:  # gone by now, or of another user
            continue
        if mine:
            words = _read(str(process / "cmdline")).split("\0")[:3]
            command = " ".join(" ".join(words).split())[:MAX_COMMAND]
            return {**held, "pid": int(process.name), "command": command}
    return {**held, "pid": None, "command": ""}


_MESH_PORTS = (15001, 15006, 15021)
"""Ports of Envoy as an Istio sidecar: outgoing, incoming, health."""


def mesh_proxy(env: Mapping[str, str]) -> str:
    """The sign that a service mesh's proxy intercepts this host's connections, or empty."""
    told = next((name for name in sorted(env) if name.startswith("ISTIO_")), "")
    if told:
        return f"variable {told}"
    listening = {
        int(row[1].rpartition(":")[2], 16)
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for row in (line.split() for line in _read(table).splitlines()[1:])
        if row[3] == _LISTEN
    }
    there = [port for port in _MESH_PORTS if port in listening]
    return f"a listener on port {there[0]}" if there else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
