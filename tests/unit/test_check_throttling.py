"""What limits of CPU time and memory did meanwhile, on made-up hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor import registry
from nccl_doctor.api import ALONE, BEFORE, Cluster, Confidence, Finding, Severity, Skip, Where
from nccl_doctor.checks.cpus import Cpus
from nccl_doctor.checks.memory import Memory
from nccl_doctor.checks.throttling import Throttling
from nccl_doctor.judge.causes import explain, root_causes
from nccl_doctor.judge.conclusion import conclude, judge_again
from nccl_doctor.report.redaction import redact
from nccl_doctor.toolkit.groups.kinds import HANG
from nccl_doctor.toolkit.shared_kinds import BANDWIDTH_LOW
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.observing import observe
from tests.support.reports import RUN
from tests.support.rows import each_row

CHECK = Throttling()
MIB = 1 << 20
Facts = dict[str, Any]


def cpu(throttled: int, stopped_s: float, used_s: float | None, **other: Any) -> Facts:
    """A limit of two CPUs, after 200 periods of 0.1 s."""
    found = {
        "file": "cpu.max",
        "quota_us": 200_000,
        "period_us": 100_000,
        "periods": 1000,
        "throttled": 500 + throttled,
        "throttled_us": 7_000_000 + int(stopped_s * 1e6),
        "used_us": None if used_s is None else 9_000_000 + int(used_s * 1e6),
    }
    return {**found, **other}


def high(events: int, stalled_s: float | None, used: int = 500, **other: Any) -> Facts:
    """A memory.high of 512 MiB; `used` in MiB."""
    found = {
        "file": "memory.high",
        "high": 512 * MIB,
        "used": used * MIB,
        "events": 40 + events,
        "stalled_us": None if stalled_s is None else 3_000_000 + int(stalled_s * 1e6),
    }
    return {**found, **other}


START = cpu(0, 0, 0, periods=800)
START_MEMORY = high(0, 0)


def late(*cpus: Facts, memory: tuple[Facts, ...] = (), container: str = "") -> Facts:
    return {"cpu": list(cpus), "memory": list(memory), "at_s": 120.0, "container": container}


def cluster(
    *hosts: Facts, before: Sequence[Facts] = (START,), memory: Facts = START_MEMORY
) -> Cluster:
    """Hosts of two ranks that worked together for 20 s, and what was read at the end."""
    made = make_cluster([f"nd{i}" for i in range(len(hosts))], nproc=2)
    first = {**late(*before, memory=(memory,)), "at_s": 100.0}
    ranks = []
    for rank in made.ranks:
        facts = {"cpus": {ALONE: outcome({"count": 64, "quota": 2.0})}}
        if not rank.local_rank:
            seen = {BEFORE: outcome(first), "late": outcome(hosts[rank.host.id])}
            facts["throttling"] = seen
        ranks.append(replace(rank, facts=facts))
    return replace(made, ranks=tuple(ranks))


CALM = late(cpu(0, 0, 4))


# CPU time -----------------------------------------------------------------------------------------


@each_row(
    "limit",
    [
        cpu(0, 0, 30),  # it used much, and was never stopped
        cpu(5, 40, 10),  # the start of many threads: half a second
        cpu(60, 1, 30),  # often a little too much
        cpu(60, 6, None),  # 6 s of what may have been 40 s of CPU time
        cpu(100, 90, 30, file="other.slice/cpu.max"),  # moved: this one was not read before
        cpu(-400, -6, -8),  # counted anew
    ],
)
def test_a_limit_that_hardly_stopped_anybody_is_no_finding(limit: Facts) -> None:
    assert judge(CHECK, cluster(CALM, late(limit))) == []


def test_a_host_that_stood_still_most_of_the_time() -> None:
    found = only(CHECK, cluster(CALM, late(cpu(150, 90, 30)), CALM), "cpu-throttled", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.CERTAIN)
    assert found.message == (
        "limit of 2 CPUs: its CPU time was used up in 150 of 200 periods of 100 ms, so what ran "
        "took about 4 times as long"
    )
    assert found.fix.startswith("echo max > /sys/fs/cgroup/cpu.max (as root); or ")


def test_what_is_only_slower_is_information() -> None:
    (found,) = judge(CHECK, cluster(CALM, late(cpu(150, 30, 30))))
    assert (found.level, found.where.hosts) == (Severity.INFO, ("nd1",))
    assert "2 times as long" in found.message


def test_cpu_time_that_is_not_counted_was_at_most_the_limit() -> None:
    made = cluster(CALM, late(cpu(150, 120, None)), before=[cpu(0, 0, None, periods=800)])
    (found,) = judge(CHECK, made)
    assert "about 4 times as long" in found.message


def test_of_several_groups_the_one_that_was_stopped_most() -> None:
    limits = cpu(150, 30, 30), cpu(150, 90, 30, file="a.slice/cpu.max")
    made = cluster(late(*limits), before=(START, {**START, "file": "a.slice/cpu.max"}))
    (found,) = judge(CHECK, made)
    assert found.evidence["limit"]["file"] == "a.slice/cpu.max"
    assert found.fix.startswith("systemctl set-property --runtime a.slice CPUQuota= (as root)")


@each_row(
    ("file", "container", "fix"),
    [
        ("cpu.max", "kubernetes", 'resources.limits.cpu: "8" in the manifest of the pod'),
        ("cpu.max", "docker", "docker update --cpus=8 NAME"),
        ("cpu.max", "podman", "podman update --cpus=8 NAME"),
        ("system.slice/docker-5f.scope/cpu.max", "docker", "docker update --cpus=8 NAME"),
        ("inner/cpu.max", "docker", "echo max > /sys/fs/cgroup/inner/cpu.max"),
        ("cpu/cpu.cfs_quota_us", "docker", "docker update --cpus=8 NAME"),
        ("cpu/inner/cpu.cfs_quota_us", "docker", "/sys/fs/cgroup/cpu/inner/cpu.cfs_quota_us"),
        ("a.slice/job.service/cpu.max", "", "systemctl set-property --runtime job.service "),
        (
            "user.slice/user@7.service/app.slice/run-1.scope/cpu.max",
            "",
            "systemctl --user set-property --runtime run-1.scope CPUQuota=",
        ),
        ("cpu/batch/cpu.cfs_quota_us", "", "echo -1 > /sys/fs/cgroup/cpu/batch/cpu.cfs_quota_us"),
    ],
)
def test_the_fix_is_for_whoever_set_the_limit(file: str, container: str, fix: str) -> None:
    limit = cpu(150, 90, 30, file=file)
    made = cluster(CALM, late(limit, container=container), before=[{**START, "file": file}])
    found = only(CHECK, made, "cpu-throttled", hosts=["nd1"])
    assert fix in found.fix


@each_row(
    "file",
    [
        "cpu.max",
        "mithril.slice/palantir.service/cpu.max",
        "user.slice/user-7.slice/user@7.service/app.slice/palantir-1.scope/cpu.max",
        "cpu/palantir/cpu.cfs_quota_us",
        "kubepods.slice/pod8f453264-8570-45ac-ae5e-228675ddc858/palantir/cpu.max",
    ],
)
def test_redacted_it_hides_the_groups_and_is_judged_the_same(file: str) -> None:
    made = cluster(CALM, late(cpu(150, 90, 30, file=file)), before=[{**START, "file": file}])
    only_this = registry.Registry((CHECK,), (), {})
    plain = judge_again(conclude(made, [CHECK], run=RUN), only_this)
    redacted, _ = redact(plain, b"key")
    again = judge_again(redacted, only_this).to_json()["findings"]
    assert again == redacted.to_json()["findings"]
    assert again[0]["code"] == "cpu-throttled"
    hidden = ("mithril", "palantir", "8f453264")
    assert [each for each in hidden if each in str(redacted.to_json())] == []


def test_docker_names_a_host_by_the_id_of_its_container() -> None:
    made = cluster(late(cpu(150, 90, 30), container="docker"))
    host = replace(made.hosts[0], name="0123456789ab")
    made = replace(made, hosts=(host,), ranks=tuple(replace(r, host=host) for r in made.ranks))
    found = only(CHECK, made, "cpu-throttled", hosts=["0123456789ab"])
    assert "docker update --cpus=8 0123456789ab" in found.fix


def test_less_than_one_cpu_for_each_rank_is_the_cause() -> None:
    one = {"quota_us": 100_000}
    made = cluster(CALM, late(cpu(150, 90, 20, **one)), before=[{**START, **one}])
    (found,) = judge(CHECK, made)
    assert found.explained_by == "cpu-limit-low"
    (alone,) = explain([found], made)  # as with gloo, where that is only information
    assert alone.explained_by is None


def test_it_explains_a_hang_and_a_slow_group_there_and_only_there() -> None:
    made, calm = cluster(CALM, late(cpu(150, 90, 30)), CALM), cluster(CALM, CALM, CALM)
    everywhere = Where(hosts=("nd0", "nd1", "nd2"), ranks=(0, 1, 2, 3, 4, 5))
    hang = Finding(HANG, "no progress", everywhere, confidence=Confidence.POSSIBLE)
    slow = [
        Finding(BANDWIDTH_LOW, "slow", Where(hosts=(name,)), confidence=Confidence.LIKELY)
        for name in ("nd1", "nd2")
    ]

    def roots(seen: Cluster, *symptoms: Finding) -> list[tuple[str, tuple[str, ...]]]:
        found = root_causes(explain([*judge(CHECK, seen), *symptoms], seen))
        return [(each.code, each.where.hosts) for each in found]

    assert roots(made, hang) == [("cpu-throttled", ("nd1",))]
    assert roots(made, *slow) == [("cpu-throttled", ("nd1",)), ("bandwidth-low", ("nd2",))]
    assert roots(calm, hang) == [("collective-hang", everywhere.hosts)]
    assert roots(calm, *slow) == [("bandwidth-low", ("nd1",)), ("bandwidth-low", ("nd2",))]


# Memory -------------------------------------------------------------------------------------------


@each_row(
    "limit",
    [
        high(0, 9),  # it waited for something else
        high(300, 0.5),  # page cache that was given back at once
        high(300, None),  # the same, where waiting is not counted
        high(9, 9, file="x/memory.high"),
    ],
)
def test_memory_that_was_given_back_is_no_finding(limit: Facts) -> None:
    made = cluster(CALM, late(memory=(limit,)))
    assert judge(CHECK, made) == []


@each_row(
    ("limit", "said", "confidence"),
    [
        (high(300, 9), "processes waited for memory in 9.0 of 20 s", Confidence.CERTAIN),
        (high(300, None, 520), "processes went beyond it 300 times", Confidence.LIKELY),
    ],
)
def test_processes_that_wait_for_memory(limit: Facts, said: str, confidence: Confidence) -> None:
    found = only(CHECK, cluster(CALM, late(memory=(limit,))), "memory-throttled", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.WARN, confidence)
    assert found.message.startswith("memory.high is 512 MiB, 5")
    assert found.message.endswith(said)
    assert found.fix == "echo max > /sys/fs/cgroup/memory.high (as root)"


@each_row(
    ("file", "container", "fix"),
    [
        ("system.slice/slurmstepd.scope/job_7/step_0/memory.high", "", "srun --mem=1G"),
        ("memory.high", "kubernetes", "resources.limits.memory: 1Gi in the manifest of the pod"),
        ("a.slice/job.scope/memory.high", "", "set-property --runtime job.scope MemoryHigh=inf"),
        ("memory.high", "docker", ""),
    ],
)
def test_the_fix_of_memory(file: str, container: str, fix: str) -> None:
    seen = late(memory=(high(300, 9, file=file),), container=container)
    found = only(
        CHECK, cluster(CALM, seen, memory=high(0, 0, file=file)), "memory-throttled", hosts=["nd1"]
    )
    assert fix in found.fix
    assert bool(found.fix) is bool(fix)


# Observing ----------------------------------------------------------------------------------------


def tree(root: Path, throttled: int, stalled_us: int) -> Path:
    for name, text in {
        "proc/meminfo": "MemTotal: 66000000 kB\nMemFree: 9000000 kB\nMemAvailable: 64000000 kB",
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/cgroup.controllers": "cpu memory",
        "sys/fs/cgroup/cpu.max": "20000 100000",
        "sys/fs/cgroup/cpu.stat": f"usage_usec {20000 * throttled}\nnr_periods {throttled + 9}\n"
        f"nr_throttled {throttled}\nthrottled_usec {80000 * throttled}",
        "sys/fs/cgroup/memory.high": f"{512 * MIB}",
        "sys/fs/cgroup/memory.current": f"{900 * MIB}",
        "sys/fs/cgroup/memory.stat": f"active_file {400 * MIB}",
        "sys/fs/cgroup/memory.events": f"high {throttled}",
        "sys/fs/cgroup/memory.pressure": f"some avg10=0.00 avg60=0.00 total={stalled_us}\n"
        "full avg10=0.00 avg60=0.00 total=1",
    }.items():
        fabrics.write(root, name, text)
    return root


def test_what_is_read_before_and_after(tmp_path: Path) -> None:
    root = tree(tmp_path, 10, 5)
    alone = {"cpus": observe(Cpus, root=root), "memory": observe(Memory, root=root)}
    first = observe(Throttling, root=root)
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    again = observe(Throttling, pod, root=tree(root, 110, 10**9))
    assert (first["container"], again["container"]) == ("", "kubernetes")
    made = make_cluster(["nd0"], nproc=1)
    facts = {name: {ALONE: outcome(seen)} for name, seen in alone.items()}
    facts["throttling"] = {BEFORE: outcome(first), "late": outcome(again)}
    made = replace(made, ranks=(replace(made.ranks[0], facts=facts),))
    assert len(CHECK.plan(made)) == 2
    assert [(f.code, f.level) for f in judge(CHECK, made)] == [
        ("cpu-throttled", Severity.WARN),
        ("memory-throttled", Severity.WARN),
    ]
    assert "limit of 0.2 CPUs" in judge(CHECK, made)[0].message
    assert "in 100 of 100 periods" in judge(CHECK, made)[0].message


def test_only_hosts_with_a_limit_are_read() -> None:
    quotas = [None, None, 2.0, 2.0, None, None]
    made = make_cluster(
        ["nd0", "nd1", "nd2"],
        2,
        check="cpus",
        by_rank={i: {"quota": q} for i, q in enumerate(quotas)},
    )
    memory = {"memory": {ALONE: outcome({"throttling": [START_MEMORY]})}}
    last = replace(made.hosts[2], facts=memory)
    ranks = tuple(replace(r, host=last) if r.host.id == last.id else r for r in made.ranks)
    both = replace(made, hosts=(*made.hosts[:2], last), ranks=ranks)
    for seen, groups in ((made, ((2,),)), (both, ((2,), (4,)))):
        assert [(r.name, r.groups) for r in CHECK.plan(seen)] == [
            (BEFORE, groups),
            ("late", groups),
        ]
    with pytest.raises(Skip, match="no limit"):
        CHECK.plan(make_cluster(check="cpus", by_rank={0: {"quota": None}}))


def test_what_is_not_known_at_both_times_says_nothing() -> None:
    made = cluster(late(cpu(150, 90, 30)))
    for rank in made.ranks[:1]:
        only_late = {**rank.facts, "throttling": {"late": rank.facts["throttling"]["late"]}}
        made = replace(made, ranks=(replace(rank, facts=only_late), *made.ranks[1:]))
    assert judge(CHECK, made) == []
