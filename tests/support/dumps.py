"""Flight-recorder dumps of made-up jobs, in each form in which they are written."""

from __future__ import annotations

import json
import pickle
import struct
from typing import Any

MS = 1_000_000
Entry = dict[str, Any]


class TorchPickle:
    """A pickle as torch makes it: protocol 2, where only texts have a place in the memo."""

    def __init__(self, value: object) -> None:
        self.memo: dict[str, int] = {}
        self.data = bytearray(b"\x80\x02")
        self.add(value)
        self.data += self.put(len(self.memo)) + b"."

    def add(self, value: object) -> None:
        fixed = {None: b"N", True: b"\x88", False: b"\x89"}
        if value is None or isinstance(value, bool):
            self.data += fixed[value]
        elif isinstance(value, int):
            self.data += b"\x8a\x08" + struct.pack("<q", value) if value >> 31 else number(value)
        elif isinstance(value, str) and value in self.memo:
            at = self.memo[value]
            self.data += b"h%c" % at if at < 256 else b"j" + struct.pack("<I", at)
        elif isinstance(value, str):
            text = value.encode()
            self.data += b"X" + struct.pack("<I", len(text)) + text + self.put(len(self.memo))
            self.memo[value] = len(self.memo)
        elif isinstance(value, tuple):
            for each in value:
                self.add(each)
            self.data += b"\x86"
        else:
            assert isinstance(value, (list, dict))
            self.data += b"](" if isinstance(value, list) else b"}("
            for each in value if isinstance(value, list) else sum(value.items(), ()):
                self.add(each)
            self.data += b"e" if isinstance(value, list) else b"u"

    @staticmethod
    def put(at: int) -> bytes:
        return b"q%c" % at if at < 256 else b"r" + struct.pack("<I", at)


def number(value: int) -> bytes:
    if value < 256:
        return b"K%c" % value
    return b"M" + struct.pack("<H", value) if value < 65536 else b"J" + struct.pack("<i", value)


def entry(number: int, group: tuple[str, str] = ("0", "default_pg"), **other: Any) -> Entry:
    """An all-reduce of a group that ended, by its number there."""
    created = 1_795_821_933_670_922_399 + number * MS
    return {
        "record_id": number,
        "pg_id": int(group[0]),
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created,
        "input_sizes": [[1024, 8]],
        "input_dtypes": ["Float"],
        "output_sizes": [[1024, 8]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": created + 5 * MS,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
        "thread_id": "140336756050816",
        "thread_name": "pt_main_thread",
        **other,
    }


def recorded(entries: list[Entry], **other: Any) -> Entry:
    """A dump with these entries."""
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}},
        "comm_lib_version": "2.27.3",
        "pg_status": {"0": {"last_enqueued_collective": 9, "last_completed_collective": 8}},
        "entries": entries,
        **other,
    }


def form(kind: str, value: object) -> bytes:
    """The bytes of a dump: a pickle of `torch` or of `python`, or `json`."""
    if kind == "torch":
        return bytes(TorchPickle(value).data)
    return pickle.dumps(value, protocol=2) if kind == "python" else json.dumps(value).encode()
