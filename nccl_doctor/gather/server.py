"""Server of the run's store at MASTER_PORT, if no agent of a launcher serves one.

The port is bound by hand, exactly as the job would (every address, IPv6 and IPv4), so that a
failure leaves an errno and not a text; the store then runs in a process of its own, because its
thread does name look-ups and must not be busy when the participant forks.

For a run of one host it then listens at one address only: that of MASTER_ADDR, where the other
ranks and check `port` look for it, which is a loopback one unless the user names another.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.launch.identity import LOOK_UP_S, host_addresses
from nccl_doctor.system import forks
from nccl_doctor.toolkit.groups.store import serve_store
from nccl_doctor.toolkit.net.interfaces import is_loopback
from nccl_doctor.toolkit.net.names import look_up

LOOPBACK = "127.0.0.1"
"""Where rank 0 reaches its own store, unless that listens elsewhere only."""
_WORDS = 1 << 16
"""Most bytes that are read of what the process of the store says."""
_BACKLOG = 4096  # capped by net.core.somaxconn; a thousand ranks sign in at once


class ServerState:
    """State of the store's server, seen from one participant; `facts` is `Context.door`."""

    def __init__(
        self,
        server: str,
        error: OSError | None = None,
        pid: int = 0,
        address: str = LOOPBACK,
        words: int = -1,
    ) -> None:
        """`words`: descriptor of the file with what the process of the store says of its end."""
        self.server = server
        self.error = error
        self.address = address
        self._pid = pid
        self._words = words

    @property
    def facts(self) -> Mapping[str, Any]:
        """State for checks: `server` (agent, self, other; none: this host should serve, and
        cannot), `bind_errno`, `bind_error`.
        """
        return {
            "server": self.server,
            "bind_errno": self.error.errno if self.error else None,
            "bind_error": str(self.error) if self.error else "",
        }

    def look(self) -> None:
        """Look after the process that serves here.

        Raises:
            RuntimeError: it has ended, and why.
        """
        if how := forks.service_end(self._pid) if self._pid else "":
            self._pid = 0
            said = os.pread(self._words, _WORDS, 0).decode("utf-8", "replace").strip()
            why = said.rpartition("\n")[2] or how
            raise RuntimeError(f"the process that serves the store of this run has ended: {why}")

    def outlast(self) -> None:
        """Serve on when the other children of this process are killed, until it is gone."""
        forks.living.discard(self._pid)

    def close(self) -> None:
        """Stop serving."""
        if self._pid:
            forks.stop_service(self._pid)
            self._pid = 0
        if self._words >= 0:
            os.close(self._words)
            self._words = -1


def serve(port: int, only_for: str | None = None) -> ServerState:
    """Bind MASTER_PORT and serve a store there until `close`, or until this process is gone.

    Args:
        port: MASTER_PORT.
        only_for: MASTER_ADDR of a job of one host; None for a job of several.
    """
    address = LOOPBACK
    try:
        listener = _bind_all(port)
        if only_for is not None:
            address = _own_address(only_for)
            with listener:  # held until now: the job would have had all of it
                listener = _bind(address, port)
        listener.listen(_BACKLOG)
    except OSError as error:
        return ServerState("self", error)
    words = forks.unnamed_file("store_server")
    pid = forks.fork_service(
        "store_server", lambda: _keep(listener, address, words), [listener.fileno(), words]
    )
    listener.close()
    return ServerState("self", pid=pid, address=address, words=words)


def refusal(port: int) -> OSError | None:
    """Error of binding the port as the store would; None if it can be bound."""
    try:
        _bind_all(port).close()
    except OSError as error:
        return error
    return None


def _own_address(name: str) -> str:
    """Address of this host that a name leads to, the one that torch would try first; a loopback one
    if it leads elsewhere, or nowhere.
    """
    answers = sorted(look_up(name, LOOK_UP_S).answers, key=lambda answer: ":" in answer)
    mine = host_addresses()
    return next((each for each in answers if is_loopback(each) or each in mine), LOOPBACK)


def _bind_all(port: int) -> socket.socket:
    with contextlib.suppress(OSError):
        return _bind("::", port)
    return _bind("0.0.0.0", port)


def _bind(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with _named("socket"):
        sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        with _named("setsockopt"):
            _set_options(sock)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


@contextlib.contextmanager
def _named(call: str) -> Iterator[None]:
    """Put the name of a call before its error: the others are those of bind."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{call}: {error.strerror}") from error


def _keep(listener: socket.socket, address: str, words: int) -> None:
    # It looks up the name of every peer, one after the other, only to log it: without a name server
    # that answers, sixteen connections would keep it busy for as many seconds, whatever their order
    # in nsswitch.conf. So it asks none (`attempts`, resolv.conf(5)).
    os.environ["RES_OPTIONS"] = "attempts:0"
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(words, 2)
    try:
        store = serve_store(listener, address, datetime.timedelta(seconds=30))
    except BaseException:
        traceback.print_exc()
        raise
    os.dup2(null, 2)  # the store logs every look-up that fails
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    while store is not None:
        time.sleep(3600)


def bound_resolver() -> None:
    """Let no look-up of the control plane take longer than a second.

    A TCPStore looks up the name of every peer, only to log it; with a name server that does not
    answer this costs 5–10 s each. What the job itself would suffer is measured by a check, in a
    child that was forked before this is set.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
