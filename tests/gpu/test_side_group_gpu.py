"""The side group with NCCL: several ranks on one GPU, which NCCL takes for several hosts.

NCCL refuses two ranks on one GPU of one host; ranks with a NCCL_HOSTID of their own are on hosts of
their own, and talk over sockets.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.ranks import Ranks

pytestmark = pytest.mark.gpu

WORLD = 3
COLLECTIVE_S = 40.0
OPTIONS = (
    *("--select", "side_group", "--groups", "weight-sync", "--backend", "nccl"),
    *("--collective-timeout", f"{COLLECTIVE_S:g}", "--timeout", "400"),
)
LOOK = "import torch; print(torch.cuda.is_available() and torch.distributed.is_nccl_available())"


@pytest.fixture(scope="module", autouse=True)
def _gpu() -> None:
    seen = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=120, check=True
    )
    if seen.stdout.split()[-1] != "True":
        pytest.skip("no GPU that torch can use with NCCL")


def one_gpu(rank: int) -> dict[str, str | None]:
    """Every rank is local rank 0 of a host of its own, as far as NCCL and torch know."""
    return {
        "CUDA_VISIBLE_DEVICES": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "NCCL_HOSTID": f"side-group-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def test_a_bound_default_group_is_blamed_for_a_hang_and_an_unbound_one_passes(
    tmp_path: Path,
) -> None:
    """With torch before 2.15. Newer ones bind by themselves: then no variant but the control may
    finish, and the binding is blamed all the same.
    """
    ranks = Ranks(tmp_path, WORLD, OPTIONS, changes={rank: one_gpu(rank) for rank in range(WORLD)})
    ended = ranks.wait(420)
    report = ranks.report()
    found = [each for each in report["findings"] if each["check"] == "side_group"]
    codes = {each["code"] for each in found}
    assert codes <= {"device-id-multi-group-hang"}, found
    assert {each.code for each in ended.values()} == {1 if codes else 0}
    for each in found:
        assert each["where"]["ranks"] == [0, WORLD - 1]
    facts = report["ranks"][0]["facts"]["side_group"]
    finished = [name for name, held in facts.items() if held["status"] == "ok"]
    assert {"unbound", "cleared"} & set(finished), facts
    for name in finished:
        assert facts[name]["facts"]["wrong"] == []
        assert "NCCL" in facts[name]["facts"]["side_class"]
