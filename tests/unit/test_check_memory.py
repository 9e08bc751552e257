"""Memory under the limits of the control group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Severity, Untested
from nccl_doctor.checks.memory import Memory
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only

CHECK = Memory()
MIB, GIB = 1 << 20, 1 << 30
FINE: dict[str, Any] = {"group": None, "oom_kills": 0, "available": 64 * GIB, "local_ranks": 4}


def cluster(backend: str = "nccl", **fields: Any) -> Cluster:
    seen = {"nd0": FINE, "nd1": {**FINE, **fields}, "nd2": FINE}
    return make_cluster(list(seen), check="memory", by_host=seen, backend=backend)


def group(limit: int, used: int = 0) -> dict[str, int]:
    return {"limit": limit, "used": used}


def test_enough_is_fine() -> None:
    assert judge(CHECK, cluster()) == []
    assert judge(CHECK, cluster(group=group(32 * GIB, 8 * GIB))) == []
    assert judge(CHECK, cluster("gloo", group=group(2 * GIB, GIB // 2))) == []
    # Kills outside of any limit are not of this job.
    assert judge(CHECK, cluster(oom_kills=3)) == []


def test_a_low_limit_is_a_risk_for_nccl_and_told_of_gloo() -> None:
    for backend, limit, severity in (
        ("nccl", 8 * GIB, Severity.WARN),
        ("gloo", GIB, Severity.INFO),
    ):
        made = cluster(backend, group=group(limit, GIB // 2))
        found = only(CHECK, made, "memory-limit-low", hosts=["nd1"])
        assert found.level is severity
        assert f"left of the control group's limit {limit // MIB} MiB, for 4 ranks" in found.message


def test_kills_before_make_it_a_risk() -> None:
    made = cluster("gloo", group=group(GIB, GIB // 2), oom_kills=2)
    found = only(CHECK, made, "memory-limit-low", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert found.message.endswith("2 of its processes were killed for memory")
    (found,) = judge(CHECK, cluster(group=group(64 * GIB), oom_kills=2))
    assert found.level is Severity.INFO
    assert found.kind.title == "Processes of this container or job were killed for memory before"


def high(limit: int, used: int = 0) -> list[dict[str, Any]]:
    return [{"file": "memory.high", "high": limit, "used": used, "events": 0, "stalled_us": None}]


def test_a_limit_that_slows_down_counts_as_one_that_kills() -> None:
    made = cluster(throttling=[*high(64 * GIB), *high(8 * GIB, GIB)], group=group(16 * GIB, GIB))
    found = only(CHECK, made, "memory-limit-low", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert found.message == (
        "7168 MiB left of memory.high 8192 MiB, beyond which the kernel slows processes down, for "
        "4 ranks"
    )
    assert "MemoryHigh=infinity" in found.kind.fix
    assert judge(CHECK, cluster(throttling=high(32 * GIB, GIB))) == []
    # Slurm sets both to the memory of the step: the one that kills is said.
    both = cluster(throttling=high(8 * GIB, GIB), group=group(8 * GIB, GIB))
    assert "limit 8192 MiB" in only(CHECK, both, "memory-limit-low", hosts=["nd1"]).message
    # Nobody is killed for it, so that even very little is no failure.
    assert [found.level for found in judge(CHECK, cluster(throttling=high(MIB)))] == [Severity.WARN]


def test_a_limit_that_holds_not_even_the_start_fails() -> None:
    made = cluster("gloo", group=group(500 * MIB, 100 * MIB))
    assert only(CHECK, made, "memory-limit-low", hosts=["nd1"]).level is Severity.FAIL


def test_a_machine_without_free_memory() -> None:
    found = only(CHECK, cluster(available=3 * GIB), "memory-limit-low", hosts=["nd1"])
    assert found.message == "3072 MiB available on the machine, for 4 ranks"
    assert "ps aux" in found.kind.fix
    assert found.level is Severity.WARN


def test_reading(tmp_path: Path) -> None:
    context = Context(launch=Launch(local_world_size=4), env={}, root=tmp_path)
    with pytest.raises(Untested):
        CHECK.observe(context)
    (tmp_path / "proc").mkdir()
    said = "MemTotal: 4096 kB\nMemFree: 99 kB\nMemAvailable:   2048 kB\n"
    (tmp_path / "proc/meminfo").write_text(said)
    expected = {"group": None, "oom_kills": None, "available": 2 * MIB, "local_ranks": 4}
    expected |= {"machine_kills": None, "throttling": []}
    assert CHECK.observe(context) == expected


def test_this_machine() -> None:
    assert CHECK.observe(Context(launch=Launch(), env={}))["available"] > 0
