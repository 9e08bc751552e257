"""A part of a GPU (MIG): how torch names it, where it is, and that it works."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.test_gpu_work_gpu import judge, observe

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _mig(machine: dict[str, Any]) -> None:
    if not machine["mig"]:
        pytest.skip("no GPU in MIG mode")


def test_a_part_has_a_uuid_of_its_own_and_the_address_of_its_gpu() -> None:
    facts, _ = observe("backend_device", "BackendDevice")
    own = facts["devices"][facts["device"]]
    assert own["uuid"].startswith("MIG-")
    state, _ = observe("gpu_state", "GpuState")
    whole = [gpu for gpu in state["gpus"] if (gpu.get("mig") or [0])[0]]
    assert own["memory_bytes"] < max(gpu["memory"]["total"] for gpu in whole)
    place, _ = observe("gpu_affinity", "GpuAffinity", "quick")
    assert place["address"] in {gpu["bus_id"] for gpu in whole}


def test_a_part_works_and_is_held_against_no_whole_gpu() -> None:
    facts, _ = observe("gpu_work", "GpuWork", "full")
    assert (facts["error"], facts["wrong"]) == (None, [])
    assert judge("gpu_work", "GpuWork", facts) == []
