"""RDMA writes from one NIC to another, both ways, without NCCL and without a GPU: by `ib_write_bw`
of perftest where both hosts have it, else by `pyverbs` where both have that.

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
from nccl_doctor.system.programs import find_program, run_program
from nccl_doctor.toolkit.cpu_wait import CpuWatch
from nccl_doctor.toolkit.fabric.gids import (
    SEARCHES_SINCE,
    fixed_index,
    gid_tables,
    pick_gid,
    wanted_kind,
    wanted_range,
)
from nccl_doctor.toolkit.host import cpu_list, tcp_sockets
from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.nccl.release import loaded_release
from nccl_doctor.toolkit.net.routes import source_towards

from .verbs_python import MODULE, has_pyverbs, written_by_pyverbs

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
_GBPS = 125e6
"""Bytes per second."""


def written_both_ways(
    ctx: Context, nic: str, settings: Mapping[str, Setting]
) -> dict[str, Any] | None:
    """Writes of the two members of this round to each other, one after the other.

    Args:
        ctx: of a round with two members.
        nic: the own one, `mlx5_0:1`.
        settings: of NCCL, which may name the index of a GID.

    Returns: `by`: `ib_write_bw` or `pyverbs`; `gbps`: Gb/s of what position 0 wrote, then position
    1; `bytes` and `seconds` of the slower one, `times`: 1, and `cpu`: the report of a `CpuWatch`.
    None for both members where one cannot: they have nothing in common, or there is no result.
    """
    assert ctx.peers is not None
    program = find_program(PROGRAM, ctx.env)
    address = _ipv4(source_towards(ctx.launch.master_addr, _NAME_S)) if program else ""
    other = next(seat for seat in ctx.group if seat != ctx.seat)
    ctx.breadcrumb("RDMA writes: meeting", nic=nic)
    own = has_pyverbs()
    ctx.peers.post("verbs", {PROGRAM: address, MODULE: own})
    told = ctx.peers.collect("verbs", _MEET_S).get(other)
    theirs = told if isinstance(told, Mapping) else {}
    there = _ipv4(theirs.get(PROGRAM))
    with _beside(nic.partition(":")[0], ctx.root):
        if program and address and there:
            return _by_program(ctx, program, _words(nic, settings), there, other)
        if own and theirs.get(MODULE) is True:
            return _by_module(ctx, nic, settings, other)
    return None


def _words(nic: str, settings: Mapping[str, Setting]) -> list[str]:
    """Arguments that both ends of `ib_write_bw` have."""
    device, _, port = nic.partition(":")
    words = ["-d", device, "-i", port or "1", "-s", str(_BYTES), "-n", str(_TIMES)]
    words += ["-F", "--report_gbits"]
    index = fixed_index(settings)
    return words if index is None else [*words, "-x", str(index)]


def _by_program(
    ctx: Context, program: str, words: list[str], there: str, other: int
) -> dict[str, Any] | None:
    rates: list[float] = []
    watch = CpuWatch(process=True)
    for writer in (0, 1):
        call = _Direction(ctx, program, words, _Letters(ctx, other, f"verbs-{writer}"))
        rate = call.write(there) if ctx.position == writer else call.receive()
        if rate is None:
            return None
        rates.append(rate)
    size = _BYTES * _TIMES
    seconds = size / (min(rates) * _GBPS)
    found = {"bytes": size, "seconds": seconds, "times": 1, "cpu": watch.report()}
    return {"by": PROGRAM, "gbps": rates, **found}


def _by_module(
    ctx: Context, nic: str, settings: Mapping[str, Setting], other: int
) -> dict[str, Any] | None:
    letters = _Letters(ctx, other, MODULE)
    ctx.breadcrumb(f"RDMA writes by {MODULE}", nic=nic)
    index = gid_index(nic, settings, ctx.root)
    found = written_by_pyverbs(nic, index, ctx.position, letters.exchange, letters.limit_s)
    if found is None:
        return None
    rates = [each["bytes"] / each["seconds"] / _GBPS for each in found]
    slower = found[rates.index(min(rates))]
    return {"by": MODULE, "gbps": rates, "times": 1, **slower}


def gid_index(nic: str, settings: Mapping[str, Setting], root: Path) -> int:
    """The index that NCCL takes; negative on InfiniBand, unless the user fixed one."""
    fixed = fixed_index(settings)
    for port in gid_tables(root):
        if port["name"] == nic:
            release = loaded_release().number
            searches = not release or release >= SEARCHES_SINCE
            wanted, subnet = wanted_kind(settings), wanted_range(settings)
            return pick_gid(port["gids"], wanted, fixed, subnet=subnet, searches=searches).index
    return -1 if fixed is None else fixed


class _Letters:
    """Letters of the two members of a round to each other about one measurement.

    Attributes:
        limit_s: longest time that one step of a measurement may take.
    """

    def __init__(self, ctx: Context, other: int, tag: str) -> None:
        assert ctx.peers is not None
        self._peers, self._other, self._tag = ctx.peers, other, tag
        self.limit_s = min(_LIMIT_S, ctx.left() / 8)  # NCCL is tried after it

    def post(self, what: str, value: Any) -> None:
        self._peers.post(f"{self._tag}-{what}", value)

    def exchange(self, what: str, value: Any) -> Any:
        """Value that the other one posts; None if it does not in time."""
        self.post(what, value)
        told = self._peers.collect(f"{self._tag}-{what}", self.limit_s + _MEET_S)
        return told.get(self._other)


class _Direction:
    """One direction: a server, which receives, and a client, which writes."""

    def __init__(self, ctx: Context, program: str, words: list[str], letters: _Letters) -> None:
        self._ctx, self._program, self._words, self._letters = ctx, program, words, letters

    def write(self, address: str) -> float | None:
        """Gb/s written to the server at `address`; None where there is no result."""
        rate = None
        port = self._letters.exchange("port", None)
        if isinstance(port, int) and port:
            self._ctx.breadcrumb("RDMA writes", to=address)
            words = [*self._words, "-p", str(port), address]
            said = run_program(self._program, words, self._ctx.env, self._letters.limit_s)
            found = _RESULT.findall(said.text) if said.code == 0 else []
            rate = float(found[-1][-1]) if found else None
        self._letters.exchange("rate", rate)
        return rate or None

    def receive(self) -> float | None:
        """Gb/s that the client wrote to this server; None where there is no result."""
        port = _free_port()
        said = iter([port])

        def tick() -> None:
            if _listens(port):
                for each in said:  # once
                    self._letters.post("port", each)

        self._ctx.breadcrumb("RDMA writes: receiving", port=port)
        words = [*self._words, "-p", str(port)]
        run_program(self._program, words, self._ctx.env, self._letters.limit_s, tick)
        for _ in said:  # it never listened
            self._letters.post("port", None)
        rate = self._letters.exchange("rate", None)
        return float(rate) if isinstance(rate, (int, float)) and rate else None


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
