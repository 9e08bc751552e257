"""Kills for lack of memory, before and after, on made-up hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Finding, Severity, Untested, Where
from nccl_doctor.checks.memory import Memory
from nccl_doctor.checks.memory_kills import MemoryKills
from nccl_doctor.judge.causes import explain
from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.toolkit.groups.kinds import CRASHED
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = MemoryKills()
Facts = dict[str, Any]


def counts(root: Path, group: int | None, machine: int | None) -> Path:
    said = "MemTotal: 66000000 kB\nMemFree: 9000000 kB\nMemAvailable: 64000000 kB"
    fabrics.write(root, "proc/meminfo", said)
    if group is not None:
        fabrics.write(root, "proc/self/cgroup", "0::/")
        fabrics.write(root, "sys/fs/cgroup/cgroup.controllers", "memory")
        fabrics.write(root, "sys/fs/cgroup/memory.events", f"oom {group}\noom_kill {group}")
    if machine is not None:
        fabrics.write(root, "proc/vmstat", f"nr_free_pages 5\noom_kill {machine}")
    return root


def early(root: Path) -> Facts:
    return observe(Memory, root=root)


def late(root: Path) -> Facts:
    return observe(MemoryKills, root=root)


def cluster(*hosts: tuple[Facts | Outcome, Facts]) -> Cluster:
    made = make_cluster([f"nd{i}" for i in range(len(hosts))], nproc=1)
    ranks = [
        replace(
            rank,
            facts={"memory": {ALONE: outcome(first)}, "memory_kills": {"late": outcome(second)}},
        )
        for rank, (first, second) in zip(made.ranks, hosts, strict=True)
    ]
    return replace(made, ranks=tuple(ranks))


def test_old_kills_are_no_news(tmp_path: Path) -> None:
    root = counts(tmp_path, 7, 9)
    same = (early(root), late(root))
    assert judge(CHECK, cluster(same, same)) == []


def test_a_kill_in_the_group_while_it_ran(tmp_path: Path) -> None:
    before = early(counts(tmp_path, 1, 4))
    still = (before, late(tmp_path))
    after = late(counts(tmp_path, 2, 5))
    found = only(CHECK, cluster(still, (before, after)), "out-of-memory-kill", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.CERTAIN)
    assert found.message == ("1 process of the control group was killed while this examination ran")


def test_it_explains_the_rank_that_crashed(tmp_path: Path) -> None:
    made = cluster((early(counts(tmp_path, 0, 0)), late(counts(tmp_path, 1, 1))))
    crash = Finding(CRASHED, "SIGKILL", Where(hosts=("nd0",), ranks=(0,)))
    explained = {f.code: f.explained_by for f in explain([*judge(CHECK, made), crash], made)}
    assert explained == {"out-of-memory-kill": None, "rank-crashed": "out-of-memory-kill"}


def test_a_kill_elsewhere_on_the_machine_may_be_another_job_s(tmp_path: Path) -> None:
    before = early(counts(tmp_path, 1, 4))
    made = cluster((before, late(counts(tmp_path, 1, 6))))
    found = only(CHECK, made, "out-of-memory-kill", hosts=["nd0"])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.POSSIBLE)
    assert found.message.startswith("2 processes of the machine were killed")
    assert "--memory" not in found.fix
    assert "killed process" in found.fix


def test_what_is_not_known_at_both_times_says_nothing(tmp_path: Path) -> None:
    lost = Outcome(OutcomeStatus.HUNG)
    seen = late(counts(tmp_path, 3, 3))
    assert judge(CHECK, cluster((lost, seen))) == []
    assert judge(CHECK, cluster(({"oom_kills": None, "available": 1}, seen))) == []
    with pytest.raises(Untested, match="does not count"):
        late(tmp_path / "nothing")


def test_every_host_reads_by_itself() -> None:
    (one,) = CHECK.plan(make_cluster(["nd0", "nd1"], nproc=2))
    assert one.groups == ((0,), (2,))
