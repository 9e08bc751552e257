"""What a process has used: bytes of its connections, memory, time of the processor."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_BYTES_AT = 120
"""Place of `tcpi_bytes_acked` and `tcpi_bytes_received` in the kernel's `struct tcp_info`."""


def bytes_of(port: int) -> tuple[int, int]:
    """(sent, received) over all connections of this process to a port."""
    sent = received = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as sock:
                if sock.getpeername()[1] != port:
                    continue
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # it is gone, or none of TCP
            continue
        out, came = struct.unpack_from("QQ", info, _BYTES_AT)
        sent, received = sent + out, received + came
    return sent, received


def peak_of(pid: int | str = "self") -> int:
    """Most memory that a process has had, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def cpu_of(pid: int | str = "self") -> float:
    """Seconds of the processor that a process has used, without its children."""
    after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after[11]) + int(after[12])) / os.sysconf("SC_CLK_TCK")


def children() -> dict[str, int]:
    """Name → process id of the children of this process."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                text = (path / "stat").read_text()
            except OSError:
                continue
            if int(text.rpartition(")")[2].split()[1]) == os.getpid():
                found[text.partition("(")[2].rpartition(")")[0]] = int(path.name)
    return found
