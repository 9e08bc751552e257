"""Control groups as file trees: version 1, version 2, and what is not there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nccl_doctor.toolkit.cgroup import cgroup_limits, cpu_throttling, memory_throttling

GIB = 1 << 30
NOTHING = {"memory": None, "pids": None, "oom_kills": None, "cpus": None, "cpuset": None}


def tree(root: Path, membership: str, files: Mapping[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": membership, **files}.items():
        path = root / (name if name.startswith("proc") else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2_takes_the_tightest_of_a_group_and_those_above(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "0::/pod/box\n",
        {
            "cgroup.controllers": "cpu memory pids\n",
            "pod/memory.max": f"{4 * GIB}\n",
            "pod/memory.current": f"{3 * GIB}\n",
            "pod/memory.stat": f"anon 5\ninactive_file {GIB // 4}\n"
            f"active_file {GIB // 8}\nslab_reclaimable {GIB // 8}\n"
            "shmem 7\nslab_unreclaimable 9\n",
            "pod/pids.max": "max\n",
            "pod/pids.current": "9\n",
            "pod/cpu.max": "150000 100000\n",
            "pod/box/memory.max": "max\n",
            "pod/box/memory.current": f"{3 * GIB}\n",
            "pod/box/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
            "pod/box/pids.max": "512\n",
            "pod/box/pids.current": "40\n",
            "pod/box/cpu.max": "max 100000\n",
            "pod/box/cpuset.cpus.effective": "0-3,8\n",
        },
    )
    assert cgroup_limits(root) == {
        "memory": {"limit": 4 * GIB, "used": 3 * GIB - GIB // 2},
        "pids": {"limit": 512, "used": 40},
        "oom_kills": 2,
        "cpus": 1.5,
        "cpuset": 5,
    }


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "5:memory:/job\n4:cpu,cpuacct:/\n3:pids:/elsewhere/not/mounted\n2:cpuset:/\n0::/\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "1000\n",
            "memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "memory/job/memory.usage_in_bytes": f"{GIB}\n",
            "memory/job/memory.stat": f"total_inactive_file {GIB // 8}\n"
            f"total_active_file {GIB // 8}\n",
            "memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
            "cpu/cpu.cfs_quota_us": "50000\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "pids/pids.max": "100\n",
            "pids/pids.current": "10\n",
            "cpuset/cpuset.cpus": "2\n",
        },
    )
    assert cgroup_limits(root) == {
        "memory": {"limit": 2 * GIB, "used": GIB - GIB // 4},
        "pids": {"limit": 100, "used": 10},
        "oom_kills": 7,
        "cpus": 0.5,
        "cpuset": 1,
    }


def test_no_limit_is_none(tmp_path: Path) -> None:
    files = {
        "cgroup.controllers": "",
        "memory.max": "max",
        "memory.current": "7",
        "cpu.max": "max 100000",
        "pids.max": "max",
    }
    assert cgroup_limits(tree(tmp_path, "0::/\n", files)) == NOTHING


def test_what_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path) == NOTHING
    odd = {"cgroup.controllers": "", "cpuset.cpus.effective": "a-b", "cpu.max": "1 2 3"}
    assert cgroup_limits(tree(tmp_path, "rubbish\n0::/../../box\n", odd)) == NOTHING


def test_this_machine() -> None:
    assert set(cgroup_limits()) == set(NOTHING)


# What a limit did ---------------------------------------------------------------------------------


def test_version_2_counts_in_every_group_that_has_a_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        "0::/pod/box\n",
        {
            "cgroup.controllers": "cpu memory pids\n",
            "pod/cpu.max": "150000 100000\n",
            "pod/cpu.stat": "usage_usec 5000\nuser_usec 4000\nnr_periods 30\nnr_throttled 4\n"
            "throttled_usec 700\n",
            "pod/memory.high": "max\n",
            "pod/memory.current": "7\n",
            "pod/memory.events": "high 0\n",
            "pod/box/cpu.max": "max 100000\n",
            "pod/box/cpu.stat": "usage_usec 5000\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n",
            "pod/box/memory.high": f"{GIB}\n",
            "pod/box/memory.current": f"{GIB}\n",
            "pod/box/memory.stat": f"inactive_file {GIB // 4}\n",
            "pod/box/memory.events": "low 0\nhigh 12\nmax 0\noom 0\n",
            "pod/box/memory.pressure": "some avg10=1.00 avg60=0.00 avg300=0.00 total=345\n"
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=12\n",
        },
    )
    assert cpu_throttling(root) == [
        {
            "file": "pod/cpu.max",
            "quota_us": 150000,
            "period_us": 100000,
            "periods": 30,
            "throttled": 4,
            "throttled_us": 700,
            "used_us": 5000,
        }
    ]
    (box,) = memory_throttling(root)
    assert box == {
        "file": "pod/box/memory.high",
        "high": GIB,
        "used": GIB - GIB // 4,
        "events": 12,
        "stalled_us": 345,
    }
    (root / "sys/fs/cgroup/pod/box/memory.pressure").unlink()  # a kernel that does not count it
    assert memory_throttling(root) == [{**box, "stalled_us": None}]


def test_version_1_counts_nanoseconds_and_cpu_time_elsewhere(tmp_path: Path) -> None:
    files = {
        "cpu/job/cpu.cfs_quota_us": "50000\n",
        "cpu/job/cpu.cfs_period_us": "100000\n",
        "cpu/job/cpu.stat": "nr_periods 9\nnr_throttled 2\nthrottled_time 3000000\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "cpu/cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n",
        "cpuacct/job/cpuacct.usage": "8000000\n",
        "memory/memory.limit_in_bytes": "1000\n",
    }
    (one,) = cpu_throttling(tree(tmp_path, "4:cpu,cpuacct:/job\n5:memory:/\n", files))
    assert one == {
        "file": "cpu/job/cpu.cfs_quota_us",
        "quota_us": 50000,
        "period_us": 100000,
        "periods": 9,
        "throttled": 2,
        "throttled_us": 3000,
        "used_us": 8000,
    }
    (apart,) = cpu_throttling(tree(tmp_path, "4:cpu:/job\n5:cpuacct:/\n", files))
    assert apart == {**one, "used_us": None}
    assert memory_throttling(tmp_path) == []


def test_where_nothing_is_limited_nothing_is_counted(tmp_path: Path) -> None:
    assert (cpu_throttling(tmp_path), memory_throttling(tmp_path)) == ([], [])
    odd = {"cgroup.controllers": "", "cpu.max": "5 10", "cpu.stat": "rubbish", "memory.high": "9"}
    root = tree(tmp_path, "0::/\n", odd)
    assert (cpu_throttling(root), memory_throttling(root)) == ([], [])
