"""True if a host of the local network answers ARP requests for an IPv4 address.

Source: proc(5), /proc/net/arp; ATF_COM in the kernel's include/uapi/linux/if_arp.h; arp(7).
"""

from __future__ import annotations

from pathlib import Path

SETTLED_S = 9.0
"""A cached answer is trusted for 5 s after a packet was sent to it, then requested again three
times, a second apart (net.ipv4.neigh: delay_first_probe_time, ucast_solicit, retrans_time_ms); a
new one is requested at once, and one of the last half minute not at all."""
_COMPLETE = 0x2


def neighbour(address: str, interface: str, root: Path = Path("/")) -> str:
    """`answers`, `silent` (requested, but no host has it), or empty: never requested, for example
    if the address is beyond a router. Settled `SETTLED_S` after a packet was sent there.
    """
    try:
        lines = (root / "proc/net/arp").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    for words in map(str.split, lines[1:]):
        if len(words) >= 6 and (words[0], words[5]) == (address, interface):
            return "answers" if int(words[2], 16) & _COMPLETE else "silent"
    return ""
