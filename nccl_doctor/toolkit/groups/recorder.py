"""Summary of torch's flight recorder: the collectives of this process, in a few lines.

Runs in a probe child that is about to miss its deadline. torch keeps the last collectives of every
process group in a ring in memory; the recorder of the NCCL groups has been there since torch 2.2,
one for every backend (gloo among them) came later under another name. Names and signatures differ
by version, and a build without them has no recorder at all. Field names: `version` 2.x of the dump,
torch/csrc/distributed/c10d/FlightRecorderDetail.hpp.

Since torch 2.15 `nccl` is the backend `nccl2`, which does not record by itself: a hook does, into
an instance for each name of a backend (FlightRecorderHook.cpp, getFlightRecorder in
FlightRecorder.cpp). An entry of it is retired when the backend says that the collective has ended,
and stays open if it failed; where the backend says nothing, it is retired as it is issued.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

GENERIC, NCCL = "_dump_fr_trace", "_dump_nccl_trace"
"""Names in `torch._C._distributed_c10d`; each may have a twin that ends in `_json`."""
HOOKED = ("nccl2", "nccl-lazy")
"""Backends for NCCL that a hook records, each in an instance of its own."""
BUFFERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Entries that the recorder keeps: the name since the generic recorder, and the one before."""
ISSUED = "issued"
MOST_GROUPS = 12
_MOST_TENSORS, _MOST_DIMENSIONS = 3, 4
_LONGEST_NAME = 80


def record() -> None:
    """Turn the recorder on, unless the user set it; call it before the first group is formed.

    The buffer of some versions is empty by default. The old name is set only where the new one is
    not known yet: later versions call it deprecated.
    """
    import torch

    if not any(name in os.environ for name in BUFFERS):
        c10d = getattr(torch._C, "_distributed_c10d", None)
        os.environ[BUFFERS[0] if hasattr(c10d, GENERIC) else BUFFERS[1]] = "2000"


def recorded(backend: str) -> dict[str, Any]:
    """The state of every process group that this process has used.

    Args:
        backend: of the default group. Only for `nccl` the recorder of NCCL groups is asked: it
            queries the CUDA events of collectives in flight, as torch's own watchdog does, and
            makes none.

    Returns: `{"groups": [...], "groups_left_out": int}` as of `summary`; empty where this torch has
    no recorder, or one that does not answer.
    """
    import torch

    c10d = getattr(torch._C, "_distributed_c10d", None)
    asked: list[tuple[str, str]] = [(GENERIC, "")]
    if backend == "nccl":
        asked = [(NCCL, ""), *asked, *((GENERIC, instance) for instance in HOOKED)]
    dumps = [dump for name, instance in asked if (dump := _dump(c10d, name, instance))]
    return summary(dumps) if dumps else {}


def summary(dumps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Dumps of the recorder as plain data of a few KB, without times and process ids.

    Returns: `groups`, those with an unfinished collective first, each with `group` (its name as all
    its members know it), `description`, `entries`, the sequence numbers `enqueued`, `started` and
    `completed` (None: unknown), and `last_enqueued`, `last_completed` and `pending` (the oldest one
    that has not ended, or that may not have): `{"collective", "sequence", "sizes", "state"}` or
    None. A sequence number counts the collectives of its group on this rank, from 1.
    """
    groups = [group for dump in dumps for group in _groups(dump)]
    groups.sort(key=lambda group: group["pending"] is None)
    data: dict[str, Any] = {"groups": groups[:MOST_GROUPS]}
    if len(groups) > MOST_GROUPS:
        data["groups_left_out"] = len(groups) - MOST_GROUPS
    return data


def _dump(c10d: Any, name: str, instance: str) -> Mapping[str, Any] | None:
    """The content of one recorder, without Python stacks, by the call that this torch has.

    `instance`: the name of a backend; empty for the recorder that every version has.
    """
    as_json, as_pickle = getattr(c10d, f"{name}_json", None), getattr(c10d, name, None)
    one = (instance,) if instance else ()
    ways: list[Callable[[], Any]] = []
    if as_json is not None:
        ways.append(lambda: json.loads(as_json(True, False, *one)))
    if as_pickle is not None:  # made by this very process a moment ago: nobody else's data
        ways.append(lambda: pickle.loads(as_pickle(True, False, False, *one)))
    # Without arguments, it would be the recorder of another backend.
    if as_json is not None and not instance:
        ways.insert(1, lambda: json.loads(as_json()))
    if as_pickle is not None and not instance:
        ways.append(lambda: pickle.loads(as_pickle()))
    for way in ways:
        try:
            dump = way()
        except Exception:  # an undocumented function: any version may fail in any way
            continue
        if isinstance(dump, Mapping):
            return dump
        if isinstance(dump, list):  # torch 2.2 gave the entries alone
            return {"entries": dump}
    return None


def _groups(dump: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    entries: dict[str, list[Mapping[str, Any]]] = {}
    for entry in _list(dump.get("entries")):
        if isinstance(entry, Mapping):
            entries.setdefault(str(entry.get("pg_id", "")), []).append(entry)
    statuses = _table(dump.get("pg_status"))
    for key in dict.fromkeys([*map(str, statuses), *entries]):
        own = sorted(entries.get(key, []), key=lambda entry: _number(entry.get("record_id")) or 0)
        status = {str(k): v for k, v in statuses.items()}.get(key)
        yield _group(own, _table(status))


def _group(entries: Sequence[Mapping[str, Any]], status: Mapping[str, Any]) -> dict[str, Any]:
    collectives = [entry for entry in entries if not entry.get("is_p2p")]
    done = [entry for entry in collectives if _state(entry) == "completed"]
    open_ = [entry for entry in collectives if _state(entry) in ("scheduled", "started")]
    # Of those that nobody saw end, all but the last have: they run in order on one stream.
    open_ = open_ or [entry for entry in collectives[-1:] if _state(entry) == ISSUED]
    if any(_backend(entry) in HOOKED for entry in entries):
        status = {}  # it counts point-to-point as well
    names = entries[-1].get("process_group", entries[-1].get("pg_name")) if entries else ""
    names = list(names) if isinstance(names, (list, tuple)) else [names]
    enqueued, started, completed = (
        _number(status.get(f"last_{what}_collective"))
        for what in ("enqueued", "started", "completed")
    )
    return {
        "group": str(names[0])[:_LONGEST_NAME] if names else "",
        "description": str(names[1])[:_LONGEST_NAME] if len(names) > 1 else "",
        "entries": len(entries),
        "enqueued": _sequence(collectives[-1:]) if enqueued is None else enqueued,
        "started": started,
        "completed": _sequence(done[-1:]) if completed is None else completed,
        "last_enqueued": _described(collectives[-1:]),
        "last_completed": _described(done[-1:]),
        "pending": _described(open_[:1]),
    }


def _state(entry: Mapping[str, Any]) -> str:
    """`scheduled`, `started`, `completed`, `timed out`, or `issued`: its end is not recorded.

    gloo has no events, so its entries stay `scheduled`: there, `retired` is the end. An NCCL entry
    that is retired without being completed has timed out, unless a hook recorded it.
    """
    state = str(entry.get("state", ""))
    if not entry.get("retired") or state == "completed":
        return state
    backend = _backend(entry)
    if backend in HOOKED:
        return ISSUED
    return "timed out" if backend == "nccl" else "completed"


def _backend(entry: Mapping[str, Any]) -> str:
    return _name(entry).partition(":")[0]


def _described(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    if not entries:
        return None
    entry = entries[0]
    sizes = [_list(size)[:_MOST_DIMENSIONS] for size in _list(entry.get("input_sizes"))]
    return {
        "collective": _name(entry),
        "sequence": _sequence(entries),
        "sizes": sizes[:_MOST_TENSORS],
        "state": _state(entry),
    }


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("profiling_name", ""))[:_LONGEST_NAME]


def _sequence(entries: Sequence[Mapping[str, Any]]) -> int | None:
    """Number of the first entry; torch 2.2 counts collectives and point-to-point together."""
    if not entries:
        return None
    return _number(entries[0].get("collective_seq_id", entries[0].get("seq_id")))


def _number(value: Any) -> int | None:
    """A number that may come as text; -1 stands for none."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if number >= 0 else None


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
