"""Processes of a run as seen from outside, by host and by what they are."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.lab.lab import Lab

_FORKED = b"tests.support.forkserver"
_CLIENT = b"-IS"


@dataclass(frozen=True)
class Seen:
    """One process: its id on its host, and what a look at it said.

    `client`: it only stands for another one, which the fork server made; see `quick_client`.
    """

    host: str
    pid: int
    parent: int
    name: str
    state: str
    started: int
    client: bool

    @property
    def alive(self) -> bool:
        """False for one that only waits to be reaped."""
        return self.state not in "ZX"

    @property
    def observes(self) -> bool:
        """Whether it is a child of the doctor that observes or serves."""
        return self.name.startswith("ncd:")


class Census:
    """The process tables of all hosts of a lab."""

    def __init__(self, lab: Lab) -> None:
        self._tables = {host.name: Path(f"/proc/{host.init}/root/proc") for host in lab.hosts}
        self._lines: dict[tuple[str, int, int, str], bytes] = {}
        self._newest = dict.fromkeys(lab.names, 0)

    def newest(self, host: str) -> int:
        """The highest process id seen on a host, 0 before there was one; threads have numbers too:
        they are not looked at, but counted with the next process.
        """
        self._newest[host] = max(self._newest[host], *self._pids(host), 0)
        return self._newest[host]

    def take(self) -> dict[str, list[Seen]]:
        """Host → its processes that belong to a run, by their id."""
        return {host: self.of(host) for host in self._tables}

    def of(self, host: str) -> list[Seen]:
        """Processes of one host that belong to a run, by their id."""
        found = []
        for pid in self._pids(host):
            with suppress(OSError, IndexError):
                found.append(self._look(host, self._tables[host] / str(pid)))
        own = {seen.pid for seen in found if self._ours(seen)}
        while more := {s.pid for s in found if s.parent in own} - own:
            own |= more
        return sorted((seen for seen in found if seen.pid in own), key=lambda seen: seen.pid)

    def _pids(self, host: str) -> list[int]:
        """Process ids on a host, but for its first process."""
        try:
            entries = os.listdir(self._tables[host])
        except OSError:  # the host is being taken down
            return []
        return [int(entry) for entry in entries if entry.isdigit() and entry != "1"]

    def _look(self, host: str, process: Path) -> Seen:
        stat = (process / "stat").read_text(errors="replace")
        name = stat[stat.index("(") + 1 : stat.rindex(")")]
        fields = stat[stat.rindex(")") + 2 :].split()
        pid, parent, started = int(process.name), int(fields[1]), int(fields[19])
        key = (host, pid, started, name)  # another program may take its place
        if key not in self._lines or not self._lines[key]:
            self._lines[key] = (process / "cmdline").read_bytes()
        client = _CLIENT in self._lines[key].split(b"\0")[:2]
        return Seen(host, pid, parent, name, fields[0], started, client)

    def _ours(self, seen: Seen) -> bool:
        line = self._lines[seen.host, seen.pid, seen.started, seen.name]
        return seen.client or _FORKED in line or b"nccl_doctor" in line

    def send(self, seen: Seen, number: int) -> bool:
        """Send a signal. Returns: there was still this process, alive."""
        table = self._tables[seen.host]
        with suppress(OSError, IndexError):
            handle = os.open(table / str(seen.pid), os.O_RDONLY | os.O_DIRECTORY)
            try:
                now = self._look(seen.host, table / str(seen.pid))
                if now.started == seen.started and now.alive:
                    signal.pidfd_send_signal(handle, number)
                    return True
            finally:
                os.close(handle)
        return False


def tops(processes: list[Seen]) -> list[Seen]:
    """Those that were started from outside the host: launchers, and supervisors of torchrun."""
    return [seen for seen in processes if seen.parent == 0 and not seen.client]


def supervisors(launcher: str, processes: list[Seen]) -> list[Seen]:
    """Processes of one host that are the doctor as its caller knows it."""
    found = tops(processes)
    return found[1:] if launcher == "torchrun" else found


def of_role(launcher: str, role: str, processes: list[Seen]) -> list[Seen]:
    """Processes of one host that play a role, those of lower ranks first where that is known."""
    alive = [seen for seen in processes if seen.alive and not seen.client]
    if role == "child":
        return [seen for seen in alive if seen.observes]
    top = tops(processes)
    if launcher == "torchrun" and role == "launcher":
        return [seen for seen in top[:1] if seen.alive]
    level = supervisors(launcher, processes)
    depth = {"own": ("launcher", "supervisor", "rank")}.get(launcher, ("supervisor", "rank"))
    for _ in range(depth.index(role)):
        above = {seen.pid for seen in level}
        level = [seen for seen in processes if seen.parent in above and not seen.observes]
    return [seen for seen in level if seen.alive and not seen.client]


def below(top: Seen, processes: list[Seen]) -> list[Seen]:
    """A process, and those that descend from it."""
    family = {top.pid}
    while more := {seen.pid for seen in processes if seen.parent in family} - family:
        family |= more
    return [seen for seen in processes if seen.pid in family]


def chain(seen: Seen, processes: list[Seen]) -> list[Seen]:
    """A process and those above it, the highest first."""
    by_pid: Mapping[int, Seen] = {each.pid: each for each in processes}
    found = [seen]
    while found[0].parent in by_pid:
        found.insert(0, by_pid[found[0].parent])
    return found
