"""What could not be read is said; and what is worth knowing of healthy GPUs: made-up clusters."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Finding, Severity
from nccl_doctor.checks.gpu_state import GpuState
from tests.support.findings import judge, only
from tests.support.gpu_facts import facts as seen_by_torch
from tests.support.gpu_facts import worked
from tests.support.gpu_states import cluster_of, every, gpu, pairs_of, state, with_backend
from tests.support.rows import each_row
from tests.unit.test_check_gpu_state_users import also

CHECK = GpuState()
NO_LOG = {
    "source": None,
    "reason": "/dev/kmsg: Operation not permitted; /var/log/kern.log: No such file or directory",
    "xids": [],
    "sxids": [],
}


# What could not be read ---------------------------------------------------------------------------


def test_a_kernel_log_that_nobody_could_read_is_said() -> None:
    made = cluster_of(state(0), state(1, kernel_log=NO_LOG))
    found = only(CHECK, made, "gpu-state-unread", hosts=["nd1"])
    assert found.level is Severity.INFO
    assert found.message == (
        "not read: the kernel log with its Xids and SXids (/dev/kmsg: Operation not permitted)"
    )
    assert "dmesg_restrict" in found.fix


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (
            {"pairs_error": {"call": "nvmlInit", "name": "did not return within 9 s"}},
            "which GPUs reach each other's memory (nvmlInit: did not return within 9 s)",
        ),
        (
            {"pairs_refused": {"p2p": {"UNKNOWN": 28}, "nearest": {}}},
            "which GPUs reach each other's memory (28 pairs: UNKNOWN)",
        ),
        (
            {"pairs_refused": {"p2p": {}, "nearest": {"NO_PERMISSION": 1}}},
            "how near GPUs are to each other (1 pair: NO_PERMISSION)",
        ),
    ],
)
def test_pairs_that_nobody_could_ask_for_are_said(lost: dict[str, Any], words: str) -> None:
    made = cluster_of(state(0), state(1, p2p={}, nearest={}, **lost))
    found = only(CHECK, made, "gpu-state-unread", hosts=["nd1"])
    assert (found.level, found.message) == (Severity.INFO, f"not read: {words}")
    both = cluster_of(state(0), state(1, p2p={}, nearest={}, kernel_log=NO_LOG, **lost))
    found = only(CHECK, both, "gpu-state-unread", hosts=["nd1"])
    assert found.message.startswith("not read: the kernel log with its Xids and SXids (/dev/kmsg")
    assert found.message.endswith(words)


def test_links_that_the_library_does_not_know_of_are_no_loss() -> None:
    silent = {"pairs_refused": {"p2p": {"NOT_SUPPORTED": 28}, "nearest": {}}}
    assert judge(CHECK, cluster_of(state(0, p2p={}, nearest={}, **silent))) == []


# P2P where NVIDIA's driver has none ---------------------------------------------------------------


def desktop(name: str = "NVIDIA GeForce RTX 4090", **changes: Any) -> dict[str, Any]:
    """Four boards for the desktop, in a host whose driver says that they reach each other."""
    of_gpu = {"nvlinks": [], "nvlink_errors": None, "fabric": None, "name": name}
    of_gpu |= changes.pop("of_gpu", {})
    return state(0, [gpu(0, index, **of_gpu) for index in range(4)], nearest={}, **changes)


def cluster_with(host: dict[str, Any], **fields: Any) -> Cluster:
    return cluster_of(host, nproc=4, **fields)


def unsupported(cluster: Cluster) -> Finding:
    return only(CHECK, cluster, "gpu-p2p-unsupported", hosts=["nd0"],
                devices=[f"GPU-0-{index}" for index in range(4)])  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 5060 Ti"],
)
def test_boards_for_the_desktop_that_seem_to_reach_each_other_are_named(name: str) -> None:
    found = unsupported(cluster_with(desktop(name)))
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert name in found.message
    assert "export NCCL_P2P_DISABLE=1" in found.kind.fix


@each_row(
    "host",
    [
        desktop("NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),  # there it is supported
        desktop("NVIDIA RTX 6000 Ada Generation"),
        desktop("NVIDIA GeForce RTX 3090"),
        desktop("NVIDIA H100 PCIe"),
        desktop(p2p={"CHIPSET_NOT_SUPPORTED": pairs_of(4)}),
        desktop(p2p={}),
        desktop(of_gpu={"nvlinks": [1, 1, 1, 1]}),
        desktop(p2p_off=True),
    ],
)
def test_boards_that_may_or_that_nobody_asks_are_not_named(host: dict[str, Any]) -> None:
    assert judge(CHECK, cluster_with(host)) == []


def test_without_nccl_nobody_asks_and_where_every_rank_turns_it_off_too() -> None:
    assert judge(CHECK, cluster_with(desktop(), backend="gloo")) == []
    off = {rank: {"NCCL_P2P_DISABLE": "1"} for rank in range(4)}
    assert judge(CHECK, cluster_with(desktop(), env=off)) == []
    unsupported(cluster_with(desktop(), env={0: off[0]}))


def peers(wrong: tuple[int, ...] = ()) -> dict[int, dict[str, Any]]:
    """What `gpu_work` sent from each GPU to the next."""
    bad = [{"what": "x", "count": 1, "of": 2, "example": "y"}]
    return {
        rank: worked(
            rank,
            uuid=f"GPU-0-{rank}",
            peer={
                "uuid": f"GPU-0-{(rank + 1) % 4}",
                "wrong": bad if rank in wrong else [],
                "error": None,
            },
        )
        for rank in range(4)
    }


def test_where_everything_sent_arrives_it_is_only_worth_knowing() -> None:
    made = cluster_with(desktop())
    arrived = unsupported(also(made, "gpu_work", peers()))
    assert arrived.level is Severity.INFO
    assert "arrived" in arrived.message
    # One that arrives changed is said by that check; here the cause is.
    assert unsupported(also(made, "gpu_work", peers(wrong=(2,)))).level is Severity.WARN


def test_one_board_that_a_rank_uses_has_nobody_to_reach() -> None:
    made = with_backend(cluster_of(desktop(), nproc=1), {0: seen_by_torch(0, 0, gpus=4)})
    assert judge(CHECK, made) == []


# Worth knowing ------------------------------------------------------------------------------------


def test_gpus_that_sleep_between_jobs_are_worth_knowing() -> None:
    found = only(CHECK, cluster_of(every(0, persistence=0)), "gpu-persistence-off", hosts=["nd0"])
    assert found.level is Severity.INFO
    assert found.message == "persistence mode is off on all 8 GPUs"
    alone = state(0, [gpu(0, 0, persistence=0)])
    assert judge(CHECK, cluster_of(alone)) == []
    some = [gpu(0, index, persistence=index % 2) for index in range(8)]
    assert {one.code for one in judge(CHECK, cluster_of(state(0, some)))} == {"gpu-differs"}


def test_a_power_limit_below_the_default_is_worth_knowing() -> None:
    made = cluster_of(every(0, power_limit_mw=500_000), every(1, power_limit_mw=500_000))
    found = judge(CHECK, made)
    assert [(one.code, one.level, one.where.hosts) for one in found] == [
        ("gpu-clocks-limited", Severity.INFO, ("nd0",)),
        ("gpu-clocks-limited", Severity.INFO, ("nd1",)),
    ]
    assert found[0].message == "power limit 500 W, default 700 W"
    assert "-pl 700" in found[0].fix
    for fine in ({"default_power_limit_mw": None}, {"power_limit_mw": 700_000}, {"ecc": None}):
        assert judge(CHECK, cluster_of(every(0, **fine))) == []
    # One of many is the odd one: that says it.
    one = [gpu(0, index, **({"power_limit_mw": 500_000} if index == 2 else {})) for index in
           range(8)]  # fmt: skip
    assert {each.code for each in judge(CHECK, cluster_of(state(0, one)))} == {"gpu-differs"}


def test_no_spare_rows_and_errors_of_caches_are_told() -> None:
    gpus = [gpu(0, index) for index in range(8)]
    gpus[2] = gpu(0, 2, banks_without_spare=3)
    found = only(CHECK, cluster_of(state(0, gpus)), "gpu-unhealthy", hosts=["nd0"],
                 devices=["GPU-0-2"])  # fmt: skip
    assert found.level is Severity.INFO
    assert "3 memory banks have no spare row left" in found.message
    assert "has little left to repair itself" in found.kind.title
    gpus[2] = gpu(0, 2, sram_threshold_exceeded=1)
    found = only(CHECK, cluster_of(state(0, gpus)), "gpu-unhealthy", hosts=["nd0"],
                 devices=["GPU-0-2"])  # fmt: skip
    assert found.level is Severity.WARN
    assert "SRAM" in found.message


# Heat ---------------------------------------------------------------------------------------------


@each_row(
    ("changes", "words"),
    [
        ({"margin_temperature": -2}, "2 °C above its limit"),
        ({"margin_temperature": 0}, ""),
        # The margin is what the driver goes by; the threshold may be that of another model.
        ({"margin_temperature": 20, "temperature": 93}, ""),
        ({"margin_temperature": None, "temperature": 93}, "too hot"),
        ({"slowdown_temperature": None, "temperature": 99}, ""),
        ({"memory_temperature": 105, "memory_max_temperature": 105}, "its memory is too hot"),
        ({"memory_temperature": 95, "memory_max_temperature": 105}, ""),
        ({"memory_temperature": 95, "memory_max_temperature": None}, ""),
        ({"memory_temperature": 0, "memory_max_temperature": 0}, ""),
    ],
)
def test_heat_is_judged_by_what_the_driver_gives(changes: dict[str, Any], words: str) -> None:
    gpus = [gpu(0, index) for index in range(8)]
    gpus[4] = gpu(0, 4, **changes)
    made = cluster_of(state(0, gpus))
    if not words:
        assert judge(CHECK, made) == []
        return
    found = only(CHECK, made, "gpu-throttled", hosts=["nd0"], devices=["GPU-0-4"])
    assert words in found.message
