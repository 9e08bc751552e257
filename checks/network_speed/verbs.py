"""RDMA writes from one NIC to another, both ways, by `ib_write_bw` of perftest: without NCCL and
without a GPU.

Source: linux-rdma/perftest, src/write_bw.c and src/perftest_parameters.c. Of a test in one
direction only the client prints a result; 1 Gb/sec is 125,000,000 bytes per second. Both ends agree
over a TCP connection to the server's port, IPv4 unless `--ipv6` is given; the client tries to
connect once.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import Context
from nccl_doctor.toolkit.cpu_wait import CpuWatch
from nccl_doctor.toolkit.fabric.gids import fixed_index
from nccl_doctor.toolkit.host import cpu_list, tcp_sockets
from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.net.routes import source_towards
from nccl_doctor.toolkit.programs import find_program, run_program

PROGRAM = "ib_write_bw"
_BYTES, _TIMES = 1 << 20, 2000
"""A message, and their number: 40 ms at 400 Gb/s, 1.7 s at 10 Gb/s."""
_LIMIT_S = 6.0
"""Seconds for one direction."""
_MEET_S = 3.0
_NAME_S = 1.0
_LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""
_RESULT = re.compile(r"^ *(\d+) +(\d+) +(?:[\d.]+|inf) +([\d.]+)", re.MULTILINE)
"""Bytes, iterations, peak and average of a result in Gb/sec."""


def written_both_ways(
    ctx: Context, nic: str, settings: Mapping[str, Setting]
) -> dict[str, Any] | None:
    """Writes of the two members of this round to each other, one after the other.

    Args:
        ctx: of a round with two members.
        nic: the own one, `mlx5_0:1`.
        settings: of NCCL, which may name the index of a GID.

    Returns: `gbps`: Gb/s of what position 0 wrote, then position 1; `bytes` of each, `seconds` of
    the slower one, `times`: 1, and `cpu`: the report of a `CpuWatch`. None for both members where
    one cannot: no such program, no IPv4 address, or no result.
    """
    assert ctx.peers is not None
    program = find_program(PROGRAM, ctx.env)
    address = _ipv4(source_towards(ctx.launch.master_addr, _NAME_S)) if program else ""
    other = next(seat for seat in ctx.group if seat != ctx.seat)
    ctx.breadcrumb("RDMA writes: meeting", nic=nic)
    ctx.peers.post("verbs", address)
    theirs = _ipv4(ctx.peers.collect("verbs", _MEET_S).get(other))
    if not (program and address and theirs):
        return None
    device, _, port = nic.partition(":")
    words = ["-d", device, "-i", port or "1", "-s", str(_BYTES), "-n", str(_TIMES)]
    words += ["-F", "--report_gbits"]
    if (index := fixed_index(settings)) is not None:
        words += ["-x", str(index)]
    rates: list[float] = []
    watch = CpuWatch(process=True)
    with _beside(device, ctx.root):
        for writer in (0, 1):
            call = _Direction(ctx, program, words, other, f"verbs-{writer}")
            rate = call.write(theirs) if ctx.position == writer else call.receive()
            if rate is None:
                return None
            rates.append(rate)
    size = _BYTES * _TIMES
    seconds = size / (min(rates) * 125e6)
    return {"gbps": rates, "bytes": size, "seconds": seconds, "times": 1, "cpu": watch.report()}


class _Direction:
    """One direction: a server, which receives, and a client, which writes."""

    def __init__(self, ctx: Context, program: str, words: list[str], other: int, tag: str) -> None:
        self._ctx, self._program, self._words = ctx, program, words
        self._other, self._tag = other, tag
        self._limit_s = min(_LIMIT_S, ctx.left() / 8)  # NCCL is tried after it

    def write(self, address: str) -> float | None:
        """Gb/s written to the server at `address`; None where there is no result."""
        rate = None
        port = self._exchange("port", None)
        if isinstance(port, int) and port:
            self._ctx.breadcrumb("RDMA writes", to=address)
            words = [*self._words, "-p", str(port), address]
            said = run_program(self._program, words, self._ctx.env, self._limit_s)
            found = _RESULT.findall(said.text) if said.code == 0 else []
            rate = float(found[-1][-1]) if found else None
        self._exchange("rate", rate)
        return rate or None

    def receive(self) -> float | None:
        """Gb/s that the client wrote to this server; None where there is no result."""
        port = _free_port()
        said = iter([port])

        def tick() -> None:
            if _listens(port):
                for each in said:  # once
                    self._post("port", each)

        self._ctx.breadcrumb("RDMA writes: receiving", port=port)
        words = [*self._words, "-p", str(port)]
        run_program(self._program, words, self._ctx.env, self._limit_s, tick)
        for _ in said:  # it never listened
            self._post("port", None)
        rate = self._exchange("rate", None)
        return float(rate) if isinstance(rate, (int, float)) and rate else None

    def _post(self, what: str, value: Any) -> None:
        assert self._ctx.peers is not None
        self._ctx.peers.post(f"{self._tag}-{what}", value)

    def _exchange(self, what: str, value: Any) -> Any:
        """Value that the other one posts; None if it does not in time."""
        assert self._ctx.peers is not None
        self._post(what, value)
        told = self._ctx.peers.collect(f"{self._tag}-{what}", self._limit_s + _MEET_S)
        return told.get(self._other)


def _ipv4(text: object) -> str:
    """The address, or empty. It becomes a word of a command line, and another one sent it: it could
    be an option.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.IPv4Address(str(text)))
    return ""


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def _listens(port: int) -> bool:
    return any(each.port == port and each.state == _LISTENING for each in tcp_sockets())


@contextlib.contextmanager
def _beside(device: str, root: Path) -> Iterator[None]:
    """Time on the CPUs next to a NIC, if this process may: a program that it starts runs there too.

    Memory of another NUMA node would make a NIC look slow.
    """
    near = cpu_list(root / "sys/class/infiniband" / device / "device/local_cpulist")
    before = os.sched_getaffinity(0)
    mine = before.intersection(near)
    if mine:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, mine)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)
