"""RDMA writes from one NIC to another by `pyverbs` of rdma-core, where a host has no `ib_write_bw`.

A child of the probe child has the queue pair, and tells what its peer has to know; both probe
children exchange that. It may crash or hang: then it is killed, and there is no result. Nothing is
listened on: a queue pair of type RC takes messages only of the one that it is connected to.

Not validated on hardware: it has run with a package that behaves as pyverbs does, and with
pyverbs 44 itself over a library that plays a NIC. Python takes some 3 us for a message, enough for
3 Tb/s.

Source: linux-rdma/rdma-core, pyverbs/*.pyx and tests/base.py (versions 44 and 65);
infiniband/verbs.h for the numbers, since pyverbs has had its constants in several modules.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import random
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from nccl_doctor.system.forks import fork_service, stop_service
from nccl_doctor.toolkit.cpu_wait import CpuWatch

MODULE = "pyverbs"
_BYTES, _WINDOW = 1 << 20, 128
"""A message, and how many are on their way at once."""
_WRITE_S = 0.5
_RC, _RDMA_WRITE, _ETHERNET = 2, 0, 2
"""IBV_QPT_RC, IBV_WR_RDMA_WRITE, IBV_LINK_LAYER_ETHERNET."""
_ACCESS = 1 | 2
"""IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE."""
_HOPS = 255
_PATIENCE = {"min_rnr_timer": 12, "timeout": 14, "retry_cnt": 7, "rnr_retry": 7}
"""As perftest has them: an attempt that is not answered fails after half a second."""
_NUMBERS = ("qpn", "psn", "rkey", "address", "lid", "mtu")
_LONGEST = 4096


def has_pyverbs() -> bool:
    """True if there is a pyverbs that fits this Python; its libraries are not loaded."""
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(f"{MODULE}.qp") is not None
    return False


def written_by_pyverbs(
    nic: str,
    gid_index: int,
    position: int,
    exchange: Callable[[str, Any], Any],
    limit_s: float,
) -> list[Mapping[str, Any]] | None:
    """Writes of two members to each other for half a second each, one after the other.

    Args:
        nic: the own one, `mlx5_0:1`.
        gid_index: of its GID; negative for InfiniBand without a GID.
        position: 0 or 1; 0 writes first.
        exchange: posts a value under a name, and returns that of the other one, or None.
        limit_s: longest time for each step.

    Returns: of each direction `bytes`, `seconds`, and `cpu`: report of a `CpuWatch` of the writer.
    None for both members where one could not.
    """
    found: list[Mapping[str, Any]] = []
    with _Child(lambda line: _serve(line, nic, gid_index), limit_s) as child:
        theirs = _end(exchange("end", child.hear()))
        ready = theirs is not None and child.ask(theirs) is True
        if exchange("ready", ready) is not True or not ready:
            return None
        for writer in (0, 1):
            mine = child.ask("write") if writer == position else None
            told = exchange(f"wrote-{writer}", mine)
            wrote = mine if writer == position else told
            if not (isinstance(wrote, Mapping) and wrote.keys() == {"bytes", "seconds", "cpu"}):
                return None
            found.append(wrote)
    return found


def _end(told: Any) -> dict[str, Any] | None:
    """The end of a connection that another host has posted; None for anything else."""
    if not isinstance(told, Mapping) or not isinstance(told.get("gid"), str):
        return None
    numbers = {name: told.get(name) for name in _NUMBERS}
    return {**numbers, "gid": told["gid"]} if _are_numbers(numbers) else None


def _are_numbers(values: Mapping[str, Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values.values())


class _Child:
    """A child that answers in lines of JSON, and is killed in the end."""

    def __init__(self, serve: Callable[[socket.socket], None], limit_s: float) -> None:
        self._line, theirs = socket.socketpair()
        self._line.settimeout(limit_s)
        with theirs:
            self._pid = fork_service("verbs", lambda: serve(theirs), [theirs.fileno()])

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *error: object) -> None:
        stop_service(self._pid)
        self._line.close()

    def ask(self, value: Any) -> Any:
        """The answer to a value; None where there is none in time."""
        with contextlib.suppress(OSError):
            _tell(self._line, value)
        return self.hear()

    def hear(self) -> Any:
        """The next value that the child says; None where it has ended, or says none in time."""
        return _hear(self._line)


def _tell(line: socket.socket, value: Any) -> None:
    line.sendall(json.dumps(value).encode() + b"\n")


def _hear(line: socket.socket) -> Any:
    """The next line; at most one is on its way."""
    said = b""
    with contextlib.suppress(OSError, ValueError):
        while not said.endswith(b"\n") and len(said) < _LONGEST:
            part = line.recv(_LONGEST)
            if not part:
                return None
            said += part
        return json.loads(said)
    return None


# In the child ------------------------------------------------------------------------------------


def _serve(line: socket.socket, nic: str, gid_index: int) -> None:
    """Say what the own end is, connect it to the other one, and write when asked."""
    end = _End(nic, gid_index)
    _tell(line, end.facts())
    if theirs := _hear(line):
        end.connect(theirs)
        _tell(line, True)
        while _hear(line) == "write":
            _tell(line, end.write())


class _End:
    """One end of a connection, with the memory that the other end writes to."""

    def __init__(self, nic: str, gid_index: int) -> None:
        self._addr, device, pd, cq, mr, qp, self._wr = (
            importlib.import_module(f"{MODULE}.{name}")
            for name in ("addr", "device", "pd", "cq", "mr", "qp", "wr")
        )
        name, _, port = nic.partition(":")
        self._number = int(port or 1)
        self._context = device.Context(name=name)
        self._port = self._context.query_port(self._number)
        # Without a LID there are only GIDs, as on RoCE.
        self._by_gid = gid_index >= 0 or self._port.link_layer == _ETHERNET or not self._port.lid
        self._index = max(0, gid_index)
        self._pd = pd.PD(self._context)
        self._cq = cq.CQ(self._context, _WINDOW)
        self._mr = mr.MR(self._pd, _BYTES, _ACCESS)
        cap = qp.QPCap(max_send_wr=_WINDOW, max_recv_wr=1)
        wanted = qp.QPInitAttr(qp_type=_RC, scq=self._cq, rcq=self._cq, cap=cap)
        self._attributes = qp.QPAttr(port_num=self._number)
        self._attributes.qp_access_flags = _ACCESS
        self._qp = qp.QP(self._pd, wanted, self._attributes)
        self._psn = random.getrandbits(24)

    def facts(self) -> dict[str, Any]:
        """Facts that the other end has to know."""
        return {
            "qpn": self._qp.qp_num,
            "psn": self._psn,
            "rkey": self._mr.rkey,
            "address": self._mr.buf,
            "lid": self._port.lid,
            "mtu": self._port.active_mtu,
            "gid": self._context.query_gid(self._number, self._index).gid,
        }

    def connect(self, theirs: Mapping[str, Any]) -> None:
        """Get ready to write to the other end."""
        route = self._addr.GlobalRoute(
            dgid=self._addr.GID(theirs["gid"]), sgid_index=self._index, hop_limit=_HOPS
        )
        way = self._addr.AHAttr(
            dlid=theirs["lid"], is_global=int(self._by_gid), port_num=self._number, gr=route
        )
        told = {"dest_qp_num": theirs["qpn"], "rq_psn": theirs["psn"], "sq_psn": self._psn}
        told |= {"path_mtu": min(self._port.active_mtu, theirs["mtu"]), "ah_attr": way}
        for name, value in {**told, "max_rd_atomic": 1, "max_dest_rd_atomic": 1}.items():
            setattr(self._attributes, name, value)
        for name, number in _PATIENCE.items():
            setattr(self._attributes, name, number)
        self._qp.to_rts(self._attributes)
        piece = self._wr.SGE(self._mr.buf, _BYTES, self._mr.lkey)
        self._work = self._wr.SendWR(opcode=_RDMA_WRITE, num_sge=1, sg=[piece])
        self._work.set_wr_rdma(theirs["rkey"], theirs["address"])

    def write(self) -> dict[str, Any]:
        """Write for half a second, and wait for the rest.

        Raises:
            ConnectionError: a write failed.
        """
        posted = done = 0
        watch, started = CpuWatch(), time.monotonic()
        while True:
            goes_on = time.monotonic() < started + _WRITE_S
            while goes_on and posted - done < _WINDOW:
                self._qp.post_send(self._work)
                posted += 1
            if not goes_on and posted == done:
                break
            count, ended = self._cq.poll(_WINDOW)
            done += count
            if any(each.status for each in ended):  # not IBV_WC_SUCCESS
                raise ConnectionError
        seconds = time.monotonic() - started
        return {"bytes": done * _BYTES, "seconds": seconds, "cpu": watch.report()}
