"""What takes a host out of service, on made-up clusters: each kind that drains, its real fault, and
what else can have made the same fact on a host that is in order.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Check, Cluster, Effect, Job, Outcome, OutcomeStatus, Severity
from nccl_doctor.checks.amd_gpus import AmdGpus
from nccl_doctor.checks.backend_device import DRIVER_STEP, BackendDevice
from nccl_doctor.checks.dcgm import Dcgm
from nccl_doctor.checks.dcgm_diag import DIAGNOSE, DcgmDiag
from nccl_doctor.checks.gpu_state import GpuState
from nccl_doctor.checks.gpu_work import GpuWork
from nccl_doctor.checks.gpu_work.work import MULTIPLY
from nccl_doctor.checks.memory_kills import MemoryKills
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.cluster import ALONE
from nccl_doctor.model.findings import Status
from nccl_doctor.model.report import Report
from nccl_doctor.report.profiles import tell
from nccl_doctor.toolkit.gpu.nvml import STEP
from tests.support import hardware
from tests.support.clusters import make_cluster, outcome
from tests.support.gpu_facts import cluster as of_work
from tests.support.gpu_facts import facts as seen_by_torch
from tests.support.gpu_facts import worked
from tests.support.gpu_states import cluster_of, gpu, lost, state, torch_sees, with_backend
from tests.support.reports import RUN, through_json
from tests.support.rows import each_row
from tests.unit.test_check_amd_gpus import cluster_of as amd_cluster
from tests.unit.test_check_amd_gpus import gpu as amd_gpu
from tests.unit.test_check_amd_gpus import state as amd_state
from tests.unit.test_check_hardware_errors import cluster as of_hardware
from tests.unit.test_check_hardware_errors import tree, watched

CHECKS = (GpuState(), BackendDevice(), GpuWork())
DOWN = {"switches": 4, "running": False, "misfit": None, "up_s": 90_000}
"""The fabric manager of a host that was started yesterday is not there."""
RUNS = {"switches": 4, "running": True, "misfit": None, "up_s": 90_000}
ELSEWHERE = {"switches": 0, "running": None, "misfit": None}
UNREGISTERED = {"state": "NOT_STARTED", "status": 0, "degraded": None}


def report_of(cluster: Cluster, *checks: Check) -> Report:
    checks = checks or CHECKS
    found = {check.name for rank in cluster.ranks for check in checks if check.name in rank.facts}
    found |= {check.name for host in cluster.hosts for check in checks if check.name in host.facts}
    used = [check for check in checks if check.name in found]
    return conclude(cluster, used, run=RUN)


def drained(cluster: Cluster, *checks: Check) -> str:
    """The Reason for Slurm; empty where the host stays in service."""
    report = report_of(cluster, *checks)
    told = tell(report, "slurm", report.exit_code)
    assert told is not None
    assert told.code == bool(told.line)
    return told.line


def with_gpu(index: int, changed: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """nd1, with one GPU that is not like the others."""
    return state(1, [changed if at == index else gpu(1, at) for at in range(8)], **facts)


def wedged(how: str, call: str = "nvmlDeviceGetName", **standing: Any) -> dict[str, Any]:
    """GPU 3, as it is described when the process that read it did not return."""
    stuck = {"call": call, "how": how, "state": "", "wchan": "", "stopped_s": 0.0, **standing}
    return {"index": 3, "uuid": "GPU-1-3", "lost": False, "refused": {}, "wedged": stuck}


def two(nd1: Any, **fields: Any) -> Cluster:
    """nd0, in order, and nd1."""
    return cluster_of(state(0), nd1, **fields)


LATE = "did not return within 39 s"
XID_79 = {"bus": "0000:1b:00", "xid": 79, "count": 1, "age_s": 9, "text": "x"}
LOG_79 = {"source": "/dev/kmsg", "reason": "", "xids": [XID_79], "sxids": []}


# gpu-lost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        lost(3),
        wedged(LATE, state="D"),
        wedged(LATE, state="D", wchan="os_acquire_rwlock_write"),
        wedged("killed the process, SIGSEGV"),
        wedged("killed the process, SIGBUS"),
    ],
)
def test_a_gpu_that_is_lost_drains(changed: dict[str, Any]) -> None:
    report = report_of(two(with_gpu(3, changed)))
    (found,) = report.root_causes
    assert (found.code, found.where.hosts) == ("gpu-lost", ("nd1",))
    assert drained(two(with_gpu(3, changed))).startswith("nccl-doctor: gpu-lost on nd1: ")


@pytest.mark.parametrize(
    "changed",
    [
        wedged(LATE, state="S"),  # slow
        wedged(LATE, state="R"),
        wedged("ended the process with exit code 3"),
    ],
)
def test_a_gpu_that_is_slow_to_answer_is_a_failure_and_drains_nothing(
    changed: dict[str, Any],
) -> None:
    made = two(with_gpu(3, changed))
    (found,) = report_of(made).root_causes
    assert (found.code, found.level, found.where.hosts) == ("gpu-lost", Severity.FAIL, ("nd1",))
    assert drained(made) == ""


@each_row(
    ("changed", "words"),
    [
        (wedged("killed the process, SIGKILL"), "ended by SIGKILL in nvmlDeviceGetName"),
        (wedged("killed the process, SIGTERM"), "ended by SIGTERM"),
        (wedged("killed the process, SIGXCPU"), "ended by SIGXCPU"),
        (wedged(LATE, state="T"), "is stopped (state T)"),
        (wedged(LATE, state="D", wchan="__refrigerator"), "is frozen (state D, __refrigerator)"),
        (wedged(LATE, state="D", wchan="rpc_wait_bit_killable"), "waits for NFS (state D, rpc_"),
        (wedged(LATE, state="D", wchan="mem_cgroup_handle_over_high"), "waits for memory"),
        (wedged(LATE, state="S", stopped_s=31.0), "itself was stopped for 31 s of it"),
    ],
)
def test_a_reader_that_somebody_stopped_or_killed_leaves_its_gpu_unknown(
    changed: dict[str, Any], words: str
) -> None:
    facts = with_gpu(3, changed)
    made = two(Outcome(OutcomeStatus.OK, facts=facts, reason="the state of GPU 3 is not known"))
    report = report_of(made)
    assert [found.code for found in report.findings] == ["gpu-state-unread"]
    (found,) = report.findings
    assert (found.where.hosts, found.where.devices) == (("nd1",), ("GPU-1-3",))
    assert words in found.message
    assert [result.status for result in report.checks] == [Status.UNKNOWN]
    assert report.exit_code == 3
    assert drained(made) == ""


def test_the_kernel_that_killed_for_memory_is_named_as_the_cause() -> None:
    facts = with_gpu(3, wedged("killed the process, SIGKILL"), memory_kills=1)
    made = two(Outcome(OutcomeStatus.OK, facts=facts, reason="the state of GPU 3 is not known"))
    (found,) = report_of(made).findings
    assert "the kernel killed 1 process for lack of memory" in found.message
    before, after = {"oom_kills": 0, "machine_kills": 4}, {"oom_kills": 1, "machine_kills": 5}
    killed = {"memory": {ALONE: outcome(before)}, "memory_kills": {"late": outcome(after)}}
    hosts = {
        host.id: replace(host, facts={**host.facts, **(killed if host.id else {})})
        for host in made.hosts
    }
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    made = replace(made, hosts=tuple(hosts.values()), ranks=ranks)
    report = report_of(made, GpuState(), MemoryKills())
    assert [found.code for found in report.root_causes] == ["out-of-memory-kill"]
    by_code = {found.code: found for found in report.findings}
    assert by_code["gpu-state-unread"].explained_by == "out-of-memory-kill"
    assert drained(made, GpuState(), MemoryKills()) == ""


def test_of_readers_that_wait_for_one_that_runs_none_is_certainly_lost() -> None:
    """GPUs that sleep are woken one after the other, under one lock."""
    gpus = [gpu(1, index) for index in range(8)]
    for index in (3, 4):
        gpus[index] = {**wedged(LATE, state="D"), "index": index, "uuid": f"GPU-1-{index}"}
    assert drained(two(state(1, gpus)))
    gpus[4]["wedged"]["state"] = "R"
    assert drained(two(state(1, gpus))) == ""


def test_a_library_that_crashes_at_every_gpu_is_no_gpu_s_fault() -> None:
    gpus = [
        {**wedged("killed the process, SIGSEGV"), "index": index, "uuid": f"GPU-1-{index}"}
        for index in range(8)
    ]
    assert drained(two(state(1, gpus))) == ""
    # One that the kernel log tells of, too.
    gpus[3]["bus_id"] = "0000:1b:00.0"
    assert "Xid 79" in drained(two(state(1, gpus, kernel_log=LOG_79)))


def test_a_gpu_that_a_rank_worked_with_is_not_certainly_lost() -> None:
    made = two(with_gpu(3, {**lost(3), "uuid": "GPU-1-3"}))
    assert drained(made)
    worked_with = {"gpu_work": {ALONE: outcome(worked(11, uuid="GPU-1-3"))}}
    ranks = tuple(
        replace(rank, facts=worked_with) if rank.rank == 11 else rank for rank in made.ranks
    )
    assert drained(replace(made, ranks=ranks)) == ""


@pytest.mark.parametrize(
    "changed",
    [
        lost(3),
        wedged(LATE, state="D"),
        gpu(1, 3, refused={"RESET_REQUIRED": ["name"]}),
        gpu(1, 3, recovery_action="GPU_RESET"),
    ],
)
def test_while_somebody_resets_the_gpus_nothing_drains(changed: dict[str, Any]) -> None:
    assert drained(two(with_gpu(3, changed)))
    made = two(with_gpu(3, changed, in_service=["nvidia-smi --gpu-reset"]))
    (found,) = report_of(made).root_causes
    assert found.level is Severity.FAIL
    assert "right now somebody works on the GPUs: nvidia-smi --gpu-reset" in found.message
    assert drained(made) == ""


# gpu-unhealthy ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"recovery_action": "NODE_REBOOT"},
        {"refused": {"RESET_REQUIRED": ["name"]}},
        {"remapped": {"corrected": 0, "uncorrected": 9, "pending": 0, "failed": 1}},
        {"ecc_uncorrected": 3, "retired_pages_pending": 1},
    ],
)
def test_a_gpu_that_its_driver_gives_up_drains(changed: dict[str, Any]) -> None:
    assert drained(two(with_gpu(3, gpu(1, 3, **changed)))).startswith(
        "nccl-doctor: gpu-unhealthy on nd1: GPU-1-3: "
    )


@pytest.mark.parametrize(
    ("changed", "level"),
    [
        ({"compute_mode": 2}, Severity.FAIL),  # set by somebody
        ({"recovery_action": "RECOVER_IMEX_DOMAIN"}, Severity.FAIL),  # by a host of the domain
        ({"refused": {"UNKNOWN": ["temperature"]}}, Severity.FAIL),
        ({"ecc_uncorrected": 3}, Severity.WARN),  # counted months ago
        ({"retired_pages": 63}, Severity.WARN),
    ],
)
def test_a_setting_another_host_or_an_old_count_drains_nothing(
    changed: dict[str, Any], level: Severity
) -> None:
    made = two(with_gpu(3, gpu(1, 3, **changed)))
    report = report_of(made)
    (found,) = report.root_causes
    assert (found.code, found.level, found.where.hosts) == ("gpu-unhealthy", level, ("nd1",))
    for each in (report, through_json(report)):
        assert tell(each, "slurm", report.exit_code) == (0, "")


@pytest.mark.parametrize("error", ["UNKNOWN", "TIMEOUT"])
def test_a_gpu_without_a_handle_drains_if_the_kernel_log_agrees(error: str) -> None:
    refused = {"index": 3, "lost": False, "refused": {error: ["handle"]}}
    assert drained(two(with_gpu(3, refused))) == ""
    assert "Xid 79" in drained(two(with_gpu(3, refused, kernel_log=LOG_79)))
    application = {**LOG_79, "xids": [{**XID_79, "xid": 31}]}
    assert drained(two(with_gpu(3, refused, kernel_log=application))) == ""


def test_a_gpu_whose_file_may_not_be_opened_belongs_to_somebody_else() -> None:
    refused = {"index": 3, "lost": False, "refused": {"UNKNOWN": ["handle"]}}
    made = two(with_gpu(3, {**refused, "refused_files": ["/dev/nvidia3"]}, kernel_log=LOG_79))
    assert [found.code for found in report_of(made).findings] == []


@pytest.mark.parametrize(
    ("error", "drains"),
    [
        ({"call": "nvmlInit", "name": "GPU_IS_LOST"}, True),
        ({"call": "nvmlInit", "name": "RESET_REQUIRED"}, True),
        ({"call": "nvmlInit", "name": LATE, "how": LATE, "state": "D", "wchan": ""}, True),
        ({"call": "nvmlInit", "name": LATE, "how": LATE, "state": "S", "wchan": ""}, False),
        # In a container that lost its devices, or while a driver is replaced.
        ({"call": "nvmlInit", "name": "UNKNOWN"}, False),
        ({"call": "nvmlInit", "name": "DRIVER_NOT_LOADED"}, False),
        (
            {"call": "nvmlInit", "name": "x", "how": "killed the process, SIGSEGV", "state": ""},
            False,
        ),
    ],
)
def test_a_library_that_does_not_start(error: dict[str, Any], drains: bool) -> None:
    made = two(state(1, [], error=error, count=0))
    (found,) = report_of(made).root_causes
    assert (found.code, found.level, found.where.hosts) == (
        "gpu-unhealthy",
        Severity.FAIL,
        ("nd1",),
    )
    assert bool(drained(made)) is drains


def stuck(step: str, status: OutcomeStatus = OutcomeStatus.HUNG, **more: Any) -> Outcome:
    crumb = {"step": step, "at_s": 0.1, "call": "cuInit"}
    return Outcome(status, breadcrumbs=(crumb,), duration_s=45.0, **more)


@pytest.mark.parametrize(
    ("end", "drains"),
    [
        ({"state": "D"}, True),
        ({"state": "D", "wchan": "nv_wait"}, True),
        ({"state": "S"}, False),
        ({"state": "R"}, False),
        ({"status": OutcomeStatus.DIED, "signal": "SIGSEGV"}, False),  # or its library
    ],
)
def test_a_driver_that_holds_a_process(end: dict[str, Any], drains: bool) -> None:
    by_nvml = two(stuck(STEP, **end))
    (found,) = report_of(by_nvml).root_causes
    assert (found.code, found.where.hosts) == ("gpu-unhealthy", ("nd1",))
    by_cuda = with_backend(two(state(1)), {8: stuck(DRIVER_STEP, **end)})
    (found,) = report_of(by_cuda).root_causes
    assert (found.code, found.where.ranks) == ("gpu-unhealthy", (8,))
    assert bool(drained(by_cuda)) is drains
    if end.get("signal") is None:
        assert bool(drained(by_nvml)) is drains
    asleep = state(1, [gpu(1, index, persistence=0) for index in range(8)])
    assert drained(with_backend(two(asleep), {8: stuck(DRIVER_STEP, **end)})) == ""


@each_row(
    ("end", "step"),
    product(
        [
            {"state": "T"},
            {"state": "D", "wchan": "rpc_wait_bit_killable"},
            {"status": OutcomeStatus.DIED, "signal": "SIGKILL"},
            {"status": OutcomeStatus.DIED, "signal": "SIGTERM"},
        ],
        [STEP, DRIVER_STEP, MULTIPLY],
    ),
)
def test_a_check_that_somebody_ended_blames_no_gpu(step: str, end: dict[str, Any]) -> None:
    if step == STEP:
        made = two(stuck(step, **end))
    elif step == DRIVER_STEP:
        made = with_backend(two(state(1)), {8: stuck(step, **end)})
    else:
        made = of_work({4: stuck(step, **end)})
    report = report_of(made)
    killed = end.get("signal") == "SIGKILL"
    assert [found.code for found in report.findings] == ["rank-killed"] * killed
    assert not any(found.has(Effect.DRAINS) for found in report.findings)
    assert Status.UNKNOWN in {result.status for result in report.checks}
    assert report.exit_code == 3
    assert drained(made) == ""


def cuda_fails(code: int, nd1: dict[str, Any]) -> Cluster:
    error = {"code": code, "name": f"CUDA_ERROR_{code}", "text": "x"}
    broken = {
        8 + local: seen_by_torch(1, local, devices=[], driver_error=error) for local in range(8)
    }
    return with_backend(two(nd1), {**torch_sees(1), **broken})


@pytest.mark.parametrize(("code", "drains"), [(214, True), (220, True), (999, False), (2, False),
                                              (304, False), (805, False)])  # fmt: skip
def test_an_error_of_cuda_drains_if_only_hardware_makes_it(code: int, drains: bool) -> None:
    made = cuda_fails(code, state(1))
    assert {found.code for found in report_of(made).root_causes} == {"gpu-unhealthy"}
    assert bool(drained(made)) is drains


@pytest.mark.parametrize(
    ("text", "drains"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: uncorrectable NVLink error detected during the execution", True),
        ("CUDA error: unspecified launch failure", False),  # of another program, with MPS
        ("CUDA error: gremlins", False),
    ],
)
def test_an_error_of_gpu_work(text: str, drains: bool) -> None:
    made = of_work({5: worked(5, error={"step": MULTIPLY, "text": text})})
    (found,) = report_of(made).root_causes
    assert (found.code, found.level, found.where.ranks) == ("gpu-unhealthy", Severity.FAIL, (5,))
    assert bool(drained(made)) is drains


def test_a_wrong_product_drains_if_another_gpu_of_the_model_got_it_right() -> None:
    bad = {"what": "product in bfloat16", "count": 3, "of": 16, "example": "element (0, 1) is 3"}
    assert drained(of_work({5: worked(5, wrong=[bad])}))
    # All of them alike: a library.
    assert drained(of_work({rank: worked(rank, wrong=[bad]) for rank in range(8)})) == ""


# fabric-manager-down ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manager", "drains"),
    [
        (DOWN, True),
        (RUNS, False),  # it is at it
        ({**DOWN, "up_s": 200}, False),  # the host was just started
        ({**DOWN, "running": None}, False),  # in a container
        (ELSEWHERE, False),  # a virtual machine, or a fabric that other hosts set up
        (None, False),
    ],
)
def test_a_fabric_that_is_not_set_up(manager: dict[str, Any] | None, drains: bool) -> None:
    gpus = [gpu(1, index, fabric=UNREGISTERED) for index in range(8)]
    made = two(state(1, gpus, fabric_manager=manager))
    (found,) = report_of(made).root_causes
    assert (found.code, found.level, found.where.hosts) == (
        "fabric-manager-down",
        Severity.FAIL,
        ("nd1",),
    )
    assert bool(drained(made)) is drains
    by_cuda = cuda_fails(802, state(1, fabric_manager=manager))
    codes = {found.code for found in report_of(by_cuda).root_causes}
    assert codes == {"fabric-manager-down"}
    assert bool(drained(by_cuda)) is drains


def test_a_registration_under_way_drains_nothing_and_one_that_failed_does() -> None:
    def of(fabric: dict[str, Any], manager: dict[str, Any]) -> Cluster:
        return two(with_gpu(3, gpu(1, 3, fabric=fabric), fabric_manager=manager))

    assert drained(of({**UNREGISTERED, "state": "IN_PROGRESS"}, DOWN)) == ""
    failed = {"state": "COMPLETED", "status": 999, "degraded": None}
    assert "failed (status 999)" in drained(of(failed, RUNS))
    assert drained(of(failed, ELSEWHERE)) == ""


def test_a_manager_of_another_version_drains_unless_it_did_its_work_before() -> None:
    misfit = {**DOWN, "misfit": ["570.1.1", "580.95.05"]}
    older = [gpu(1, index, fabric=None) for index in range(8)]  # A100: NVML does not tell
    made = two(state(1, older, fabric_manager=misfit))
    assert "does not fit driver 580.95.05" in drained(made)
    assert drained(two(state(1, fabric_manager=misfit))) == ""
    busy = state(1, older, fabric_manager=misfit, in_service=["nvidia-dkms-580"])
    assert drained(two(busy)) == ""


# nvswitch-error -----------------------------------------------------------------------------------


def test_an_error_of_an_nvswitch_drains_while_gpus_feel_it() -> None:
    fatal = {"switch": 0, "bus": "0000:c3:00.0", "sxid": 24007, "fatal": True, "link": None,
             "count": 1, "age_s": 5_000_000, "text": "x"}  # fmt: skip
    log = {"source": "/dev/kmsg", "reason": "", "xids": [], "sxids": [fatal]}
    old = two(state(1, kernel_log=log))
    (found,) = report_of(old).root_causes
    assert (found.code, found.level) == ("nvswitch-error", Severity.WARN)
    assert drained(old) == ""
    unhealthy = {"state": "COMPLETED", "status": 0, "degraded": False, "health_mask": 1 << 4}
    now = two(with_gpu(3, gpu(1, 3, fabric=unhealthy), kernel_log=log))
    assert drained(now).startswith("nccl-doctor: nvswitch-error on nd1: ")


# memory-failing -----------------------------------------------------------------------------------


def test_a_module_that_fails_now_drains_and_an_error_of_no_module_does_not(tmp_path: Path) -> None:
    from nccl_doctor.checks.hardware_errors import HardwareErrors

    quiet = watched(tree(tmp_path / "quiet"))

    def of(name: str, **more: Any) -> Cluster:
        def fails(root: Path) -> None:
            modules = {"dimm0": (1 if not more else 0, 7), "dimm1": (0, 0)}
            hardware.memory(root, modules, **more)

        return of_hardware(quiet, watched(tree(tmp_path / name), fails))

    assert drained(of("module"), HardwareErrors()).startswith("nccl-doctor: memory-failing on nd1")
    nobody = of("nobody", more=(1, 0))
    (found,) = report_of(nobody, HardwareErrors()).root_causes
    assert (found.code, found.level) == ("memory-failing", Severity.FAIL)
    assert drained(nobody, HardwareErrors()) == ""
    # Whatever was counted before the run began is old.
    assert drained(of_hardware(quiet, watched(tree(tmp_path / "old"))), HardwareErrors()) == ""


# AMD GPUs and DCGM --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"errors": {"correctable": 0, "uncorrectable": 9, "deferred": 0}},
        {"pages": {"reserved": 200, "pending": 0, "unreservable": 9}},
        {"refused": {"IO": ["memory", "temperature"]}},
        {"wedged": {"call": "x", "how": LATE, "state": "D", "wchan": "", "stopped_s": 0.0}},
    ],
)
def test_nothing_about_an_amd_gpu_takes_a_host_out_of_service(changes: dict[str, Any]) -> None:
    """No such fault was seen on hardware yet, nor what else looks like one."""
    cluster = amd_cluster(amd_state(0), amd_state(1, amd_gpu(1, 3, **changes)))
    report = report_of(cluster, AmdGpus())
    assert [found.where.hosts for found in report.root_causes if found.has(Effect.DRAINS)] == [
        ("nd1",)
    ]
    assert not drained(cluster, AmdGpus())


def test_nothing_that_dcgm_has_seen_takes_a_host_out_of_service() -> None:
    """It may be over, or the fault of another program."""
    seen = {"group": "GPU", "entity": "3", "system": "Memory system", "health": "Failure"}
    facts = {"overall": "Failure", "incidents": [{**seen, "words": "2 rows are pending"}]}
    cluster = make_cluster(["nd0", "nd1"], 8, check="dcgm", by_host={"nd1": facts}, backend="nccl")
    assert [found.code for found in report_of(cluster, Dcgm()).root_causes] == ["gpu-unhealthy"]
    assert not drained(cluster, Dcgm())
    result = {"test": "memory", "entity": "GPU 3", "status": "fail", "words": "7 faulty elements"}
    cluster = make_cluster(
        ["nd0", "nd1"],
        8,
        check="dcgm_diag",
        round_name=DIAGNOSE,
        by_host={
            "nd0": {"level": 2, "tests": 9, "results": []},
            "nd1": {"level": 2, "tests": 9, "results": [result]},
        },
        backend="nccl",
        job=Job(dcgm_level=2),
    )
    assert [found.code for found in report_of(cluster, DcgmDiag()).root_causes] == ["gpu-unhealthy"]
    assert not drained(cluster, DcgmDiag())
