"""Rules of check amd_gpus on made-up clusters: whose GPU it is, and differences between hosts."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Outcome, OutcomeStatus, Severity
from nccl_doctor.checks.amd_gpus import AmdGpus
from nccl_doctor.checks.amd_gpus.rules import why_refused
from nccl_doctor.checks.gpu_state import GpuState
from nccl_doctor.toolkit.gpu.lost import hosts_without_gpu
from nccl_doctor.toolkit.gpu.nvml import STEP
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.gpu_facts import facts as seen_by_torch

CHECK = AmdGpus()
GIB = 1 << 30
MI300X = "AMD Instinct MI300X OAM"


def bus(index: int) -> str:
    return f"0000:{0x0C + 0x11 * index:02x}:00.0"


def unique(node: int, index: int) -> str:
    return f"{0x1BADCAFE00000000 + 16 * node + index:016x}"


def gpu(node: int, index: int, **changes: Any) -> dict[str, Any]:
    """A healthy MI300X; an argument changes a field."""
    made = {
        "index": index,
        "lost": False,
        "refused": {},
        "bus_id": bus(index),
        "unique_id": unique(node, index),
        "uuid": f"{node}-{index}",
        "name": MI300X,
        "driver": "6.12.12",
        "memory": {"total": 192 * GIB, "used": GIB},
        "temperature": 41,
        "slowdown_temperature": 100,
        "memory_temperature": 35,
        "memory_max_temperature": 105,
        "errors": {"correctable": 0, "uncorrectable": 0, "deferred": 0},
        "xgmi_errors": {"correctable": 0, "uncorrectable": 0, "deferred": 0},
        "pages": {"reserved": 0, "pending": 0, "unreservable": 0},
        "most_pages": 128,
        "pcie": {"width": 16, "max_width": 16, "speed": 32000, "max_speed": 32000},
        "power_limit_mw": 750_000,
        "default_power_limit_mw": 750_000,
        "max_sm_clock_mhz": 2100,
        "level": "auto",
        "throttle": [],
        "xgmi_links": [*["up"] * 7, "disabled"],
        "xgmi_peers": 7,
        "compute_partition": "SPX",
        "memory_partition": "NPS1",
        "processes": [],
    }
    return {**made, **changes}


def state(
    node: int, *odd: dict[str, Any], each: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """Facts of a host with eight GPUs: healthy, but for those that are given."""
    gpus = {index: gpu(node, index, **(each or {})) for index in range(8)}
    gpus.update({one["index"]: one for one in odd})
    made = {
        "library": "26.0",
        "driver": "6.12.12",
        "error": None,
        "hidden": 0,
        "gpus": list(gpus.values()),
        "own": [],
        "memory_kills": 0,
    }
    return {**made, **changes}


def cluster_of(*hosts: Any, **fields: Any) -> Cluster:
    names = [f"nd{node}" for node in range(len(hosts))]
    by_host = dict(zip(names, hosts, strict=True))
    fields = {"backend": "nccl", **fields}
    return make_cluster(names, 8, check="amd_gpus", by_host=by_host, **fields)


def hip_uuid(node: int, index: int) -> str:
    """As torch writes HIP's UUID, whose bytes are the digits of the unique id."""
    digits = unique(node, index).encode().hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return f"GPU-{'-'.join(parts)}"


def with_torch(cluster: Cluster, by_rank: dict[int, dict[str, Any]]) -> Cluster:
    """The same with the GPU that some ranks would take, as torch describes it."""
    for seat, device in by_rank.items():
        seen = {
            **seen_by_torch(0, 0),
            "rocm": "7.0",
            "cuda": None,
            "devices": [device],
            "device": 0,
        }
        cluster = change_rank(cluster, seat, facts={"backend_device": {ALONE: outcome(seen)}})
    return cluster


def test_equal_hosts_give_nothing() -> None:
    assert not judge(CHECK, cluster_of(state(0), state(1)))


def test_a_fault_names_the_rank_that_takes_the_gpu_after_visible_devices_changed_the_order() -> (
    None
):
    sick = gpu(0, 5, errors={"correctable": 0, "uncorrectable": 1, "deferred": 0})
    # HIP_VISIBLE_DEVICES=7,6,5,…: rank 2 takes GPU 5.
    seen = {rank: {"uuid": hip_uuid(0, 7 - rank)} for rank in range(8)}
    cluster = with_torch(cluster_of(state(0, sick)), seen)
    found = only(CHECK, cluster, "gpu-unhealthy", hosts=["nd0"], ranks=[2], devices=["0-5"])
    assert found.level is Severity.WARN
    assert "1 uncorrected ECC error since" in found.message


@pytest.mark.parametrize("by", ["unique_id", "bus_id"])
def test_a_gpu_that_no_rank_takes_is_only_information(by: str) -> None:
    sick = gpu(0, 7, throttle=["socket"])
    devices = [
        {"uuid": hip_uuid(0, index)} if by == "unique_id" else {"uuid": None, "bus_id": bus(index)}
        for index in (0, 1, 2, 3, 4, 5, 6, 6)
    ]
    cluster = with_torch(cluster_of(state(0, sick)), dict(enumerate(devices)))
    found = only(CHECK, cluster, "gpu-throttled", hosts=["nd0"], devices=["0-7"])
    assert found.level is Severity.INFO
    assert found.message == "the GPU is too hot; no rank uses this GPU"


def test_parts_of_a_gpu_are_nobodys_only_where_that_is_known() -> None:
    """In mode CPX torch gives all parts of a GPU one bus id."""
    sick = gpu(0, 7, throttle=["socket"], compute_partition="CPX")
    host = state(0, sick, each={"compute_partition": "CPX"})
    devices = {rank: {"uuid": None, "bus_id": bus(0)} for rank in range(8)}
    found = only(
        CHECK,
        with_torch(cluster_of(host), devices),
        "gpu-throttled",
        hosts=["nd0"],
        devices=["0-7"],
    )
    assert found.level is Severity.WARN


def test_another_users_process_is_named_and_our_own_is_not() -> None:
    def on(pid: int, held: int, name: str | None = "python3", here: bool = True) -> dict[str, Any]:
        return {"pid": pid, "bytes": held, "name": name, "here": here}

    stranger, ours = on(4711, 5 * GIB), on(99, 9 * GIB, "nccl-doctor")
    small, elsewhere = on(4712, 8 << 20), on(4713, 5 * GIB, None, here=False)
    busy = gpu(0, 2, processes=[ours, small, elsewhere])
    assert not judge(CHECK, cluster_of(state(0, busy, own=[99])))
    busy["processes"].append(stranger)
    found = only(
        CHECK, cluster_of(state(0, busy, own=[99])), "gpu-busy", hosts=["nd0"], devices=["0-2"]
    )
    assert (found.level, found.message) == (Severity.WARN, "pid 4711 (python3, 5.0 GiB) uses it")
    assert [step.command for step in found.fix.steps] == [
        "ps -o user,pid,lstart,args -p 4711",
        "kill 4711",
    ]
    full = gpu(0, 2, processes=[on(4711, 190 * GIB)])
    found = only(CHECK, cluster_of(state(0, full)), "gpu-busy", hosts=["nd0"], devices=["0-2"])
    assert found.level is Severity.FAIL
    nameless = gpu(0, 2, processes=[on(4711, 5 * GIB, None)])
    found = only(CHECK, cluster_of(state(0, nameless)), "gpu-busy", hosts=["nd0"], devices=["0-2"])
    assert found.confidence.value == "possible"


def test_a_host_that_differs_is_named() -> None:
    other = state(2, each={"memory_partition": "NPS4"}, driver="6.10.5")
    findings = judge(CHECK, cluster_of(state(0), state(1), other))
    assert [(found.code, found.where.hosts, found.level) for found in findings] == [
        ("gpu-differs", ("nd2",), Severity.WARN),
        ("gpu-differs", ("nd2",), Severity.INFO),
    ]
    assert findings[0].message == (
        "memory partition NPS4; the other hosts have memory partition NPS1"
    )


def test_hosts_with_fewer_gpus_are_named_unless_a_container_hides_some() -> None:
    few = state(2)
    del few["gpus"][4:]
    found = only(CHECK, cluster_of(state(0), state(1), few), "gpu-differs", hosts=["nd2"])
    assert found.message.startswith(f"GPUs 4 x {MI300X}; the other hosts have GPUs 8 x")
    assert not judge(CHECK, cluster_of(state(0), state(1), {**few, "hidden": 4}))


def test_a_limit_that_all_gpus_share_is_information() -> None:
    found = only(
        CHECK,
        cluster_of(state(0, each={"power_limit_mw": 500_000})),
        "gpu-clocks-limited",
        hosts=["nd0"],
        devices=[f"0-{index}" for index in range(8)],
    )
    assert (found.level, found.message) == (
        Severity.INFO,
        "power limit 500 W, default 750 W",
    )
    assert not judge(CHECK, cluster_of(state(0, each={"level": "determinism"})))


WEDGED = {
    "call": "amdsmi_get_gpu_memory_total",
    "state": "D",
    "wchan": "amdgpu_x",
    "stopped_s": 0.0,
}


def test_a_reader_in_state_d_makes_a_lost_gpu_likely_and_takes_no_host_out_of_service() -> None:
    stuck = {"index": 3, "bus_id": bus(3), "lost": False, "refused": {}}
    stuck["wedged"] = {**WEDGED, "how": "did not return within 30 s"}
    cluster = cluster_of(state(0, stuck))
    found = only(CHECK, cluster, "gpu-lost", hosts=["nd0"], devices=[bus(3)])
    assert (found.level, found.confidence.value, found.drains) == (Severity.FAIL, "likely", False)
    over_gloo = only(
        CHECK,
        cluster_of(state(0, stuck), backend="gloo"),
        "gpu-lost",
        hosts=["nd0"],
        devices=[bus(3)],
    )
    assert over_gloo.level is Severity.WARN


def test_readers_that_all_wait_in_a_call_about_all_gpus_blame_no_gpu() -> None:
    stuck = {**WEDGED, "call": "amdsmi_init", "how": "did not return within 30 s"}
    gpus = [
        {"index": index, "bus_id": bus(index), "lost": False, "refused": {}, "wedged": stuck}
        for index in range(8)
    ]
    found = only(CHECK, cluster_of(state(0, *gpus)), "gpu-unhealthy", hosts=["nd0"])
    assert (found.message, found.confidence.value) == (
        "amdsmi_init did not return within 30 s",
        "likely",
    )


def test_a_gpu_that_the_library_refuses_is_unknown_and_nobody_is_blamed() -> None:
    refused = {"index": 3, "bus_id": bus(3), "lost": False, "refused": {"BUSY": ["handle"]}}
    facts = state(0, refused)
    assert why_refused(facts) == ["GPU 3 could not be read: amdsmi refuses (BUSY)"]
    only(CHECK, cluster_of(facts), "gpu-state-unread", hosts=["nd0"], devices=[bus(3)])


def test_a_library_older_than_the_driver_is_no_sick_gpu() -> None:
    each = {"pcie": None, "throttle": None, "refused": {"UNEXPECTED_DATA": ["pcie", "throttle"]}}
    devices = [f"0-{index}" for index in range(8)]
    cluster = cluster_of(state(0, each=each))
    found = only(CHECK, cluster, "gpu-state-unread", hosts=["nd0"], devices=devices)
    assert found.level is Severity.INFO
    assert found.message == "not read: pcie, throttle (UNEXPECTED_DATA)"


def test_a_host_without_its_gpu_explains_what_hip_misses_there() -> None:
    stuck = {"index": 3, "bus_id": bus(3), "lost": False, "refused": {}}
    stuck["wedged"] = {**WEDGED, "how": "did not return within 30 s"}
    cluster = cluster_of(state(0), state(1, stuck))
    assert hosts_without_gpu(cluster) == frozenset({cluster.hosts[1].id})


@pytest.mark.parametrize(
    "how",
    ["did not return within 30 s", "killed the process, SIGKILL", "killed the process, SIGTERM"],
)
def test_a_reader_that_somebody_stopped_or_killed_says_nothing_of_its_gpu(how: str) -> None:
    stuck = {"index": 3, "bus_id": bus(3), "lost": False, "refused": {}}
    stuck["wedged"] = {**WEDGED, "how": how, "state": "T", "wchan": "do_signal_stop"}
    found = only(
        CHECK, cluster_of(state(0, stuck)), "gpu-state-unread", hosts=["nd0"], devices=[bus(3)]
    )
    assert found.level is Severity.WARN


@pytest.mark.parametrize(
    ("end", "named"),
    [
        ({"status": OutcomeStatus.HUNG, "state": "S"}, True),
        ({"status": OutcomeStatus.HUNG, "state": "T"}, False),
        ({"status": OutcomeStatus.DIED, "signal": "SIGKILL"}, False),
    ],
)
def test_an_observation_that_ended_in_the_library(end: dict[str, Any], named: bool) -> None:
    crumb = {"step": STEP, "call": "amdsmi_init"}
    seen = Outcome(breadcrumbs=(crumb,), **end)
    cluster = cluster_of(seen)
    if named:
        found = only(CHECK, cluster, "gpu-unhealthy", hosts=["nd0"])
        assert found.confidence.value == "likely"
    else:
        assert not judge(CHECK, cluster)


def test_the_codes_are_those_of_nvidia_gpus_but_for_the_links() -> None:
    own = {kind.code for kind in CHECK.kinds} - {kind.code for kind in GpuState.kinds}
    assert own == {"xgmi-down", "xgmi-errors"}
