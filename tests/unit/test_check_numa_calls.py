"""NUMA calls that a container forbids, and GPUs on nodes without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import (
    ALONE,
    Cluster,
    Confidence,
    Context,
    Launch,
    Outcome,
    OutcomeStatus,
    Severity,
    Skip,
)
from nccl_doctor.checks.numa_calls import NumaCalls
from nccl_doctor.toolkit.libraries import COLUMNS as LIBRARY_COLUMNS
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only

CHECK = NumaCalls()
FINE: dict[str, Any] = {"refused": None, "empty": [], "driver": "580.95.05"}
GPU = ["0000:41:00.0", 1]
QUIET = {"NCCL_CONF_FILE": "/nonexistent"}


def cluster(version: str | None, **fields: Any) -> Cluster:
    """Two ranks for each of three hosts; nd1 is the odd one."""
    seen = {"nd0": FINE, "nd1": json.loads(json.dumps({**FINE, **fields})), "nd2": FINE}
    made = make_cluster(list(seen), check=CHECK.name, by_host=seen, backend="nccl")
    library = {"built": "2.21.5", "loaded": {"version": version}}
    for seat in range(6) if version else ():
        made = change_rank(made, seat, facts={"nccl_library": {ALONE: outcome(library)}})
    return made


def test_a_kernel_that_answers() -> None:
    assert judge(CHECK, cluster("2.27.5")) == []
    # A kernel without NUMA has one node, of which CUDA takes.
    assert judge(CHECK, cluster("2.27.5", refused="ENOSYS")) == []


@pytest.mark.parametrize(
    ("version", "severity", "confidence"),
    [
        ("2.24.3", Severity.WARN, Confidence.LIKELY),
        ("2.26.2", Severity.WARN, Confidence.LIKELY),
        ("2.26.3", Severity.INFO, Confidence.LIKELY),
        ("2.30.7", Severity.INFO, Confidence.LIKELY),
        (None, Severity.WARN, Confidence.POSSIBLE),
    ],
)
def test_a_container_that_forbids_it(
    version: str | None, severity: Severity, confidence: Confidence
) -> None:
    found = only(CHECK, cluster(version, refused="EPERM"), "numa-calls-blocked", hosts=["nd1"])
    assert (found.level, found.confidence) == (severity, confidence)
    assert "SYS_NICE" in found.kind.fix


@pytest.mark.parametrize(
    ("driver", "asked", "silent"),
    [
        ("535.183.06", False, True),
        ("555.42.06", False, True),
        ("560.28.03", False, False),
        ("535.183.06", True, False),
        ("525.147.05", True, True),
        (None, False, False),
    ],
)
def test_drivers_before_cuda_12_6_are_not_asked_by_nccl(
    driver: str | None, asked: bool, silent: bool
) -> None:
    made = cluster("2.26.2", refused="EPERM", empty=[GPU], driver=driver, asked=asked)
    codes = {found.code for found in judge(CHECK, made)}
    assert codes == (set() if silent else {"numa-calls-blocked", "numa-node-empty"})


def test_a_driver_that_is_not_known_is_a_possibility() -> None:
    made = cluster("2.26.2", refused="EPERM", driver=None)
    found = only(CHECK, made, "numa-calls-blocked", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.POSSIBLE)
    made = on(made, 2, "gpu_state", APART)
    assert only(CHECK, made, "numa-calls-blocked", hosts=["nd1"]).level is Severity.WARN
    newer = cluster("2.27.5", refused="EPERM", driver=None)
    assert only(CHECK, newer, "numa-calls-blocked", hosts=["nd1"]).level is Severity.INFO


def on(made: Cluster, seat: int, check: str, value: Any, round_name: str = ALONE) -> Cluster:
    own = {**made.ranks[seat].facts, check: {round_name: outcome(value)}}
    return change_rank(made, seat, facts=own)


def test_libcuda_of_a_compat_folder_counts_for_the_driver() -> None:
    made = cluster("2.26.2", refused="EPERM", driver="535.183.06")
    rows = [
        ["libcuda", "570.86.10", "/usr/local/cuda/compat/libcuda.so.570.86.10", "", None, 9, ""]
    ]
    loaded = {"kernel": "535.183.06", "loaded": {"columns": list(LIBRARY_COLUMNS), "rows": rows}}
    only(CHECK, on(made, 2, "driver_libraries", loaded), "numa-calls-blocked", hosts=["nd1"])
    assert judge(CHECK, on(made, 0, "driver_libraries", loaded)) == []


APART = {"p2p": {"OK": [[0, 1]], "CHIPSET_NOT_SUPPORTED": [[0, 2], [1, 2]]}}


def test_gpus_that_do_not_reach_each_other_need_what_is_forbidden() -> None:
    made = on(cluster("2.26.2", refused="EPERM"), 2, "gpu_state", APART)
    found = only(CHECK, made, "numa-calls-blocked", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    joined = on(cluster("2.26.2", refused="EPERM"), 2, "gpu_state", {"p2p": {"OK": [[0, 1]]}})
    assert only(CHECK, joined, "numa-calls-blocked", hosts=["nd1"]).level is Severity.WARN
    newer = on(cluster("2.26.3", refused="EPERM"), 2, "gpu_state", APART)
    assert only(CHECK, newer, "numa-calls-blocked", hosts=["nd1"]).level is Severity.INFO
    for seat in (2, 3):
        made = on(made, seat, "collectives", {}, "world")
    assert only(CHECK, made, "numa-calls-blocked", hosts=["nd1"]).level is Severity.WARN


def test_collectives_that_end_with_that_error_make_it_a_failure() -> None:
    made = cluster("2.25.1", refused="EPERM")
    error = "DistBackendError: NCCL error\nLast error:\nCuda failure 801 'operation not supported'"
    for reason, severity in ((error, Severity.FAIL), ("Connection refused", Severity.WARN)):
        ended = Outcome(OutcomeStatus.RAISED, reason=reason)
        seen = on(made, 3, "collectives", ended, "world")
        assert only(CHECK, seen, "numa-calls-blocked", hosts=["nd1"]).level is severity
        elsewhere = on(made, 4, "collectives", ended, "world")
        assert only(CHECK, elsewhere, "numa-calls-blocked", hosts=["nd1"]).level is Severity.WARN


def test_an_old_nccl_makes_no_such_calls() -> None:
    assert judge(CHECK, cluster("2.23.4", refused="EPERM", empty=[GPU])) == []


def test_a_gpu_on_a_node_without_memory() -> None:
    found = only(CHECK, cluster("2.27.5", empty=[GPU]), "numa-node-empty", hosts=["nd1"])
    assert found.message == "0000:41:00.0 on node 1; NCCL 2.27.5, driver 580.95.05"
    assert found.level is Severity.WARN
    assert judge(CHECK, cluster("2.27.5", empty=[GPU], driver="595.45.04")) == []


# Observing ----------------------------------------------------------------------------------------


def device(root: Path, address: str, node: str, *, vendor: str = "0x10de", of: str = "0x030200"):
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("class", of), ("numa_node", node)):
        (folder / name).write_text(f"{text}\n")


def memory(root: Path, node: int, kib: int) -> None:
    folder = root / f"sys/devices/system/node/node{node}"
    folder.mkdir(parents=True)
    (folder / "meminfo").write_text(
        f"\nNode {node} MemTotal:       {kib} kB\nNode 0 MemFree: 7 kB\n"
    )


def observe(root: Path, monkeypatch: pytest.MonkeyPatch, **env: str) -> Any:
    return CHECK.observe(Context(launch=Launch(), env={**QUIET, **env}, backend="nccl", root=root))


def test_reading_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(tmp_path, 0, 1000)
    memory(tmp_path, 1, 0)
    device(tmp_path, "0000:01:00.0", "0")
    device(tmp_path, "0000:41:00.0", "1")
    device(tmp_path, "0000:42:00.0", "-1")
    device(tmp_path, "0000:43:00.0", "7")
    device(tmp_path, "0000:44:00.0", "1", vendor="0x8086")
    device(tmp_path, "0000:45:00.0", "1", of="0x040300")
    assert observe(tmp_path, monkeypatch)["empty"] == [GPU]


def test_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observe(tmp_path, monkeypatch)
    assert (seen["empty"], seen["driver"]) == ([], None)
    json.dumps(seen)
    assert not seen["asked"]
    assert observe(tmp_path, monkeypatch, NCCL_CUMEM_HOST_ENABLE="1")["asked"]


@pytest.mark.parametrize("name", ["NCCL_CUMEM_HOST_ENABLE", "NCCL_CUMEM_ENABLE"])
def test_switched_off(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Skip, match=name):
        observe(tmp_path, monkeypatch, **{name: "0"})


def test_gloo_does_not_ask() -> None:
    with pytest.raises(Skip):
        CHECK.observe(Context(launch=Launch(), env=QUIET))
