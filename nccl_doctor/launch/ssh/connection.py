"""One command on many hosts, by the ssh of the system: start, send the input, read all output.

Of many hosts only some are on the way in at the same time: a thousand log-ins at once would keep
each other from coming in before their time-out, here and on a host that all of them jump over. Who
is in stays until the end.

Nothing here knows what the commands do. Every ssh gets its own session, so that Ctrl-C reaches this
process only; what runs on a host sees its standard input close when it is to end, also when this
process is killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from nccl_doctor import __version__
from nccl_doctor.launch.ssh import program
from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.model.options import Options
from nccl_doctor.system import supervisor
from nccl_doctor.system.deadline import no_more
from nccl_doctor.system.forks import to_catch, wake_pipe
from nccl_doctor.system.masking import masked
from nccl_doctor.toolkit.host import open_descriptors

STDOUT_MAX = 256 << 20
STDERR_MAX = 64 << 10
"""Bytes kept of one host: the beginning of its stdout, the end of its stderr."""
HANG_UP_S = 8.0
"""Time for the processes on the hosts to write their reports after an interrupt."""
WORD_MAX = 60 << 10
"""Largest input of a command: it fits into an empty pipe, so writing it never blocks."""

AT_ONCE = 64
"""Most commands on the way in."""
_HOLDS_S = 3.0
"""After this, one that is not in keeps nobody else waiting: most likely its host is down."""
_FILES = 3
"""Open files for each command."""

_ALIVE_S, _ALIVE_COUNT = 5, 3
_TICK_S = 0.05
_REAP_S = 2.0
_SPARE_FILES, _LEAST_FILES = 64, 8


def ssh_command(
    destination: str,
    command: Sequence[str],
    *,
    connect_s: float,
    port: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[str]:
    """Words of a local `ssh` that runs a command on another host.

    Host keys, users, ports, keys and jumps are left to the user's own configuration. Nobody is
    there to be asked for a password.

    Args:
        destination: `host` or `user@host`.
        command: its words, each quoted for the login shell there.
        connect_s: how long ssh may try to connect.
        port: of the server there; None: as the user's configuration says.
        variables: set for the command. They are seen by whoever lists processes.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(max(1, round(connect_s))),
        "ConnectionAttempts": "1",
        "ServerAliveInterval": str(_ALIVE_S),
        "ServerAliveCountMax": str(_ALIVE_COUNT),
        "ControlMaster": "no",  # a new master would stay behind, and keep our pipes
        "ClearAllForwardings": "yes",
        "LogLevel": "ERROR",
    }
    words = ["ssh", "-T"]
    for name, value in options.items():
        words += ["-o", f"{name}={value}"]
    if port is not None:
        words += ["-p", str(port)]
    there = ["exec", "env", *(f"{k}={v}" for k, v in (variables or {}).items()), *command]
    return [*words, "--", destination, shlex.join(there)]


@dataclass(frozen=True)
class CommandEnd:
    """Ending of one command. `code` is None if it was still running at the deadline.

    `ready` says that it had announced itself; `stderr` is the end of it.
    """

    code: int | None
    ready: bool
    stdout: str
    stderr: str
    seconds: float


class TooFewFiles(Exception):
    """Limit of open files that is too low for so many commands; the text says what to do."""


@dataclass(frozen=True)
class Heard:
    """All of them, in the order of the commands; `interrupted` names the signal, if one came."""

    ended: tuple[CommandEnd, ...]
    interrupted: str | None = None


@dataclass
class _Ssh:
    process: subprocess.Popen[bytes]
    stdin: IO[bytes]
    started: float
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    ready: bool = False
    instructed: bool = False
    seconds: float | None = None

    def tell(self, word: bytes) -> None:
        """Say the word."""
        self.instructed = True
        with contextlib.suppress(OSError):  # it is gone; how, will be read from its end
            self.stdin.write(word)
            self.stdin.flush()

    def hang_up(self) -> None:
        """Close its standard input: the other end is to stop."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def ended(self) -> CommandEnd:
        code = self.process.returncode if self.seconds is not None else None
        seconds = time.monotonic() - self.started if self.seconds is None else self.seconds
        stdout, stderr = (data.decode("utf-8", "replace") for data in (self.stdout, self.stderr))
        return CommandEnd(code, self.ready, stdout, masked(stderr), round(seconds, 3))


def converse(
    commands: Sequence[Sequence[str]],
    *,
    marker: str,
    word: Callable[[frozenset[int]], str],
    ready_by: float,
    deadline: float,
    spread_s: float = math.inf,
    tick: Callable[[str], None] = lambda doing: None,
    hear: Callable[[bytes], None] = lambda stderr: None,
    more: Callable[[], float] = no_more,
) -> Heard:
    """Run commands at the same time, only from the main thread, and read all their output.

    Every command announces itself by a line on stderr that holds `marker`, and goes on when it has
    read one line. They are told together: when each of them is ready or has ended, or at the time
    `ready_by`; who gets ready later is told then, as long as another one that was told still runs.

    Args:
        commands: words of each.
        marker: see above.
        word: the line to tell, at most `WORD_MAX` long, given the indices of those that had ended
            without getting ready when the first were told.
        ready_by: `time.monotonic()` second, as above; later by as much as the last one is started
            later than the first.
        deadline: `time.monotonic()` second at which whoever still runs is killed.
        spread_s: seconds in which all have to be started, however slowly they get ready.
        tick: called several times a second with what is going on.
        hear: called with the end of what one has written to stderr, whenever something came.
        more: seconds by which the deadline is put off meanwhile.

    Raises:
        OSError: a command could not be started; none is left running.
        TooFewFiles: not all of them can be started.
    """
    holds_s = min(_HOLDS_S, spread_s * AT_ONCE / max(1, len(commands)))
    with _Conversation(commands, marker.encode(), hear, holds_s) as talk:
        lost: frozenset[int] | None = None
        hangs_up = math.inf
        while talk.goes_on and time.monotonic() < min(deadline + more(), hangs_up):
            talk.start_some()
            talk.listen()
            late = time.monotonic() > ready_by + talk.spread_s
            if lost is None and not talk.to_come and (late or talk.all_are_ready):
                lost = talk.lost()
            for ssh in talk.running():
                if lost is not None and ssh.ready and not (ssh.instructed or talk.hung_up):
                    ssh.tell(word(lost).encode())
            if talk.interrupted and not talk.hung_up:
                talk.hang_up()
                hangs_up = time.monotonic() + HANG_UP_S
            there = sum(ssh.ready for ssh in talk.all)
            failed = f", {len(talk.lost())} failed" if talk.lost() else ""
            left = len(talk.running()) + len(talk.to_come)
            tick(f"{there} of {len(commands)} hosts reached by ssh{failed}, waiting for {left}")
            if talk.instructed_have_ended():
                break  # whoever is still on the way in would meet nobody there
        never = [CommandEnd(None, False, "", "", 0.0) for _ in talk.to_come]
        return Heard((*(ssh.ended() for ssh in talk.all), *never), talk.interrupted)


class _Conversation:
    """The processes, their pipes and this process's signals, together put away at the end.

    `all` are those that were started, in order; `to_come` are the commands after them. One that is
    not ready holds back others for `holds_s`.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        marker: bytes,
        hear: Callable[[bytes], None],
        holds_s: float,
    ) -> None:
        self.all: list[_Ssh] = []
        self.to_come = deque(commands)
        self._holds_s = holds_s
        self.interrupted: str | None = None
        self.hung_up = False
        self._marker = marker
        self._hear = hear
        self._selector = selectors.DefaultSelector()
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> _Conversation:
        with self._cleanup as undo:
            undo.callback(self._end)
            undo.enter_context(_signals_wake(self._selector, self._interrupt))
            _make_room(len(self.to_come))
            self.start_some()
            self._cleanup = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    @property
    def goes_on(self) -> bool:
        return bool(self.running()) or (bool(self.to_come) and not self.hung_up)

    @property
    def all_are_ready(self) -> bool:
        return all(ssh.ready for ssh in self.running())

    @property
    def spread_s(self) -> float:
        """Seconds between the first start and the last one so far."""
        return self.all[-1].started - self.all[0].started if self.all else 0.0

    def start_some(self) -> None:
        """Start as many as there is room for on the way in."""
        since = time.monotonic() - self._holds_s
        on_the_way = sum(not ssh.ready and ssh.started > since for ssh in self.running())
        while self.to_come and on_the_way < AT_ONCE and not self.interrupted:
            self._start(self.to_come.popleft())
            on_the_way += 1

    def running(self) -> list[_Ssh]:
        return [ssh for ssh in self.all if ssh.seconds is None]

    def lost(self) -> frozenset[int]:
        """Indices of those that ended before they were ready."""
        return frozenset(
            i for i, ssh in enumerate(self.all) if ssh.seconds is not None and not ssh.ready
        )

    def instructed_have_ended(self) -> bool:
        """True if some got their input, and all of these have ended."""
        these = [ssh for ssh in self.all if ssh.instructed]
        return bool(these) and all(ssh.seconds is not None for ssh in these)

    def listen(self) -> None:
        """Read what has come, for a tick; note the processes that have ended."""
        for key, _ in self._selector.select(_TICK_S):
            key.data()
        for ssh in self.running():
            if ssh.process.poll() is not None:
                for stream in (ssh.process.stdout, ssh.process.stderr):
                    while stream is not None and self._read(ssh, stream):
                        pass
                ssh.seconds = time.monotonic() - ssh.started

    def hang_up(self) -> None:
        self.hung_up = True
        for ssh in self.all:
            ssh.hang_up()

    def _start(self, command: Sequence[str]) -> None:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        ssh = _Ssh(process, process.stdin, time.monotonic())
        self.all.append(ssh)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, partial(self._read, ssh, stream))

    def _read(self, ssh: _Ssh, stream: IO[bytes]) -> bool:
        """Take what a pipe holds; False where it holds nothing, now or ever."""
        if stream.closed:
            return False
        try:
            data = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(stream)
            stream.close()
            return False
        if stream is ssh.process.stdout:
            ssh.stdout += data[: STDOUT_MAX - len(ssh.stdout)]
            return True
        ssh.stderr += data
        ssh.ready = ssh.ready or self._marker in ssh.stderr
        self._hear(bytes(ssh.stderr))
        del ssh.stderr[:-STDERR_MAX]
        return True

    def _interrupt(self, number: int) -> None:
        self.interrupted = self.interrupted or signal.Signals(number).name

    def _end(self) -> None:
        """Kill what still runs, and close every pipe."""
        for ssh in self.all:
            if ssh.process.poll() is None:
                os.killpg(ssh.process.pid, signal.SIGKILL)  # with its ProxyCommand
        for ssh in self.all:
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                ssh.process.wait(_REAP_S)
            ssh.hang_up()
            for stream in (ssh.process.stdout, ssh.process.stderr):
                if stream is not None:
                    stream.close()
        self._selector.close()


def _make_room(commands: int) -> None:
    """Let this process open the files for that many commands.

    Raises:
        TooFewFiles: its hard limit does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    needed = open_descriptors() + _FILES * commands
    if most < needed + _LEAST_FILES:
        raise TooFewFiles(
            f"ssh to {commands} hosts needs {needed + _SPARE_FILES} open files, and this process "
            f"may have {most}: raise the limit (ulimit -Hn {needed + _SPARE_FILES}, as root), or "
            "start the run with srun, mpirun or clush"
        )
    if soft != resource.RLIM_INFINITY and soft < needed + _SPARE_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed + _SPARE_FILES, most), hard))


@contextlib.contextmanager
def _signals_wake(
    selector: selectors.BaseSelector, interrupt: Callable[[int], None]
) -> Iterator[None]:
    """Have signals that would end this process wake a selector instead, and be noted."""
    wake, wake_end = wake_pipe()
    before = {number: signal.getsignal(number) for number in to_catch()}
    fd_before = signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    for number in before:
        signal.signal(number, lambda *_: None)
    selector.register(wake, selectors.EVENT_READ, lambda: interrupt(os.read(wake, 1)[0]))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    supervisor.take_signals()
    try:
        yield
    finally:
        # The supervisor remembers one that comes from now on, and limits the time that is left.
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        selector.unregister(wake)
        os.close(wake)
        os.close(wake_end)


# Other end of --hostfile: this process was started over ssh, and answers on its stdout.
#
# It announces itself, reads one line that says what to do, and from then on ends as soon as its
# standard input closes: then whoever asked is gone, or wants it to stop.


MARKER = "nccl-doctor relay: ready, version "
"""Begin of the line on stderr that shows the other end that this process has started."""
MORE = "nccl-doctor relay: seconds more for this run: "
"""Begin of the line on stderr that tells the other end to wait longer."""

_AGAIN_S = 1.0


def tell_more(seconds: int) -> None:
    """Tell the other end that the run ends so much later."""
    sys.stderr.write(f"{MORE}{seconds}\n")
    sys.stderr.flush()


def instructions(options: Options, variables: Mapping[str, str], secret: bytes = b"") -> str:
    """The line that a relay waits for; `secret` is what all hosts of the run share."""
    line = {"options": encode(options), "variables": dict(variables), "secret": secret.hex()}
    return json.dumps(line) + "\n"


def attend() -> tuple[Options, bytes]:
    """Announce this process, wait for the options, set the variables, and watch the connection.

    Returns: the options of the run, and its secret.

    Raises:
        ValueError: what came is not the line that `instructions` makes.
        EOFError: the line closed before.
    """
    sys.stderr.write(f"{MARKER}{__version__}\n")
    sys.stderr.flush()
    given = _first_line()
    options = decode(Options, Node("options", given["options"]))
    secret = bytes.fromhex(given["secret"])
    program.apply(given["variables"])
    threading.Thread(target=_watch, name="relay", daemon=True).start()
    return options, secret


def _first_line() -> Any:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(0, 1 << 16)  # not through sys.stdin: nothing else must be taken
        if not more:
            raise EOFError
        data += more
    return json.loads(data)


def _watch() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 16):
            pass
    while True:  # again: the handlers of a process that is starting its ranks may not be set yet
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_AGAIN_S)
