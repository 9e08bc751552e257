"""The host that serves the rendezvous of torchrun's c10d backend, by torch's own rule.

Source: `_create_tcp_store` in torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py, and
`parse_rendezvous_endpoint` and `_matches_machine_hostname` in utils.py beside it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Mapping, Sequence

_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")
_READ_TIMEOUT_S = 60.0
"""Of the store of the rendezvous: for each operation, and for connecting to it."""


def endpoint_host(endpoint: str) -> str:
    """Host of `HOST[:PORT]`, an IPv6 address in brackets; localhost if it is empty."""
    text = endpoint.strip()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] or text or "localhost"


def is_host_of(conf: str) -> bool | None:
    """`is_host` of PET_RDZV_CONF (`key=value,…`); None if torch decides."""
    for part in re.split(r"[,;]", conf):
        name, _, value = part.partition("=")
        if name.strip() == "is_host":
            word = value.strip().lower()
            return True if word in _TRUE else False if word in _FALSE else None
    return None


def read_timeout(env: Mapping[str, str]) -> float | None:
    """Seconds in which torchrun's c10d rendezvous must be connected; None without c10d."""
    if env.get("PET_RDZV_BACKEND", "").lower() != "c10d":
        return None
    for part in re.split(r"[,;]", env.get("PET_RDZV_CONF", "")):
        name, _, value = part.partition("=")
        if name.strip() == "read_timeout" and value.strip().isdecimal():
            return float(value)
    return _READ_TIMEOUT_S


def matches_machine(
    host: str, own_name: str, resolved: Sequence[str], own: Sequence[str], canonical: str = ""
) -> bool:
    """Whether a machine recognises itself as the endpoint, and so serves the store.

    It compares with the addresses that its own *name* resolves to, not with its interfaces.

    Args:
        host: of the endpoint.
        own_name: as gethostname says.
        resolved: addresses of `host`, as this machine resolves it.
        own: addresses of `own_name`.
        canonical: the resolver's canonical name of `own_name`, or empty.
    """
    if host in ("localhost", own_name, canonical):
        return True
    meant = set(resolved)
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_loopback:
            return True
        meant.add(str(address))
    return not meant.isdisjoint(own)
