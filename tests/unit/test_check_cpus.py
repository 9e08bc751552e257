"""CPUs that the ranks of a host share."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Context, Launch, Severity
from nccl_doctor.checks.cpus import Cpus
from tests.support import fabrics
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.observing import observe
from tests.support.rows import each_row

CHECK = Cpus()


def cpus(affinity: str, count: int, allowed: int = 64, quota: float | None = None) -> Any:
    return {"affinity": affinity, "count": count, "allowed": allowed, "quota": quota}


ALL = cpus("0–63", 64)


def cluster(*bad: dict[str, Any], backend: str = "nccl") -> Cluster:
    seen = dict(enumerate([ALL] * 4 + list(bad) + [ALL] * 4))
    return make_cluster(["nd0", "nd1", "nd2"], 4, check="cpus", by_rank=seen, backend=backend)


def test_cores_for_everybody_are_fine() -> None:
    assert judge(CHECK, cluster(*[ALL] * 4)) == []
    apart = [cpus(f"{8 * i}–{8 * i + 7}", 8) for i in range(4)]
    assert judge(CHECK, cluster(*apart)) == []
    assert judge(CHECK, cluster(*[cpus("0–63", 64, quota=4.0)] * 4)) == []


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_all_ranks_on_one_core_by_a_binding(backend: str) -> None:
    made = cluster(*[cpus("3", 1)] * 4, backend=backend)
    found = only(CHECK, made, "cpu-limit-low", hosts=["nd1"], ranks=[4, 5, 6, 7])
    assert found.level is Severity.WARN
    assert found.message == "4 ranks on CPU 3 of 64"
    assert "NCCL_IGNORE_CPU_AFFINITY=1" in found.kind.fix


def test_ranks_that_were_not_started_yet_will_share_the_core() -> None:
    """A host that cannot sign in examines itself with its first rank alone."""
    made = make_cluster(["nd0"], 1, check="cpus", by_rank={0: cpus("0", 1)}, backend="gloo")
    assert judge(CHECK, made) == []
    launch = Launch(launcher="nccl-doctor", rank=0, local_rank=0, local_world_size=2)
    made = replace(made, ranks=tuple(replace(rank, launch=launch) for rank in made.ranks))
    found = only(CHECK, made, "cpu-limit-low", hosts=["nd0"], ranks=[0])
    assert (found.message, found.level) == ("2 ranks on CPU 0 of 64", Severity.WARN)
    others = replace(launch, launcher="torchrun")
    made = replace(made, ranks=tuple(replace(rank, launch=others) for rank in made.ranks))
    assert judge(CHECK, made) == []


def test_one_core_each_is_too_few_for_nccl_s_threads() -> None:
    own = [cpus(str(i), 1) for i in range(4)]
    assert judge(CHECK, cluster(*own, backend="gloo")) == []
    found = only(CHECK, cluster(*own), "cpu-limit-low", hosts=["nd1"], ranks=[4, 5, 6, 7])
    assert found.message == "4 ranks on CPU 0 and 1 and 2 and 3 of 64"
    for others in (ALL, cpus("8–15", 8)):
        made = cluster(others, others, others, cpus("5", 1))
        found = only(CHECK, made, "cpu-limit-low", hosts=["nd1"], ranks=[7])
        assert found.message == "1 rank on CPU 5 of 64"


@pytest.mark.parametrize("small", [cpus("0–1", 2, 2), cpus("0–63", 64, quota=1.5)])
def test_a_small_machine_is_a_risk_with_nccl_only(small: dict[str, Any]) -> None:
    for backend, severity in (("nccl", Severity.WARN), ("gloo", Severity.INFO)):
        (found,) = judge(CHECK, cluster(*[small] * 4, backend=backend))
        assert found.level is severity
        assert found.where.hosts == ("nd1",)
    assert found.message.endswith(", CPU time of 1.5 CPUs" if small["quota"] else "of 2")


# Kinds of CPUs -----------------------------------------------------------------------------------


def kinds(*hosts: str, nccl: str | None = "2.20.5", backend: str = "nccl", **env: str) -> Cluster:
    """Two ranks on each host, of a maker and an architecture like `AMD x86_64`; NCCL is loaded."""
    seen = {}
    for rank in range(2 * len(hosts)):
        vendor, _, machine = hosts[rank // 2].rpartition(" ")
        seen[rank] = {**ALL, "machine": machine or None, "vendor": vendor or None}
    names = [f"nd{number}" for number in range(len(hosts))]
    envs = dict.fromkeys(seen, env)
    made = make_cluster(names, check="cpus", by_rank=seen, backend=backend, env=envs)
    library = {"nccl_library": {ALONE: outcome({"built": "2.19.3", "loaded": {"version": nccl}})}}
    for rank in made.ranks if nccl else ():
        made = change_rank(made, rank.seat, facts={**rank.facts, **library})
    return made


INTEL, AMD, ARM = "Intel x86_64", "AMD x86_64", "aarch64"


@pytest.mark.parametrize(
    ("nccl", "severity", "confidence"),
    [
        ("2.18.1", Severity.WARN, Confidence.LIKELY),
        ("2.21.5", Severity.WARN, Confidence.LIKELY),
        ("2.17.1", Severity.INFO, Confidence.CERTAIN),
        ("2.22.3", Severity.INFO, Confidence.CERTAIN),
        ("2.30.7", Severity.INFO, Confidence.CERTAIN),
        (None, Severity.INFO, Confidence.CERTAIN),
    ],
)
def test_cpus_of_another_maker(nccl: str | None, severity: Severity, confidence: Any) -> None:
    found = only(CHECK, kinds(INTEL, AMD, INTEL, nccl=nccl), "cpu-differs", hosts=["nd1"])
    assert (found.level, found.confidence) == (severity, confidence)
    assert found.message == "CPU=AMD x86_64, elsewhere CPU=Intel x86_64"
    # A release that makes one choice for all ranks needs no repair.
    repair = nccl is None or severity is Severity.WARN
    assert ("NCCL_NET_OVERHEAD" in found.kind.fix) is repair


def test_another_architecture_and_a_tie() -> None:
    only(CHECK, kinds(ARM, INTEL, INTEL), "cpu-differs", hosts=["nd0"])
    found = only(CHECK, kinds(INTEL, AMD), "cpu-differs", hosts=["nd0", "nd1"])
    assert "equally divided" in found.message


def test_kinds_of_cpus_that_do_no_harm() -> None:
    assert judge(CHECK, kinds(INTEL, INTEL, INTEL)) == []
    assert judge(CHECK, kinds(INTEL, AMD, INTEL, backend="gloo")) == []
    assert judge(CHECK, kinds(INTEL, AMD, NCCL_NET_OVERHEAD="1000")) == []
    assert judge(CHECK, kinds(INTEL, AMD, NCCL_ALGO="Ring", NCCL_PROTO="Simple")) == []
    assert judge(CHECK, kinds("", AMD)) == []  # a report of an earlier version says nothing
    only(CHECK, kinds(INTEL, AMD, INTEL, NCCL_ALGO="Ring"), "cpu-differs", hosts=["nd1"])
    some = change_rank(kinds(INTEL, AMD, INTEL), 0, env={"NCCL_NET_OVERHEAD": "1000"})
    only(CHECK, some, "cpu-differs", hosts=["nd1"])


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\n", "Intel"),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", "AMD"),
        ("processor\t: 0\nvendor_id\t: Gremlin\u00e9\n", "Gremlin\u00e9"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", None),
        ("\n" * 100 + "vendor_id\t: GenuineIntel\n", None),
        ("", None),
        (None, None),
    ],
)
def test_the_maker_by_the_kernel(tmp_path: Path, text: str | None, vendor: str | None) -> None:
    if text is not None:
        fabrics.write(tmp_path, "proc/cpuinfo", text)

    seen = observe(Cpus, root=tmp_path)
    assert (seen["vendor"], seen["machine"]) == (vendor, os.uname().machine)


def test_this_process() -> None:
    seen = CHECK.observe(Context(launch=Launch(), env={}))
    assert seen["count"] == len(os.sched_getaffinity(0)) <= seen["allowed"]


def test_the_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    for name, text in {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cgroup.controllers": "cpu cpuset\n",
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/cpuset.cpus.effective": "0-7\n",
    }.items():
        fabrics.write(tmp_path, name, text)

    seen = observe(Cpus, root=tmp_path)
    assert (seen["quota"], seen["allowed"]) == (0.5, 8)


# Clocks ------------------------------------------------------------------------------------------


def clock(governor: str, driver: str = "acpi-cpufreq", low: int = 1500, high: int = 3700) -> Any:
    held = governor == "powersave"
    return {
        "driver": driver,
        "governors": {governor: "0–63"},
        "lowest_khz": low * 1000 if held else None,
        "highest_khz": high * 1000 if held else None,
    }


def clocks(*hosts: Any, backend: str = "nccl") -> Cluster:
    """Two ranks on each host."""
    seen = {rank: {**ALL, "clock": hosts[rank // 2]} for rank in range(2 * len(hosts))}
    names = [f"nd{number}" for number in range(len(hosts))]
    return make_cluster(names, check="cpus", by_rank=seen, backend=backend)


FAST = clock("performance")
GENERIC = ("acpi-cpufreq", "cppc_cpufreq", "intel_cpufreq", "amd-pstate", "amd_pstate")


@each_row(("driver", "backend"), product(GENERIC, ["nccl", "gloo"]))
def test_powersave_of_a_generic_driver_holds_cpus_low(driver: str, backend: str) -> None:
    made = clocks(FAST, clock("powersave", driver), FAST, backend=backend)
    found = only(CHECK, made, "cpu-clock-held-low", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.CERTAIN)
    assert found.message == f"governor powersave of {driver} holds CPU 0–63 at 1.5 of 3.7 GHz"


@pytest.mark.parametrize("driver", ["intel_pstate", "amd-pstate-epp", "amd_pstate_epp", "other"])
def test_powersave_that_follows_the_load_is_the_usual_one(driver: str) -> None:
    assert judge(CHECK, clocks(*[clock("powersave", driver)] * 3)) == []


def test_powersave_whose_lowest_clock_is_nearly_the_highest_does_no_harm() -> None:
    assert judge(CHECK, clocks(*[clock("powersave", low=3600)] * 2)) == []
    unread = {**clock("powersave"), "lowest_khz": None}
    found = only(CHECK, clocks(unread, FAST, FAST), "cpu-clock-held-low", hosts=["nd0"])
    assert found.message.endswith("at their lowest clock")


def test_cpus_that_some_ranks_run_on() -> None:
    made = clocks(FAST, FAST)
    some = {"driver": "acpi-cpufreq", "governors": {"performance": "0–31", "powersave": "32–63"}}
    half = {**some, "lowest_khz": 1_500_000, "highest_khz": 3_700_000}
    cpus_of = {"cpus": {ALONE: outcome({**ALL, "clock": half})}}
    found = only(CHECK, change_rank(made, 3, facts=cpus_of), "cpu-clock-held-low", hosts=["nd1"])
    assert "holds CPU 32–63 at" in found.message


def test_governors_that_differ_are_worth_knowing() -> None:
    lazy = clock("powersave", "intel_pstate")
    eager = clock("performance", "intel_pstate")
    found = only(CHECK, clocks(eager, eager, lazy), "cpu-governor-differs", hosts=["nd2"])
    assert found.level is Severity.INFO
    assert found.message == (
        "governor=intel_pstate powersave, elsewhere governor=intel_pstate performance"
    )
    found = only(CHECK, clocks(lazy, eager), "cpu-governor-differs", hosts=["nd0", "nd1"])
    assert found.confidence is Confidence.POSSIBLE


def test_machines_that_set_no_clocks_and_earlier_reports_say_nothing() -> None:
    assert judge(CHECK, clocks(None, None, FAST)) == []
    assert judge(CHECK, cluster(*[ALL] * 4)) == []


def test_governors_as_the_kernel_shows_them(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    for cpu in mine:
        folder = f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        for name, text in {
            "scaling_governor": "powersave",
            "scaling_driver": "acpi-cpufreq",
            "scaling_min_freq": "1500000",
            "cpuinfo_max_freq": "2450000",
        }.items():
            fabrics.write(tmp_path, f"{folder}/{name}", text)

    seen = observe(Cpus, root=tmp_path)
    assert seen["clock"] == {
        "driver": "acpi-cpufreq",
        "governors": {"powersave": seen["affinity"]},
        "lowest_khz": 1_500_000,
        "highest_khz": 2_450_000,
    }
    (tmp_path / folder / "scaling_min_freq").write_text("<unsupported>\n")
    assert observe(Cpus, root=tmp_path / "nowhere")["clock"] is None
