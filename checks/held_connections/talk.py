"""Connections that are silent on purpose: the caller, the listener, and their words.

A listener binds one address, port 0, and does not answer a caller without the token that it posted.
A connection is

    caller: MAGIC, token, who speaks first, a number, length of the silence
                                                      listener: its own token
    nobody, for that long
    who speaks first: the number                      the other: the number
    the listener, if it spoke first: the number again

A new connection after a loss has no silence. Its listener adds one byte before the number: whether
it heard the caller on the connection that has this number and was lost.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nccl_doctor.toolkit.net.dial import dial
from nccl_doctor.toolkit.peers.echo import TOKEN_BYTES, Door

CALLER, LISTENER, NOW = b"c", b"l", b"n"
"""Side that speaks first after the silence; `NOW`: the caller, without a silence."""
PATIENCE_S = 4.0
"""Time for an answer after the silence: five retransmissions (0.2, 0.4, 0.8, 1.6, 3.2 s)."""
START_S = 8.0
"""Time to connect and to introduce oneself: all hosts call all others at once."""
AFTER_S = 2 * PATIENCE_S + START_S + 2.0
"""The longest time from the end of the silence to the end of the last call."""
LOST = ("silent", "reset", "closed")

_MAGIC = b"ncdr-id1"
_NUMBER_BYTES = 8
_HELLO = struct.Struct(f"!{len(_MAGIC)}s{TOKEN_BYTES}sc{_NUMBER_BYTES}sQ")
_MOST_SERVED = 512
_LINGER_S = 1.0
"""Seconds for a host that lost all connections at once to call again."""


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


class Listener:
    """A socket that listens on one address of this host, and its door."""

    def __init__(self, address: str) -> None:
        """Listen on a new port.

        Raises:
            OSError: the address is not one of this host.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.sock = socket.create_server((address, 0), family=family, backlog=1024)
        tokens = (secrets.token_hex(TOKEN_BYTES // 2) for _ in "12")
        self.door = Door(address, self.sock.getsockname()[1], *tokens)

    def close(self) -> None:
        """Stop listening."""
        self.sock.close()


def hold(
    listeners: Sequence[Listener], doors: Sequence[Door], plan: Sequence[tuple[bytes, float]]
) -> list[list[Held]]:
    """Hold one connection to each of these doors for each (first, seconds) of the plan.

    Meanwhile the others are answered, until they have ended their calls too.

    Returns: for each door what became of its connections, in the order of the plan.
    """
    return asyncio.run(_hold(listeners, doors, plan))


async def _hold(
    listeners: Sequence[Listener], doors: Sequence[Door], plan: Sequence[tuple[bytes, float]]
) -> list[list[Held]]:
    longest_s = max(idle_s for _, idle_s in plan)
    end = time.monotonic() + START_S + longest_s + AFTER_S
    ears = _Ears(longest_s)
    servers = [
        await asyncio.start_server(functools.partial(ears.serve, each.door), sock=each.sock)
        for each in listeners
    ]
    try:
        calls = (_call(door, first, idle_s) for door in doors for first, idle_s in plan)
        made = await asyncio.gather(*calls)
        await ears.deserted(end)
    finally:
        for server in servers:
            server.close()
        await ears.stop()
    return [made[at : at + len(plan)] for at in range(0, len(made), len(plan))]


# The caller ---------------------------------------------------------------------------------------


async def _call(door: Door, first: bytes, idle_s: float) -> Held:
    number = secrets.token_bytes(_NUMBER_BYTES)
    who = "caller" if first == CALLER else "listener"
    try:
        start = _introduced(door, first, number, idle_s)
        reader, writer = await asyncio.wait_for(start, START_S)
    except (_Failed, asyncio.TimeoutError) as error:
        why = str(error) or f"no connection within {START_S:g} s"
        return Held(who, idle_s, "untested", detail=why)
    began = time.monotonic()
    try:
        await (_speak if first == CALLER else _listen)(reader, writer, number, idle_s)
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
        fresh, heard = await asyncio.wait_for(_again(door, number), START_S)
    except asyncio.TimeoutError:
        fresh, heard = "no answer", None
    writer.transport.abort()
    return Held(who, idle_s, outcome, after_s, detail, fresh, heard)


async def _speak(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: bytes, idle_s: float
) -> None:
    """Break the silence, and wait for the answer."""
    try:
        early = await asyncio.wait_for(reader.read(1), idle_s)
    except asyncio.TimeoutError:
        writer.write(number)
        await _heard(reader, number, PATIENCE_S)
    else:
        raise OSError("bytes in the silence") if early else asyncio.IncompleteReadError(b"", 1)


async def _listen(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: bytes, idle_s: float
) -> None:
    """Wait until the other one breaks the silence, answer, and wait for its word on that."""
    await _heard(reader, number, idle_s + PATIENCE_S)
    writer.write(number)
    await _heard(reader, number, PATIENCE_S)


async def _again(door: Door, number: bytes) -> tuple[str, bool | None]:
    """Whether a new connection works, and whether the lost one had been heard."""
    try:
        reader, writer = await _introduced(door, NOW, number, 0.0)
    except _Failed as error:
        return str(error), None
    try:
        writer.write(number)
        told = await asyncio.wait_for(reader.readexactly(1), PATIENCE_S)
        await _heard(reader, number, PATIENCE_S)
    except (OSError, EOFError, asyncio.TimeoutError) as error:
        return f"connected, then: {type(error).__name__}", None
    finally:
        writer.close()
    return "ok", told == b"\x01"


class _Failed(Exception):
    """A connection that did not come about; the text says why."""


async def _introduced(
    door: Door, first: bytes, number: bytes, idle_s: float
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
        writer.write(_HELLO.pack(_MAGIC, door.token.encode(), first, number, length))
        answer = await asyncio.wait_for(reader.readexactly(TOKEN_BYTES), START_S / 2)
    except (OSError, EOFError, asyncio.TimeoutError) as error:
        writer.transport.abort()
        raise _Failed(f"connected, but no proof of identity ({type(error).__name__})") from error
    if answer != door.answer.encode():
        writer.transport.abort()
        raise _Failed("another service answered")
    return reader, writer


async def _heard(reader: asyncio.StreamReader, number: bytes, limit_s: float) -> None:
    """Wait for the number.

    Raises:
        asyncio.TimeoutError: nothing came.
        asyncio.IncompleteReadError: the connection was closed.
        OSError: it was reset, or something else came.
    """
    if await asyncio.wait_for(reader.readexactly(_NUMBER_BYTES), limit_s) != number:
        raise OSError("other bytes than those that were sent")


# The listener -------------------------------------------------------------------------------------


class _Ears:
    """Answers all callers of this host."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._heard: set[bytes] = set()
        self._served: dict[asyncio.Task[Any], bytes] = {}

    async def serve(
        self, door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one caller until it closes the connection."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._served) >= _MOST_SERVED:
            writer.transport.abort()
            return
        self._served[task] = b""
        try:
            await self._answer(task, door, reader, writer)
            writer.close()
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
            writer.transport.abort()  # the caller reports what came of it
        finally:
            del self._served[task]

    async def _answer(
        self,
        task: asyncio.Task[Any],
        door: Door,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        said = await asyncio.wait_for(reader.readexactly(_HELLO.size), START_S / 2)
        magic, token, first, number, length = _HELLO.unpack(said)
        if not secrets.compare_digest(magic + token, _MAGIC + door.token.encode()):
            return
        self._served[task] = number if first != NOW else b""
        writer.write(door.answer.encode())
        if first == NOW:
            writer.write(b"\x01" if number in self._heard else b"\x00")
            for lost in [each for each, held in self._served.items() if held == number]:
                lost.cancel()  # its end would never arrive
        elif first == LISTENER:
            await asyncio.sleep(min(length / 1000, self._longest_s))
            writer.write(number)
        await _heard(reader, number, self._longest_s + START_S + AFTER_S)
        self._heard.add(number)
        writer.write(number)
        await reader.read(1)

    async def deserted(self, end: float) -> None:
        """Wait until every caller has closed its connections, but not beyond `end`."""
        since = now = time.monotonic()
        while now < end and now - since < _LINGER_S:
            await asyncio.sleep(0.05)
            now = time.monotonic()
            since = now if self._served else since

    async def stop(self) -> None:
        """End what is still open."""
        tasks = list(self._served)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
