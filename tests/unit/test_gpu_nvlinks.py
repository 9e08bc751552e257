"""NVLinks and their fabric: what is down, unhealthy or badly set up, on made-up hosts."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_doctor.api import Confidence, Severity
from nccl_doctor.checks.gpu_state import GpuState
from tests.support.findings import judge, only
from tests.support.gpu_states import cluster_of, gpu, state, torch_sees, with_backend
from tests.support.rows import each_row

CHECK = GpuState()
FINE = 0b10_10_10 << 2 | 0b10 | 1 << 8 | 1 << 12 | 1 << 14  # every bit field says that all is well


def fabric(mask: int | None, **changes: Any) -> dict[str, Any]:
    seen = {"state": "COMPLETED", "status": 0, "degraded": False, "health_mask": mask}
    return {"fabric": {**seen, **changes}}


def on_one(**changes: Any) -> dict[str, Any]:
    return state(0, [gpu(0, index, **(changes if index == 5 else {})) for index in range(8)])


@each_row(
    ("mask", "code", "words"),
    [
        (1 << 4, "nvlink-down", "reports unhealthy routes for this GPU"),
        (1 << 2, "nvlink-down", "recovers routes of this GPU"),
        (1 << 6, "nvlink-down", "recovers from an access that timed out"),
        (4 << 8, "fabric-manager-down", "the GPU is in no partition"),
        (5 << 8, "fabric-manager-down", "too few NVLinks"),
        (6 << 8, "fabric-manager-down", "firmware of the GPU"),
        (12 << 8, "fabric-manager-down", "incorrect configuration 12"),
        (2 << 12, "fabric-manager-down", "assigned this GPU to no partition"),
        (4 << 8 | 2 << 12, "fabric-manager-down", "the GPU is in no partition"),
        (2 << 14, "fabric-manager-down", "lost its controller"),
    ],
)
def test_what_the_fabric_says_of_its_health(mask: int, code: str, words: str) -> None:
    made = with_backend(cluster_of(on_one(**fabric(mask))), torch_sees(1))
    found = only(CHECK, made, code, hosts=["nd0"], ranks=[5], devices=["GPU-0-5"])
    assert found.level is Severity.WARN
    assert words in found.message


@pytest.mark.parametrize("mask", [0, FINE, None])
def test_a_fabric_that_is_well_or_does_not_say(mask: int | None) -> None:
    assert judge(CHECK, cluster_of(on_one(**fabric(mask)))) == []


def test_why_a_gpu_is_not_registered_is_told() -> None:
    down = fabric(4 << 8, state="IN_PROGRESS", degraded=None)
    found = only(CHECK, cluster_of(on_one(**down)), "fabric-manager-down", hosts=["nd0"],
                 devices=["GPU-0-5"])  # fmt: skip
    assert found.message.endswith("in progress; the GPU is in no partition")
    assert found.level is Severity.FAIL


# Links --------------------------------------------------------------------------------------------


def alone(*down: int, **changes: Any) -> dict[str, Any]:
    """A host with one GPU: there is nothing to compare its links with."""
    return state(0, [gpu(0, 0, nvlinks=[0 if n in down else 1 for n in range(18)], **changes)])


def test_a_link_that_is_down_below_a_switch_is_named_with_nothing_to_compare() -> None:
    found = only(CHECK, cluster_of(alone(7)), "nvlink-down", hosts=["nd0"], devices=["GPU-0-0"])
    assert found.message == "17 of 18 NVLinks are up"
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    two = [gpu(0, index, nvlinks=[int(n != 3 + index) for n in range(18)]) for index in range(2)]
    only(CHECK, cluster_of(state(0, two)), "nvlink-down", hosts=["nd0"],
         devices=["GPU-0-0", "GPU-0-1"])  # fmt: skip


def test_links_that_are_meant_to_be_down_are_not_named() -> None:
    # A guest that was given one GPU has none of its links.
    assert judge(CHECK, cluster_of(alone(*range(18)))) == []
    # Without a fabric, a bridge may join some of them only.
    assert judge(CHECK, cluster_of(alone(7, fabric=None))) == []
    # Of a model with fewer, all GPUs have the same ones.
    model = [gpu(0, index, nvlinks=[1] * 8 + [0] * 10) for index in range(8)]
    assert judge(CHECK, cluster_of(state(0, model))) == []


def errors(**counts: int) -> dict[str, Any]:
    return {"nvlink_errors": {"replay": 0, "recovery": 0, "crc_flit": 0, **counts}}


def test_one_gpu_with_very_many_errors_on_its_links_is_worth_knowing() -> None:
    found = only(CHECK, cluster_of(on_one(**errors(crc_flit=50_000, replay=4))), "nvlink-errors",
                 hosts=["nd0"], devices=["GPU-0-5"])  # fmt: skip
    assert found.level is Severity.INFO
    assert found.message == (
        "its NVLinks counted 50000 CRC errors, at most 0 on another GPU of the host"
    )
    assert judge(CHECK, cluster_of(on_one(**errors(crc_flit=500)))) == []
    many = [gpu(0, index, **errors(crc_flit=50_000 + index)) for index in range(8)]
    assert judge(CHECK, cluster_of(state(0, many))) == []
    two = [gpu(0, 0, **errors()), gpu(0, 1, **errors(crc_flit=50_000))]
    assert judge(CHECK, cluster_of(state(0, two))) == []
    # Those that had to recover are said as before.
    found = only(CHECK, cluster_of(on_one(**errors(recovery=9, replay=99_999))), "nvlink-errors",
                 hosts=["nd0"], devices=["GPU-0-5"])  # fmt: skip
    assert (found.level, found.message) == (Severity.WARN, "its NVLinks recovered 9 times")


def newer(**counts: int) -> dict[str, Any]:
    return {"nvlink_errors": {"recovery_failed": 0, "recovered": 0, "effective": 0, **counts}}


def test_what_nvlink_5_counts() -> None:
    found = only(CHECK, cluster_of(on_one(**newer(recovery_failed=2))), "nvlink-errors",
                 hosts=["nd0"], devices=["GPU-0-5"])  # fmt: skip
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert found.message == "its NVLinks went down 2 times, as a recovery failed"
    several = [gpu(0, index, **newer(effective=50_000 * (index == 5))) for index in range(8)]
    found = only(CHECK, cluster_of(state(0, several)), "nvlink-errors", hosts=["nd0"],
                 devices=["GPU-0-5"])  # fmt: skip
    assert found.level is Severity.INFO
    assert "50000 errors that were not corrected" in found.message
    # Recoveries that succeed are what a link is made for.
    assert judge(CHECK, cluster_of(on_one(**newer(recovered=70)))) == []


# Links to the CPU ---------------------------------------------------------------------------------


def grace(*states: list[int]) -> dict[str, Any]:
    return state(0, [gpu(0, index, c2c=links) for index, links in enumerate(states)])


def test_a_gpu_with_fewer_links_to_its_cpu_than_the_next() -> None:
    made = cluster_of(grace([1] * 10, [1] * 10, [1] * 7 + [0] * 3, [1] * 10))
    found = only(CHECK, made, "c2c-down", hosts=["nd0"], devices=["GPU-0-2"])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert found.message == ("7 of 10 C2C links to the CPU are up, 10 on another GPU of the host")
    made = cluster_of(grace([0] * 10, [1] * 10))
    only(CHECK, made, "c2c-down", hosts=["nd0"], devices=["GPU-0-0"])
    made = cluster_of(grace([1, 1, 0]))
    found = only(CHECK, made, "c2c-down", hosts=["nd0"], devices=["GPU-0-0"])
    assert found.message == "2 of 3 C2C links to the CPU are up"


def test_links_to_the_cpu_as_the_model_has_them() -> None:
    assert judge(CHECK, cluster_of(grace([1] * 10, [1] * 10))) == []
    assert judge(CHECK, cluster_of(grace([1, 1, 0], [1, 1, 0]))) == []
    assert judge(CHECK, cluster_of(grace([0, 0], [0, 0]))) == []
    # Facts of an older version have none.
    old = grace([], [])
    for one in old["gpus"]:
        del one["c2c"], one["gsp"]
    assert judge(CHECK, cluster_of(old, state(1, [gpu(1, 0), gpu(1, 1)]))) == []


def test_gsp_firmware_that_is_off_on_one_host_is_worth_knowing() -> None:
    hosts = [state(node) for node in range(3)]
    for one in hosts[1]["gpus"]:
        one["gsp"] = [0, 1]
    found = only(CHECK, cluster_of(*hosts), "gpu-differs", hosts=["nd1"])
    assert found.level is Severity.INFO
    assert found.message == "GSP firmware off; the other hosts have GSP firmware on"
