"""The state of this process's job, from NCCL's RAS subsystem.

Since 2.24 every NCCL process has a RAS thread that knows all processes with which it shares a
communicator, and answers requests at NCCL_RAS_ADDR (localhost:28028 if that is not set) in lines
of text: `CLIENT PROTOCOL n`, `TIMEOUT seconds`, `SET FORMAT json` (since 2.28.7; older ones
answer `ERROR` and continue in text), `VERBOSE STATUS`; it closes the connection after the answer.
A process that does not answer other RAS threads delays the answer until `TIMEOUT`.
Source: src/ras/client_support.cc of NCCL, and the RAS page of its user guide.
Not validated on hardware.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from nccl_doctor.model.findings import number_range

ADDRESS = "NCCL_RAS_ADDR"
DEFAULT_ADDRESS = "localhost:28028"
LIMIT_S = 2.2
"""Seconds for a request and its answer: where a process does not answer it, RAS waits for whole
seconds, once for its network and once for the communicators."""
_PAUSE_S = 0.2
_MAX_ANSWER_BYTES = 1 << 20
_MAX_TEXT = 2000
_MOST_COMMUNICATORS = 8
_LONGEST_RANKS = 200
_MISSING_COMMA = re.compile(r'([0-9"}\]el])(\s*\n\s*")')
"""NCCL 2.28.9 leaves out commas between the lines of `missing_ranks` (seen by Ray Train)."""


def own_address() -> str:
    """A value of NCCL_RAS_ADDR for this process alone: a port of 127.0.0.1 that is free now.

    By default all NCCL processes of a host share port 28028 (SO_REUSEPORT), so a request to it may
    be answered by another job's process, and another job's user may be answered by this one. The
    port may be in use before NCCL binds it; then NCCL continues without it, and there is no answer.

    Raises:
        OSError: 127.0.0.1 cannot be used.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def ask_ras(address: str = "", limit_s: float = LIMIT_S, pid: int | None = None) -> dict[str, Any]:
    """The state of the communicators that can be reached from this process.

    Args:
        address: as NCCL_RAS_ADDR; the default where it is empty.
        limit_s: seconds for everything.
        pid: of the process that the answer should be about; this one.

    Returns: as `summary`, or `{"answer": "none", "why": str}` if there is no answer, which is no
    error: RAS may be off, too old, or not started yet.
    """
    until = time.monotonic() + limit_s
    try:
        text = _exchange(address or DEFAULT_ADDRESS, until)
    except (OSError, ValueError) as error:
        return {"answer": "none", "why": str(error) or type(error).__name__}
    return summary(text, os.getpid() if pid is None else pid)


def ask_ras_twice(address: str, limit_s: float) -> dict[str, Any]:
    """The last of two answers, a moment apart: what is in flight in the first one may be done.

    Returns: as `ask_ras`, and `asked`: how many of them had an answer.
    """
    until = time.monotonic() + limit_s
    first = ask_ras(address, min(LIMIT_S, limit_s))
    if first["answer"] == "none":
        return first
    left = until - time.monotonic() - _PAUSE_S
    if left > 0:
        time.sleep(_PAUSE_S)
        second = ask_ras(address, left)
        if second["answer"] != "none":
            return {**second, "asked": 2}
    return {**first, "asked": 1}


def summary(text: str, pid: int) -> dict[str, Any]:
    """A short form of an answer.

    Returns: `answer` is `json` or `text`. For `text`, `text` is its beginning. For `json`: `nccl`
    (version), `timeouts`, `own_process` (whether process `pid` is in it: else another job has
    answered), and `communicators`, those with a difference first, each with `size`, `status` and
    `collectives` (what → ranks; only those that at least one rank did), `missing`,
    `unresponsive`, `dead` and `behind` (ranks that did fewer collectives of a kind than others).
    """
    data = parsed_status(text)
    if data is None:
        return {"answer": "text", "text": text.strip()[:_MAX_TEXT]}
    communicators = [_communicator(each) for each in _tables(data.get("communicators"))]
    communicators.sort(key=lambda each: not (each["missing"] or each["behind"]))
    found: dict[str, Any] = {
        "answer": "json",
        "nccl": str(data.get("nccl_version", ""))[:40],
        "timeouts": _table(data.get("ras")).get("timeouts_count"),
        "own_process": any(
            rank.get("pid") == pid
            for each in _tables(data.get("communicators"))
            for rank in (*_tables(each.get("ranks")), *_tables(each.get("missing_ranks")))
        ),
        "communicators": communicators[:_MOST_COMMUNICATORS],
    }
    if len(communicators) > _MOST_COMMUNICATORS:
        found["communicators_left_out"] = len(communicators) - _MOST_COMMUNICATORS
    return found


def _exchange(address: str, until: float) -> str:
    """Ask, and read until the other side closes, or for as long as there is time.

    Raises:
        OSError: no service there, or no RAS.
        ValueError: no address.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]") or "localhost", int(port)), _left(until)) as s:
        _send(s, "CLIENT PROTOCOL 2\n", until)
        hello, rest = _line(s, until)
        if not hello.upper().startswith("SERVER PROTOCOL"):
            raise OSError("the service there is not NCCL's RAS")
        # Whole seconds: rasClientRunInternal of all versions up to 2.30.7 reads no fraction.
        _send(s, "TIMEOUT 1\nSET FORMAT json\nVERBOSE STATUS\n", until)
        answer = _rest(s, rest, until)
    lines = answer.decode("utf-8", "replace").splitlines(keepends=True)
    for _ in range(2):  # one answer for each command before the last
        if lines and lines[0].strip().upper().startswith(("OK", "ERROR")):
            del lines[0]
    if not "".join(lines).strip():
        raise OSError("no answer in time")
    return "".join(lines)


def _line(sock: socket.socket, until: float) -> tuple[str, bytes]:
    data = b""
    while b"\n" not in data:
        sock.settimeout(_left(until))
        chunk = sock.recv(4096)
        if not chunk or len(data) > 4096:
            raise OSError("the service there is not NCCL's RAS")
        data += chunk
    line, _, rest = data.partition(b"\n")
    return line.decode("utf-8", "replace").strip(), rest


def _rest(sock: socket.socket, data: bytes, until: float) -> bytes:
    """The answer so far, complete or not: the beginning of a late answer is useful too."""
    try:
        while len(data) < _MAX_ANSWER_BYTES:
            sock.settimeout(_left(until))
            chunk = sock.recv(1 << 16)
            if not chunk:
                break
            data += chunk
    except OSError:
        pass
    return data


def _send(sock: socket.socket, text: str, until: float) -> None:
    sock.settimeout(_left(until))
    sock.sendall(text.encode())


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def parsed_status(text: str) -> Mapping[str, Any] | None:
    """An answer in JSON, with the commas that NCCL 2.28.9 leaves out; None if it is none."""
    text = text[text.find("{") :] if "{" in text else text
    for attempt in (text, _MISSING_COMMA.sub(r"\1,\2", text)):
        try:
            data = json.loads(attempt)
        except (ValueError, RecursionError):
            continue
        return data if isinstance(data, Mapping) else None
    return None


def _communicator(each: Mapping[str, Any]) -> dict[str, Any]:
    ranks, missing = _tables(each.get("ranks")), _tables(each.get("missing_ranks"))
    status: dict[str, list[int]] = {}
    counts: dict[str, dict[int, list[int]]] = {}
    for rank in ranks:
        status.setdefault(_status(_table(rank.get("status"))), []).append(_rank(rank))
        for name, count in _table(rank.get("collective_counts")).items():
            if isinstance(count, int):
                counts.setdefault(str(name), {}).setdefault(count, []).append(_rank(rank))
    done = {name: by_count for name, by_count in counts.items() if set(by_count) != {0}}
    behind = {
        rank
        for by_count in done.values()
        for count, these in by_count.items()
        if count < max(by_count)
        for rank in these
    }
    return {
        "size": each.get("size"),
        "status": {name: _range(these) for name, these in sorted(status.items())},
        "collectives": {
            name: {str(count): _range(these) for count, these in sorted(by_count.items())[:6]}
            for name, by_count in sorted(done.items())[:8]
        },
        "missing": _range([_rank(rank) for rank in missing]),
        "unresponsive": _range([_rank(r) for r in missing if _is(r, "unresponsive")]),
        "dead": _range([_rank(r) for r in missing if _is(r, "considered_dead")]),
        "behind": _range(sorted(behind)),
    }


def _status(flags: Mapping[str, Any]) -> str:
    """Status as in RAS's own summary; `init_state` 0 is ncclSuccess, 7 is ncclInProgress."""
    if flags.get("abort_flag"):
        return "ABORT"
    if flags.get("finalize_called") or flags.get("destroy_flag"):
        return "FINALIZE"
    state = flags.get("init_state")
    return {0: "RUNNING", 7: "INIT"}.get(state, f"error {state}") if state is not None else "?"


def _is(rank: Mapping[str, Any], flag: str) -> bool:
    return _table(rank.get("status")).get(flag) is True


def _rank(rank: Mapping[str, Any]) -> int:
    number = rank.get("rank")
    return number if isinstance(number, int) else -1


def _range(ranks: list[int]) -> str:
    text = number_range(ranks)
    return text if len(text) <= _LONGEST_RANKS else f"{text[:_LONGEST_RANKS]}… ({len(ranks)} ranks)"


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
