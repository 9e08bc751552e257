"""Calls to MASTER_PORT that this host, a firewall or a router rejected. Pure."""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from typing import Any

from nccl_doctor.api import Confidence


def forbidden_here(last: Mapping[str, Any]) -> bool:
    """True if this host's own rules forbid a call, so that no packet has left.

    EPERM is always local, EACCES in IPv4 too. In IPv6 the kernel also reports EACCES for a firewall
    that answers "administratively prohibited", as firewalld does (net/ipv6/icmp.c).
    """
    if last["errno"] == errno.EACCES:
        return ":" not in last["address"]
    return bool(last["errno"] == errno.EPERM)


def rejected_here(last: Mapping[str, Any], own: Collection[str]) -> bool:
    """True if a rule of this host answered its own call, by the sender of the ICMP message.

    "Host unreachable" from an own address comes from the kernel, where no host has the address.

    Args:
        last: the last attempt.
        own: addresses of this host.
    """
    said = last.get("icmp") or {"sender": "", "cannot_deliver": True}
    is_own = said["sender"] in own and last["address"] not in own
    return is_own and not said["cannot_deliver"]


def rejected_by(last: Mapping[str, Any], port_that_answers: int | None) -> tuple[str, Confidence]:
    """Words for who rejects; certain only if the host is known to be up or a firewall says so.

    Args:
        last: the last attempt, with `icmp` where the kernel tells.
        port_that_answers: another port of that host, None if none is known.
    """
    said = last.get("icmp") or {}
    sender = said.get("sender", "")
    detail = last["detail"]
    if last["errno"] == errno.ECONNREFUSED:  # "Connection refused" reads like a closed port
        detail = "ICMP port unreachable"
    words = f": {detail}" if detail else ""
    words += f" (from {sender})" if sender else ""
    if port_that_answers:
        return f"a firewall{words}; its port {port_that_answers} answers", Confidence.CERTAIN
    if sender and (sender == last["address"] or not said["cannot_deliver"]):
        return f"a firewall{words}", Confidence.CERTAIN
    # A router says the same of a host that is off.
    return f"a firewall, or by a router because the host is off{words}", Confidence.LIKELY


def refused_by(last: Mapping[str, Any]) -> str:
    """Words for a refusal that comes from another host than the called one; else empty."""
    said = last.get("icmp")
    if said is None or said["sender"] == last["address"].partition("%")[0]:
        return ""
    return (
        f" (says {said['sender']}, not that host: a firewall on the way, or a Kubernetes service "
        "without a ready pod)"
    )


def turned_back_by(last: Mapping[str, Any]) -> str:
    """Words for the answer of a router on the way."""
    said = last.get("icmp")
    router = f"router {said['sender']}" if said else "a router on the way"
    if said and said["no_host"]:
        return f"{router} answers that no host has this address"
    return f"{router} answers that it cannot deliver there: {last['detail']}"
