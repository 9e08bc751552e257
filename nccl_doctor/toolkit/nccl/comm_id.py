"""NCCL_COMM_ID as NCCL reads it: `ncclSocketGetAddrFromString` in src/misc/socket.cc."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Resolver = Callable[[str], Sequence[str] | None]
"""Host name → its addresses in the resolver's order; None where it did not answer in time."""


@dataclass(frozen=True)
class CommId:
    """The address in an NCCL_COMM_ID; empty if NCCL refuses the value.

    `zone` is the interface of a link-local address. `unknown`: no answer about the host `name`.
    """

    address: str = ""
    zone: str = ""
    name: str = ""
    unknown: bool = False


def no_names(name: str) -> Sequence[str] | None:
    """Know no host."""
    return ()


def comm_id(value: str, resolve: Resolver = no_names) -> CommId:
    """Read `ADDRESS:PORT`, `NAME:PORT` or `[IPV6%INTERFACE]:PORT`."""
    if len(value) < 2:
        return CommId()
    if value.startswith("["):
        inside, closed, _ = value[1:].partition("]")
        address, _, zone = inside.partition("%")
        return CommId(address, zone) if closed and _is_address(address) else CommId()
    # Of a list, the first entry that has a name.
    names = (entry.partition(":")[0] for entry in value.split(","))
    name = next(filter(None, names), "")
    if not name or _is_address(name):
        return CommId(name)
    found = resolve(name)
    return CommId(found[0] if found else "", name=name, unknown=found is None)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
