"""A command whose output is kept on disk while it passes.

Its streams, its signals and its exit code are those that it would have alone: a stream that is a
terminal is one for the command too, a reader that leaves ends its writes, and a disk that does not
answer holds nothing up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from nccl_doctor.system import folders, forks

_READ = 1 << 20
_LARGEST = 64 << 20
"""Bytes of one file; of each stream this and the one before it are kept."""
_MOST_WAITING = 16 << 20
"""Bytes that may wait for the disk; what comes then is not kept."""
_MODE = 0o644
"""Mode of a file, less what the umask takes."""
_LOOK_S = 0.2
_REST_S = 2.0
"""Time for what is in the pipes when the command has ended: others may hold them open."""
_FLUSH_S = 5.0
_SIGNALS = (*forks.SIGNALS, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
_BY_KERNEL = 0
"""`si_code` above it: the kernel sends the signal to all that a terminal has in front."""


@dataclass
class KeptEnd:
    """End of a command: its exit code, negative for a signal, the seconds that it ran, and the
    signals that this process got to send on.
    """

    code: int
    seconds: float
    sent_on: list[int] = field(default_factory=list)

    @property
    def was_asked(self) -> bool:
        """True if it was asked to end by a signal from outside."""
        asks = {*forks.SIGNALS, signal.SIGQUIT}
        return bool(asks & {*self.sent_on}) or -self.code in (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Silence:
    """Reaction to a command that prints nothing for `after_s` seconds: `call`, in a thread of its
    own, with the process id of the command; once for each such time.
    """

    after_s: float
    call: Callable[[int], None]


def run_kept(command: Sequence[str], folder: Path, silence: Silence | None = None) -> KeptEnd:
    """Run a command and keep its output in files of `folder`, which is there; only from the main
    thread, and only once.

    Files: stdout.log and stderr.log, or console.log if both are one stream; the 64 MiB before the
    last ones are in stdout.0.log and so on.
    """
    started = time.monotonic()
    forks.open_streams()
    streams = _streams(folder)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(command, streams, before, parent)
    for stream in streams:
        stream.begin()
    end = KeptEnd(0, 0.0)
    threading.Thread(target=_send_on, args=(pid, streams, end.sent_on), daemon=True).start()
    status = _pass_on(pid, streams, silence)
    for stream in streams:
        stream.file.close()
    while (info := signal.sigtimedwait(_SIGNALS, 0)) is not None:
        end.sent_on.append(info.si_signo)  # the thread had no time to take it: it was the command's
    signal.pthread_sigmask(signal.SIG_SETMASK, before)  # what follows may be interrupted
    end.code, end.seconds = os.waitstatus_to_exitcode(status), time.monotonic() - started
    return end


def leave_as(code: int) -> NoReturn:
    """End this process as a command ended: with its exit code, or by its signal."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core is the command's
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no disposition
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


@dataclass
class _KeptStream:
    """One stream of the command, or two that are one: `numbers` are its descriptors there, `end` is
    where it writes and `here` where that is read; `out` is ours.
    """

    numbers: tuple[int, ...]
    here: int
    end: int
    file: _KeptFile

    @property
    def out(self) -> int:
        return self.numbers[0]

    def begin(self) -> None:
        os.close(self.end)
        self.file.begin()

    def resize(self) -> None:
        """Give the terminal of the command the size of ours."""
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self.out, termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(self.here, termios.TIOCSWINSZ, size)

    def pass_on(self) -> bool:
        """Pass on all that can be read now; False at the end, or if our reader has left."""
        try:
            data = os.read(self.here, _READ)
        except OSError:  # a terminal without a writer
            data = b""
        if data:
            self.file.put(data)
        try:
            _write(self.out, data)
        except OSError:
            data = b""
        if not data:
            os.close(self.here)  # then the command learns it from its next write
        return bool(data)


def _streams(folder: Path) -> list[_KeptStream]:
    """The streams of the command: pipes or terminals, as ours are."""
    one = os.path.sameopenfile(1, 2)
    made = []
    for name, numbers in [("console", (1, 2))] if one else [("stdout", (1,)), ("stderr", (2,))]:
        here, end = os.openpty() if os.isatty(numbers[0]) else _wide_pipe()
        stream = _KeptStream(numbers, here, end, _KeptFile(folder / f"{name}.log"))
        if os.isatty(end):
            modes = termios.tcgetattr(numbers[0])
            modes[1] &= ~termios.OPOST  # our own terminal does that
            termios.tcsetattr(end, termios.TCSANOW, modes)
            stream.resize()
        made.append(stream)
    return made


def _wide_pipe() -> tuple[int, int]:
    """The ends of a pipe that holds as much as one read takes, where the kernel allows it."""
    here, end = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(here, fcntl.F_SETPIPE_SZ, _READ)
    return here, end


def _become(
    command: Sequence[str], streams: Sequence[_KeptStream], before: set[int], parent: int
) -> NoReturn:
    try:
        forks.die_with(parent)
        for stream in streams:
            for number in stream.numbers:
                os.dup2(stream.end, number)
            os.close(stream.end)
            os.close(stream.here)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"nccl-doctor: cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(2)


def _send_on(pid: int, streams: Sequence[_KeptStream], sent_on: list[int]) -> None:
    """Send signals on to the command, but for those that its terminal sends to it as well."""
    while True:
        info = signal.sigwaitinfo(_SIGNALS)
        if info.si_signo == signal.SIGWINCH:
            for stream in streams:
                stream.resize()
        else:
            sent_on.append(info.si_signo)
            if info.si_code > _BY_KERNEL:
                continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, info.si_signo)


def _pass_on(pid: int, streams: Sequence[_KeptStream], silence: Silence | None) -> int:
    """Pass the output on until the command has ended. Returns: its wait status."""
    open_ones = {stream.here: stream for stream in streams}
    status: int | None = None
    until, printed, told = 0.0, time.monotonic(), False
    while True:
        wait_s = _LOOK_S if status is None else 0.0
        readable = select.select([*open_ones], [], [], wait_s)[0] if open_ones else []
        for here in readable:
            if not open_ones[here].pass_on():
                del open_ones[here]
        if readable:
            printed, told = time.monotonic(), False
        elif silence and not told and time.monotonic() - printed > silence.after_s:
            told = True
            threading.Thread(target=silence.call, args=(pid,), daemon=True).start()
        if status is None:
            if not open_ones:  # nothing more to read: it may go on without its streams
                return os.waitpid(pid, 0)[1]
            ended, status_now = os.waitpid(pid, os.WNOHANG)
            if ended:
                status, until = status_now, time.monotonic() + _REST_S
        elif not readable or time.monotonic() > until:
            return status


def _write(number: int, data: bytes) -> None:
    """Write all of it, however long the reader takes.

    Raises:
        OSError: nobody reads it.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(number, rest) :]
        except BlockingIOError:
            select.select([], [number], [])


class _KeptFile:
    """The last part of a stream, on disk. A thread writes it: the disk may not answer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._older = path.with_suffix(f".0{path.suffix}").name
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Keep some bytes, unless the disk is too far behind."""
        with self._news:
            if self._bytes + len(data) <= _MOST_WAITING:
                self._waiting.append(data)
                self._bytes += len(data)

    def close(self) -> None:
        """Wait until all is written, but no longer than a disk may take that answers."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join(_FLUSH_S)

    def _work(self) -> None:
        # It may be full, or gone: the command goes on.
        with contextlib.suppress(OSError), folders.opened(self._path.parent) as folder:
            while self._fill(folder):
                os.rename(self._path.name, self._older, src_dir_fd=folder, dst_dir_fd=folder)
        with self._news:
            self._bytes = _MOST_WAITING  # nothing more is kept

    def _fill(self, folder: int) -> bool:
        """Write one file. Returns: it is full; False at the end of the stream."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        file = folders.open_in_place(folder, self._path.name, flags, _MODE)
        if file is None:
            raise PermissionError(errno.EPERM, "another user could have chosen this file")
        try:
            left = _LARGEST
            while left > 0 and (data := self._next()):
                _write(file, data)
                left -= len(data)
            return left <= 0
        finally:
            os.close(file)

    def _next(self) -> bytes:
        """All that came since the last look; empty at the end."""
        with self._news:
            while not self._closed:
                self._news.wait(_LOOK_S)  # for all that comes meanwhile: one write, not hundreds
                if self._waiting:
                    break
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._bytes = 0
            return data
