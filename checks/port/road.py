"""Attempts to reach MASTER_ADDR:MASTER_PORT, until a store answers or waiting cannot help.

Hosts start at different times, and their names appear at different times: what is missing now may
exist in a second. So the name, the route and the port are all tried again, as torch itself does. A
fault that waiting cannot fix ends this early, and `final` is the reason.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.toolkit.firewall.portrules import fits, rules_for_calls_out
from nccl_doctor.toolkit.net.dial import Dial, arp_flags, dial, has_route
from nccl_doctor.toolkit.net.interfaces import interfaces, is_loopback
from nccl_doctor.toolkit.net.names import NOT_A_NAME, LookUp, look_up
from nccl_doctor.toolkit.net.routes import dead_route
from nccl_doctor.toolkit.net.rtnetlink import fixed_neighbours

from .rejections import forbidden_here
from .store_ping import StoreAnswer, ask_store, store_accepts

DIAL_S = 3.5
"""Longer than the three ARP requests after which the kernel reports that no host answers."""
MIN_DIAL_S = 0.5
"""With less time left than this, an attempt would fail only for lack of time."""
SURE_S = 1.2
"""In less, only one SYN is sent: that it has no answer may be chance, on a road that is lossy."""
DIAL_AGAIN_S = 2.0
"""A host that answers on another port has no ARP to wait for: one repeated SYN is enough."""
RESOLVE_S = 4.0
ASK_S = 1.0
CONFIRM_S = 2.0
RULES_S = 1.5
"""For each of the four programs that may list the firewall rules of this host."""
PAUSES_S = (0.2, 1.0)
"""First and longest pause between two rounds."""
MAX_ADDRESSES = 8
MAX_CHANGES = 20

NO_ROUTE_STANDS_S = 5.0
"""A route that appears with the network of a booting host exists by then."""
REJECT_STANDS_S = 3.0
SELF_STANDS_S = 8.0
"""Rank 0 on the same machine may only be slow to start."""

TELL_S = 3.0
"""Hosts are started within seconds of each other: before that there is nothing to report."""

_TALKATIVE = (
    *("rejected", "refused", "dropped", "turned-back"),
    *("no-neighbour", "unreachable", "error"),
)
"""Outcomes at several addresses, the most informative first."""
_SOMEBODY_ELSE = ("dropped", "rejected", "turned-back")
"""Outcomes that prove nothing of the host itself: another port of it may answer."""
_WORDS = {
    "refused": "refuses connections",
    "dropped": "gives no answer",
    "rejected": "is rejected by a firewall",
    "no-neighbour": "has an address that no host on the local network has",
    "unreachable": "has an address without a route to it",
    "turned-back": "has an address to which a router on the way cannot deliver",
    "error": "cannot be connected to",
    "store": "answers as a store",
    "silent": "accepts connections and sends nothing",
    "closed": "accepts connections and closes them",
    "other": "answers, but is not a store",
}


class Name(TypedDict):
    """The look-up of MASTER_ADDR: its answers or its error, and the seconds until it came."""

    answers: list[str]
    error: str
    came_s: float | None


class Knocks(TypedDict):
    """All attempts to reach the store, as `knock` returns them."""

    name: Name
    first: dict[str, Any] | None
    last: dict[str, Any] | None
    passed: list[list[str]]
    changes: list[list[Any]]
    knocks: int
    seconds: float
    neighbour: dict[str, Any] | None
    rules: dict[str, Any] | None
    final: str


def knock(
    name: str,
    port: int,
    until: float,
    *,
    serves: bool = False,
    elsewhere: bool = False,
    breadcrumb: Callable[..., None] = lambda words, **details: None,
    root: Path = Path("/"),
) -> Knocks:
    """Try to connect again and again, until a store answers, waiting cannot help, or time is up.

    Every round looks the name up and tries its addresses in torch's order, which is that of the
    resolver (RFC 6724): torch asks for IPv6 with AI_V4MAPPED and AI_ALL, so that glibc sorts all of
    them together (socket.cpp, SocketConnectOp::tryConnect). A service that accepts
    connections but is not a store is tested twice, the second time with a real client.

    Args:
        name: MASTER_ADDR.
        port: MASTER_PORT.
        until: `time.monotonic()` second about which this comes back.
        serves: this host serves the store, which may then use all the time.
        elsewhere: rank 0 is not on this host, by its launch record.
        breadcrumb: called with a text whenever the outcome changes; with `tell=True` once it has
            been the same for some seconds, to show it to the user.
        root: the folder below which /proc is read.

    Returns: `name`: `{"answers", "error", "came_s"}`, the last look-up that had an answer (else the
    last one) and the seconds until it came; `first` and `last`: the result of the first and the
    last round with an address, each `{"address", "outcome", "errno", "detail", "duration_s",
    "answer", "reply"}` (`Dial` and `StoreAnswer`; `answer` is empty without a connection), or None;
    `passed`: the [address, outcome] of the other addresses in the last round; `changes`: the
    [seconds, text] of each outcome that differs from the one before; `knocks`: number of rounds;
    `seconds`; `neighbour`: the answer of another port of a host that drops or rejects, `{"port",
    "outcome"}` or None; `rules`: the packet filter rules of this host for the calls (see
    `rules_for_calls_out`) or None; `final`: why waiting could not help, or empty.
    """
    road = _Road(
        name, port, until, serves=serves, elsewhere=elsewhere, breadcrumb=breadcrumb, root=root
    )
    return road.travel()


class _Road:
    """All rounds of one `knock`."""

    def __init__(
        self,
        name: str,
        port: int,
        until: float,
        *,
        serves: bool,
        elsewhere: bool,
        breadcrumb: Callable[..., None],
        root: Path,
    ) -> None:
        self.root = root
        self.name, self.port, self.until = name, port, until
        self.serves, self.elsewhere, self.breadcrumb = serves, elsewhere, breadcrumb
        self.started = time.monotonic()
        self.found: LookUp | None = None
        self.came_s: float | None = None
        self.first: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        self.passed: list[list[str]] = []
        self.changes: list[list[Any]] = []
        self.knocks = self.strangers = 0
        self.state, self.since, self.rounds = "", self.started, 0
        self.printed = ""
        self.neighbour: dict[str, Any] | None = None
        self.rules: dict[str, Any] | None = None

    def travel(self) -> Knocks:
        pause, final = PAUSES_S[0], ""
        while True:
            self._round()
            if self.last and self.last["answer"] == "store":
                break
            final = self._final()
            if final or self._left() < pause + MIN_DIAL_S:
                break
            time.sleep(pause)
            pause = min(2 * pause, PAUSES_S[1])
        found = self.found
        return {
            "name": {
                "answers": list(found.answers) if found else [],
                "error": found.error if found else "",
                "came_s": self.came_s,
            },
            "first": self.first,
            "last": self.last,
            "passed": self.passed,
            "changes": self.changes,
            "knocks": self.knocks,
            "seconds": round(time.monotonic() - self.started, 2),
            "neighbour": self.neighbour,
            "rules": self.rules,
            "final": final,
        }

    def _left(self, limit_s: float = float("inf")) -> float:
        return max(0.0, min(limit_s, self.until - time.monotonic()))

    def _round(self) -> None:
        """One look-up, and one attempt at each address."""
        self.knocks += 1
        found = look_up(self.name, max(0.2, self._left(RESOLVE_S)))
        if found.answers or self.found is None or not self.found.answers:
            self.found = found
        if not self.found.answers:
            self._now(f"{self.name} does not resolve ({found.error})")
            return
        if self.came_s is None:
            self.came_s = round(time.monotonic() - self.started, 2)
        is_hasty = self._left() < SURE_S
        tried: list[dict[str, Any]] = []
        for address in self.found.answers[:MAX_ADDRESSES]:  # glibc's order, as torch has it
            tried.append(self._try(address))
            if tried[-1]["answer"] or not self._left():
                break
        last = min(tried, key=_says_most)
        if is_hasty and last["outcome"] == "dropped" and self.last is not None:
            return
        self.last = last
        self.first = self.first or last
        self.passed = [[one["address"], one["outcome"]] for one in tried if one is not last]
        self.strangers = self.strangers + 1 if last["answer"] not in ("", "store") else 0
        words = _WORDS[last["answer"] or last["outcome"]]
        self._now(f"{self.name}:{self.port} ({last['address']}) {words}")
        if last["outcome"] in _SOMEBODY_ELSE and not self._host_answers():
            self.neighbour = self._ask_next_port(last["address"])

    def _now(self, words: str) -> None:
        """Record the outcome of this round, and report it if it is a new one."""
        if words != self.state:
            self.state, self.since, self.rounds = words, time.monotonic(), 0
            if len(self.changes) < MAX_CHANGES:
                self.changes.append([round(self.since - self.started, 2), words])
                self.breadcrumb(f"{words}; trying for {self._left():.0f} s more")
        elif words != self.printed and time.monotonic() - self.since > TELL_S:
            self.printed = words
            self.breadcrumb(f"{words}; trying for {self._left():.0f} s more", tell=True)
        self.rounds += 1

    def _try(self, address: str) -> dict[str, Any]:
        """The result of one connection; of two if another service answered before."""
        answer = StoreAnswer("")
        if ":" in address and not has_route(address):  # there may be no IPv6 in this kernel at all
            call = Dial("unreachable", errno.ENETUNREACH, os.strerror(errno.ENETUNREACH), 0.0)
        else:
            limit_s = DIAL_AGAIN_S if self._host_answers() else DIAL_S
            call, sock = dial(address, self.port, max(0.2, self._left(limit_s)))
            if sock is not None:
                with sock:
                    answer = ask_store(sock, max(0.2, self._left(ASK_S)))
                again = self.strangers and answer.kind != "store" and self._left() > 0.5
                if again and store_accepts(address, self.port, self._left(CONFIRM_S)):
                    answer = StoreAnswer("store")
        seen = call.to_json()
        if call.outcome in ("rejected", "dropped") and arp_flags(address, self.root) == 0:
            # ARP gets no answer: nothing was dropped or rejected. The kernel itself reports this
            # only after three requests; an attempt may end before that, or may join another one's
            # requests and fail early with them.
            seen["outcome"] = "no-neighbour"
        seen |= {"address": address, "answer": answer.kind, "reply": answer.reply}
        if call.outcome == "connected":
            return seen
        # What the tables of this host have to do with it, where they have.
        route, entered = dead_route(address, call.errno, self.root), fixed_neighbours().get(address)
        return seen | ({"route": route} if route else {}) | ({"fixed": entered} if entered else {})

    def _ask_next_port(self, address: str) -> dict[str, Any]:
        """The answer of the next port: a host that is up refuses a port where nothing listens."""
        port = self.port + 1 if self.port < 65535 else self.port - 1
        call, sock = dial(address, port, max(0.2, self._left(1.0)))
        if sock is not None:
            sock.close()
        return {"port": port, "outcome": call.outcome}

    def _host_answers(self) -> bool:
        """True if the host that drops or rejects was seen to be up, on another port."""
        return self.neighbour is not None and self.neighbour["outcome"] in ("refused", "connected")

    def _final(self) -> str:
        """Reason that waiting cannot help; empty if it may."""
        stood = time.monotonic() - self.since
        if self.last is None:
            return _no_name(self.name, self.found) if self.found else ""
        outcome, answer = self.last["outcome"], self.last["answer"]
        if answer:
            return "" if self.serves or self.strangers < 2 else "the service there is not a store"
        if outcome in ("dropped", "rejected") or (outcome == "refused" and stood > 2.0):
            self._read_rules(self.last["address"])
        if self.rounds < 2 or self.serves:
            return ""
        if self.rules and fits(self.rules, self.last):
            return "a rule of this host blocks the connection"
        return self._stands(outcome, stood)

    def _stands(self, outcome: str, stood: float) -> str:
        """The reason that has been the same for so long that it will not change, or empty."""
        assert self.last is not None
        address = self.last["address"]
        if forbidden_here(self.last):
            return "this host forbids the connection"
        if outcome == "unreachable" and stood > NO_ROUTE_STANDS_S:
            return f"this host has had no route to {address} for {stood:.0f} s"
        no_route = outcome == "turned-back" and self.last["errno"] == errno.ENETUNREACH
        if no_route and stood > NO_ROUTE_STANDS_S:
            return f"a router on the way has had no route to {address} for {stood:.0f} s"
        # A router also answers for a host that is off: only its own kernel proves that it is up.
        up = self._host_answers() or arp_flags(address, self.root)
        # Kubernetes refuses at the port of a service until a pod of it is ready: that may pass.
        stays = self.last["errno"] != errno.ECONNREFUSED
        if outcome in ("rejected", "turned-back") and stays and up and stood > REJECT_STANDS_S:
            return f"a firewall has rejected the connection for {stood:.0f} s"
        if outcome == "dropped" and self._host_answers():
            return f"the host is up, and only port {self.port} gives no answer"
        if outcome == "refused" and self.elsewhere and stood > SELF_STANDS_S and _is_own(address):
            return f"{address} is this host, and rank 0 is on another"
        return ""

    def _read_rules(self, address: str) -> None:
        """Read the firewall rules, once: it starts programs."""
        if self.rules is None and self._left() > MIN_DIAL_S:
            self.rules = rules_for_calls_out(
                address, self.port, self._left(5 * RULES_S) / 5, self.root
            )


def _says_most(tried: Mapping[str, Any]) -> int:
    return -1 if tried["answer"] else _TALKATIVE.index(tried["outcome"])


def _no_name(name: str, found: LookUp) -> str:
    """Reason that a text can never be the name of a host, or empty."""
    if found.error.startswith(NOT_A_NAME):
        return found.error
    if re.search(r"[/\s]", name) or name.count(":") == 1:
        return f"{NOT_A_NAME}: {name}"
    return ""


def _is_own(address: str) -> bool:
    return is_loopback(address) or any(address in nic.addresses for nic in interfaces())
