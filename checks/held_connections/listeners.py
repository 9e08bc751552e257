"""Connections that are silent on purpose: their words, and the side that is called.

A listener binds one address, port 0, and does not answer a caller without the token that it posted.
A connection is

    caller: MAGIC, token, who speaks first, a number, length of the silence
                                                      listener: its own token
    nobody, for that long
    who speaks first: the number                      the other: the number
    the listener, if it spoke first: the number again

A new connection after a loss has no silence. Its listener adds one byte before the number: whether
it heard the caller on the connection that has this number and was lost.

A connection that is held while the run goes on has the same words, but no process of the listener
to hear them before the end: the kernel keeps what the caller said at first. The token of the
listener comes with its number then, so that the right side breaks the silence.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nccl_doctor.toolkit.peers.echo import TOKEN_BYTES, ListeningAddress

CALLER, LISTENER, NOW = b"c", b"l", b"n"
"""Side that speaks first after the silence; `NOW`: the caller, without a silence."""
PATIENCE_S = 4.0
"""Time for an answer after the silence: five retransmissions (0.2, 0.4, 0.8, 1.6, 3.2 s)."""
START_S = 8.0
"""Time to connect and to introduce oneself: all hosts call all others at once."""
AFTER_S = 2 * PATIENCE_S + START_S + 2.0
"""The longest time from the end of the silence to the end of the last call."""

MAGIC = b"ncdr-id1"
NUMBER_BYTES = 8
HELLO = struct.Struct(f"!{len(MAGIC)}s{TOKEN_BYTES}sc{NUMBER_BYTES}sQ")
_MOST_SERVED = 512
_LINGER_S = 1.0
"""Seconds for a host that lost all connections at once to call again."""
T = TypeVar("T")


@dataclass(frozen=True)
class Listener:
    """A socket that listens on one address of this host, and its door."""

    sock: socket.socket
    door: ListeningAddress

    @classmethod
    def at(cls, address: str) -> Listener:
        """Listen on a new port.

        Raises:
            OSError: the address is not one of this host.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.create_server((address, 0), family=family, backlog=1024)
        tokens = (secrets.token_hex(TOKEN_BYTES // 2) for _ in "12")
        return cls(sock, ListeningAddress(address, sock.getsockname()[1], *tokens))

    def close(self) -> None:
        """Stop listening."""
        self.sock.close()


async def serve(
    listeners: Sequence[Listener],
    longest_s: float | None,
    calls: Iterable[Awaitable[T]],
    over: Callable[[Ears], Awaitable[object]],
) -> list[T]:
    """Answer the others from the first of these calls to the last, and until it is `over`.

    `longest_s`: the longest silence that anybody may ask for; None where the silence has been.
    """
    ears = Ears(longest_s)
    servers = [
        await asyncio.start_server(functools.partial(ears.serve, each.door), sock=each.sock)
        for each in listeners
    ]
    try:
        made = await asyncio.gather(*calls)
        await over(ears)
    finally:
        for server in servers:
            server.close()
        await ears.stop()
    return made


async def heard(reader: asyncio.StreamReader, words: bytes, limit_s: float) -> None:
    """Wait for the number, or for other words.

    Raises:
        asyncio.TimeoutError: nothing came.
        asyncio.IncompleteReadError: the connection was closed.
        OSError: it was reset, or something else came.
    """
    if await asyncio.wait_for(reader.readexactly(len(words)), limit_s) != words:
        raise OSError("other bytes than those that were sent")


class Ears:
    """Answers all callers of this host."""

    def __init__(self, longest_s: float | None) -> None:
        self._longest_s = longest_s or 0.0
        self._has_been = longest_s is None
        self._heard: set[bytes] = set()
        self._served: dict[asyncio.Task[Any], bytes] = {}

    async def serve(
        self, door: ListeningAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
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
        door: ListeningAddress,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        said = await asyncio.wait_for(reader.readexactly(HELLO.size), START_S / 2)
        magic, token, first, number, length = HELLO.unpack(said)
        if not secrets.compare_digest(magic + token, MAGIC + door.token.encode()):
            return
        self._served[task] = number if first != NOW else b""
        token = door.answer.encode()
        if self._has_been and first == CALLER:
            last = token + number
        else:
            writer.write(token)
            last = number
        if first == NOW:
            writer.write(b"\x01" if number in self._heard else b"\x00")
            for lost in [each for each, held in self._served.items() if held == number]:
                lost.cancel()  # its end would never arrive
        elif first == LISTENER:
            await asyncio.sleep(min(length / 1000, self._longest_s))
            writer.write(number)
        await heard(reader, number, self._longest_s + START_S + AFTER_S)
        self._heard.add(number)
        writer.write(last)
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
