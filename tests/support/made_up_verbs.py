"""A package that behaves as `pyverbs` of rdma-core does, and moves bytes between two processes.

Its classes take the arguments and have the attributes of pyverbs 44 that are used; a wrong name, a
wrong order of states, or ends that do not fit together are errors, as with a real NIC. Memory that
may be written by others is a file beside the package.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WORLD = Path(__file__).parent / "world"
MODULES = ("addr", "device", "pd", "cq", "mr", "qp", "wr")
RC, RDMA_WRITE, LOCAL_WRITE, REMOTE_WRITE = 2, 0, 1, 2
REM_ACCESS_ERR, RETRY_EXC_ERR = 10, 12


def install_pyverbs(folder: Path, *, fault: str = "", link_layer: int = 1) -> Path:
    """Make the package in a new folder for sys.path.

    Args:
        folder: `ends` in it gets the attributes of each queue pair that was connected, as JSON.
        fault: `open` (no device can be opened), `crash` (when connecting), `hang` (no write ends),
            or `status` (a write ends with an error).
        link_layer: 1 for InfiniBand, 2 for Ethernet.
    """
    package = folder / "pyverbs"
    (package / "world").mkdir(parents=True)
    shutil.copy(__file__, package / "made_up.py")
    (package / "__init__.py").touch()
    for name in MODULES:
        (package / f"{name}.py").write_text("from pyverbs.made_up import *\n")
    how = {"fault": fault, "link_layer": link_layer}
    (package / "world/how").write_text(json.dumps(how))
    return folder


def _how(name: str) -> Any:
    return json.loads((WORLD / "how").read_text())[name]


class PyverbsRDMAError(Exception):
    pass


class GID:
    def __init__(self, val: str | None = None) -> None:
        words = (val or ":".join(["0000"] * 8)).split(":")
        if [len(word) for word in words] != [4] * 8:
            raise PyverbsRDMAError(f"Invalid GID value ({val})")
        self.gid = ":".join(words)


class Context:
    def __init__(self, *, name: str) -> None:
        if _how("fault") == "open" or not name.startswith("mlx5_"):
            raise PyverbsRDMAError("Failed to get devices list")
        self.name = name
        self.lid = os.getpid() & 0xFFF

    def query_port(self, port_num: int) -> SimpleNamespace:
        layer = _how("link_layer")
        lid = self.lid if layer == 1 else 0
        return SimpleNamespace(lid=lid, active_mtu=4 + self.lid % 2, link_layer=layer, state=4)

    def query_gid(self, port_num: int, index: int) -> GID:
        return GID(f"fe80:0000:0000:0000:0000:0000:{self.lid:04x}:{index:04x}")


class PD:
    def __init__(self, creator: Context) -> None:
        self.context = creator


class CQ:
    def __init__(self, context: Context, cqe: int) -> None:
        self.context, self.cqe, self.ended = context, cqe, list[SimpleNamespace]()

    def poll(self, num_entries: int = 1) -> tuple[int, list[SimpleNamespace]]:
        if _how("fault") == "hang":
            time.sleep(1000)
        found, self.ended = self.ended[:num_entries], self.ended[num_entries:]
        return len(found), found


class MR:
    def __init__(self, creator: PD, length: int = 0, access: int = 0) -> None:
        self.pd, self.length, self.access = creator, length, access
        self.rkey = self.lkey = random.getrandbits(31)
        self.buf = 0x7F0000000000 + (self.rkey << 12)
        with (WORLD / f"mr-{self.rkey}").open("w+b") as file:
            file.truncate(length)
            self.memory = mmap.mmap(file.fileno(), length)
        self.memory[:8] = os.getpid().to_bytes(8, "big")
        described = {"base": self.buf, "length": length, "access": access}
        (WORLD / f"mr-{self.rkey}.json").write_text(json.dumps(described))


class GlobalRoute:
    def __init__(self, *, dgid: GID, sgid_index: int = 0, hop_limit: int = 1) -> None:
        self.dgid, self.sgid_index, self.hop_limit = dgid, sgid_index, hop_limit


class AHAttr:
    def __init__(
        self, *, dlid: int = 0, is_global: int = 0, port_num: int = 1, gr: GlobalRoute | None = None
    ) -> None:
        self.dlid, self.is_global, self.port_num = dlid, is_global, port_num
        self.gr = gr if is_global else None


class QPCap:
    def __init__(self, max_send_wr: int = 1, max_recv_wr: int = 10) -> None:
        self.max_send_wr = max_send_wr


class QPInitAttr:
    def __init__(self, qp_type: int, *, scq: CQ, rcq: CQ, cap: QPCap) -> None:
        self.qp_type, self.send_cq, self.cap = qp_type, scq, cap


class QPAttr:
    __slots__ = (
        *("ah_attr", "dest_qp_num", "max_dest_rd_atomic", "max_rd_atomic", "min_rnr_timer"),
        *("path_mtu", "pkey_index", "port_num", "qp_access_flags", "qp_state", "retry_cnt"),
        *("rnr_retry", "rq_psn", "sq_psn", "timeout"),
    )

    def __init__(self, *, port_num: int = 1) -> None:
        self.port_num, self.path_mtu, self.pkey_index, self.qp_access_flags = port_num, 3, 0, 0


class QP:
    def __init__(self, creator: PD, init_attr: QPInitAttr, qp_attr: QPAttr) -> None:
        assert init_attr.qp_type == RC
        self.cap, self.cq, self.lid = init_attr.cap, init_attr.send_cq, creator.context.lid
        self.qp_num = random.getrandbits(24)
        self.access = qp_attr.qp_access_flags  # of the transition to INIT
        self.file = WORLD / f"qp-{self.qp_num}"
        self.told: dict[str, Any] = {}

    def to_rts(self, qp_attr: QPAttr) -> None:
        if _how("fault") == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        way = qp_attr.ah_attr
        told = {name: getattr(qp_attr, name) for name in QPAttr.__slots__ if name != "qp_state"}
        told["ah_attr"] = {"dlid": way.dlid, "is_global": way.is_global, "lid": self.lid}
        if way.gr is not None:
            told |= {"dgid": way.gr.dgid.gid, "index": way.gr.sgid_index, "hops": way.gr.hop_limit}
        self.told = told
        self.file.write_text(json.dumps({**told, "access": self.access}))
        with (WORLD.parent.parent / "ends").open("a") as ends:
            ends.write(json.dumps(told) + "\n")

    def post_send(self, wr: SendWR) -> None:
        if not self.told:
            raise PyverbsRDMAError("Failed to post send: not in state RTS")
        if len(self.cq.ended) >= min(self.cap.max_send_wr, self.cq.cqe):
            raise PyverbsRDMAError("Failed to post send: the queue is full")
        self.cq.ended.append(SimpleNamespace(status=self._write(wr)))

    def _write(self, wr: SendWR) -> int:
        assert wr.opcode == RDMA_WRITE
        peer = WORLD / f"qp-{self.told['dest_qp_num']}"
        theirs = json.loads(peer.read_text()) if peer.exists() else {}
        fits = theirs.get("dest_qp_num") == self.qp_num
        fits = fits and theirs["rq_psn"] == self.told["sq_psn"]
        fits = fits and theirs["path_mtu"] == self.told["path_mtu"]
        if not self.told["ah_attr"]["is_global"]:
            fits = fits and self.told["ah_attr"]["dlid"] == theirs["ah_attr"]["lid"]
        if not fits or _how("fault") == "status":
            return RETRY_EXC_ERR
        (piece,) = wr.sg
        own = WORLD / f"mr-{piece.lkey}"
        other = json.loads((WORLD / f"mr-{wr.rkey}.json").read_text())
        writable = theirs["access"] & other["access"] & REMOTE_WRITE
        if not writable or wr.address != other["base"] or piece.length > other["length"]:
            return REM_ACCESS_ERR
        (WORLD / f"mr-{wr.rkey}").write_bytes(own.read_bytes()[: piece.length])
        return 0


class SGE:
    def __init__(self, addr: int, length: int, lkey: int) -> None:
        self.addr, self.length, self.lkey = addr, length, lkey


class SendWR:
    def __init__(self, *, opcode: int, num_sge: int, sg: Sequence[SGE]) -> None:
        assert num_sge == len(sg) == 1
        self.opcode, self.sg = opcode, sg

    def set_wr_rdma(self, rkey: int, addr: int) -> None:
        self.rkey, self.address = rkey, addr
