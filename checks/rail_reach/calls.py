"""Calls from each RoCE rail of a host to the same rail of the others, and their results.

TCP on the interface of a rail uses the same routing and neighbour tables, and goes through the same
cable and switch ports, as RoCE. Source: `rdma_resolve_ip` in the kernel's
drivers/infiniband/core/addr.c.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nccl_doctor.api import Rank
from nccl_doctor.toolkit.net.dial import Origin
from nccl_doctor.toolkit.peers.calls import Entry, door_of
from nccl_doctor.toolkit.peers.echo import call_all
from nccl_doctor.toolkit.peers.matrix import PeerCall, outcome_of, sure_attempts

from .neighbours import SETTLED_S, neighbour

RailEnd = tuple[int, int]
"""Seat of a host, and the number of one of its rails."""

_POLL_S = 0.25
_BROKEN = ("unreachable", "no-neighbour", "turned-back")
"""Outcomes that hold for RoCE too: no firewall rule causes them."""


def rails_to_call(rails: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Number → rail, of the rails (from `rails_of`) that are up and have an address to call."""
    return {
        number: rail
        for number, rail in enumerate(rails)
        if rail["state"] == "ACTIVE" and rail["nic"] and rail["address"]
    }


def call_rails(
    entries: Sequence[Entry],
    mine: Mapping[int, Mapping[str, Any]],
    budget_s: float,
    *,
    cross: bool,
    root: Path = Path("/"),
) -> list[dict[str, Any]]:
    """Call the same rail of the other hosts.

    Args:
        entries: with `rail`, `name` and `interface`.
        mine: from `rails_to_call`.
        budget_s: no call begins later than this.
        cross: whether to call the next rail of the first host as well.
        root: holds proc.

    Returns: for each call `rail` and `source` of this host, `seat`, `to` (rail), `address`,
    `interface` and `port` of the other, `attempts`, and `neighbour`, where it failed.
    """
    wanted = [
        (number, seat, entry)
        for seat, entry in entries
        for number in mine
        if number == entry["rail"]
        or (cross and seat == entries[0][0] and (number + 1) % len(mine) == entry["rail"])
    ]
    origins = [Origin(mine[number]["address"], mine[number]["nic"]) for number, _, _ in wanted]
    started = time.monotonic()
    made = call_all([door_of(entry) for _, _, entry in wanted], budget_s, origins)
    asked = {
        (entry["address"], origin.interface)
        for (_, _, entry), origin, attempts in zip(wanted, origins, made, strict=True)
        if attempts and attempts[-1].outcome not in ("ok", "mtu")
    }
    neighbours = {each: neighbour(*each, root) for each in asked}
    while "answers" in neighbours.values() and time.monotonic() < started + SETTLED_S:
        time.sleep(_POLL_S)
        neighbours = {each: neighbour(*each, root) for each in asked}
    found = []
    for (number, seat, entry), origin, attempts in zip(wanted, origins, made, strict=True):
        found.append(
            {
                "rail": number,
                "source": origin.address,
                "seat": seat,
                "to": entry["rail"],
                "address": entry["address"],
                "interface": entry["interface"],
                "port": entry["port"],
                "attempts": [each.to_json() for each in attempts],
                "neighbour": neighbours.get((entry["address"], origin.interface), ""),
            }
        )
    return found


class RailCall(NamedTuple):
    """A `PeerCall` from one rail to another; `neighbour`: as of `neighbour`, on the caller."""

    call: PeerCall
    rails: tuple[int, int]
    neighbour: str

    @property
    def ends(self) -> tuple[RailEnd, RailEnd]:
        """Caller and listener."""
        return (self.call.caller, self.rails[0]), (self.call.listener, self.rails[1])

    @property
    def is_cross(self) -> bool:
        """True if it went from one rail to another."""
        return self.rails[0] != self.rails[1]

    @property
    def stuck(self) -> tuple[RailEnd, RailEnd]:
        """Both ends, in the order in which large packets are lost."""
        return self.ends if self.call.stuck == self.call.pair else self.ends[::-1]

    @property
    def outcome(self) -> str:
        """The outcome of the `PeerCall`."""
        return self.call.outcome

    @property
    def address(self) -> str:
        """The address that was called."""
        return self.call.address

    @property
    def words(self) -> str:
        """The outcome in words."""
        if self.neighbour == "silent":
            return "no host answers for the address on the local network"
        return self.call.words

    @property
    def is_surely_broken(self) -> bool:
        """True if no firewall can be the reason."""
        return self.neighbour == "silent" or self.outcome in _BROKEN

    def shown(self, labels: Mapping[int, str]) -> dict[str, Any]:
        """The call as evidence, with the names of both hosts."""
        return {**self.call.shown(labels), "rails": list(self.rails), "neighbour": self.neighbour}


def read_rail_calls(reports: Iterable[tuple[Rank, Mapping[str, Any]]]) -> list[RailCall]:
    """Calls between hosts that both reported; calls that were not confirmed are left out."""
    facts = {rank.seat: report for rank, report in reports}
    found = []
    for caller, report in facts.items():
        for each in report["calls"]:
            listener = each["seat"]
            attempts = sure_attempts(each, facts[listener]) if listener in facts else ()
            outcome = outcome_of(attempts)
            if outcome == "untested":
                continue
            call = PeerCall(
                caller,
                listener,
                each["address"],
                each["interface"],
                each["port"],
                each["source"],
                True,
                attempts,
                outcome,
            )
            found.append(RailCall(call, (each["rail"], each["to"]), each["neighbour"]))
    return found
