"""Error counters of RDMA ports, and what moved between two readings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nccl_doctor.tools.fabric.ports import rdma_ports, word

LINK_COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_xmit_discards",
)
"""Of the port, under counters/: on a healthy link they stand still, whatever is sent."""
LOSS_COUNTERS = (
    "local_ack_timeout_err",
    "req_transport_retries_exceeded",
    "rnr_nak_retry_err",
    "unresponsive_remote_events",
    "impaired_remote_conn_events",
    "rdma_read_wr_err",
    "rdma_write_wr_err",
)
"""Under hw_counters/: of mlx5, packets that had to be sent again, as nobody acknowledged them; of
EFA, peers that did not answer, and requests that failed.

Those that also move on a healthy fabric with adaptive routing or congestion control
(out_of_sequence, np_cnp_sent, retrans_pkts, …) are left out.
"""


def error_counters(root: Path = Path("/")) -> dict[str, dict[str, int]]:
    """Port (`mlx5_0:1`) → counter → value, of the counters that are there."""
    folder = root / "sys/class/infiniband"
    found: dict[str, dict[str, int]] = {}
    for port in rdma_ports(folder):
        at = folder / port["device"] / "ports" / port["port"]
        files = [at / "counters" / name for name in LINK_COUNTERS]
        files += [at / "hw_counters" / name for name in LOSS_COUNTERS]
        values = {path.name: text for path in files if (text := word(path)).isdigit()}
        found[f"{port['device']}:{port['port']}"] = {n: int(v) for n, v in values.items()}
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
