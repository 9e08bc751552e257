"""Flight-recorder dumps of torch: the last collectives of each rank, read without torch.

A dump is a pickle of plain dictionaries, or the same as JSON; formats 2.1 to 2.10 are those of
torch 2.4 to 2.15. Nobody vouches for such a file. A pickle is first read as a row of opcodes, by a
regular expression that lets through only what torch writes: nothing that makes a class or calls,
and nothing by which a small file becomes large in memory. Of thousands of entries only those of
interest are made into objects, which costs a third of the time.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn

LARGEST = 32 << 20
"""Bytes of a dump; one of the usual 2,000 entries with their stacks has 3 MB."""
_MOST = 50_000
"""Entries of a dump, and pairs in it: no dump of torch has so many."""
_NEAR = 8
"""Entries kept of each stream, on either side of the last one that ended, and at its end."""
_KEYS = (b"collective_seq_id", b"pg_config", b"pg_status", b"profiling_name", b"record_id")
_RANK = re.compile(r"(?<!\d)(\d{1,6})(?:\.(?:json|pickle|pkl|bin))?$")
# A place in the memo ("q", "r") has 20 bits, as the unpickler allocates all places below it.
_OPCODES = re.compile(
    rb"(?:[hKq].|[](})uaseN.\x86\x88\x89]+|M..|[Jj]....|r..[\0-\x0f]\0|G.{8}"
    rb"|\x8a(?:" + b"|".join(rb"\x%02x.{%d}" % (n, n) for n in range(8, -1, -1)) + rb")){1,8000}",
    re.DOTALL,
)


@dataclass(frozen=True)
class Group:
    """A process group as one rank knows it; `enqueued` is the number of its last call there."""

    description: str = ""
    ranks: tuple[int, ...] = ()
    enqueued: int | None = None


@dataclass(frozen=True)
class Collective:
    """One entry: a collective, a send or a receive, that a rank called."""

    group: str
    number: int
    p2p_number: int
    is_p2p: bool
    operation: str
    backend: str
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()
    created_ns: int = 0
    # It is the same call, however far it is in another dump of its rank.
    state: str = field(default="", compare=False)
    retired: bool = field(default=False, compare=False)
    started_ns: int | None = field(default=None, compare=False)
    completed_ns: int | None = field(default=None, compare=False)
    timeout_ms: int | None = field(default=None, compare=False)
    frame: str = field(default="", compare=False)


@dataclass(frozen=True)
class Dump:
    """Record of one rank; of its entries only those of interest, see `_kept`."""

    rank: int | None
    version: str
    groups: Mapping[str, Group]
    entries: tuple[Collective, ...]


def is_dump(head: bytes) -> bool:
    """True if a file that begins so is a dump: some hundred bytes are enough."""
    if head[:2] == b"\x80\x02":
        return b"version" in head and any(key in head for key in (*_KEYS, b"entries"))
    return head.lstrip()[:1] == b"{" and any(b'"%s"' % key in head for key in _KEYS)


def read_dump(data: bytes, name: str) -> Dump:
    """The dump in a file of this name; ValueError, in one line, if it is none."""
    try:
        decoded = _decoded(data)
        if not (isinstance(decoded, dict) and isinstance(decoded.get("version"), str)):
            raise ValueError("it has no version")
        raw = decoded.get("entries", [])  # JSON without entries has no such key
        if not isinstance(raw, list) or len(raw) > _MOST:
            few = f"a list of {len(raw)}" if isinstance(raw, list) else type(raw).__name__
            raise ValueError(f"its entries are {few}, not a list of at most {_MOST}")
        raw = [each for each in raw if isinstance(each, dict)]
        streams = [(_texts(each.get("process_group")), each.get("is_p2p") is True) for each in raw]
        kept = _kept(streams, lambda i: raw[i].get("state") == "completed")
    except (MemoryError, RecursionError):
        raise ValueError(f"{name}: no flight-recorder dump: it is nested too deeply") from None
    except Exception as error:  # the unpickler raises whatever its stack makes it raise
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"{name}: no flight-recorder dump: {reason}") from error
    rank = _RANK.search(name)
    entries = [raw[i] for i in sorted(kept)]
    return Dump(
        int(rank[1]) if rank else None,
        _text(decoded["version"], 20),
        _groups(decoded, entries),
        tuple(map(_collective, entries)),
    )


class _Plain(pickle.Unpickler):
    """An unpickler of plain data; the opcodes have been looked at, and this is a second lock."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"it names {module}.{name}, and a dump names no code")

    def persistent_load(self, pid: object) -> NoReturn:
        raise ValueError("it refers to an object outside of it")


def _decoded(data: bytes) -> Any:
    if len(data) > LARGEST:
        raise ValueError(f"it has {len(data)} bytes, and a dump at most {LARGEST}")
    if data[:1] != b"\x80":
        return json.loads(data)
    try:
        return _unpickled(_shortened(data))
    except Exception:  # torch has not made it, or by chance a number in it looks like a mark
        return _unpickled(data)


def _unpickled(data: bytes) -> Any:
    at = 2
    while at < len(data):
        if data[at] == ord("X"):
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif run := _OPCODES.match(data, at):
            at = run.end()
        else:
            raise ValueError(f"byte {data[at]:#04x} at {at} is nothing that torch writes there")
    if at > len(data) or data[-1:] != b".":
        raise ValueError(f"it is cut off after {len(data)} bytes")
    containers, pairs = data.count(b"}") + data.count(b"]"), data.count(b"\x86")
    if containers > 1000 + len(data) // 8 or pairs > _MOST:
        raise ValueError(f"it has {containers} containers and {pairs} pairs in {len(data)} bytes")
    return _Plain(io.BytesIO(data)).load()


def _shortened(data: bytes) -> bytes:
    """The same pickle with the entries of interest only; an error if torch has not made it.

    All entries but the first begin with the same key, by its place in the memo. An entry that is
    the first to mention something stays too, as others refer to that.
    """
    place: dict[bytes, bytes] = {}
    mentions, first = [found.start() for found in re.finditer(rb"u[qr]", data)], 0
    for found in re.finditer(rb"X(..)\0\0", data, re.DOTALL):
        mentions.append(found.start())
        end = found.end() + int.from_bytes(found[1], "little")
        text, put = data[found.end() : end], data[end : end + 5]
        place.setdefault(text, b"h" + put[1:2] if put[:1] == b"q" else b"j" + put[1:])
        first = first or (end + 2 if text == b"entries" else 0)
    key = place[data[first + 9 : first + 9 + data[first + 5]]]  # after the marks of list and entry
    starts = [each.start() for each in re.finditer(re.escape(b"}(" + key), data)]
    last = re.compile(rb"eu(?:q.|r....)?\.\Z", re.DOTALL).search(data, len(data) - 8)
    if not (first and last and starts and starts[0] > first):
        raise ValueError
    entries = [data[a:b] for a, b in zip(starts, [*starts[1:], last.start()], strict=True)]
    group = re.compile(re.escape(place[b"process_group"]) + rb"((?:h.|j....){2}\x86)", re.DOTALL)
    ended = place[b"state"] + place.get(b"completed", b"\0none")
    sends = re.finditer(re.escape(place[b"is_p2p"] + b"\x88"), data)
    p2p = {bisect(starts, each.start()) - 1 for each in sends}
    named = enumerate(map(group.search, entries))
    streams = [(found[1], i in p2p) if found else i for i, found in named]
    kept = _kept(streams, lambda i: ended in entries[i])
    kept.update(bisect(starts, at) - 1 for at in mentions if at > starts[0])
    return b"".join([data[: starts[0]], *(entries[i] for i in sorted(kept)), last[0]])


def _kept(streams: Sequence[object], ended: Callable[[int], bool]) -> set[int]:
    """Positions of the entries of interest, given the stream of calls that each belongs to.

    Of each stream: the last ones, and those on either side of the last one that ended, if any did,
    as the first one that did not end is found there.
    """
    places: dict[object, list[int]] = {}
    for i, stream in enumerate(streams):
        places.setdefault(stream, []).append(i)
    kept: set[int] = set()
    for of in places.values():
        last = next((i for i in range(len(of) - 1, -1, -1) if ended(of[i])), 0)
        kept.update(of[max(last - _NEAR, 0) : last + _NEAR], of[-_NEAR:])
    return kept


def _collective(entry: Mapping[str, Any]) -> Collective:
    get = entry.get
    backend, _, operation = _text(get("profiling_name")).rpartition(":")
    return Collective(
        group=(*_texts(get("process_group")), "")[0],
        number=_number(get("collective_seq_id", get("seq_id"))) or 0,
        p2p_number=_number(get("p2p_seq_id")) or 0,
        is_p2p=get("is_p2p") is True,
        operation=operation,
        backend=backend,
        input_sizes=_sizes(get("input_sizes")),
        input_dtypes=_texts(get("input_dtypes")),
        output_sizes=_sizes(get("output_sizes")),
        output_dtypes=_texts(get("output_dtypes")),
        state=_text(get("state")),
        retired=get("retired") is True,
        created_ns=_number(get("time_created_ns")) or 0,
        started_ns=_number(get("time_discovered_started_ns")) or None,  # JSON: 0 for none
        completed_ns=_number(get("time_discovered_completed_ns")) or None,
        timeout_ms=_number(get("timeout_ms")),
        frame=_own_frame(get("frames")),
    )


def _groups(decoded: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, Group]:
    """The groups by name.

    The numbers of a group stand under an id of this rank. Entries tell whose id it is; for other
    groups, ids and names are both given in the order in which the groups were made.
    """
    config, status = (_table(decoded.get(key)) for key in ("pg_config", "pg_status"))
    config.pop("", None)  # gloo's entry is no group
    named = [((*_texts(e.get("process_group")), "", "")[:2], e.get("pg_id")) for e in entries]
    ids = {str(_number(number)): name for (name, _), number in named}
    if len(config) == len(status) and all(map(str.isdecimal, (*config, *status))):
        ordered = dict(zip(sorted(status, key=int), sorted(config, key=int), strict=True))
        ids = ordered if ids.items() <= ordered.items() else ids
    last = {ids[number]: each for number, each in status.items() if number in ids}
    enqueued = {name: _number(each.get("last_enqueued_collective")) for name, each in last.items()}
    groups = {name: Group(said, (), enqueued.get(name)) for (name, said), _ in named}
    members: dict[str, tuple[int, ...]] = {}  # one for all groups that mention the same text
    for name, each in config.items():
        text = _text(each.get("ranks"), 1 << 20)
        members[text] = members.get(text) or tuple(map(int, re.findall(r"\d{1,7}", text)))
        groups[name] = Group(_text(each.get("desc")), members[text], enqueued.get(name))
    return groups


def _table(value: object) -> dict[str, Mapping[str, Any]]:
    items = value.items() if isinstance(value, dict) else ()
    return {_text(key): each for key, each in items if isinstance(each, dict)}


def _number(value: object) -> int | None:
    if isinstance(value, int):
        return value if abs(value) < 1 << 64 else None
    # JSON writes some numbers as text.
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value) else None


def _text(value: object, most: int = 200) -> str:
    text = value[:most] if isinstance(value, str) else ""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(_text, islice(value, 16))) if isinstance(value, (list, tuple)) else ()


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    tensors = islice(value, 16) if isinstance(value, list) else ()
    return tuple(tuple(_number(n) or 0 for n in t[:8]) for t in tensors if isinstance(t, list))


def _own_frame(frames: object) -> str:
    """The innermost frame that is not of torch."""
    for frame in frames[:200] if isinstance(frames, list) else ():
        if isinstance(frame, dict) and "/torch/" not in (file := _text(frame.get("filename"))):
            return f"{_text(frame.get('name'))} ({file}:{_number(frame.get('line'))})"
    return ""
