"""Routes and filters that the packets of failed calls meet on a host, by its own kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nccl_doctor.toolkit.net.interfaces import Interface
from nccl_doctor.toolkit.net.routes import reverse_path_filter
from nccl_doctor.toolkit.net.rtnetlink import way_in, way_to


def ways_of_pairs(
    pairs: Iterable[Mapping[str, Any]], seat: int, nics: Sequence[Interface], root: Path
) -> list[dict[str, Any]]:
    """Fate of packets of failed calls that reach this host: whether its kernel takes them, and by
    which interface it answers.

    Args:
        pairs: from `sample_for_rules`; those that do not touch this host are left out.
        seat: of this host.
        nics: of this host.
        root: holds proc.

    Returns: for each call `caller` and `listener`; `own` address, its `interface`, and that of the
    other end, `peer`; `taken`: whether the kernel takes a packet that arrives there; `filter`: the
    reverse path filter; `leaves`: the interface of the answer, empty where there is no way back.
    Calls about which the kernel may not be asked are left out.
    """
    owners = {address: nic for nic in nics for address in nic.addresses}
    found = []
    for pair in pairs:
        calling = seat == pair["caller"]
        own, peer = pair["source"], pair["target"]
        if not calling:
            own, peer = peer, own
        nic = owners.get(own)
        if nic is None or not (calling or seat == pair["listener"]):
            continue
        name = nic.name.partition(":")[0]
        arrives, answer = way_in(own, peer, name), way_to(peer, own)
        if arrives is not None and answer is not None:
            found.append(
                {
                    "caller": pair["caller"],
                    "listener": pair["listener"],
                    "own": own,
                    "peer": peer,
                    "interface": name,
                    "taken": not arrives.errno,
                    "filter": reverse_path_filter(name, root),
                    "leaves": answer.interface,
                }
            )
    return found
