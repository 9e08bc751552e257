"""NUMA calls that a container forbids, and GPUs on nodes without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Context, Launch, Severity, Skip
from nccl_doctor.checks.numa_calls import NumaCalls
from tests.clusters import change_rank, make_cluster, outcome
from tests.findings import judge, only

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
    monkeypatch.setattr(NumaCalls, "root", root)
    return CHECK.observe(Context(launch=Launch(), env={**QUIET, **env}, backend="nccl"))


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


@pytest.mark.parametrize("name", ["NCCL_CUMEM_HOST_ENABLE", "NCCL_CUMEM_ENABLE"])
def test_switched_off(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Skip, match=name):
        observe(tmp_path, monkeypatch, **{name: "0"})


def test_gloo_does_not_ask() -> None:
    with pytest.raises(Skip):
        CHECK.observe(Context(launch=Launch(), env=QUIET))
