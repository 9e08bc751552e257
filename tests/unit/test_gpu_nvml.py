"""The real nvidia-ml-py against a stand-in library, in real probe children."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Outcome, OutcomeStatus, Severity
from nccl_doctor.checks.gpu_state import GpuState
from nccl_doctor.checks.gpu_state.gather import gather_gpus
from nccl_doctor.checks.mnnvl import Mnnvl
from nccl_doctor.toolkit.gpu.nvml import STEP
from tests.nvml.stand_in import (
    Machine,
    build,
    gathered,
    h100s,
    observe,
    small_process,
    uuid,
    write,
)
from tests.ranks.ranks import descendants
from tests.support import limited
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.racks import rack

CHECK = GpuState()
GIB = 1 << 30
DEADLINE_S = 2.0
SLACK_S = 2.5  # examining a stuck child, killing it, and a busy machine
LATER_S = 6.0
"""What is kept of the deadline for what comes after the GPUs."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build(tmp_path_factory.mktemp("nvml"))
    small_process()  # no test is to find it among what was left behind
    return built


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("old-nvml"), "-DOLD_DRIVER")


def quiet_root(folder: Path) -> Path:
    """A machine with a kernel log that may be read, and nothing in it."""
    made = folder / "root"
    (made / "dev").mkdir(parents=True)
    (made / "dev/kmsg").write_text("")
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return quiet_root(tmp_path)


def look(library: Path, root: Path, machine: Machine, deadline_s: float = 20.0) -> Outcome:
    return gathered(library, write(machine, root.with_name("machine")), root, deadline_s + LATER_S)


@pytest.fixture
def see(library: Path, root: Path) -> Callable[..., Outcome]:
    return functools.partial(look, library, root)


@pytest.fixture(scope="module")
def healthy(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return look(library, quiet_root(tmp_path_factory.mktemp("healthy")), h100s())


FEW = 5
"""GPUs of a host with one that differs; each is read in a process of its own. Of fewer, the pairs
with one GPU would be half of all.
"""


@pytest.fixture(scope="module")
def few(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return look(library, quiet_root(tmp_path_factory.mktemp("few")), h100s(FEW))


def two_hosts(
    of_second: Outcome, of_first: Outcome | None = None, ranks: int = 8, **fields: Any
) -> Cluster:
    """nd0 with what a healthy host observed, unless said otherwise, and nd1."""
    by_host: dict[str, Any] = {"nd1": of_second}
    if of_first is not None:
        by_host["nd0"] = of_first
    fields = {"backend": "nccl", **fields}
    return make_cluster(["nd0", "nd1"], ranks, check="gpu_state", by_host=by_host, **fields)


def test_a_healthy_machine_is_described_and_gives_no_finding(see: Any) -> None:
    outcome = see(h100s())
    assert outcome.status is OutcomeStatus.OK, outcome
    facts = outcome.facts
    assert (facts["driver"], facts["nvml"], facts["cuda"]) == ("580.95.05", "13.580.95.05", "13.0")
    assert [gpu["uuid"] for gpu in facts["gpus"]] == [uuid(index) for index in range(8)]
    gpu = facts["gpus"][3]
    assert gpu["bus_id"] == "0000:1b:00.0"
    assert gpu["name"] == "NVIDIA H100 80GB HBM3"
    assert gpu["memory"] == {"total": 80 * GIB, "used": GIB}
    assert gpu["remapped"] == {"corrected": 0, "uncorrected": 0, "pending": 0, "failed": 0}
    assert gpu["fabric"] == {
        "state": "COMPLETED", "status": 0, "degraded": False, "health_mask": 0,
        "cluster_uuid": None, "clique": 0,
    }  # fmt: skip
    assert gpu["chassis"] is None
    assert gpu["nvlinks"] == [1] * 18
    assert gpu["nvlink_errors"] == {"replay": 0, "recovery": 0, "crc_flit": 0}
    assert (gpu["temperature"], gpu["recovery_action"], gpu["ecc"]) == (33, "NONE", [1, 1])
    # What this machine's driver does not say is a fact about that field.
    assert set(gpu["refused"]) == {"NOT_SUPPORTED"}
    assert "retired_pages" in gpu["refused"]["NOT_SUPPORTED"]
    assert len(facts["p2p"]["OK"]) == len(facts["nearest"]["SYSTEM"]) == 28
    assert len(json.dumps(facts)) < 20_000
    assert judge(CHECK, two_hosts(outcome, outcome)) == []


def test_the_place_in_an_nvlink_domain_of_several_hosts_is_read(see: Any) -> None:
    machine = h100s(2)
    machine["0"] |= {"fabric": "3 0 0 7 171", "nvmlDeviceGetPlatformInfo": "1821024190001"}
    machine["1"] |= {"fabric": "2 0 0 0 0", "nvmlDeviceGetPlatformInfo": "0000000000"}
    first, second = see(machine).facts["gpus"]
    domain = "abababab-abab-abab-abab-abababababab"
    assert (first["fabric"]["cluster_uuid"], first["fabric"]["clique"]) == (domain, 7)
    # The serial number itself is in no report.
    assert first["chassis"] == hashlib.sha256(b"1821024190001").hexdigest()[:12]
    assert (second["fabric"]["state"], second["fabric"]["cluster_uuid"]) == ("IN_PROGRESS", None)
    assert second["chassis"] is None


def test_a_host_in_another_clique_of_the_domain_is_named(see: Any) -> None:
    usual, odd = h100s(2), h100s(2)
    for machine, clique in ((usual, 7), (odd, 8)):
        for gpu in machine.values():
            gpu["fabric"] = f"3 0 0 {clique} 171"
    seen, apart = see(usual), see(odd)
    found = only(Mnnvl(), rack(seen, seen, apart), "nvlink-domain-split", hosts=["nd2"])
    assert found.message.endswith(": 2 hosts in clique 7, 1 host in clique 8")
    assert judge(Mnnvl(), rack(seen, seen, seen)) == []
    assert judge(CHECK, rack(seen, seen, apart)) == []


def test_links_of_grace_blackwell_are_read(see: Any) -> None:
    machine = h100s(1)
    gpu = machine["0"]
    for key in [key for key in gpu if key.startswith("nvmlDeviceGetNvLinkErrorCounter")]:
        del gpu[key]
    field = "nvmlDeviceGetFieldValues"
    gpu |= {"nvmlDeviceGetGspFirmwareMode": "1 1", f"{field}.170": 3, f"{field}.171": 1}
    gpu |= {f"{field}.171.1": 1, f"{field}.171.2": 0}
    # Link 0 has no number in the key; link 3 counts more than 32 bits hold, the others nothing.
    gpu |= {f"{field}.214": 1, f"{field}.214.5": 2, f"{field}.219.3": 1 << 33}
    (seen,) = see(machine).facts["gpus"]
    assert (seen["gsp"], seen["c2c"]) == ([1, 1], [1, 1, 0])
    assert seen["nvlink_errors"] == {"recovery_failed": 3, "effective": 1 << 33}


def test_an_old_driver_lacks_functions_and_is_read_all_the_same(
    old_library: Path, root: Path, tmp_path: Path
) -> None:
    machine = h100s(2)
    machine["0"]["processes"] = f"77 {GIB}"
    file = write(machine, tmp_path / "machine")
    outcome = observe(old_library, file, lambda crumb: gather_gpus(crumb, root))
    gpu = outcome.facts["gpus"][0]
    assert (gpu["throttle"], gpu["fabric"]["state"]) == (1, "COMPLETED")
    assert gpu["fabric"]["degraded"] is None
    assert gpu["processes"] == [{"pid": 77, "bytes": GIB, "name": None, "here": False}]


def break_gpu(index: int, **calls: Any) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        machine[str(index)].update({key.replace("__", "."): value for key, value in calls.items()})

    return change


def lonely(machine: Machine) -> None:
    """GPU 2 reaches no other."""
    for one in range(FEW):
        for other in range(one + 1, FEW):
            if 2 in (one, other):
                machine[str(one)][f"nvmlDeviceGetP2PStatus.{other}.0"] = 1


def link_down(machine: Machine) -> None:
    machine["1"].update({f"nvmlDeviceGetNvLinkState.{link}": 0 for link in (3, 4)})


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        (break_gpu(3, nvmlDeviceGetTemperature__0="!15"), "gpu-lost 3 fail", "GPU_IS_LOST"),
        (break_gpu(2, nvmlDeviceGetRemappedRows="0 1 1 0", nvmlDeviceGetTotalEccErrors__1__0=4),
         "gpu-unhealthy 2 fail", "4 uncorrected ECC errors, and bad memory"),
        (break_gpu(2, nvmlDeviceGetTotalEccErrors__1__0=4),
         "gpu-unhealthy 2 warn", "4 uncorrected ECC errors since"),
        (break_gpu(2, nvmlDeviceGetRemappedRows="0 1 0 1"), "gpu-unhealthy 2 fail", "spare"),
        (break_gpu(2, nvmlDeviceGetRemappedRows="0 1 1 0"), "gpu-unhealthy 2 warn", "remapped"),
        (break_gpu(3, nvmlDeviceGetFieldValues__230=2), "gpu-unhealthy 3 fail", "node reboot"),
        (break_gpu(3, nvmlDeviceGetName="!16"), "gpu-unhealthy 3 fail", "RESET_REQUIRED"),
        (break_gpu(3, nvmlDeviceGetComputeMode=2), "gpu-unhealthy 3 fail", "Prohibited"),
        (break_gpu(1, nvmlDeviceGetMemoryInfo="!999"), "gpu-unhealthy 1 fail", "UNKNOWN"),
        (break_gpu(0, throttle=0x48, **{"nvmlDeviceGetTemperature__0": 93}),
         "gpu-throttled 0 warn", "hardware: the GPU is too hot"),
        (break_gpu(0, throttle=0x88), "gpu-throttled 0 warn", "power brake"),
        (break_gpu(0, nvmlDeviceGetApplicationsClock__1=1095), "gpu-clocks-limited 0 warn",
         "applications clocks: SM clock at most 1095 of 1980 MHz"),
        (break_gpu(0, throttle=0x02), "gpu-clocks-limited 0 warn", "clocks that somebody set"),
        (break_gpu(0, nvmlDeviceGetVirtualizationMode=2), "gpu-virtual 0 info", "vGPU"),
        (lonely, "gpu-p2p-unavailable 2 warn", "no direct access between GPU 2 and "
         "any other GPU of the host (the driver: the chipset does not support it)"),
        (link_down, "nvlink-down 1 warn", "16 NVLinks are up, 18 on another GPU"),
        (break_gpu(1, nvmlDeviceGetNvLinkErrorCounter__2__1=9), "nvlink-errors 1 warn",
         "recovered 9 times"),
        (break_gpu(0, fabric="1 0 0"), "fabric-manager-down 0 fail", "not started"),
        (break_gpu(0, fabric="3 999 0"), "fabric-manager-down 0 fail", "status 999"),
        (break_gpu(0, fabric="3 0 1"), "nvlink-down 0 warn", "less bandwidth"),
        (break_gpu(0, fabric="3 0 18"), "nvlink-down 0 warn", "unhealthy routes for this GPU"),
        (break_gpu(2, nvmlDeviceGetCurrPcieLinkWidth=8), "pcie-degraded 2 warn", "x8 of x16"),
        (break_gpu(2, nvmlDeviceGetCurrPcieLinkGeneration=1), "pcie-degraded 2 warn",
         "generation 1 of 5"),
        (break_gpu(0, nvmlDeviceGetMemoryInfo=f"{80 * GIB} {70 * GIB} {10 * GIB}"),
         "gpu-busy 0 warn", "10 of 80 GiB in use, but no process"),
        (break_gpu(0, nvmlDeviceGetMemoryInfo=f"{80 * GIB} {2 * GIB} {78 * GIB}"),
         "gpu-busy 0 fail", "78 of 80 GiB"),
        (break_gpu(3, nvmlDeviceGetPowerManagementLimit=300000), "gpu-differs 3 warn",
         "power limit 300 W; the other GPUs of the host have power limit 700 W"),
        (break_gpu(3, nvmlDeviceGetVbiosVersion="96.00.30.00.01"), "gpu-differs 3 info",
         "VBIOS 96.00.30.00.01"),
    ],
)  # fmt: skip
def test_one_bad_gpu_of_one_host(
    see: Any, few: Outcome, change: Callable[[Machine], None], place: str, words: str
) -> None:
    code, index, severity = place.split()
    machine = h100s(FEW)
    change(machine)
    outcome = see(machine)
    assert outcome.status is OutcomeStatus.OK, outcome
    cluster = two_hosts(outcome, few, FEW)
    found = only(CHECK, cluster, code, hosts=["nd1"], devices=[uuid(int(index))])
    assert words in found.message
    assert found.level is Severity(severity)
    assert "BUS_ID" not in (found.fix or found.kind.fix)
    works = {
        "4 uncorrected ECC errors since": "had errors",
        "Prohibited": "A setting",
        "less bandwidth": "less than it should",
    }
    assert works.get(words, "") in found.kind.title


def test_the_same_on_all_gpus_of_a_host_is_one_finding(see: Any) -> None:
    machine = h100s()
    for index in range(8):
        break_gpu(index, throttle=0x40, nvmlDeviceGetFieldValues__230=1)(machine)
        machine[str(index)]["nvmlDeviceGetTemperature.0"] = 80 + index
    findings = judge(CHECK, two_hosts(see(machine)))
    assert {finding.code for finding in findings} == {"gpu-throttled", "gpu-unhealthy"}
    assert len(findings) == 2
    for finding in findings:
        assert finding.where.devices == tuple(uuid(index) for index in range(8))
    fixes = " ".join(finding.fix for finding in findings)
    assert "0000:18:00.0,0000:19:00.0" in fixes


def test_over_gloo_the_job_starts_without_its_gpus(see: Any) -> None:
    machine = h100s(2)
    machine["1"]["nvmlDeviceGetUUID"] = "!15"
    (found,) = judge(CHECK, two_hosts(see(machine), backend="gloo"))
    assert (found.code, found.level, found.where.devices) == ("gpu-lost", Severity.WARN, ("GPU 1",))


def test_a_gpu_off_the_bus_has_no_handle_and_its_xid_is_told(see: Any, root: Path) -> None:
    machine = h100s()
    machine["3"] = {"nvmlDeviceGetHandleByIndex_v2": "!15"}
    (root / "dev/kmsg").write_text(
        "4,901,77000000,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\n"
    )
    outcome = see(machine)
    found = only(CHECK, two_hosts(outcome), "gpu-lost", hosts=["nd1"], devices=["GPU 3"])
    assert "Xid 79 (the GPU has fallen off the PCIe bus)" in found.message
    assert found.evidence["gpus"][0]["xids"][0]["bus"] == "0000:1b:00"


@pytest.mark.parametrize("how", ["!wedge", "!die"])
def test_a_call_that_never_returns_costs_the_deadline_of_its_gpu_and_the_others_go_on(
    see: Any, healthy: Outcome, how: str
) -> None:
    machine = h100s()
    machine["3"]["nvmlDeviceGetPersistenceMode"] = how
    machine["5"]["nvmlDeviceGetRemappedRows"] = "0 1 0 1"
    started = time.monotonic()
    outcome = see(machine, DEADLINE_S)
    assert time.monotonic() - started < DEADLINE_S + SLACK_S
    assert outcome.status is OutcomeStatus.OK, outcome
    gpus = outcome.facts["gpus"]
    assert [gpu["index"] for gpu in gpus] == list(range(8))
    assert [gpu.get("name") is None for gpu in gpus] == [index == 3 for index in range(8)]
    stuck = gpus[3]["wedged"]
    assert stuck["call"] == "nvmlDeviceGetPersistenceMode"
    assert len(outcome.facts["p2p"]["OK"]) == 21  # each two of the seven
    findings = judge(CHECK, two_hosts(outcome, healthy))
    assert {(found.code, found.where.devices) for found in findings} == {
        ("gpu-lost", (uuid(3),)),
        ("gpu-unhealthy", (uuid(5),)),
    }
    (lost,) = [found for found in findings if found.code == "gpu-lost"]
    assert lost.where.hosts == ("nd1",)
    assert lost.level is Severity.FAIL
    words = "did not return within" if how == "!wedge" else "killed the process, SIGABRT"
    assert lost.message.startswith(f"nvmlDeviceGetPersistenceMode {words}")
    assert ("process state S" in lost.message) is (how == "!wedge")


def test_nothing_of_a_wedged_gpu_is_left_behind(see: Any) -> None:
    machine = h100s(2)
    machine["1"]["nvmlDeviceGetName"] = "!wedge"
    before = set(descendants(os.getpid()))
    see(machine, 1.0)
    assert set(descendants(os.getpid())) <= before


def test_a_library_that_never_starts_is_of_the_host(
    library: Path, root: Path, tmp_path: Path
) -> None:
    machine = h100s()
    machine["-"]["nvmlInitWithFlags"] = "!wedge"
    file = write(machine, tmp_path / "machine")
    outcome = observe(library, file, lambda crumb: gather_gpus(crumb, root), DEADLINE_S)
    assert outcome.status is OutcomeStatus.HUNG
    last = outcome.breadcrumbs[-1]
    assert (last["step"], last["call"]) == (STEP, "nvmlInit")
    found = only(CHECK, two_hosts(outcome), "gpu-unhealthy", hosts=["nd1"])
    assert "nvmlInit did not return" in found.message


def test_a_library_that_kills_the_process_is_of_the_host(see: Any) -> None:
    machine = h100s()
    machine["-"]["nvmlInitWithFlags"] = "!die"
    found = only(CHECK, two_hosts(see(machine)), "gpu-unhealthy", hosts=["nd1"])
    assert found.message == "nvmlInit: killed the process, SIGABRT"


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (9, OutcomeStatus.SKIPPED, "no NVIDIA GPU here, and the NVIDIA driver cannot be"),
        (18, OutcomeStatus.UNTESTED, "another version than the kernel driver"),
        (4, OutcomeStatus.UNTESTED, "NO_PERMISSION"),
    ],
)
def test_a_library_that_does_not_start(
    see: Any, error: int, status: OutcomeStatus, words: str
) -> None:
    outcome = see({"-": {"nvmlInitWithFlags": f"!{error}"}})
    assert outcome.status is status
    assert words in outcome.reason


def test_gpus_on_the_bus_without_a_driver(see: Any, root: Path) -> None:
    for number in range(3):
        device = root / f"sys/bus/pci/devices/0000:1{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
    (device / "driver").symlink_to("/sys/bus/pci/drivers/vfio-pci")
    outcome = see({"-": {"nvmlInitWithFlags": "!9"}})
    found = only(CHECK, two_hosts(outcome), "gpu-unhealthy", hosts=["nd1"])
    assert found.message.startswith("2 NVIDIA GPUs on the PCI bus, but no driver")


def test_a_driver_without_gpus_is_skipped(see: Any) -> None:
    outcome = see({"-": {"nvmlDeviceGetCount_v2": 0}})
    assert (outcome.status, outcome.reason) == (
        OutcomeStatus.SKIPPED,
        "the NVIDIA driver shows no GPU here",
    )


def run_by(root: Path, **processes: str) -> None:
    """Make processes `p41="python"`; `kthreadd` is seen by who sees all processes."""
    for pid, name in processes.items():
        (root / f"proc/{pid[1:]}").mkdir(parents=True)
        (root / f"proc/{pid[1:]}/comm").write_text(f"{name}\n")


def test_a_driver_without_gpus_where_device_files_are_is_unknown(see: Any, root: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (root / "dev" / name).write_text("")
    outcome = see({"-": {"nvmlDeviceGetCount_v2": 0}})
    assert outcome.status is OutcomeStatus.UNTESTED
    begin = "2 device files of NVIDIA GPUs here, and the driver shows no GPU; "
    assert outcome.reason.startswith(f"{begin}none is on the PCI bus: the files are left over, or")
    (root / "proc/driver/nvidia/gpus/0000:18:00.0").mkdir(parents=True)
    outcome = see({"-": {"nvmlDeviceGetCount_v2": 0}})
    assert outcome.status is OutcomeStatus.UNTESTED
    assert outcome.reason.startswith(f"{begin}they did not start, or were taken off the bus: ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_device_files_that_may_not_be_opened_are_the_reason(library: Path, root: Path) -> None:
    """As in a container whose control group lost the devices, or for a user without the group."""
    (root / "dev/nvidia0").write_text("")
    (root / "dev/nvidia0").chmod(0o400)
    os.chown(root / "dev/nvidia0", 65533, 65533)

    def as_any_user(crumb: Callable[..., None]) -> Mapping[str, Any]:
        limited.keep_rights(limited.DAC_READ_SEARCH)
        return gather_gpus(crumb, root)

    file = write({"-": {"nvmlDeviceGetCount_v2": 0}}, root.with_name("machine"))
    outcome = observe(library, file, as_any_user)
    assert outcome.status is OutcomeStatus.UNTESTED
    assert "/dev/nvidia0 may not be opened here: start the container again" in outcome.reason


def test_own_processes_and_those_of_mps_are_nobody_else(see: Any, root: Path) -> None:
    run_by(root, p2="kthreadd", p41="ncd:backend_de", p42="nvidia-cuda-mps", p43="python")
    machine = h100s(1)
    machine["0"]["processes"] = f"41 {GIB} 42 {GIB} 1008 {GIB}"  # 1008: a rank of nd1
    outcome = see(machine)
    assert judge(CHECK, two_hosts(outcome)) == []
    machine["0"]["processes"] += f" 43 {GIB}"
    found = only(CHECK, two_hosts(see(machine)), "gpu-busy", hosts=["nd1"], devices=[uuid(0)])
    assert "pid 43 (python) uses it" in found.message
    assert [step.command for step in found.fix.steps] == [
        "ps -o user,pid,lstart,args -p 43",
        "kill 43",
    ]


def test_a_process_without_a_name_on_a_host_that_sees_all(see: Any, root: Path) -> None:
    run_by(root, p2="kthreadd")
    machine = h100s()
    machine["0"]["processes"] = f"1 {40 * GIB}"
    found = only(CHECK, two_hosts(see(machine)), "gpu-busy", hosts=["nd1"], devices=[uuid(0)])
    assert "pid 1 (" in found.message
    assert found.level is Severity.WARN


def test_process_ids_of_the_host_blame_nobody_in_a_container(see: Any, root: Path) -> None:
    """Our own ranks, by the numbers that they have outside, one of which is another's in here."""
    run_by(root, p1="bash", p43="python")
    (root / "proc/43/fd").mkdir()
    (root / "proc/43/fd/3").symlink_to("/var/log/syslog")
    machine = h100s()
    for index in range(8):
        machine[str(index)]["processes"] = f"43 {GIB} {90000 + index} {GIB}"
    outcome = see(machine)
    assert (outcome.status, outcome.reason) == (OutcomeStatus.OK, "")
    assert judge(CHECK, two_hosts(outcome)) == []
    # what is in use beside our own work is somebody's all the same
    machine["5"]["nvmlDeviceGetMemoryInfo"] = f"{80 * GIB} {2 * GIB} {78 * GIB}"
    found = only(CHECK, two_hosts(see(machine)), "gpu-busy", hosts=["nd1"], devices=[uuid(5)])
    assert found.level is Severity.FAIL
    assert "78 of 80 GiB in use, but no process is visible from here" in found.message


def test_a_process_of_the_same_container_is_named(see: Any, root: Path) -> None:
    run_by(root, p1="bash", p43="python")
    (root / "proc/43/fd").mkdir()
    (root / "proc/43/fd/3").symlink_to("/dev/nvidia0")
    machine = h100s()
    machine["0"]["processes"] = f"43 {GIB}"
    found = only(CHECK, two_hosts(see(machine)), "gpu-busy", hosts=["nd1"], devices=[uuid(0)])
    assert "pid 43 (python) uses it" in found.message


def test_who_uses_a_gpu_is_not_known_without_process_ids_of_ours_and_memory(
    library: Path, root: Path
) -> None:
    machine = h100s(2)
    machine["1"] |= {"processes": f"90001 {GIB}", "nvmlDeviceGetMemoryInfo": "!3"}
    file = write(machine, root.with_name("machine"))
    context = Context(launch=Launch(), env={}, root=root)
    outcome = observe(
        library, file, lambda crumb: CHECK.observe(replace(context, breadcrumb=crumb))
    )
    assert outcome.reason == (
        "whether others use GPU 1 is not known: NVML gives process ids that are not of this PID "
        "namespace, and not how much memory is in use"
    )
    assert judge(CHECK, two_hosts(outcome)) == []


def test_without_any_library_the_check_is_skipped(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a GPU")

    def look(crumb: Callable[..., None]) -> Mapping[str, Any]:
        return gather_gpus(crumb, tmp_path)

    libc = Path("libc.so.6")  # any library: nothing stands in here

    def without_bindings(crumb: Callable[..., None]) -> Mapping[str, Any]:
        sys.modules["pynvml"] = None  # type: ignore[assignment]
        return gather_gpus(crumb, tmp_path)

    reason = observe(libc, tmp_path / "none", without_bindings).reason
    assert (
        reason == "no NVIDIA GPU here, and nvidia-ml-py is not installed (python -m pip install "
        "nvidia-ml-py)"
    )
    outcome = observe(libc, tmp_path / "none", look)
    assert outcome.status is OutcomeStatus.SKIPPED
    assert outcome.reason == "no NVIDIA GPU here, and libnvidia-ml.so.1 is not installed here"
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/kfd").write_text("")
    (tmp_path / "dev/dri/renderD128").write_text("")
    outcome = observe(libc, tmp_path / "none", look)
    assert outcome.status is OutcomeStatus.SKIPPED
    assert outcome.reason == "no NVIDIA GPU here; check amd_gpus reads the state of AMD GPUs"
    (tmp_path / "dev/nvidia0").write_text("")  # an AMD CPU with graphics, and a GPU of NVIDIA
    for work, words in (
        (look, "libnvidia-ml.so.1 is not installed here (in a container: NVIDIA_DRIVER_CAPABILIT"),
        (without_bindings, "1 NVIDIA GPU is here, and the bindings to read their state are not "
         "installed: python -m pip install nvidia-ml-py"),
    ):  # fmt: skip
        outcome = observe(libc, tmp_path / "none", work)
        assert outcome.status is OutcomeStatus.UNTESTED
        assert outcome.reason.startswith(words)


def test_gpus_without_bindings_are_seen_by_the_kernel_and_in_a_container_by_their_files(
    tmp_path: Path,
) -> None:
    def without_bindings(crumb: Callable[..., None]) -> Mapping[str, Any]:
        sys.modules["pynvml"] = None  # type: ignore[assignment]
        return gather_gpus(crumb, tmp_path)

    device = tmp_path / "sys/bus/pci/devices/0000:18:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    libc = Path("libc.so.6")
    outcome = observe(libc, tmp_path / "none", without_bindings)
    assert outcome.status is OutcomeStatus.SKIPPED, "a container that was given none"
    (tmp_path / "proc/2").mkdir(parents=True)
    (tmp_path / "proc/2/comm").write_text("kthreadd\n")
    outcome = observe(libc, tmp_path / "none", without_bindings)
    assert outcome.status is OutcomeStatus.UNTESTED
    assert outcome.reason.startswith("1 NVIDIA GPU is here, ")
    for bus in ("18", "19"):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{bus}:00.0").mkdir(parents=True)
    assert observe(libc, tmp_path / "none", without_bindings).reason.startswith(
        "2 NVIDIA GPUs are here, and the bindings"
    )


def test_the_check_itself_observes_this_machine() -> None:
    context = Context(launch=Launch(), env={})
    outcome = observe(
        Path("libc.so.6"), Path("none"), lambda crumb: CHECK.observe(context), deadline_s=45.0
    )
    assert outcome.status in (OutcomeStatus.OK, OutcomeStatus.SKIPPED), outcome
