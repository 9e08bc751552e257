"""NCCL's own diagnostics between two GPUs of a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.toolkit.versions import release
from tests.gpu.one_gpu import COLLECTIVE_S, WALL_S
from tests.ranks.ranks import Ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _two(machine: dict[str, Any]) -> None:
    if len(machine["gpus"]) < 2:
        pytest.skip("one GPU only")
    if release(machine["nccl"]) < (2, 31):
        pytest.skip(f"NCCL {machine['nccl']} has no diagnostics")


def test_the_paths_of_a_healthy_machine_are_good_and_nccl_says_so(tmp_path: Path) -> None:
    changes = {rank: {"CUDA_VISIBLE_DEVICES": "0,1"} for rank in range(2)}
    options = ["--backend", "nccl", "--level", "full", "--timeout", "400"]
    options += ["--collective-timeout", f"{COLLECTIVE_S:g}"]
    options += ["--select", "nccl_library,backend_device,collectives,nccl_diagnostics"]
    ranks = Ranks(tmp_path, 2, options, changes=changes)
    ended = ranks.wait(WALL_S)
    report = ranks.report()
    assert {each.code for each in ended.values()} == {0}, report["findings"]
    (check,) = (each for each in report["checks"] if each["name"] == "nccl_diagnostics")
    assert check["status"] == "pass", check
    assert "nccl-diagnostics-failed" not in {found["code"] for found in report["findings"]}
