"""Error counters of RDMA ports: read, what grew between two readings, what is at its limit.

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
"""Counters of the port, under counters/ → width in bits: on a healthy link they never grow. At all
ones they stop, until somebody resets them.
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
"""Counters under hw_counters/: of mlx5, packets sent again because of no acknowledgement, and
packets of RoCE that arrived changed; of EFA, peers that did not answer, and requests that failed.

Those that also move on a healthy fabric with adaptive routing or congestion control
(out_of_sequence, np_cnp_sent, retrans_pkts, …) are left out.
"""


NIC_COUNTERS = ("rx_crc_errors",)
"""Counters of the Ethernet interface of a RoCE port, under statistics/: frames that arrive damaged.

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
    """Port → counter → by how much it grew; a counter that was reset is left out."""
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
    """Port → counter → value, of counters that were at their limit both times: errors happened, and
    further ones cannot be seen.
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
