"""What a strike does to the hosts of a lab; nothing outside of it is changed but a cgroup."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.lab import faults
from tests.lab.chaos import Plan
from tests.lab.hosts import Host
from tests.lab.lab import Lab
from tests.support.waiting import comes

_MIB = 1 << 20
_SCRATCH = 128 * _MIB
_BALLAST = "ballast-of-the-lab"
_OF_TORCHRUN = ("file torchelastic_", "file torchinductor_")
_MEMORY = Path("/sys/fs/cgroup")


class Scene:
    """A lab that one plan is carried out on. `out` is the folder of its reports."""

    def __init__(self, plan: Plan, lab: Lab) -> None:
        self.plan, self.lab = plan, lab
        self.host = lab[plan.victim]
        self.out = lab.folder / "out"
        self._scratch: Path | None = None
        self._cgroup: Path | None = None
        self.out.mkdir()
        if plan.strike == "tmp":
            self._scratch = lab.folder / "scratch"
            self._scratch.mkdir()
            size = f"size={_SCRATCH}"
            self.host.call("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self._scratch))

    @property
    def env(self) -> dict[str, dict[str, str]]:
        """Host → variables that it needs."""
        return {self.host.name: {"TMPDIR": str(self._scratch)}} if self._scratch else {}

    def strike(self) -> str:
        """Do what is planned, but for signals.

        Returns: why it cannot be done here, if it cannot.
        """
        steps: dict[str, Callable[[], str | None]] = {
            "cable": lambda: faults.pull_cable(self.lab, self.host),
            "flap": lambda: faults.pull_cable(self.lab, self.host),
            "drop": lambda: faults.incoming(self.host, f"{self._match()} drop"),
            "reject": lambda: faults.incoming(self.host, f"{self._match()} reject with tcp reset"),
            "path": self._cut_path,
            "shm": self._fill_shared_memory,
            "tmp": self._fill_scratch,
            "folder": lambda: shutil.rmtree(self.out),
            "memory": self._limit_memory,
        }
        return steps[self.plan.strike]() or ""

    def plug_in(self, *, out: bool) -> None:
        """Move the cable of the victim."""
        self.lab.in_switch("ip", "link", "set", f"p{self.host.index}", "down" if out else "up")

    def _match(self) -> str:
        new = " and tcp flags & (fin | syn | rst | ack) == syn".removeprefix(" and ")
        return "meta l4proto tcp" + (f" {new}" if self.plan.scope == "new" else "")

    def _cut_path(self) -> None:
        ends = [self.lab[self.plan.other]] if self.plan.other else self._others()
        faults.cut_path(self.lab, self.host, *ends)

    def _others(self) -> Sequence[Host]:
        return [host for host in self.lab.hosts if host is not self.host]

    def _seen_here(self, path: str | Path) -> Path:
        """A folder of the victim as this process reaches it."""
        return Path(f"/proc/{self.host.init}/root{path}")

    def _fill_shared_memory(self) -> None:
        folder = self._seen_here("/dev/shm")
        ballast = folder / _BALLAST
        ballast.touch()
        page = os.sysconf("SC_PAGE_SIZE")
        for _ in range(20):  # what is used grows meanwhile
            state = os.statvfs(folder)
            size = (state.f_blocks - state.f_bfree) * state.f_frsize + page
            with suppress(Exception):
                self.host.call("mount", "-o", f"remount,size={size}", "/dev/shm")
                break
        _fill(ballast)

    def _fill_scratch(self) -> None:
        assert self._scratch is not None
        _fill(self._seen_here(self._scratch) / _BALLAST)

    def _limit_memory(self) -> str | None:
        """Limit the memory of all processes that the victim has; `relieve` kills, not the kernel.

        The kernel counts its kills for the whole machine, and so for each of these hosts and for
        everything else that runs there.
        """
        old = (_MEMORY / "memory" / "memory.oom_control").exists()
        base = _MEMORY / "memory" if old else _MEMORY
        folder = base / f"nccl-doctor-chaos-{os.getpid()}-{self.plan.number}"
        limit = "memory.limit_in_bytes" if old else "memory.high"
        try:
            folder.mkdir()
            self._cgroup = folder
            if not (folder / limit).exists():
                return "this machine has no limits of memory"
            if old:
                (folder / "memory.oom_control").write_text("1")
            (folder / limit).write_text(str(self.plan.amount * _MIB))
        except OSError:
            return "this machine lets nobody limit memory"
        for pid in self.host.pids():
            with suppress(OSError):
                (folder / "cgroup.procs").write_text(str(pid))
        return None

    def relieve(self) -> None:
        """Kill the largest process if memory is short, as systemd-oomd does."""
        if self._cgroup is None or not _is_short(self._cgroup):
            return
        with suppress(OSError, ValueError):
            pids = [int(each) for each in (self._cgroup / "cgroup.procs").read_text().split()]
            os.kill(max(pids, key=_size), signal.SIGKILL)

    def leftovers(self) -> list[str]:
        """What the run left where only this strike looks."""
        if self._scratch is None:
            return []
        names = sorted(os.listdir(self._seen_here(self._scratch)))
        where = f"in TMPDIR of {self.host.name}"
        return [f"file {name} {where}" for name in names if name != _BALLAST]

    def is_others(self, leftover: str) -> bool:
        """Whether something that is left is the strike's own, or a temporary file of torchrun."""
        torchrun = self.plan.launcher == "torchrun" and leftover.startswith(_OF_TORCHRUN)
        return torchrun or f" {_BALLAST} " in leftover

    def close(self) -> None:
        """Remove the cgroup, once nothing is in it any more."""
        cgroup, self._cgroup = self._cgroup, None

        def is_gone() -> bool:
            with suppress(OSError):
                cgroup.rmdir()
            return not cgroup.exists()

        if cgroup is not None:
            comes(is_gone, 5)


def _fill(file: Path) -> None:
    """Let a file take all the room that there is."""
    with file.open("ab") as ballast:
        step = 1 << 22
        while step >= 512:
            try:
                os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, step)
            except OSError:
                step //= 2


def _is_short(cgroup: Path) -> bool:
    """Whether processes wait for memory."""
    try:
        if (cgroup / "memory.oom_control").exists():
            return "under_oom 1" in (cgroup / "memory.oom_control").read_text()
        used = int((cgroup / "memory.current").read_text())
        return used >= int((cgroup / "memory.high").read_text())
    except (OSError, ValueError):
        return False


def _size(pid: int) -> int:
    """Pages that a process has in memory; 0 for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
