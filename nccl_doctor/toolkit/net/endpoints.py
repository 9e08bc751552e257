"""Endpoints as people write them: `HOST:PORT`. Pure."""

from __future__ import annotations

_MOST = 65535


def read_endpoint(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, an IPv6 address in brackets.

    Raises:
        ValueError: it is none; says why.
    """
    host, _, word = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, [fd00::1]:8000")
    if not host or not host.isprintable() or any(each in host for each in " /@"):
        raise ValueError(f"{text!r} is not HOST:PORT")
    port = int(word) if word.isascii() and word.isdecimal() and len(word) < 6 else 0
    if not 0 < port <= _MOST:
        raise ValueError(f"{text!r}: the port is not a whole number from 1 to {_MOST}")
    return host, port


def endpoint_words(host: str, port: int) -> str:
    """The inverse: `[fd00::1]:8000`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
