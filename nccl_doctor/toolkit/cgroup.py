"""Limits of control groups, version 1 or 2, on this process, and how much of them is used."""

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

    def folders(self, controller: str) -> Iterator[Path]:
        """The group of this process, then those above it."""
        unified = (self._mount / "cgroup.controllers").exists()
        mount = self._mount if unified else self._mount / controller
        inside = self._paths.get("" if unified else controller, "/").strip("/")
        folder = mount / inside
        if ".." in folder.parts or not folder.is_dir():  # the path is that of another namespace
            folder = mount
        yield folder
        while folder != mount:
            folder = folder.parent
            yield folder


Usage = dict[str, int]


def _tightest(usages: Iterator[Usage | None]) -> Usage | None:
    known = [usage for usage in usages if usage is not None]
    return min(known, key=lambda usage: usage["limit"] - usage["used"], default=None)


def _memory(folder: Path) -> Usage | None:
    for limit, used, caches in (
        ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
        (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            ("total_inactive_file", "total_active_file"),
        ),
    ):
        most, now = _number(folder / limit), _number(folder / used)
        if most is not None and now is not None:
            stat = _table(folder / "memory.stat")
            spare = sum(stat.get(cache, 0) for cache in caches)  # tmpfs is in none of them
            return {"limit": most, "used": max(0, now - spare)}
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
    words = text_of(folder / "cpu.max").split()
    if len(words) == 2:
        quota, period = (int(word) if word.isdigit() else None for word in words)
    else:
        quota = _number(folder / "cpu.cfs_quota_us")
        period = _number(folder / "cpu.cfs_period_us")
    return round(quota / period, 2) if quota and period else None


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
