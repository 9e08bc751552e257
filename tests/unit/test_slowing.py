"""Which settings make NCCL slower than its hardware."""

from __future__ import annotations

from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.nccl.slowing import BETWEEN, INSIDE, NVLS_OFF, slowing
from tests.support.rows import each_row


def settings(**values: str) -> dict[str, Setting]:
    return {name: Setting(value, "environment") for name, value in values.items()}


@each_row(
    ("names", "given", "found"),
    [
        (INSIDE, {"NCCL_P2P_DISABLE": "1"}, True),
        (INSIDE, {"NCCL_P2P_DISABLE": "0"}, False),
        (INSIDE, {"NCCL_P2P_LEVEL": "loc"}, True),
        (INSIDE, {"NCCL_P2P_LEVEL": "NVL"}, False),
        (INSIDE, {"NCCL_MAX_CTAS": "4"}, True),
        (INSIDE, {"NCCL_ALGO": ""}, False),
        (INSIDE, {"NCCL_NVLS_ENABLE": "0", "NCCL_TOPO_FILE": "/a.xml"}, False),
        (NVLS_OFF, {"NCCL_NVLS_ENABLE": "0"}, True),
        (NVLS_OFF, {"NCCL_CUMEM_ENABLE": "0"}, True),
        (NVLS_OFF, {"NCCL_ALGO": "Ring"}, True),
        (NVLS_OFF, {"NCCL_NVLS_ENABLE": "2", "NCCL_TOPO_FILE": "/a.xml"}, False),
        (INSIDE, {"NCCL_NET_GDR_LEVEL": "LOC"}, False),
        (BETWEEN, {"NCCL_NET_GDR_LEVEL": "LOC"}, True),
        (BETWEEN, {"NCCL_NET_GDR_LEVEL": "SYS"}, False),
        (BETWEEN, {"NCCL_P2P_DISABLE": "1"}, False),
    ],
)
def test_only_what_slows_down_counts(names: dict, given: dict[str, str], found: bool) -> None:
    assert slowing(settings(**given), names) == (given if found else {})
