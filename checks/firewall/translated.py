"""Hosts behind NAT: the others see their calls come from another address than they tell. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping

from nccl_doctor.api import Fix
from nccl_doctor.toolkit.containers import network_for
from nccl_doctor.toolkit.net.interfaces import is_loopback
from nccl_doctor.toolkit.peers.matrix import PeerCall

TRANSLATED = {
    "title": "A host is behind an address translation (NAT): it can call, and cannot be called",
    "why": "NCCL and gloo tell the others the address of an interface. Behind NAT no other host "
    "reaches that address, and they wait for it until their time-outs.",
}


def seen_addresses(calls: Iterable[PeerCall]) -> dict[int, str]:
    """Seat of a host → the address from which another host saw its calls come, if that is none of
    its own. A proxy on the very host that is called (a service mesh) is no translation.
    """
    well = (call for call in calls if call.outcome == "ok")
    seen = {call.caller: call.seen for call in well}
    return {seat: far for seat, far in seen.items() if far and not is_inside(far)}


def is_inside(address: str) -> bool:
    """True if no packet of another machine comes from an address: from loopback, or from those of
    IPv6 that begin with 96 zeros. A proxy of Istio calls its pod from 127.0.0.6 or ::6.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    return is_loopback(address) or (ip.version == 6 and int(ip) < 1 << 32)


def is_translated(failed: Iterable[PeerCall], seen: Mapping[int, str]) -> bool:
    """True if all of these calls, which failed, were to hosts behind an address translation."""
    return all(call.listener in seen for call in failed)


def translation(
    failed: Iterable[PeerCall], seen: Mapping[int, str], labels: Mapping[int, str], other: str
) -> tuple[str, Fix]:
    """Message (the address that a host tells, and the one from which it calls) and fix.

    Args:
        failed: calls to hosts behind an address translation.
        seen: seat → address from which others see it call.
        labels: seat → host.
        other: another fix, for who has none.
    """
    told = {labels[call.listener]: (call.address, seen[call.listener]) for call in failed}
    said = [
        f"{host} tells {own}, and others see it call from {far}"
        for host, (own, far) in told.items()
    ]
    way = network_for("")
    more = f"; and {len(said) - 2} more hosts" if len(said) > 2 else ""
    return "; ".join(said[:2]) + more, Fix(text=way, alternatives=[*way.alternatives, other])
