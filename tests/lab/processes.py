"""Processes on a host: output with the time of each line, and signals."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tests.support.forkserver import Forked, read_early
from tests.support.waiting import comes

if TYPE_CHECKING:
    from tests.lab.hosts import Host

PATH = os.pathsep.join([str(Path(sys.executable).parent), "/usr/sbin", "/usr/bin", "/sbin", "/bin"])


class LabError(RuntimeError):
    """A command of the lab itself failed: not the fault of what is tested."""


def call(argv: Sequence[str], stdin: str = "", timeout_s: float = 10.0) -> str:
    """Run a command to its end and return its standard output.

    Raises:
        LabError: it failed or took longer than `timeout_s` seconds.
    """
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={"PATH": PATH},
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{argv} took longer than {timeout_s} s") from error
    if done.returncode:
        raise LabError(f"{argv} failed ({done.returncode}): {done.stderr.strip()}\n{stdin}")
    return done.stdout


def first_child(pid: int) -> int | None:
    """Process id of the first child of a process, if it has one.

    Raises:
        OSError: the process is gone.
    """
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def _field(process: Path, name: str) -> str:
    """One line of /proc/PID/status."""
    (line,) = [x for x in (process / "status").read_text().splitlines() if x.startswith(f"{name}:")]
    return line.partition(":")[2].strip()


def describe(pid: int) -> str:
    """Process id, name, state and command line."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        comm = Path(f"/proc/{pid}/comm").read_text().strip()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return f"{pid} (gone)"
    return f"{pid} {comm} [{state}] {line}"


@dataclass(frozen=True)
class Line:
    """One line of output: seconds after the start of the process, `stdout` or `stderr`, text."""

    seconds: float
    stream: str
    text: str


_DOCTOR = [sys.executable, "-m", "nccl_doctor"]
_numbers = itertools.count()


class Process:
    """A command on a host. Output goes to two files, and to `lines` with the time of each line.

    The doctor is forked from a process that has imported torch, unless its environment says
    something that is read before, or the host's lab wants all of them `fresh`.
    """

    def __init__(self, host: Host, argv: Sequence[str], env: Mapping[str, str], folder: Path):
        self.host = host
        self.argv = list(argv)
        self.env = dict(env)
        self.lines: list[Line] = []
        self.returncode: int | None = None
        self.seconds: float | None = None
        self.started = time.monotonic()
        stem = folder / f"{host.name}.{next(_numbers)}"
        self._files = {name: Path(f"{stem}.{name}") for name in ("stdout", "stderr")}
        self._outer: subprocess.Popen[str] | Forked
        pipes: list[Path | IO[str] | None]
        if self._can_be_forked():
            pipes = [Path(f"{stem}.{number}.pipe") for number in (1, 2)]
            for pipe in pipes:
                os.mkfifo(pipe)
            out, err = pipes
            self._outer = Forked(
                argv[len(_DOCTOR) :],
                self.env,
                folder=folder,
                out=out,
                err=err,
                host=host.init,
            )
        else:
            self._outer = subprocess.Popen(
                [*host.enter, "env", "-C", str(folder), *argv],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            pipes = [self._outer.stdout, self._outer.stderr]
        self._readers = []
        for name, pipe in zip(self._files, pipes, strict=True):
            reader = threading.Thread(target=self._read, args=(name, pipe), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _can_be_forked(self) -> bool:
        lab = self.host.lab
        told = {name: value for name, value in self.env.items() if lab.env.get(name) != value}
        return self.argv[: len(_DOCTOR)] == _DOCTOR and not (read_early(told) or lab.fresh)

    @property
    def outer_pid(self) -> int:
        """Process id of the command, or of what waits for it and ends as it does."""
        return self._outer.pid

    def _command(self) -> int | None:
        """Process id of the command itself; None where it is over, or has not begun."""
        pid = self._outer.pid
        here, there = (os.readlink(f"/proc/{each}/ns/pid") for each in (pid, self.host.init))
        return pid if here == there else first_child(pid)

    @property
    def inner_pid(self) -> str:
        """Process id of the command in its host's table; empty where it is over."""
        try:
            pid = self._command()
            return _field(Path("/proc", str(pid)), "NSpid").split()[-1] if pid else ""
        except OSError:
            return ""

    def _read(self, name: str, pipe: Path | IO[str]) -> None:
        if isinstance(pipe, Path):
            stream = pipe.open(errors="replace")  # once the other side has opened it as well
            pipe.unlink()
        else:
            stream = pipe
        with self._files[name].open("w") as copy:
            for text in stream:
                self.lines.append(Line(time.monotonic() - self.started, name, text.rstrip("\n")))
                copy.write(text)
                copy.flush()

    @property
    def pid(self) -> int:
        """Process id on the machine (not in the host's table) of the command itself.

        Raises:
            LabError: it is over, or did not start within two seconds.
        """

        def started() -> int | None:
            with suppress(OSError):
                return self._command()
            return None

        comes(lambda: started() or self._outer.poll() is not None, every_s=0.002)
        if self._outer.poll() is not None or not (pid := started()):
            raise LabError(f"{self.argv} does not run")
        return pid

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self.returncode is None and self._outer.poll() is not None:
            self.seconds = time.monotonic() - self.started
            self.returncode = self._outer.returncode
            for reader in self._readers:
                reader.join(1.0)  # a stray child may hold the pipe: then leave the rest
        return self.returncode

    def wait(self, timeout_s: float) -> int | None:
        """Exit code, or None if it still runs after `timeout_s` seconds (it is left running)."""
        comes(lambda: self.poll() is not None, timeout_s, every_s=0.01)
        return self.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the command itself."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the command and wait for it; its own children are left to the host's end."""
        if self.poll() is None:
            with suppress(LabError, ProcessLookupError):
                self.signal(signal.SIGKILL)
            self._outer.kill()  # nsenter stops itself when its child is stopped
            self._outer.wait(5)
            self.poll()

    def _text(self, name: str) -> str:
        return "\n".join(line.text for line in list(self.lines) if line.stream == name)

    @property
    def stdout(self) -> str:
        """Standard output so far."""
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return self._text("stderr")

    def wait_for(self, text: str, timeout_s: float) -> float:
        """Seconds after the start at which a line with `text` came.

        Raises:
            LabError: it did not come within `timeout_s` seconds from now.
        """

        def came() -> list[float]:
            return [line.seconds for line in list(self.lines) if text in line.text]

        if not (found := comes(came, timeout_s, every_s=0.005)):
            said = f"{self.stdout}\n{self.stderr}"
            raise LabError(f"{text!r} was not printed by {self.argv}:\n{said}")
        return found[0]


def wait_for_one(running: Sequence[Process], timeout_s: float) -> None:
    """Wait until one of them has ended, or for `timeout_s` seconds, and use no core meanwhile."""
    ends = select.poll()
    with ExitStack() as stack:
        for process in running:
            try:
                handle = os.pidfd_open(process.outer_pid)
            except ProcessLookupError:  # another thread has asked for its exit code
                return
            stack.callback(os.close, handle)
            ends.register(handle, select.POLLIN)
        ends.poll(timeout_s * 1000)


_LOOK_S = 0.004
_NEW_S = 2.0


class Strike:
    """A signal on its way to a probe child. `pid`, as the host sees it, is set once it was sent.

    `act` is called in place of the signal.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        rank: int | None,
        number: int,
        comm: str,
        parent: bool,
        *,
        act: Callable[[], None] | None = None,
    ):
        self.hosts, self.rank, self.act = hosts, rank, act
        self.number, self.comm, self.parent = number, comm, parent
        self.pid: int | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        # The child lives for some 50 ms: on a busy machine this thread must not queue for a core.
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        tables = {host: Path(f"/proc/{host.init}/root/proc") for host in self.hosts}
        # A child takes its name as it starts: one that has been here for long is somebody else.
        first_seen: dict[Path, float] = {}
        while self.pid is None and not self.over.wait(_LOOK_S):
            now = time.monotonic()
            for host, table in tables.items():
                for entry in os.listdir(table):
                    if not entry.isdigit() or entry == "1":
                        continue
                    process = table / entry
                    if now - first_seen.setdefault(process, now) > _NEW_S:
                        continue
                    if self._hit(host, process):
                        self.pid = int(entry)
                        return

    def _rank_of(self, host: Host, process: Path) -> str:
        """By the environment that its supervisor was started with, or was given."""
        told = (process / "environ").read_bytes().split(b"\0")
        if shown := [each for each in told if each.startswith(b"RANK=")]:
            return shown[0].removeprefix(b"RANK=").decode()
        table, top = process.parent, process.name
        while (above := _field(table / top, "PPid")) not in ("0", "1"):
            top = above
        mine = [each for each in host.lab.processes if each.host is host and each.inner_pid == top]
        return mine[0].env.get("RANK", "") if mine else ""

    def _hit(self, host: Host, process: Path) -> bool:
        """Signal a process, given its folder in /proc, if it is the one."""
        try:
            if (process / "comm").read_text().strip() != self.comm:
                return False
            if self.rank is not None and str(self.rank) != self._rank_of(host, process):
                return False
            if self.parent:
                stat = (process / "stat").read_text()
                process = process.parent / stat.rpartition(")")[2].split()[1]
            handle = os.open(process, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return False
        try:
            if self.act is not None:
                self.act()
            else:
                signal.pidfd_send_signal(handle, self.number)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True
