"""Limits of control groups, version 1 or 2, on this process: how much of them is used, and whether
the kernel stops or slows its processes for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.toolkit.host import text_of

_NO_LIMIT = 1 << 60
"""Version 1 writes the largest multiple of a page for `no limit`."""


def cgroup_limits(root: Path = Path("/")) -> dict[str, Any]:
    """The tightest limits of this process's groups and of those above them that are visible.

    Returns: `memory` = {`limit`, `used`} in bytes, of the group that has the least left; page cache
    and slab that the kernel can reclaim are not counted as used. `pids` = {`limit`, `used`}.
    `oom_kills` = processes that were killed for lack of memory. `cpus` = CPU time in CPUs.
    `cpuset` = number of CPUs that the group may use. None if there is no limit, or nothing can be
    read.
    """
    groups = _Groups(root)
    quotas = [quota for folder in groups.folders("cpu") if (quota := _quota(folder)) is not None]
    return {
        "memory": _tightest(map(_memory, groups.folders("memory"))),
        "pids": _tightest(map(_pids, groups.folders("pids"))),
        "oom_kills": next(map(_oom_kills, groups.folders("memory"))),
        "cpus": min(quotas, default=None),
        "cpuset": next(map(_cpuset, groups.folders("cpuset"))),
    }


class MemoryKills(TypedDict):
    """Counts that `memory_kills` returns."""

    oom_kills: int | None
    machine_kills: int | None


def memory_kills(root: Path = Path("/")) -> MemoryKills:
    """Processes killed for lack of memory so far: `oom_kills` in this process's group, and
    `machine_kills` since boot. None if that is not counted, or cannot be read.
    """
    group = next(map(_oom_kills, _Groups(root).folders("memory")))
    return {"oom_kills": group, "machine_kills": _table(root / "proc/vmstat").get("oom_kill")}


def kills_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Processes killed for lack of memory in between: of this group, else of the machine."""
    for name in ("oom_kills", "machine_kills"):
        if before[name] is not None and after[name] is not None and after[name] > before[name]:
            return int(after[name] - before[name])
    return 0


class CpuThrottling(TypedDict):
    """A limit of CPU time, and what it did since the group was made; times in microseconds.

    `file` of the limit, below /sys/fs/cgroup. `periods` of `period_us` in which the group ran, in
    each of which it may use `quota_us`; `throttled`: those in which that was used up;
    `throttled_us`: how long it was stopped then, added up over the CPUs that it ran on; `used_us`:
    CPU time, None if that is not counted here.
    """

    file: str
    quota_us: int
    period_us: int
    periods: int
    throttled: int
    throttled_us: int
    used_us: int | None


def cpu_throttling(root: Path = Path("/")) -> list[CpuThrottling]:
    """The groups with a limit of CPU time: of this process, and those above it that are visible."""
    groups = _Groups(root)
    found = (groups.cpu_throttling(folder) for folder in groups.folders("cpu"))
    return [each for each in found if each is not None]


class MemoryThrottling(TypedDict):
    """A `memory.high`: beyond that many bytes, the kernel slows the processes of a group down.

    `file` of the limit, below /sys/fs/cgroup. `used`: bytes, without page cache and slab that the
    kernel can reclaim. `events`: how often the group was beyond it; `stalled_us`: how long a
    process of it waited for memory, None where the kernel does not count that (pressure stall
    information).
    """

    file: str
    high: int
    used: int
    events: int
    stalled_us: int | None


def memory_throttling(root: Path = Path("/")) -> list[MemoryThrottling]:
    """The groups with a `memory.high`: of this process, and those above it that are visible.
    Version 1 has no such limit.
    """
    groups = _Groups(root)
    found = (groups.memory_throttling(folder) for folder in groups.folders("memory"))
    return [each for each in found if each is not None]


class _Groups:
    """The folders of this process's control groups."""

    def __init__(self, root: Path) -> None:
        self._mount = root / "sys/fs/cgroup"
        self._paths: dict[str, str] = {}
        for line in text_of(root / "proc/self/cgroup").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            for controller in controllers.split(","):
                self._paths[controller] = path
        self._unified = (self._mount / "cgroup.controllers").exists()

    def folders(self, controller: str) -> Iterator[Path]:
        """The group of this process, then those above it."""
        unified = self._unified
        mount = self._mount if unified else self._mount / controller
        inside = self._paths.get("" if unified else controller, "/").strip("/")
        folder = mount / inside
        if ".." in folder.parts or not folder.is_dir():  # the path is that of another namespace
            folder = mount
        yield folder
        while folder != mount:
            folder = folder.parent
            yield folder

    def cpu_throttling(self, folder: Path) -> CpuThrottling | None:
        limit, stat = _cpu_limit(folder), _table(folder / "cpu.stat")
        if limit is None or "nr_throttled" not in stat:
            return None
        name = "cpu.max" if self._unified else "cpu.cfs_quota_us"
        return {
            "file": str((folder / name).relative_to(self._mount)),
            "quota_us": limit[0],
            "period_us": limit[1],
            "periods": stat.get("nr_periods", 0),
            "throttled": stat["nr_throttled"],
            # Version 1 counts nanoseconds.
            "throttled_us": stat.get("throttled_usec", stat.get("throttled_time", 0) // 1000),
            "used_us": stat.get("usage_usec", self._used_us(folder)),
        }

    def _used_us(self, folder: Path) -> int | None:
        """CPU time of a group of version 1, which a controller of its own counts."""
        if self._unified or self._paths.get("cpu") != self._paths.get("cpuacct"):
            return None
        inside = folder.relative_to(self._mount / "cpu")
        used = _number(self._mount / "cpuacct" / inside / "cpuacct.usage")
        return None if used is None else used // 1000

    def memory_throttling(self, folder: Path) -> MemoryThrottling | None:
        high, used = _number(folder / "memory.high"), _memory_used(folder)
        events = _table(folder / "memory.events").get("high")
        if high is None or used is None or events is None:
            return None
        return {
            "file": str((folder / "memory.high").relative_to(self._mount)),
            "high": high,
            "used": used,
            "events": events,
            "stalled_us": _stalled_us(text_of(folder / "memory.pressure")),
        }


Usage = dict[str, int]


def _tightest(usages: Iterator[Usage | None]) -> Usage | None:
    known = [usage for usage in usages if usage is not None]
    return min(known, key=lambda usage: usage["limit"] - usage["used"], default=None)


def _memory(folder: Path) -> Usage | None:
    limits = map(_number, (folder / "memory.max", folder / "memory.limit_in_bytes"))
    most, used = next((each for each in limits if each is not None), None), _memory_used(folder)
    return None if most is None or used is None else {"limit": most, "used": used}


def _memory_used(folder: Path) -> int | None:
    """Bytes that the kernel cannot reclaim."""
    for name, caches in (
        ("memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
        ("memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ):
        if (now := _number(folder / name)) is not None:
            stat = _table(folder / "memory.stat")
            spare = sum(stat.get(cache, 0) for cache in caches)  # tmpfs is in none of them
            return max(0, now - spare)
    return None


def _stalled_us(pressure: str) -> int | None:
    """Microseconds in which at least one process waited: `some avg10=0.00 … total=5`."""
    for line in pressure.splitlines():
        name, _, rest = line.partition(" ")
        total = rest.rpartition("total=")[2]
        if name == "some" and total.isdecimal():
            return int(total)
    return None


def _pids(folder: Path) -> Usage | None:
    most, now = _number(folder / "pids.max"), _number(folder / "pids.current")
    return None if most is None or now is None else {"limit": most, "used": now}


def _oom_kills(folder: Path) -> int | None:
    for name in ("memory.events", "memory.oom_control"):
        if (count := _table(folder / name).get("oom_kill")) is not None:
            return count
    return None


def _quota(folder: Path) -> float | None:
    limit = _cpu_limit(folder)
    return None if limit is None else round(limit[0] / limit[1], 2)


def _cpu_limit(folder: Path) -> tuple[int, int] | None:
    """(microseconds of CPU time, in each period of so many microseconds)."""
    words = text_of(folder / "cpu.max").split()
    if len(words) == 2:
        quota, period = (int(word) if word.isdigit() else None for word in words)
    else:
        quota = _number(folder / "cpu.cfs_quota_us")
        period = _number(folder / "cpu.cfs_period_us")
    return (quota, period) if quota and period else None


def _cpuset(folder: Path) -> int | None:
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    text = next((text for name in names if (text := text_of(folder / name))), "")
    count = 0
    with suppress(ValueError):
        for part in text.split(",") if text else ():
            first, _, last = part.partition("-")
            count += int(last or first) - int(first) + 1
    return count or None


def _number(path: Path) -> int | None:
    """A limit or a count; None for `max`, -1 and values that mean no limit."""
    text = text_of(path)
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in text_of(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
