"""Connections that are silent on purpose: the side that calls, and what became of them.

The words are those of `listeners`.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nccl_doctor.toolkit.net.dial import dial
from nccl_doctor.toolkit.peers.echo import TOKEN_BYTES, ListeningAddress

from .listeners import (
    AFTER_S,
    CALLER,
    HELLO,
    LISTENER,
    MAGIC,
    NOW,
    NUMBER_BYTES,
    PATIENCE_S,
    START_S,
    Listener,
    heard,
    serve,
)

LOST = ("silent", "reset", "closed")


@dataclass(frozen=True)
class Held:
    """The end of one connection.

    `outcome` is `ok`; one of `LOST`: no answer, a reset, closed by none of the two; or `untested`:
    it never came about. `after_s`: silence until the connection was cut, or until somebody spoke in
    vain. Of one that was lost, `fresh` is `ok` if a new connection then worked at once, or what
    failed; `heard`: whether the listener heard the caller on the lost one, None if it did not say.
    """

    first: str
    idle_s: float
    outcome: str
    after_s: float = 0.0
    detail: str = ""
    fresh: str = ""
    heard: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data; less for a connection that was not lost."""
        full = {**asdict(self), "after_s": round(self.after_s, 1)}
        if self.outcome in LOST:
            return full
        return {name: full[name] for name in ("first", "idle_s", "outcome", "detail") if full[name]}


@dataclass(frozen=True)
class Begun:
    """A connection that was begun. If it failed, `sock` is None and `detail` says why."""

    door: ListeningAddress
    first: bytes
    number: bytes
    sock: socket.socket | None
    detail: str = ""


def hold(
    listeners: Sequence[Listener],
    doors: Sequence[ListeningAddress],
    plan: Sequence[tuple[bytes, float]],
) -> list[list[Held]]:
    """Hold one connection to each of these doors for each (first, seconds) of the plan.

    Meanwhile the others are answered, until they have ended their calls too.

    Returns: for each door what became of its connections, in the order of the plan.
    """
    longest_s = max(idle_s for _, idle_s in plan)
    end = time.monotonic() + START_S + longest_s + AFTER_S
    calls = [_call(door, first, idle_s) for door in doors for first, idle_s in plan]
    made = asyncio.run(serve(listeners, longest_s, calls, lambda ears: ears.deserted(end)))
    return [made[at : at + len(plan)] for at in range(0, len(made), len(plan))]


def begin(doors: Sequence[ListeningAddress], plan: Sequence[bytes]) -> list[Begun]:
    """Begin one connection to each of these doors for each side that is to speak first."""

    async def all_of_them() -> list[Begun]:
        return await asyncio.gather(*(_begin(door, first) for door in doors for first in plan))

    return asyncio.run(all_of_them())


def end(
    listeners: Sequence[Listener],
    begun: Sequence[Begun],
    idle_s: float,
    over: Callable[[], object],
) -> list[Held]:
    """Break the silence on connections that were begun `idle_s` seconds ago.

    The others are answered until `over`, which is called in a thread when all calls are done, and
    waits for theirs.
    """
    calls = [_end(each, idle_s) for each in begun]
    return asyncio.run(serve(listeners, None, calls, lambda _: asyncio.to_thread(over)))


# The caller ---------------------------------------------------------------------------------------


async def _call(door: ListeningAddress, first: bytes, idle_s: float) -> Held:
    number = secrets.token_bytes(NUMBER_BYTES)
    try:
        start = _introduced(door, first, number, idle_s)
        reader, writer = await asyncio.wait_for(start, START_S)
    except (_Failed, asyncio.TimeoutError) as error:
        why = str(error) or f"no connection within {START_S:g} s"
        return Held(_who(first), idle_s, "untested", detail=why)
    talk = (_speak if first == CALLER else _listen)(reader, writer, number, idle_s)
    return await _told(Begun(door, first, number, None), idle_s, talk, writer, time.monotonic())


async def _begin(door: ListeningAddress, first: bytes) -> Begun:
    number = secrets.token_bytes(NUMBER_BYTES)
    try:
        dialled, sock = await asyncio.to_thread(dial, door.address, door.port, START_S / 2)
        if sock is not None:
            sock.sendall(HELLO.pack(MAGIC, door.token.encode(), first, number, 0))
    except OSError as error:
        return Begun(door, first, number, None, str(error))
    return Begun(door, first, number, sock, dialled.detail or dialled.outcome)


async def _end(begun: Begun, idle_s: float) -> Held:
    if begun.sock is None:
        return Held(_who(begun.first), idle_s, "untested", detail=begun.detail)
    reader, writer = await asyncio.open_connection(sock=begun.sock)
    began = time.monotonic() - idle_s

    async def talk() -> None:
        if begun.first == CALLER:
            writer.write(begun.number)
        await heard(reader, begun.door.answer.encode() + begun.number, PATIENCE_S)
        if begun.first == LISTENER:
            writer.write(begun.number)
            await heard(reader, begun.number, PATIENCE_S)

    return await _told(begun, idle_s, talk(), writer, began)


async def _told(
    begun: Begun, idle_s: float, talk: Awaitable[None], writer: asyncio.StreamWriter, began: float
) -> Held:
    """What became of a connection in this talk; `began`: the second in which its silence did."""
    who = _who(begun.first)
    try:
        await talk
    except asyncio.TimeoutError:
        outcome, detail = "silent", "no answer"
    except asyncio.IncompleteReadError:
        outcome, detail = "closed", "closed by neither end"
    except OSError as error:
        outcome, detail = "reset", error.strerror or str(error)
    else:
        writer.close()
        return Held(who, idle_s, "ok")
    after_s = idle_s if outcome == "silent" else time.monotonic() - began
    try:
        fresh, was_heard = await asyncio.wait_for(_again(begun.door, begun.number), START_S)
    except asyncio.TimeoutError:
        fresh, was_heard = "no answer", None
    writer.transport.abort()
    return Held(who, idle_s, outcome, after_s, detail, fresh, was_heard)


def _who(first: bytes) -> str:
    return "caller" if first == CALLER else "listener"


async def _speak(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: bytes, idle_s: float
) -> None:
    """Break the silence, and wait for the answer."""
    try:
        early = await asyncio.wait_for(reader.read(1), idle_s)
    except asyncio.TimeoutError:
        writer.write(number)
        await heard(reader, number, PATIENCE_S)
    else:
        raise OSError("bytes in the silence") if early else asyncio.IncompleteReadError(b"", 1)


async def _listen(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: bytes, idle_s: float
) -> None:
    """Wait until the other one breaks the silence, answer, and wait for its word on that."""
    await heard(reader, number, idle_s + PATIENCE_S)
    writer.write(number)
    await heard(reader, number, PATIENCE_S)


async def _again(door: ListeningAddress, number: bytes) -> tuple[str, bool | None]:
    """True if a new connection works, and whether the lost one had been heard."""
    try:
        reader, writer = await _introduced(door, NOW, number, 0.0)
    except _Failed as error:
        return str(error), None
    try:
        writer.write(number)
        told = await asyncio.wait_for(reader.readexactly(1), PATIENCE_S)
        await heard(reader, number, PATIENCE_S)
    except (OSError, EOFError, asyncio.TimeoutError) as error:
        return f"connected, then: {type(error).__name__}", None
    finally:
        writer.close()
    return "ok", told == b"\x01"


class _Failed(Exception):
    """A connection that did not come about; the text says why."""


async def _introduced(
    door: ListeningAddress, first: bytes, number: bytes, idle_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which both have shown their tokens.

    No option is set: what the libraries of the job get is keep-alive off, unless somebody turned it
    on for all programs.
    """
    try:
        dialled, sock = await asyncio.to_thread(dial, door.address, door.port, START_S / 2)
        if sock is None:
            raise _Failed(dialled.detail or dialled.outcome)
        reader, writer = await asyncio.open_connection(sock=sock)
    except OSError as error:  # no socket to be had
        raise _Failed(str(error)) from error
    try:
        length = round(idle_s * 1000)
        writer.write(HELLO.pack(MAGIC, door.token.encode(), first, number, length))
        answer = await asyncio.wait_for(reader.readexactly(TOKEN_BYTES), START_S / 2)
    except (OSError, EOFError, asyncio.TimeoutError) as error:
        writer.transport.abort()
        raise _Failed(f"connected, but no proof of identity ({type(error).__name__})") from error
    if answer != door.answer.encode():
        writer.transport.abort()
        raise _Failed("another service answered")
    return reader, writer
