"""What is between the GPUs of a host, and limits that somebody set: on made-up clusters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Confidence, Outcome, OutcomeStatus, Severity
from nccl_doctor.checks.backend_device import BackendDevice
from nccl_doctor.checks.gpu_state import GpuState
from tests.support.clusters import outcome
from tests.support.findings import judge, only
from tests.support.gpu_states import (
    cluster_of,
    every,
    far,
    gpu,
    near,
    p2p,
    pairs_of,
    state,
    torch_sees,
    with_backend,
)

CHECK, BACKEND = GpuState(), BackendDevice()


# What is between GPUs -----------------------------------------------------------------------------


def test_a_pair_that_is_cut_off_is_named_and_no_other_gpu() -> None:
    cut = state(1, p2p=p2p("CHIPSET_NOT_SUPPORED", [2, 3]))
    found = only(CHECK, cluster_of(state(0), cut), "gpu-p2p-unavailable", hosts=["nd1"],
                 devices=["GPU-1-2", "GPU-1-3"])  # fmt: skip
    assert found.level is Severity.WARN
    assert found.message == (
        "no direct access between GPU 2 and GPU 3; most pairs in one NUMA node have it (the "
        "driver: the chipset does not support it)"
    )


def test_a_gpu_that_reaches_nobody_is_named_alone() -> None:
    alone = [[one, other] for one, other in pairs_of(8) if 5 in (one, other)]
    cut = state(1, p2p=p2p("DISABLED_BY_REGKEY", *alone))
    found = only(CHECK, cluster_of(state(0), cut), "gpu-p2p-unavailable", hosts=["nd1"],
                 devices=["GPU-1-5"])  # fmt: skip
    assert found.message.startswith("no direct access between GPU 5 and any other GPU of the host")
    assert "an option of the driver's module turns it off" in found.message


def test_sockets_that_never_reach_each_other_are_how_the_board_is_made() -> None:
    board = p2p("IOH_TOPOLOGY_NOT_SUPPORTED", *far(8))
    assert judge(CHECK, cluster_of(state(0, p2p=board), state(1, p2p=board))) == []
    none = {"CHIPSET_NOT_SUPPORTED": pairs_of(8)}  # GPUs for the desktop
    assert judge(CHECK, cluster_of(state(0, p2p=none), state(1, p2p=none))) == []
    assert judge(CHECK, cluster_of(state(0, p2p={}, nearest={}))) == []


def test_a_host_where_no_pair_can_is_seen_against_the_others() -> None:
    none = state(2, p2p={"CHIPSET_NOT_SUPPORTED": pairs_of(8)})
    found = only(CHECK, cluster_of(state(0), state(1), none), "gpu-differs", hosts=["nd2"])
    assert found.level is Severity.WARN
    assert found.message == (
        "GPUs that reach each other's memory no pair; the other hosts have GPUs that reach each "
        "other's memory every pair"
    )


def test_acs_and_iommu_are_named_beside_a_pair_that_is_cut_off() -> None:
    made = cluster_of(state(0), state(1, p2p=p2p("CHIPSET_NOT_SUPPORTED", [0, 1])))
    direct = {"iommu": {"0000:18:00.0": "DMA-FQ"}, "acs": {"0000:17:01.0": 0x1D}}
    hosts = tuple(
        replace(host, facts={**host.facts, "gpu_direct": {ALONE: outcome(direct)}})
        for host in made.hosts
    )
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    found = only(CHECK, replace(made, hosts=hosts, ranks=ranks), "gpu-p2p-unavailable",
                 hosts=["nd1"], devices=["GPU-1-0", "GPU-1-1"])  # fmt: skip
    assert found.message.endswith(
        "; ACS is on for 1 PCIe bridges; the IOMMU translates for 1 GPUs and NICs"
    )


def test_hosts_with_another_topology_are_worth_knowing() -> None:
    other = state(2, nearest={"SINGLE": near(8), "SYSTEM": far(8)})
    found = only(CHECK, cluster_of(state(0), state(1), other), "gpu-differs", hosts=["nd2"])
    assert found.level is Severity.INFO
    assert "12 behind one PCIe switch, 16 in different NUMA nodes" in found.message
    moved = [gpu(2, index, numa=index % 2) for index in range(8)]
    found = only(CHECK, cluster_of(state(0), state(1), state(2, moved)), "gpu-differs",
                 hosts=["nd2"])  # fmt: skip
    assert found.message.startswith("GPUs by NUMA node 4 on 0, 4 on 1; ")


def sxid(number: int, *, fatal: bool, **changes: Any) -> dict[str, Any]:
    seen = {"switch": 3, "bus": "0000:05:00.0", "sxid": number, "fatal": fatal, "link": 32}
    return {**seen, "count": 1, "age_s": 7300, "text": "egress PRIV error", **changes}


def test_a_fatal_error_of_an_nvswitch_is_named_and_others_are_not() -> None:
    def logged(*sxids: dict[str, Any]) -> dict[str, Any]:
        log = {"source": "/dev/kmsg", "reason": "", "xids": [], "sxids": list(sxids)}
        return state(1, kernel_log=log)

    assert judge(CHECK, cluster_of(state(0), logged(sxid(22013, fatal=False)))) == []
    made = cluster_of(state(0), logged(sxid(22013, fatal=False), sxid(12028, fatal=True, count=2)))
    found = only(CHECK, made, "nvswitch-error", hosts=["nd1"], devices=["0000:05:00.0"])
    assert found.message == (
        "kernel log: SXid 12028 of NVSwitch 3 on link 32: egress PRIV error, 2 times, 2 h ago"
    )
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    many = [sxid(11000 + number, fatal=True, link=None, age_s=None) for number in range(6)]
    found = only(CHECK, cluster_of(state(0), logged(*many)), "nvswitch-error", hosts=["nd1"],
                 devices=["0000:05:00.0"])  # fmt: skip
    assert found.message.endswith("; and 2 more")


# The fabric manager -------------------------------------------------------------------------------


def manager(**changes: Any) -> dict[str, Any]:
    return {"switches": 4, "running": False, "misfit": None, **changes}


def test_switches_without_a_fabric_manager_are_named() -> None:
    a100 = {"fabric": None}  # of Ampere, the library says nothing about the fabric
    made = cluster_of(every(0, **a100), {**every(1, **a100), "fabric_manager": manager()})
    found = only(CHECK, made, "fabric-manager-down", hosts=["nd1"])
    assert found.message == "4 NVSwitches, but no process nv-fabricmanager"
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    found = only(CHECK, with_backend(made, torch_sees(2)), "fabric-manager-down", hosts=["nd1"])
    assert found.level is Severity.WARN


@pytest.mark.parametrize(
    "seen", [manager(running=None), manager(running=True), manager(switches=0), None]
)
def test_where_it_runs_or_nobody_can_know_nothing_is_said(seen: Any) -> None:
    assert judge(CHECK, cluster_of(state(0, fabric_manager=seen))) == []


def test_a_fabric_manager_of_another_version_is_the_cause_that_is_named() -> None:
    down = {"state": "NOT_STARTED", "status": 0, "degraded": None}
    misfit = manager(misfit=["580.65.06", "580.95.05"])
    made = cluster_of(state(0), {**every(1, fabric=down), "fabric_manager": misfit})
    found = only(CHECK, made, "fabric-manager-down", hosts=["nd1"],
                 devices=[f"GPU-1-{index}" for index in range(8)])  # fmt: skip
    assert found.message == (
        "registration with the NVLink fabric: not started; fabric manager 580.65.06 does not fit "
        "driver 580.95.05 and did not start"
    )
    assert "after fabric manager 580.95.05 was installed" in found.fix
    # What the log says of an earlier driver is over.
    old = manager(running=None, misfit=["570.1", "570.2"])
    assert judge(CHECK, cluster_of(state(0, fabric_manager=old))) == []


# Clocks, and what is new --------------------------------------------------------------------------


def test_clocks_that_somebody_set_everywhere_are_said_once_for_each_host() -> None:
    made = cluster_of(every(0, set_sm_clock_mhz=1200), every(1, set_sm_clock_mhz=1200))
    found = judge(CHECK, made)
    assert [(f.code, f.where.hosts, len(f.where.devices)) for f in found] == [
        ("gpu-clocks-limited", ("nd0",), 8),
        ("gpu-clocks-limited", ("nd1",), 8),
    ]
    assert "SM clock at most 1200 of 1980 MHz" in found[0].message


def test_a_bit_that_all_gpus_show_is_how_the_model_is() -> None:
    assert judge(CHECK, cluster_of(every(0, throttle=2), every(1, throttle=2))) == []
    assert judge(CHECK, cluster_of(every(0, default_sm_clock_mhz=1095))) == []


def test_gpus_with_other_clocks_set_are_the_minority() -> None:
    gpus = [gpu(0, index, set_sm_clock_mhz=1500, default_sm_clock_mhz=1500) for index in range(8)]
    gpus[6] = gpu(0, 6, set_sm_clock_mhz=1980, default_sm_clock_mhz=1500)
    found = only(CHECK, cluster_of(state(0, gpus)), "gpu-differs", hosts=["nd0"],
                 devices=["GPU-0-6"])  # fmt: skip
    assert found.message.startswith("SM clock set 1980 MHz; the other GPUs")


def test_an_xid_that_is_over_asks_for_nothing() -> None:
    back = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    one = {"bus": "0000:1a:00", "xid": 154, "count": 2, "age_s": 9, "text": back}
    log = {"source": "/dev/kmsg", "reason": "", "xids": [one], "sxids": []}
    assert judge(CHECK, cluster_of(state(0, kernel_log=log))) == []
    one["text"] = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    only(CHECK, cluster_of(state(0, kernel_log=log)), "gpu-unhealthy", hosts=["nd0"],
         devices=["GPU-0-2"])  # fmt: skip


def test_a_wedged_gpu_explains_that_cuda_does_not_start() -> None:
    gpus = [gpu(1, index) for index in range(8)]
    stuck = {"call": "nvmlDeviceGetName", "how": "did not return within 39 s", "state": "D"}
    gpus[3] = {"index": 3, "uuid": "GPU-1-3", "lost": False, "refused": {}, "wedged": stuck}
    made = cluster_of(state(0), state(1, gpus))
    found = only(CHECK, made, "gpu-lost", hosts=["nd1"], devices=["GPU-1-3"])
    assert found.message == "nvmlDeviceGetName did not return within 39 s, process state D"
    hung = Outcome(
        OutcomeStatus.HUNG,
        breadcrumbs=({"step": "starting the GPU driver", "at_s": 0.1, "call": "cuInit"},),
    )
    made = with_backend(made, {**torch_sees(1), **dict.fromkeys(range(8, 16), hung)})
    assert {f.explained_by for f in judge(BACKEND, made)} == {"gpu-lost"}


def test_facts_of_an_older_release_are_judged_as_before() -> None:
    new = ("set_sm_clock_mhz", "default_sm_clock_mhz", "set_memory_clock_mhz", "virtualization",
           "margin_temperature", "memory_temperature", "memory_max_temperature",
           "banks_without_spare", "sram_threshold_exceeded", "default_power_limit_mw")  # fmt: skip
    old = {key: value for key, value in gpu(0, 0).items() if key not in new}
    del old["fabric"]["health_mask"]
    facts = state(0, [old], p2p={}, nearest={})
    del facts["fabric_manager"], facts["kernel_log"]["sxids"]
    del facts["pairs_refused"], facts["pairs_error"], facts["p2p_off"]
    assert judge(CHECK, cluster_of(facts)) == []
