"""Kernels and their settings, compared between hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Context, Launch, Severity
from nccl_doctor.checks.kernel_settings import KernelSettings
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only

CHECK = KernelSettings()
HOSTS = ("nd0", "nd1", "nd2")
SAME = {"kernel": "6.8.0-40-generic", "transparent huge pages": "madvise", "NUMA balancing": "0"}


def found(*changes: dict[str, Any]) -> Any:
    facts = {name: {**SAME, **each} for name, each in zip(HOSTS, changes, strict=False)}
    return make_cluster(tuple(facts), check=CHECK.name, by_host=facts)


def test_hosts_that_are_alike_are_silent_whatever_they_have() -> None:
    assert judge(CHECK, found({}, {}, {})) == []
    assert judge(CHECK, found(*[{"NUMA balancing": "1"}] * 3)) == []
    without = make_cluster(HOSTS[:2], check=CHECK.name, by_host={"nd0": SAME, "nd1": {}})
    assert judge(CHECK, without) == []


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("kernel", "5.15.0-1-generic", "boot the same kernel on every host"),
        (
            "transparent huge pages",
            "always",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        ("NUMA balancing", "1", "sysctl -w kernel.numa_balancing=0"),
    ],
)
def test_the_odd_host_is_named_with_both_values(name: str, value: str, fix: str) -> None:
    one = only(CHECK, found({}, {name: value}, {}), "kernel-settings-differ", hosts=["nd1"])
    assert one.message == f"{name}: {SAME[name]} on nd0, nd2; {value} on nd1"
    assert (one.level, one.fix) == (Severity.INFO, fix)


def test_two_hosts_are_a_tie_and_each_fact_is_a_finding() -> None:
    both = judge(CHECK, found({}, {"kernel": "5.15.0", "NUMA balancing": "1"}))
    assert [each.where.hosts for each in both] == [("nd0", "nd1")] * 2


def test_what_a_host_has_is_read(tmp_path: Path) -> None:
    thp = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    thp.parent.mkdir(parents=True)
    thp.write_text("always [madvise] never\n")
    proc = tmp_path / "proc/sys/kernel"
    proc.mkdir(parents=True)
    (proc / "osrelease").write_text("6.8.0-40-generic\n")
    seen = CHECK.observe(Context(launch=Launch(), env={}, root=tmp_path))
    assert seen == {"kernel": "6.8.0-40-generic", "transparent huge pages": "madvise"}
