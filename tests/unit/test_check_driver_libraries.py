"""Libraries of another driver than the kernel's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Context, Launch, Severity, Skip
from nccl_doctor.checks.driver_libraries import DriverLibraries
from nccl_doctor.toolkit.libraries import COLUMNS as LIBRARY_COLUMNS
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.libraries import compiled

CHECK = DriverLibraries()
KERNEL = "580.95.05"
LIB = "/usr/lib/x86_64-linux-gnu"


def facts(cuda: str = f"{LIB}/libcuda.so.{KERNEL}", ml: str = KERNEL) -> dict[str, Any]:
    rows = [
        ["libcuda", cuda.rpartition(".so.")[2] or None, cuda, "system", None, 9, "aa"],
        ["libnvidia-ml", ml, f"{LIB}/libnvidia-ml.so.{ml}", "system", None, 9, "aa"],
    ]
    return {"kernel": KERNEL, "loaded": {"columns": list(LIBRARY_COLUMNS), "rows": rows}}


def cluster(bad: dict[str, Any], backend: str = "nccl") -> Cluster:
    seen = json.loads(json.dumps([facts(), bad, facts()]))
    by_rank = dict(enumerate(seen))
    return make_cluster(
        ("nd0", "nd1", "nd2"), 1, check=CHECK.name, by_rank=by_rank, backend=backend
    )


def test_one_driver() -> None:
    assert judge(CHECK, cluster(facts())) == []


@pytest.mark.parametrize(
    "fine",
    [
        "/usr/lib/wsl/lib/libcuda.so.1.1",
        "/usr/lib/aarch64-linux-gnu/tegra/libcuda.so.1",
        "/opt/libcuda.so",
    ],
)
def test_what_is_another_version_by_intent(fine: str) -> None:
    assert judge(CHECK, cluster(facts(fine))) == []


COMPAT = "/usr/local/cuda/compat/libcuda.so.590.48.01"


def every(*libcuda: str, backend: str = "nccl") -> Cluster:
    by_rank = {rank: facts(path) for rank, path in enumerate(libcuda)}
    hosts = [f"nd{rank}" for rank in by_rank]
    return make_cluster(hosts, 1, check=CHECK.name, by_rank=by_rank, backend=backend)


def test_libcuda_of_a_compat_folder_on_one_rank_only() -> None:
    found = only(CHECK, cluster(facts(COMPAT)), "libcuda-differs", hosts=["nd1"], ranks=[1])
    assert found.level is Severity.WARN
    assert found.message == "libcuda=compat 590, elsewhere libcuda=the driver's own"
    assert "compat" in found.kind.fix
    own = f"{LIB}/libcuda.so.{KERNEL}"
    only(CHECK, every(COMPAT, own, COMPAT), "libcuda-differs", hosts=["nd1"], ranks=[1])
    found = only(CHECK, every(COMPAT, own), "libcuda-differs", hosts=["nd0", "nd1"], ranks=[0, 1])
    assert "equally divided" in found.message
    (found,) = judge(CHECK, cluster(facts(COMPAT), backend="gloo"))
    assert found.level is Severity.INFO


def test_libcuda_of_compat_folders_that_are_as_good_as_equal() -> None:
    assert judge(CHECK, every(COMPAT, COMPAT, COMPAT)) == []
    assert judge(CHECK, every(COMPAT, COMPAT.replace("590.48.01", "590.44.01"), COMPAT)) == []
    newer = COMPAT.replace("590.48.01", "600.1.02")
    only(CHECK, every(COMPAT, newer, COMPAT), "libcuda-differs", hosts=["nd1"], ranks=[1])


def test_libcuda_that_conda_installs_for_older_drivers() -> None:
    conda = "/opt/conda/envs/job/cuda-compat/libcuda.so.590.48.01"
    assert judge(CHECK, every(conda, conda, conda)) == []
    # a folder that merely has the word in its name is none
    other = "/opt/compatriots/lib/libcuda.so.590.48.01"
    assert {found.code for found in judge(CHECK, every(other, other, other))} == {"driver-mismatch"}


def test_libcuda_by_which_nccl_takes_the_driver_for_a_newer_one() -> None:
    old = {**facts(COMPAT, ml="535.104.05"), "kernel": "535.104.05"}
    by_rank = {0: facts(), 1: facts()}
    made = make_cluster(("nd0", "nd1"), 1, check=CHECK.name, by_rank=by_rank, backend="nccl")
    assert judge(CHECK, made) == []
    same = make_cluster(
        ("nd0", "nd1"), 1, check=CHECK.name, by_rank={0: old, 1: old}, backend="nccl"
    )
    found = judge(CHECK, same)
    assert [(f.code, f.level, f.where.hosts) for f in found] == [
        ("libcuda-compat", Severity.INFO, ("nd0",)),
        ("libcuda-compat", Severity.INFO, ("nd1",)),
    ]
    assert found[0].message == (
        f"{COMPAT} has version 590.48.01, the kernel module 535.104.05: CUDA and NCCL take the "
        "driver for one of branch 590"
    )


@pytest.mark.parametrize("kernel", ["580.95.05", "590.44.01", "600.1.02"])
def test_libcuda_of_a_compat_folder_that_changes_no_decision(kernel: str) -> None:
    """With the same branch, with an older one than the driver's, and beyond what NCCL asks for."""
    fine = {**facts(COMPAT, ml=kernel), "kernel": kernel}
    made = make_cluster(("nd0",), 1, check=CHECK.name, by_rank={0: fine}, backend="nccl")
    assert judge(CHECK, made) == []


def test_nvml_of_an_upgraded_driver() -> None:
    found = only(
        CHECK, cluster(facts(ml="580.105.08")), "driver-mismatch", hosts=["nd1"], ranks=[1]
    )
    assert found.level is Severity.FAIL
    assert found.message == (
        f"{LIB}/libnvidia-ml.so.580.105.08 has version 580.105.08, the kernel module 580.95.05"
    )
    assert found.fix.startswith("restart the container")
    assert "does not belong to the kernel module" in found.kind.title
    (found,) = judge(CHECK, cluster(facts(ml="580.105.08"), backend="gloo"))
    assert found.level is Severity.WARN


def test_a_stub() -> None:
    bad = facts("/usr/local/cuda/lib64/stubs/libcuda.so")
    found = only(CHECK, cluster(bad), "driver-mismatch", hosts=["nd1"], ranks=[1])
    assert "stubs" in found.fix


def test_what_the_driver_said_itself_is_not_said_again() -> None:
    error = {"code": 803, "name": "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "text": "mismatch"}
    made = cluster(facts(ml="580.105.08"))
    own = {**made.ranks[1].facts, "backend_device": {ALONE: outcome({"driver_error": error})}}
    assert judge(CHECK, change_rank(made, 1, facts=own)) == []


def test_without_a_kernel_module(tmp_path: Path) -> None:
    with pytest.raises(Skip):
        CHECK.observe(Context(launch=Launch(), env={}, root=tmp_path))


LOOK = """
import ctypes, json, sys
from pathlib import Path
ctypes.CDLL(sys.argv[1])
from nccl_doctor.api import Context, Launch
from nccl_doctor.checks.driver_libraries import DriverLibraries
context = Context(launch=Launch(), env={}, root=Path(sys.argv[2]))
print(json.dumps(DriverLibraries().observe(context)))
"""


def test_a_library_that_is_really_mapped(tmp_path: Path) -> None:
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    )
    library = compiled(tmp_path / "libnvidia-ml.so.535.1.2", "int nvmlInit_v2(void) { return 18; }")
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(library), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kernel"] == KERNEL
    made = make_cluster(("nd0",), 1, check=CHECK.name, by_rank={0: seen}, backend="nccl")
    found = [f for f in judge(CHECK, made) if str(tmp_path) in f.message]
    assert [(f.code, f.where.ranks) for f in found] == [("driver-mismatch", (0,))]
