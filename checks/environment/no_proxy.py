"""True if programs would use a proxy for an address, by http_proxy and no_proxy. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
"""Read in capitals as well."""
_NO_PROXY = "no_proxy"


def is_proxied(env: Mapping[str, str]) -> bool:
    """True if programs that obey proxy variables would use a proxy for MASTER_ADDR.

    Each library reads no_proxy in its own way: an exception for any of them counts.
    """
    host = env.get("MASTER_ADDR", "").strip().lower()
    if not host or not any(env.get(each) for name in PROXIES for each in (name, name.upper())):
        return False
    exceptions = " ".join(env.get(each, "") for each in (_NO_PROXY, _NO_PROXY.upper()))
    return not _is_local(host) and not any(
        _excepts(entry, host) for entry in re.split(r"[,\s]+", exceptions.lower()) if entry
    )


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _excepts(entry: str, host: str) -> bool:
    """True if one entry of no_proxy matches the host: a name, a domain, an address, a subnet."""
    if entry == "*":
        return True
    if "/" in entry:
        try:
            return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    name = re.sub(r":\d+$", "", entry) if entry.count(":") == 1 else entry
    name = name.lstrip("*").lstrip(".")
    return host == name or host.endswith(f".{name}") if name else False
