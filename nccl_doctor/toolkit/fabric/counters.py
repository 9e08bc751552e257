"""Error counters of RDMA ports, what moved between two readings, and what cannot move any more.

Source: `PORT_PMA_ATTR` in the kernel's drivers/infiniband/core/sysfs.c; InfiniBand architecture
specification, volume 1, PortCounters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from nccl_doctor.toolkit.fabric.ports import rdma_devices, word

LINK_COUNTERS = {
    "symbol_error": 16,
    "link_error_recovery": 8,
    "link_downed": 8,
    "port_rcv_errors": 16,
    "port_rcv_remote_physical_errors": 16,
    "local_link_integrity_errors": 4,
    "excessive_buffer_overrun_errors": 4,
    "port_xmit_discards": 16,
}
"""Of the port, under counters/ → width in bits: on a healthy link they stand still, whatever is
sent. At all ones they stay, until somebody resets them.
"""
LOSS_COUNTERS = (
    "local_ack_timeout_err",
    "rx_icrc_encapsulated",
    "req_transport_retries_exceeded",
    "rnr_nak_retry_err",
    "unresponsive_remote_events",
    "impaired_remote_conn_events",
    "rdma_read_wr_err",
    "rdma_write_wr_err",
)
"""Under hw_counters/: of mlx5, packets that had to be sent again, as nobody acknowledged them, and
packets of RoCE that arrived changed; of EFA, peers that did not answer, and requests that failed.

Those that also move on a healthy fabric with adaptive routing or congestion control
(out_of_sequence, np_cnp_sent, retrans_pkts, …) are left out.
"""


NIC_COUNTERS = ("rx_crc_errors",)
"""Of the Ethernet interface of a RoCE port, under statistics/: what a bad cable does to frames.

`rx_errors` is left out: it also counts frames that are sound, but longer than the MTU.
"""


def error_counters(root: Path = Path("/")) -> dict[str, dict[str, int]]:
    """Port (`mlx5_0:1`) → counter → value, of the counters that are there."""
    found: dict[str, dict[str, int]] = {}
    for port in (port for device in rdma_devices(root) for port in device["ports"]):
        at = root / "sys/class/infiniband" / port["device"] / "ports" / port["port"]
        files = [at / "counters" / name for name in LINK_COUNTERS]
        files += [at / "hw_counters" / name for name in LOSS_COUNTERS]
        if port["netdev"]:
            statistics = root / "sys/class/net" / port["netdev"] / "statistics"
            files += [statistics / name for name in NIC_COUNTERS]
        values = {path.name: text for path in files if (text := word(path)).isdigit()}
        found[port["name"]] = {n: int(v) for n, v in values.items()}
    return found


def counters_risen(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Port → counter → by how much it grew; one that was reset says nothing."""
    grown: dict[str, dict[str, int]] = {}
    for port, counters in after.items():
        for name, value in counters.items():
            rise = value - before.get(port, {}).get(name, value)
            if rise > 0:
                grown.setdefault(port, {})[name] = rise
    return grown


def counters_full(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Port → counter → value, of those that stood at the most that they can count all the while:
    errors happened, and nobody can see whether more do.
    """
    return {
        port: full
        for port, counters in after.items()
        if (full := dict(_full(before.get(port, {}), counters)))
    }


def _full(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    for name, value in after.items():
        most = (1 << LINK_COUNTERS.get(name, 0)) - 1
        if most and value == before.get(name, value) == most:
            yield name, value
