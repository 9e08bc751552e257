"""Connections that are held while the run goes on: begun in one round, asked in another one.

No process of this check runs between them: the sockets wait in the participant.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from nccl_doctor.api import Context, SocketHandoff, Untested
from nccl_doctor.toolkit.peers.echo import ListeningAddress

from .listeners import CALLER, LISTENER, Listener
from .talk import Begun, Held, begin, end

Entry = Mapping[str, Any]
"""What a host posts of one of its listeners: the interface, and its door."""
_READY_S = 10.0
"""Time for the other hosts to take their sockets again."""
_OVER_S = 18.0
"""Time for the calls of the other hosts."""
_SIDES = (CALLER, LISTENER)


def begin_all(
    handoff: SocketHandoff,
    listeners: Sequence[Listener],
    entries: Sequence[tuple[int, Entry]],
    also: Mapping[str, Any],
) -> int:
    """Begin connections to these listeners of others (seat, entry), and hand all of them over.

    `also`: facts for the round that asks.

    Returns: the number of connections.

    Raises:
        Untested: no room for the sockets.
    """
    made = begin([door_of(entry) for _, entry in entries], _SIDES)
    whose = [(seat, entry) for seat, entry in entries for _ in _SIDES]
    calls = [
        {
            "seat": seat,
            "entry": dict(entry),
            "first": each.first.decode(),
            "number": each.number.hex(),
            "detail": each.detail,
            "open": each.sock is not None,
        }
        for (seat, entry), each in zip(whose, made, strict=True)
    ]
    doors = [each.door.to_json() for each in listeners]
    left = {"began": time.monotonic(), "doors": doors, "calls": calls, "also": dict(also)}
    sockets = [each.sock for each in made if each.sock is not None]
    try:
        handoff.put(left, [*(each.sock for each in listeners), *sockets])
    except OSError as error:
        raise Untested(f"{len(sockets)} connections cannot be kept: {error}") from error
    return len(sockets)


def ask_all(ctx: Context) -> tuple[float, Mapping[str, Any], list[tuple[int, Entry, Held]]]:
    """Break the silence of all that was begun.

    Returns: its length, the facts that were left, and what became of each connection, with the
        seat and the entry that were called.

    Raises:
        Untested: nothing was begun.
    """
    try:
        left = ctx.handoff.take() if ctx.handoff is not None else None
    except OSError as error:
        raise Untested(f"the connections that were kept cannot be taken: {error}") from error
    if left is None or ctx.peers is None:
        raise Untested("no connection was opened at the beginning of the run")
    told, sockets = left
    rest = iter(sockets)
    listeners = [Listener(next(rest), ListeningAddress(**door)) for door in told["doors"]]
    calls = [
        (call["seat"], call["entry"], _begun(call, next(rest) if call["open"] else None))
        for call in told["calls"]
    ]
    ctx.peers.post("ready", True)
    ready = ctx.peers.collect("ready", min(_READY_S, ctx.left()))
    calls = [call for call in calls if call[0] in ready]
    idle_s = round(time.monotonic() - told["began"], 1)
    peers = ctx.peers

    def over() -> None:
        peers.post("done", True)
        peers.collect("done", min(_OVER_S, max(0.0, ctx.left() - 1)))

    ctx.breadcrumb(f"asking on connections that were silent for {idle_s:g} s", calls=len(calls))
    made = end(listeners, [begun for _, _, begun in calls], idle_s, over)
    return idle_s, told["also"], [(s, e, held) for (s, e, _), held in zip(calls, made, strict=True)]


def door_of(entry: Entry) -> ListeningAddress:
    """The door in an entry."""
    return ListeningAddress(
        **{name: entry[name] for name in ("address", "port", "token", "answer")}
    )


def _begun(call: Mapping[str, Any], sock: Any) -> Begun:
    number = bytes.fromhex(call["number"])
    return Begun(door_of(call["entry"]), call["first"].encode(), number, sock, call["detail"])
