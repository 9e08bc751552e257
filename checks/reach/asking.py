"""One URL, asked step by step as Python's HTTP clients do: name, connection, proxy, TLS, answer.

Nothing of a URL but scheme, host and port is used, and no byte of an answer behind its first line.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import os
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from nccl_doctor.toolkit.net.dial import dial
from nccl_doctor.toolkit.net.endpoints import endpoint_words
from nccl_doctor.toolkit.net.names import look_up

LOOK_UP_S, CONNECT_S, TLS_S, ANSWER_S = 3.0, 4.0, 6.0, 8.0
MOST_ADDRESSES = 3
LONGEST_S = LOOK_UP_S + MOST_ADDRESSES * CONNECT_S + 2 * TLS_S + 2 * ANSWER_S
_BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
_PORTS = {"http": 80, "https": 443}
_LINE = 8192
_PROXY_AUTHENTICATION = 407
_WORDS = {
    "dropped": "no answer",
    "refused": "connection refused",
    "rejected": "rejected by a firewall",
    "unreachable": "network is unreachable",
    "no-neighbour": "no host answers for the address on the local network",
    "turned-back": "a router on the way answers that it cannot deliver",
}


class Failed(Exception):
    """A step that failed; the text says how. `step`: name, connect, proxy, tls or answer."""

    def __init__(self, step: str, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.step = step
        self.code = code


@dataclass
class Asked:
    """The result of one URL.

    `hosts` are those of the URL and of the proxy. `step` is the one that failed, or empty, and
    `detail` how. `proxy` is the one that was used, without its user and password. `status` is that
    of the answer. `verify` is OpenSSL's code where a certificate was refused; `day` is the date of
    this host then. `bundle` says which certificates were trusted; `system`: those of the system
    accept it.
    """

    url: str
    hosts: tuple[str, ...] = ()
    step: str = ""
    detail: str = ""
    proxy: str = ""
    address: str = ""
    status: int | None = None
    verify: int = 0
    bundle: str = ""
    system: bool = False
    day: str = ""
    took_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "took_s": round(self.took_s, 3)}


def proxy_for(url: SplitResult, env: Mapping[str, str]) -> str:
    """URL of the proxy for a URL, as urllib takes it from the environment; empty for none."""
    lower = {name: value for name, value in env.items() if name == name.lower()}
    known = {name.lower(): value for name, value in env.items()} | lower
    if "REQUEST_METHOD" in env:  # CGI: a request could have set it
        known["http_proxy"] = lower.get("http_proxy", "")
    proxy = known.get(f"{url.scheme}_proxy", "")
    exceptions = {"no": known.get("no_proxy", "")}
    host = endpoint_words(url.hostname or "", port_of(url))
    # Not in its documentation, but what it documents by its behaviour.
    bypassed = urllib.request.proxy_bypass_environment(host, exceptions)  # type: ignore[attr-defined]
    return "" if bypassed else proxy


def port_of(url: SplitResult) -> int:
    """Port of a URL, by its scheme if it names none."""
    return url.port or _PORTS.get(url.scheme, 0)


def ask(text: str, env: Mapping[str, str]) -> Asked:
    """Ask one URL; never raises, never takes longer than `LONGEST_S`."""
    asked, began = Asked(text), time.monotonic()
    try:
        _ask(asked, urlsplit(text), env)
    except Failed as failed:
        asked.step, asked.detail, asked.verify = failed.step, str(failed), failed.code
    except ValueError as error:  # of a proxy variable
        asked.step, asked.detail = "proxy", str(error)
    asked.took_s = time.monotonic() - began
    return asked


def _ask(asked: Asked, url: SplitResult, env: Mapping[str, str]) -> None:
    asked.hosts = (url.hostname or "",)
    proxy_text = "" if url.scheme == "tcp" else proxy_for(url, env)
    proxy = urlsplit(proxy_text if "://" in proxy_text else f"http://{proxy_text}")
    if proxy_text:
        asked.hosts += (proxy.hostname or "",)
        asked.proxy = f"{proxy.scheme}://{endpoint_words(proxy.hostname or '', proxy.port or 80)}"
        if proxy.scheme != "http" or not proxy.hostname:
            raise Failed("proxy", f"{asked.proxy} is no proxy that urllib can use")

    def connected() -> socket.socket:
        sock = _connect(asked, proxy if proxy_text else url)
        if proxy_text and url.scheme == "https":
            try:
                _tunnel(sock, url, proxy)
            except Failed:
                sock.close()
                raise
        return sock

    if url.scheme == "tcp":
        connected().close()
        return
    if url.scheme == "https":
        asked.bundle, bundle = bundle_of(env)
        try:
            with connected() as sock, _secured(sock, url, bundle) as safe:
                asked.status = _status(safe, _head(url, "/"))
        except Failed as failed:
            if failed.step == "tls" and failed.code:
                asked.day = time.strftime("%Y-%m-%d", time.gmtime())
                asked.system = bundle is not None and _is_accepted(connected, url)
            raise
        return
    with connected() as sock:
        target = f"http://{endpoint_words(url.hostname or '', port_of(url))}/"
        more = _authorization(proxy) if proxy_text else ""
        asked.status = _status(sock, _head(url, target if proxy_text else "/", more))
    if asked.status == _PROXY_AUTHENTICATION:
        raise Failed("proxy", "the proxy wants a user and a password (407)", asked.status)


def _connect(asked: Asked, url: SplitResult) -> socket.socket:
    """A connection to the host of a URL, by the first of its addresses that works."""
    host, port = url.hostname or "", url.port or _PORTS.get(url.scheme, 80)
    found = look_up(host, LOOK_UP_S)
    if not found.answers:
        raise Failed("name", f"{host} does not resolve: {found.error}")
    outcomes: dict[str, str] = {}
    for address in found.answers[:MOST_ADDRESSES]:
        asked.address = address
        try:
            dialled, sock = dial(address, port, CONNECT_S)
        except OSError as error:  # no socket of this family
            outcomes[address] = str(error)
            continue
        if sock is not None:
            return sock
        outcomes[address] = _WORDS.get(dialled.outcome, dialled.detail)
    words = "; ".join(f"{endpoint_words(at, port)}: {how}" for at, how in outcomes.items())
    raise Failed("connect", words)


def _tunnel(sock: socket.socket, url: SplitResult, proxy: SplitResult) -> None:
    target = endpoint_words(url.hostname or "", port_of(url))
    lines = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{_authorization(proxy)}\r\n"
    status = _status(sock, lines, "proxy")
    if status == _PROXY_AUTHENTICATION:
        raise Failed("proxy", "the proxy wants a user and a password (407)", status)
    if status // 100 != 2:
        raise Failed("proxy", f"the proxy answers {status} to CONNECT {target}", status)


def _authorization(proxy: SplitResult) -> str:
    if not proxy.username:
        return ""
    user = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return f"Proxy-Authorization: Basic {base64.b64encode(user.encode()).decode()}\r\n"


def _head(url: SplitResult, target: str, more: str = "") -> str:
    host = url.netloc
    agent = "User-Agent: nccl-doctor\r\nConnection: close\r\n"
    return f"HEAD {target} HTTP/1.1\r\nHost: {host}\r\n{agent}{more}\r\n"


def _status(sock: socket.socket, lines: str, step: str = "answer") -> int:
    """Status of the answer to a request; what follows its head on a tunnel is not read."""
    data = b""
    end = time.monotonic() + ANSWER_S
    try:
        sock.settimeout(ANSWER_S)
        sock.sendall(lines.encode())
        # Byte for byte: what follows the head of a tunnel is TLS, and not ours to read.
        while not data.endswith(b"\r\n\r\n") and len(data) < _LINE:
            sock.settimeout(max(0.01, end - time.monotonic()))
            part = sock.recv(1)
            if not part:
                break
            data += part
    except OSError as error:
        if not data:
            words = f"no answer within {ANSWER_S:.0f} s" if _is_late(error) else str(error)
            raise Failed(step, f"connected, then: {words}") from error
    words_of_line = data.split(b"\r\n")[0].split()
    if len(words_of_line) > 1 and data.startswith(b"HTTP/") and words_of_line[1].isdigit():
        return int(words_of_line[1][:3])
    said = "closed without an answer" if not data else "the answer is not HTTP"
    raise Failed(step, f"connected, then: {said}")


def _is_late(error: OSError) -> bool:
    return isinstance(error, TimeoutError) or "timed out" in str(error)


def bundle_of(env: Mapping[str, str]) -> tuple[str, str | None]:
    """Certificates that Python's HTTP clients trust: their name, and the file; None for those of
    the system.
    """
    for name in _BUNDLES:
        if env.get(name):
            return f"{name}={env[name]}", env[name]
    with contextlib.suppress(ImportError):
        return "those of certifi", str(importlib.import_module("certifi").where())
    return "those of the system", None


def _is_accepted(connected: Callable[[], socket.socket], url: SplitResult) -> bool:
    """True if the certificates of the system accept the one of the server."""
    try:
        with connected() as sock, _secured(sock, url, None):
            return True
    except Failed:
        return False


@contextlib.contextmanager
def _secured(sock: socket.socket, url: SplitResult, bundle: str | None) -> Iterator[ssl.SSLSocket]:
    """The connection with TLS; the name and the certificates are verified."""
    try:
        folder = bundle is not None and os.path.isdir(bundle)
        context = ssl.create_default_context(
            cafile=None if folder else bundle, capath=bundle if folder else None
        )
    except OSError as error:
        raise Failed("tls", f"{bundle}: {error.strerror or error}", -1) from error
    sock.settimeout(TLS_S)
    try:
        safe = context.wrap_socket(sock, server_hostname=url.hostname)
    except ssl.SSLCertVerificationError as error:
        raise Failed("tls", error.verify_message, error.verify_code) from error
    except OSError as error:
        words = f"no answer within {TLS_S:.0f} s" if _is_late(error) else str(error)
        raise Failed("tls", f"no TLS: {words}") from error
    with safe:
        yield safe
