"""Facts that a host has of each partner, read without trust: for maps of the network. Pure.

They may be those of another version of the check: what is not there, or is not as this version
knows it, is not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.model.cluster import Cluster, Host, OutcomeStatus
from nccl_doctor.toolkit.hosts import network_of


def facts_of(host: Host, check: str, round_name: str) -> Mapping[str, Any] | None:
    """Facts of a check on a host in one round; None if its outcome is not `ok`."""
    outcome = host.facts.get(check, {}).get(round_name)
    return outcome.facts if outcome is not None and outcome.status is OutcomeStatus.OK else None


def by_partner(
    cluster: Cluster, check: str, round_name: str, key: str
) -> Iterator[tuple[Host, Host, Any]]:
    """(host, partner, value) of a fact that is a table: seat of the partner → value.

    A partner that was lost in the same round says nothing about the road to it, and there is none
    between node ranks of one machine.
    """
    of_seat = {str(rank.seat): rank.host for rank in cluster.ranks}
    facts = {host.id: facts_of(host, check, round_name) for host in cluster.hosts}
    for host in cluster.hosts:
        for seat, value in mapping(mapping(facts[host.id]).get(key)).items():
            partner = of_seat.get(str(seat))
            if partner is None or facts[partner.id] is None:
                continue
            if network_of(partner) != network_of(host):
                yield host, partner, value


def mapping(value: Any) -> Mapping[str, Any]:
    """The value, or an empty table in place of anything else."""
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Any]:
    """The value as a list; an empty one in place of what is none."""
    return list(value) if isinstance(value, (list, tuple)) else []


def number(value: Any) -> float | None:
    """The value where it is a number that can be measured: finite, and not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) and value >= 0 else None
    except OverflowError:  # JSON knows whole numbers of any size
        return None
