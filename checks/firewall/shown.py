"""The calls as the map of the network shows them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nccl_doctor.api import Cluster, HostLink
from nccl_doctor.toolkit.peers.matrix import job_roles, unread_s
from nccl_doctor.toolkit.peers.pairs import by_partner, facts_of, items, mapping

_ENOUGH = 2
"""A call that failed once only is not known to fail."""
_MILD = "mtu"
_WORDS = {
    "dropped": "no answer",
    "refused": "connection refused",
    "rejected": "rejected by a firewall",
    "unreachable": "no route",
    "no-neighbour": "no host has the address",
    "turned-back": "a router cannot deliver",
    "own-address": "the caller has the same address",
    "intercepted": "something else answers",
    "mtu": "large packets are lost",
}


def links_of(cluster: Cluster, check: str) -> Iterator[HostLink]:
    """Each call to an address that the job would use; of none such, every call."""
    for host, partner, entries in by_partner(cluster, check, "matrix", "peers"):
        theirs = mapping(facts_of(partner, check, "matrix"))
        wanted = job_roles(cluster.backend, theirs.get("nccl_data") == "sockets")
        calls = [entry for entry in items(entries) if isinstance(entry, Mapping)]
        job = [call for call in calls if wanted & set(map(str, items(call.get("roles"))))]
        for call in job or calls:
            attempts = [each for each in items(call.get("attempts")) if mapping(each)]
            if not attempts or unread_s(call, theirs):
                continue
            outcome = str(attempts[-1].get("outcome"))
            if outcome == "ok":
                yield HostLink(host.id, partner.id, "ok")
            elif outcome == "own-address" or len(attempts) >= _ENOUGH:
                mild = outcome == _MILD
                back = mild and attempts[-1].get("stalled") == "download"
                start, end = (partner, host) if back else (host, partner)
                words = _WORDS.get(outcome, outcome)
                yield HostLink(start.id, end.id, "impaired" if mild else "failed", words)
