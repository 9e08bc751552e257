"""Look-ups by the resolver of this host, with their time; no look-up can hang its caller.

A look-up in glibc cannot be cancelled: each runs in a daemon thread that is left behind if it does
not return in time.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

SLOW_S = 0.9
"""A look-up that takes longer delays every connection: a healthy one takes milliseconds. Less than
a second, the shortest time that a resolver waits for a name server (`options timeout:1`).
"""

NOT_A_NAME = "not a host name"
"""The beginning of the error of a look-up that no resolver can ever answer."""

PATIENT_S = 7.0
"""Time in which the second name server is heard: the resolver gives the first 5 s. No answer even
then means, as a rule, that there will be none; `timed_out` without it may be a first name server
that is down, which costs each look-up those 5 s.
"""

_PAUSE_S = 0.3


@dataclass(frozen=True)
class LookUp:
    """The result of one look-up.

    `answers` are numeric addresses in the resolver's order (forward) or one name (reverse); `error`
    is the resolver's text if there are none. `took_s` holds the seconds of every attempt, of an
    unfinished one until it was abandoned. `timed_out`: no attempt returned in time.
    `slow`: the first attempt took longer than `SLOW_S`, and so did the one that repeated it.
    """

    query: str
    answers: tuple[str, ...]
    error: str
    took_s: tuple[float, ...]
    timed_out: bool = False
    slow: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "answers": list(self.answers), "took_s": list(self.took_s)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LookUp:
        """Inverse of `to_json`."""
        lists = {"answers": tuple(data["answers"]), "took_s": tuple(data["took_s"])}
        return cls(**{**data, **lists})


def canonical_name(name: str, timeout_s: float) -> str:
    """Canonical name that the resolver has for a name; empty if it gives none in time."""

    def ask() -> str:
        flags = socket.AI_CANONNAME
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=flags)[0][3])

    return _in_time(ask, timeout_s)


def full_name(timeout_s: float) -> str:
    """Full name of this host by `socket.getfqdn()`; its host name if no answer comes in time."""
    return _in_time(socket.getfqdn, timeout_s) or socket.gethostname()


def _in_time(ask: Callable[[], str], timeout_s: float) -> str:
    """The answer of a look-up, in a thread that is left behind; empty without one in time."""
    found: list[str] = []

    def work() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.append(ask())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found[0] if found else ""


class _LookUpThread:
    """One look-up in a thread of its own."""

    def __init__(self, query: str, reverse: bool, family: int) -> None:
        self.answers: tuple[str, ...] = ()
        self.error = ""
        self.done = threading.Event()
        self._took = 0.0
        self._started = time.monotonic()
        threading.Thread(target=self._ask, args=(query, reverse, family), daemon=True).start()

    def _ask(self, query: str, reverse: bool, family: int) -> None:
        try:
            self.answers = _name_of(query) if reverse else _addresses_of(query, family)
        except OSError as error:
            self.error = error.strerror or str(error)
        except UnicodeError as error:  # no host name at all: an empty or overlong label
            self.error = f"{NOT_A_NAME}: {error}"
        self._took = time.monotonic() - self._started
        self.done.set()

    @property
    def took_s(self) -> float:
        return self._took if self.done.is_set() else time.monotonic() - self._started


def look_up(
    query: str,
    timeout_s: float,
    *,
    reverse: bool = False,
    patience_s: float = 0.0,
    family: int = socket.AF_UNSPEC,
) -> LookUp:
    """Resolve a host name, or with `reverse` an address; never raises, never takes longer.

    A name is looked up for all address families, or for one. With an IPv4 address of it in
    /etc/hosts, the first is answered from there, and IPv6 alone is asked of the name server.

    A look-up without an answer after `SLOW_S` is repeated once in parallel: one lost datagram
    stalls the resolver for five seconds, and proves nothing about the name server. One that fails
    with an error is repeated for `patience_s`: the name of a pod or a new host may come late.
    """
    started = time.monotonic()

    def left(limit_s: float) -> float:
        return max(0.0, started + limit_s - time.monotonic())

    attempts = [_LookUpThread(query, reverse, family)]
    attempts[0].done.wait(min(SLOW_S, timeout_s))
    if not attempts[0].done.is_set() and left(timeout_s):
        attempts.append(_LookUpThread(query, reverse, family))
        attempts[1].done.wait(left(timeout_s))
    while attempts[-1].error and left(patience_s) > _PAUSE_S:
        time.sleep(_PAUSE_S)
        attempts.append(_LookUpThread(query, reverse, family))
        attempts[-1].done.wait(left(timeout_s))
    finished = [attempt for attempt in reversed(attempts) if attempt.done.is_set()]
    best = next((attempt for attempt in finished if attempt.answers), None)
    took = tuple(round(attempt.took_s, 3) for attempt in attempts)
    return LookUp(
        query=query,
        answers=best.answers if best else (),
        error="" if best else finished[0].error if finished else "no answer from the resolver",
        took_s=took,
        timed_out=not finished,
        slow=len(took) > 1 and min(took[:2]) > SLOW_S,
    )


def _addresses_of(name: str, family: int) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _name_of(address: str) -> tuple[str, ...]:
    # Not getnameinfo: before Python 3.11 it holds the interpreter's lock while it waits.
    return (socket.gethostbyaddr(address)[0],)


def meant_address(name: str) -> str:
    """An address as the resolver takes it, for one in brackets or with zeros that make a part
    octal; else empty. An address with a zone is none that torch can use: its clients time out at
    `::1%lo` (2.13).
    """
    if name[:1] == "[" and name[-1:] == "]":
        return "" if "%" in name else name[1:-1]
    parts = name.split(".")
    if len(parts) != 4 or not all(map(str.isdecimal, parts)):
        return ""
    plain = ".".join(part.lstrip("0") or "0" for part in parts)
    return "" if plain == name else plain
