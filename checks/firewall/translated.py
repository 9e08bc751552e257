"""Hosts behind NAT: the others see their calls come from another address than they tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    seen = {call.caller: str(call.attempts[-1].get("seen", "")) for call in well}
    return {seat: far for seat, far in seen.items() if far and not is_loopback(far)}


def is_translated(failed: Iterable[PeerCall], seen: Mapping[int, str]) -> bool:
    """Whether all of these calls, which failed, were to hosts behind an address translation."""
    return all(call.listener in seen for call in failed)


def translation(
    failed: Iterable[PeerCall], seen: Mapping[int, str], labels: Mapping[int, str]
) -> tuple[str, str]:
    """Message (the address that a host tells, and the one from which it calls) and fix."""
    told = {labels[call.listener]: (call.address, seen[call.listener]) for call in failed}
    said = [
        f"{host} tells {own}, and others see it call from {far}"
        for host, (own, far) in told.items()
    ]
    more = f"; and {len(said) - 2} more hosts" if len(said) > 2 else ""
    hosts = ", ".join(sorted(told)[:8])
    return "; ".join(said[:2]) + more, f"on {hosts}: " + network_for("")
