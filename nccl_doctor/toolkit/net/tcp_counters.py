"""The kernel's own counters of TCP on a host, at the start and at the end of its examination.

They count all that this network namespace sends, other programs' traffic too: alone they blame
nobody. Sources: snmp_counter(7) in the kernel's Documentation/networking/snmp_counter.rst;
/proc/net/snmp and /proc/net/netstat, which are those of the reader's own network namespace.
"""

from __future__ import annotations

from pathlib import Path

from nccl_doctor.model.cluster import Cluster

FIRST = "kernel_limits"
"""The check whose facts hold the counters at the start, as `tcp`."""
LAST = ("retransmissions", "late")
"""Check and round that hold those at the end."""
SENT, AGAIN = "OutSegs", "RetransSegs"
_FILES = {
    "proc/net/snmp": ("Tcp", (SENT, AGAIN)),
    "proc/net/netstat": ("TcpExt", ("TCPTimeouts", "TCPLostRetransmit", "TCPSynRetrans")),
}


def read_tcp_counters(root: Path) -> dict[str, int]:
    """Counter → value, of those that the kernel has; empty where they cannot be read."""
    found: dict[str, int] = {}
    for file, (group, names) in _FILES.items():
        try:
            lines = (root / file).read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        rows = [line.split()[1:] for line in lines if line.startswith(f"{group}: ")]
        for heads, values in zip(rows[::2], rows[1::2], strict=False):
            known = dict(zip(heads, values, strict=False))
            found |= {name: int(known[name]) for name in names if known.get(name, "").isdigit()}
    return found


def tcp_rises(cluster: Cluster) -> dict[int, dict[str, int]]:
    """Id of a host → by how much each counter rose while it was examined.

    Only of hosts whose counters are known at both times, and were not reset meanwhile.
    """
    first = {rank.host.id: facts.get("tcp") or {} for rank, facts in cluster.facts(FIRST)}
    found = {}
    for rank, late in cluster.facts(*LAST):
        early = first.get(rank.host.id, {})
        now = late.get("tcp") or {}
        rise = {name: value - early[name] for name, value in now.items() if name in early}
        if rise and min(rise.values()) >= 0:
            found[rank.host.id] = rise
    return found
