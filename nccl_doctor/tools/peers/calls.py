"""Calls to what the other hosts listen on: the facts that `matrix` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nccl_doctor.tools.net.interfaces import interfaces
from nccl_doctor.tools.peers.echo import Door, call_all, source_of


def call_others(
    entries: Sequence[tuple[int, Mapping[str, Any]]], budget_s: float
) -> dict[str, list[dict[str, Any]]]:
    """Call every address that other hosts listen on; one that this host has too is not called.

    Args:
        entries: (seat, `echo.Door` as plain data with `interface` and `roles` added).
        budget_s: no call begins later than this.

    Returns: seat, as text, → for each entry `address`, `interface`, `roles`, `port`, `attempts`
    (see `matrix.PeerCall`) and, where the call failed, `source`: the own address that it came from.
    """
    own = {address for each in interfaces() for address in each.addresses}
    shared = [entry["address"].partition("%")[0] in own for _, entry in entries]
    doors = [
        Door(entry["address"], entry["port"], entry["token"], entry["answer"])
        for (_, entry), mine in zip(entries, shared, strict=True)
        if not mine
    ]
    results = iter(call_all(doors, budget_s))
    peers: dict[str, list[dict[str, Any]]] = {}
    for (seat, entry), mine in zip(entries, shared, strict=True):
        # The tokens of the listener stay out of the facts.
        known = {key: entry[key] for key in ("address", "interface", "roles", "port")}
        made = [] if mine else [call.to_json() for call in next(results)]
        known["attempts"] = [{"outcome": "own-address"}] if mine else made
        if made and made[-1]["outcome"] != "ok":
            known["source"], lost = source_of(entry["address"])
            if lost is not None:  # this host itself has no route, whatever its errno was
                known["attempts"] = [{**each, "outcome": "unreachable"} for each in made]
        peers.setdefault(str(seat), []).append(known)
    return peers
