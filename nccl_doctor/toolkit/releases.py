"""Known faults of releases of NCCL, torch, DeepSpeed and the driver: `releases.toml`. Pure."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from nccl_doctor.model.findings import Severity
from nccl_doctor.toolkit.advice import fix_of
from nccl_doctor.toolkit.tables import read_table
from nccl_doctor.toolkit.versions import release

PRODUCTS = ("nccl", "torch", "deepspeed", "driver")
RDMA, COMM_ID, NO_P2P, STRANGERS = "rdma", "comm-id", "no-p2p", "strangers"
DEVICE_ID, DEVICE_ID_GROUPS = "device-id", "device-id-groups"
ONE_RANK = "one-rank"
EMPTY_NODE = "empty-node"
CONDITIONS = (
    RDMA,
    COMM_ID,
    NO_P2P,
    STRANGERS,
    DEVICE_ID,
    DEVICE_ID_GROUPS,
    ONE_RANK,
    EMPTY_NODE,
)
"""Conditions beside the release: an RDMA port that NCCL would use; NCCL_COMM_ID is set; GPUs of a
host that do not reach each other's memory; somebody connects to ports of the job; the default group
is given a device_id; the same, and the job forms further groups; it has one rank, and a further
group has processes of another world; NCCL requests memory of a NUMA node that has none."""


@dataclass(frozen=True)
class KnownFault:
    """One row; `unless` is a variable and the value that prevents it (`*`: any value)."""

    product: str
    since: str
    before: str
    condition: str
    symptom: str
    fix: str
    unless: tuple[str, str]
    severity: Severity
    reference: str
    driver: tuple[int, int] | None = None

    def has(self, version: str) -> bool:
        """True if a version of the product has the fault."""
        return release(self.since) <= release(version) < release(self.before)


@functools.cache
def known_faults(product: str) -> tuple[KnownFault, ...]:
    """The rows of a product, in the order of the table."""
    rows = read_table(__package__, "releases.toml")["release"]
    return tuple(
        KnownFault(
            **{
                **row,
                "fix": fix_of(row["fix"]),
                "unless": tuple(row["unless"].partition("=")[::2]),
                "severity": Severity(row["severity"]),
                "driver": tuple(row["driver"]) if "driver" in row else None,
            }
        )
        for row in rows
        if row["product"] == product
    )
