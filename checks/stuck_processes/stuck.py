"""Processes that are stuck in the kernel: which ones, where, and the probable fault.

Only files of /proc are read that never wait for their process: `stat`, `status` and `wchan`. Its
`cmdline`, `maps` and `stack` may wait for a lock that a stuck process holds.
Source: proc(5); kernel documentation, filesystems/proc.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from nccl_doctor.system.forks import OURS
from nccl_doctor.toolkit.host import Mount, mounts, text_of
from nccl_doctor.toolkit.kernel_waits import CAUSES

_NEAR_S = 60.0
_MOST = 64
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in the kernel's include/linux/sched.h
_MEANT = ("__refrigerator", "kernel_clone", "_do_fork", "do_fork", "wait_for_vfork_done")
"""Functions in which a process waits that was frozen, or whose vfork child has not started yet."""
_FIRST = 1


class Process(NamedTuple):
    """A process as /proc/PID/stat has it; `started` and `ticks` of CPU time in clock ticks."""

    pid: int
    name: str
    state: str
    parent: int
    flags: int
    ticks: int
    started: int


class Waiting(NamedTuple):
    """A process in uninterruptible sleep; `switches`: how often it has left a CPU, None if unknown.

    Two of them are equal if the process has not run in between.
    """

    pid: int
    name: str
    ticks: int
    started: int
    switches: int | None


def look_for_stuck(root: Path, *, pause_s: float, youngest_s: float) -> dict[str, Any]:
    """Find stuck processes: look twice if any process waits at the first look, else once.

    Args:
        root: the folder below which /proc is read.
        pause_s: between the looks.
        youngest_s: younger processes are left out.

    Returns: `seen`: number of visible processes; `hidden`: whether there may be others; `stuck`:
    `pid`, `name` and `wchan` of each that did not run (`wchan` is empty if it may not be read), up
    to 64; `mounts`: if any is stuck, `[place, type]` of file systems that may be the reason.
    """
    proc = root / "proc"
    seen = processes(proc)
    ticks, now = os.sysconf("SC_CLK_TCK"), time.clock_gettime(time.CLOCK_BOOTTIME)
    found = waiting(proc, seen, (now - youngest_s) * ticks)
    if found:
        ours = family(seen, os.getpid(), _NEAR_S * ticks)
        found = {one for one in found if one.pid not in ours}
        found = {one for one in found if wait_channel(proc, one.pid) not in _MEANT}
    if found:
        time.sleep(pause_s)
        found = again(proc, found)
    stuck = [
        {"pid": one.pid, "name": one.name, "wchan": wchan}
        for one in sorted(found)
        if (wchan := wait_channel(proc, one.pid)) not in _MEANT
    ]
    return {
        "seen": len(seen),
        "hidden": hides_processes(root),
        "stuck": stuck[:_MOST],
        "mounts": remote_mounts(root) if stuck else [],
    }


def processes(proc: Path) -> dict[int, Process]:
    """All visible processes, by process id."""
    found = {}
    with suppress(OSError):
        for name in os.listdir(proc):
            seen = _process(proc, int(name)) if name.isdecimal() else None
            if seen is not None:
                found[seen.pid] = seen
    return found


def waiting(proc: Path, seen: Mapping[int, Process], youngest: float) -> set[Waiting]:
    """Processes that wait in the kernel and started up to `youngest` clock ticks after boot.

    Kernel threads are left out: some of them always wait.
    """
    return {
        Waiting(one.pid, one.name, one.ticks, one.started, _switches(proc / str(one.pid)))
        for one in seen.values()
        if one.state == "D" and not one.flags & _KERNEL_THREAD and one.started <= youngest
    }


def again(proc: Path, first: Collection[Waiting]) -> set[Waiting]:
    """Processes among the given ones that still wait and have not run since."""
    found = set()
    for one in first:
        now = _process(proc, one.pid)
        if now is not None and now.state == "D":
            switches = _switches(proc / str(one.pid))
            found.add(Waiting(one.pid, now.name, now.ticks, now.started, switches))
    return found & set(first)


def family(seen: Mapping[int, Process], mine: int, near: float) -> set[int]:
    """Processes of the run: those that the examination forked, those above them, and ranks.

    Args:
        seen: of `processes`.
        mine: this process, a child of the rank.
        near: clock ticks. Processes that the same launcher started within this time of the rank,
            and all below them, are taken as ranks of the same run.
    """
    above = [mine]
    while above[-1] in seen and seen[above[-1]].parent not in (0, *above):
        above.append(seen[above[-1]].parent)
    forked = {pid for pid, one in seen.items() if one.name.startswith(OURS)}
    rank = next((seen[pid] for pid in above if pid in seen and pid not in forked), None)
    ranks = {
        pid
        for pid, one in seen.items()
        if rank and one.parent == rank.parent and abs(one.started - rank.started) < near
    }
    below = {pid for pid in seen if not ranks.isdisjoint(_line(seen, pid))} if ranks else set()
    return {*above, *forked, *below}


def _line(seen: Mapping[int, Process], pid: int) -> Iterator[int]:
    """Ids of a process and of those above it."""
    passed: set[int] = set()
    while pid in seen and pid not in passed:
        yield pid
        passed.add(pid)
        pid = seen[pid].parent


def wait_channel(proc: Path, pid: int) -> str:
    """The kernel function that a process waits in; empty where it may not be read."""
    text = text_of(proc / f"{pid}/wchan")
    return "" if text == "0" else text


def hides_processes(root: Path) -> bool:
    """True if processes of other users cannot be seen (mount option hidepid)."""
    if not text_of(root / f"proc/{_FIRST}/stat"):
        return True
    options = ""
    for mount in _mounts(root):
        if (mount.folder, mount.kind) == ("/proc", "proc"):
            options = mount.options  # the last one lies on top
    hidden = re.search(r"\bhidepid=(\w+)", options)
    return hidden is not None and hidden[1] not in ("0", "off") and os.geteuid() != 0


def remote_mounts(root: Path) -> list[list[str]]:
    """Mounts of file systems that processes may get stuck in, as [place, type], no servers."""
    known = {each for cause in CAUSES for each in cause.file_systems}
    return [
        [mount.folder, mount.kind]
        for mount in _mounts(root)
        if mount.kind.partition(".")[0] in known
    ]


def _mounts(root: Path) -> list[Mount]:
    try:
        return mounts(root)
    except OSError:
        return []


# Files of /proc -----------------------------------------------------------------------------------


def _process(proc: Path, pid: int) -> Process | None:
    """A process by its id; None if it has ended, or may not be seen."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:  # there may be thousands
            before, _, after = file.read().rpartition(b")")
    except OSError:
        return None
    fields = after.split()
    if len(fields) < 20:
        return None
    return Process(
        pid,
        before.partition(b"(")[2].decode("utf-8", "replace"),  # it may hold brackets, too
        fields[0].decode("ascii", "replace"),
        int(fields[1]),
        int(fields[6]),
        int(fields[11]) + int(fields[12]),
        int(fields[19]),
    )


def _switches(process: Path) -> int | None:
    text = text_of(process / "status")
    counts = re.findall(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", text, re.MULTILINE)
    return sum(map(int, counts)) if counts else None
