"""Check amd_gpus against a stand-in library of each layout, in real probe children."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import (
    Cluster,
    Context,
    Finding,
    Launch,
    Outcome,
    OutcomeStatus,
    Severity,
    Skip,
)
from nccl_doctor.checks.amd_gpus import AmdGpus
from nccl_doctor.checks.amd_gpus.gather import gather_amd
from nccl_doctor.toolkit.gpu.nvml import STEP
from nccl_doctor.toolkit.gpu.unread import why_unread
from tests.amdsmi.stand_in import (
    GIB,
    Machine,
    build,
    bus,
    gathered,
    host,
    mi300x,
    observe,
    uuid,
    write,
)
from tests.support.clusters import make_cluster
from tests.support.findings import judge

CHECK = AmdGpus()
DEADLINE_S = 2.0
SLACK_S = 2.5  # examining a stuck child, killing it, and a busy machine
LATER_S = 6.0
"""What is kept of the deadline for what comes after the GPUs."""
LAYOUTS = {
    "6.3": ("-DRELEASE=24",),
    "6.4.0": ("-DRELEASE=25", "-DSHORT_PROCESS=1"),
    "6.4": ("-DRELEASE=25",),
    "7": ("-DRELEASE=26",),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("amdsmi"))


@pytest.fixture(scope="module")
def of_release(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The library of a release, built once."""
    return functools.cache(
        lambda release: build(tmp_path_factory.mktemp("release"), *LAYOUTS[release])
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return host(tmp_path / "root", "renderD128")


def look(library: Path, root: Path, machine: Machine, deadline_s: float = 20.0) -> Outcome:
    file = write(machine, root.with_name("machine"))
    return gathered(library, file, root, deadline_s + LATER_S)


@pytest.fixture
def see(library: Path, root: Path) -> Callable[..., Outcome]:
    return functools.partial(look, library, root)


def one_host(seen: Outcome, **fields: Any) -> Cluster:
    return make_cluster(
        ["nd0"], 8, check="amd_gpus", by_host={"nd0": seen}, backend="nccl", **fields
    )


def the_one(seen: Outcome) -> Finding:
    """The only finding on a host."""
    (found,) = judge(CHECK, one_host(seen))
    return found


@pytest.mark.parametrize("release", LAYOUTS)
def test_a_healthy_machine_is_described_alike_by_every_release(
    release: str, of_release: Callable[[str], Path], root: Path
) -> None:
    machine = mi300x()
    machine["2"]["processes"] = f"4711 {3 * GIB} 4712 {5 * GIB}"
    machine["3"]["processes"] = f"4713 {GIB}"
    seen = look(of_release(release), root, machine)
    assert seen.status is OutcomeStatus.OK, seen
    facts = seen.facts
    assert (facts["driver"], len(facts["gpus"]), facts["hidden"]) == ("6.12.12", 8, 0)
    assert [gpu["bus_id"] for gpu in facts["gpus"]] == [bus(index) for index in range(8)]
    gpu = facts["gpus"][2]
    assert (gpu["uuid"], gpu["name"]) == (uuid(2), "AMD Instinct MI300X OAM")
    assert gpu["memory"] == {"total": 192 * GIB, "used": 300 << 20}
    assert (gpu["temperature"], gpu["slowdown_temperature"]) == (41, 100)
    assert (gpu["memory_temperature"], gpu["memory_max_temperature"]) == (35, 105)
    assert gpu["errors"] == {"correctable": 0, "uncorrectable": 0, "deferred": 0}
    assert gpu["pages"] == {"reserved": 0, "pending": 0, "unreservable": 0}
    assert gpu["pcie"] == {"width": 16, "max_width": 16, "speed": 32000, "max_speed": 32000}
    assert (gpu["power_limit_mw"], gpu["default_power_limit_mw"]) == (750_000, 750_000)
    assert (gpu["max_sm_clock_mhz"], gpu["level"], gpu["throttle"]) == (2100, "auto", [])
    assert (gpu["compute_partition"], gpu["memory_partition"]) == ("SPX", "NPS1")
    assert gpu["xgmi_peers"] == 7
    assert [(one["pid"], one["bytes"]) for one in gpu["processes"]] == [
        (4711, 3 * GIB),
        (4712, 5 * GIB),
    ]
    assert [one["pid"] for one in facts["gpus"][3]["processes"]] == [4713]
    newer = release != "6.3"  # which knows neither the threshold nor the state of links
    assert gpu["xgmi_links"] == ([*["up"] * 7, "disabled"] if newer else None)
    assert gpu["most_pages"] == (128 if newer else None)
    assert set(gpu["refused"]) == (set() if newer else {"FUNCTION_NOT_FOUND"})


@pytest.mark.parametrize("release", LAYOUTS)
def test_heat_is_read_at_its_place_in_every_release(
    release: str, of_release: Callable[[str], Path], root: Path
) -> None:
    machine = mi300x(2)
    machine["1"]["violations"] = "255 1 0 0 1"  # the power limit under load is normal
    seen = look(of_release(release), root, machine)
    assert [gpu["throttle"] for gpu in seen.facts["gpus"]] == [[], ["ppt", "hbm"]]
    found = the_one(seen)
    assert (found.code, found.level) == ("gpu-throttled", Severity.WARN)
    assert (found.message, found.where.devices) == ("its memory is too hot", (uuid(1),))


def test_a_healthy_machine_gives_no_finding(see: Any) -> None:
    assert not judge(CHECK, one_host(see(mi300x())))


@pytest.mark.parametrize(
    ("answers", "code", "severity", "words"),
    [
        ({"ecc": "7 2 0"}, "gpu-unhealthy", Severity.WARN, "2 uncorrected ECC errors since the"),
        ({"ecc": "900 0 0"}, "", None, ""),  # corrected: nothing was lost
        ({"ecc": "0 0 3"}, "gpu-unhealthy", Severity.INFO, "3 deferred ECC errors"),
        ({"pages": "RRPF"}, "gpu-unhealthy", Severity.WARN, "1 bad page of memory could not be"),
        ({"pages": "RRRP"}, "", None, ""),  # the driver took them out of use, or is about to
        (
            {"pages": "R" * 128},
            "gpu-unhealthy",
            Severity.WARN,
            "128 bad pages of memory, and from 128 on the driver does not start the GPU again",
        ),
        ({"ecc.0x80": "5 1 0"}, "xgmi-errors", Severity.WARN, "1 uncorrected error of xGMI"),
        ({"links": "UDUX"}, "xgmi-down", Severity.WARN, "2 of 3 xGMI links are up; down: 1"),
        ({"violations": "1 0 0 0 0"}, "gpu-throttled", Severity.WARN, "the board demands it"),
        ({"temperature.1.0": 104}, "gpu-throttled", Severity.WARN, "the GPU is too hot (104 °C"),
        ({"level": 1}, "gpu-clocks-limited", Severity.WARN, "performance level low"),
        ({"level": 8}, "gpu-clocks-limited", Severity.WARN, "performance level determinism"),
        ({"pcie": "16 32000 8 32000"}, "pcie-degraded", Severity.WARN, "8 of 16 lanes"),
        ({"pcie": "16 32000 16 16000"}, "pcie-degraded", Severity.WARN, "16000 of 32000 MT/s"),
        ({"power_cap": "500000000 750000000"}, "gpu-differs", Severity.WARN, "power limit 500 W"),
        ({"memory_partition": "NPS4"}, "gpu-differs", Severity.WARN, "memory partition NPS4"),
        ({"memory_total": 128 * GIB}, "gpu-differs", Severity.WARN, "memory 128.0 GiB"),
        ({"temperature.1.0": "!12"}, "gpu-unhealthy", Severity.WARN, "the driver answers IO for"),
        ({"temperature.1.0": "!30"}, "gpu-state-unread", Severity.INFO, "temperature (BUSY)"),
        ({"ecc": "!10"}, "gpu-state-unread", Severity.INFO, "not read: errors (NO_PERM)"),
        ({"pages": "!2"}, "", None, ""),  # a GPU without RAS
    ],
)
def test_what_ails_one_gpu_is_named_and_no_other_is(
    see: Any, answers: dict[str, Any], code: str, severity: Severity | None, words: str
) -> None:
    machine = mi300x(4)  # each is read in a process of its own
    machine["2"].update(answers)
    found = judge(CHECK, one_host(see(machine)))
    if not code:
        assert not found
        return
    named = {each.code: each for each in found}
    first = named.pop(code)
    assert set(named) <= {"gpu-state-unread"}
    assert words in first.message
    assert (first.level, first.where.devices) == (severity, (uuid(2),))
    assert not first.drains


def test_a_gpu_that_reaches_fewer_others_over_xgmi_is_named_where_links_cannot_be_read(
    of_release: Callable[[str], Path], root: Path
) -> None:
    machine = mi300x()
    for other in range(8):
        machine["6"][f"link_type.{other}"] = 1
        machine[str(other)]["link_type.6"] = 1
    seen = look(of_release("6.3"), root, machine)
    found = the_one(seen)
    assert (found.code, found.where.devices) == ("xgmi-down", (uuid(6),))
    assert found.message.startswith(
        "it reaches 0 other GPUs over xGMI; most GPUs of the host reach 6"
    )


def test_links_that_all_gpus_lack_are_the_design(see: Any) -> None:
    machine = mi300x()
    for index in range(8):
        machine[str(index)].update({"links": "UUUDDDDX", "link_type": 1})
    assert not judge(CHECK, one_host(see(machine)))


def test_a_gpu_that_never_answers_is_likely_lost_and_the_others_are_read(see: Any) -> None:
    machine = mi300x()
    machine["3"]["memory_total"] = "!wedge"
    started = time.monotonic()
    seen = see(machine, DEADLINE_S)
    assert time.monotonic() - started < DEADLINE_S + SLACK_S
    found = the_one(seen)
    assert (found.code, found.confidence.value) == ("gpu-lost", "likely")
    assert found.message.startswith("amdsmi_get_gpu_memory_total did not return within")
    assert found.where.devices == (bus(3),)
    assert len([gpu for gpu in seen.facts["gpus"] if gpu.get("name")]) == 7


def test_a_reader_that_was_killed_is_no_lost_gpu(see: Any) -> None:
    machine = mi300x()
    machine["3"]["memory_total"] = "!signal 9"
    seen = see(machine)
    (reason,) = why_unread(seen.facts)
    assert "ended by SIGKILL in amdsmi_get_gpu_memory_total" in reason
    found = the_one(seen)
    assert (found.code, found.level) == ("gpu-state-unread", Severity.WARN)


def test_a_slow_gpu_is_read(see: Any) -> None:
    machine = mi300x(2)
    machine["1"]["memory_total"] = f"!slow {192 * GIB}"
    assert not judge(CHECK, one_host(see(machine)))


def test_a_library_that_crashes_at_one_gpu_is_tried_twice(see: Any) -> None:
    machine = mi300x(2)
    machine["1"]["memory_total"] = "!die"
    seen = see(machine)
    assert seen.facts["gpus"][1]["wedged"]["how"] == "killed the process, SIGABRT"
    found = the_one(seen)
    assert (found.code, found.confidence.value) == ("gpu-lost", "likely")


def test_a_listing_that_never_returns_is_a_finding_on_the_host(see: Any) -> None:
    machine = {"-": {"gpus": "!wedge"}}
    seen = see(machine, DEADLINE_S)
    found = the_one(seen)
    assert (found.code, found.confidence.value) == ("gpu-unhealthy", "likely")
    assert found.message.startswith("amdsmi_get_socket_handles did not return within")


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"-": {"release": 27}}, "libamd_smi.so 27.0 is not one whose structures this version"),
        ({"-": {"amdsmi_init": "!34"}}, "amdsmi refuses: amdsmi_init: DRIVER_NOT_LOADED"),
        ({"-": {"gpus": "!18"}}, "amdsmi refuses: amdsmi_get_socket_handles: INIT_ERROR"),
        ({"-": {"gpus": 0}}, "amdsmi shows no AMD GPU that this container was given"),
    ],
)
def test_a_library_that_cannot_be_asked_leaves_the_state_unknown(
    see: Any, machine: Machine, words: str
) -> None:
    seen = see(machine)
    assert (seen.status, seen.reason[: len(words)]) == (OutcomeStatus.UNTESTED, words)


def test_a_release_that_would_leave_files_in_dev_shm_is_not_started(
    tmp_path: Path, root: Path
) -> None:
    seen = look(build(tmp_path, "-DRELEASE=24", "-DBEFORE_6_2"), root, mi300x())
    assert seen.status is OutcomeStatus.UNTESTED
    assert seen.reason.startswith("libamd_smi.so before ROCm 6.2 is not one whose structures")


def test_gpus_that_a_container_was_not_given_are_not_read(library: Path, tmp_path: Path) -> None:
    given = host(tmp_path / "given", "renderD130")
    for index in range(4):
        (given / f"sys/bus/pci/devices/{bus(index)}/drm/renderD{128 + index}").mkdir(parents=True)
    machine = mi300x(4)
    machine["0"]["memory_total"] = "!wedge"
    seen = look(library, given, machine)
    assert [gpu["index"] for gpu in seen.facts["gpus"]] == [2]
    assert seen.facts["hidden"] == 3
    assert not judge(CHECK, one_host(seen))


def test_without_devices_nothing_is_asked(library: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    seen = look(library, bare, {"-": {"amdsmi_init": "!wedge"}})
    assert seen.status is OutcomeStatus.SKIPPED
    assert seen.reason == "no AMD GPU for computing here (no /dev/kfd)"
    seen = look(library, host(tmp_path / "kfd"), {"-": {"amdsmi_init": "!wedge"}})
    assert seen.status is OutcomeStatus.UNTESTED
    assert seen.reason.startswith("/dev/kfd is here, but no /dev/dri/renderD*")


def test_accelerators_without_a_driver_are_seen_on_the_host_and_not_in_a_container(
    library: Path, tmp_path: Path
) -> None:
    device = tmp_path / "host/sys/bus/pci/devices/0000:0c:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1002\n")
    (device / "class").write_text("0x120000\n")
    assert look(library, tmp_path / "host", {}).status is OutcomeStatus.SKIPPED
    (tmp_path / "host/proc/2").mkdir(parents=True)
    (tmp_path / "host/proc/2/comm").write_text("kthreadd\n")
    seen = look(library, tmp_path / "host", {})
    assert seen.status is OutcomeStatus.UNTESTED
    assert seen.reason.startswith("1 AMD accelerator is on the PCI bus, and /dev/kfd is not here")


def test_without_the_library_the_state_is_unknown(root: Path) -> None:
    seen = observe(Path("libc.so.6"), root / "none", lambda crumb: gather_amd(crumb, root))
    assert seen.status is OutcomeStatus.UNTESTED
    assert seen.reason.startswith("AMD GPUs are here, and libamd_smi.so to read their state is not")


def test_the_library_is_found_in_the_folder_of_rocm(library: Path, root: Path) -> None:
    folders = [str(library.parent)]
    file = write(mi300x(1), root.with_name("machine"))
    seen = observe(Path("libc.so.6"), file, lambda crumb: gather_amd(crumb, root, folders=folders))
    assert len(seen.facts["gpus"]) == 1


@pytest.mark.xdist_group("torch")
def test_torch_without_rocm_touches_no_library(root: Path) -> None:
    crumbs: list[str] = []

    def note(step: str, **_: Any) -> None:
        crumbs.append(step)

    context = Context(Launch(launcher="plain"), {}, breadcrumb=note, root=root)
    with pytest.raises(Skip, match="is not built for ROCm"):
        CHECK.observe(context)
    assert STEP not in crumbs
