"""Forked processes that die with this one, and how to end them.

The process that forks must have no busy thread of its own: a lock that such a thread holds at that
moment stays locked in the child for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator

from nccl_doctor.system.leaving import give_back

OURS = "ncd:"
"""How the names of our own processes begin."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a process to end. Across a fork they are blocked until the child can take them:
what the parent would do at a signal is not for the child to do."""

REAP_WAIT_S = 1.0
STOPPED_S = 3.0
"""Longest time to wait for a child that a signal has stopped (state T): it may go on."""
_FILES = 1 << 16
"""Number above all descriptors: far more than this program ever opens."""
_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_PR_SET_NAME = 15

living: set[int] = set()
"""Process ids of the children of this process, for the watchdog that kills them."""


def to_catch() -> tuple[signal.Signals, ...]:
    """Those of `SIGNALS` that this process is to catch.

    SIGHUP and SIGINT stay ignored where this process was started so (`nohup`, `trap '' INT`, `&` in
    a script). SIGTERM always ends it.
    """
    return tuple(
        number
        for number in SIGNALS
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN
    )


def wake_pipe() -> tuple[int, int]:
    """The ends of a pipe for `signal.set_wakeup_fd`; writing to it does not wait.

    The kernel keeps the page of a byte that was read (anon_pipe_buf_release in fs/pipe.c). So the
    first signal finds one where no memory is left, and Python has no error to print.
    """
    wake, wake_end = os.pipe()
    os.write(wake_end, b"\0")
    os.read(wake, 1)
    os.set_blocking(wake_end, False)
    return wake, wake_end


def open_streams() -> None:
    """Lead a standard stream that was closed before we started nowhere: the next file that is
    opened would else get its descriptor, and the report be written into that.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one


def unnamed_file(name: str) -> int:
    """Descriptor of a new file without a path: in memory, or where a sandbox refuses that, in the
    folder for temporary files.
    """
    try:
        return os.memfd_create(name)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def kill_living() -> None:
    """Kill every child at once, with all it started; for the last resort."""
    for pid in list(living):
        kill(pid)


def fork() -> tuple[int, int]:
    """Fork, with nothing left in a buffer that both would write.

    `SIGNALS` are blocked in the child until it is settled, or has a watchdog of its own.

    Returns: as `os.fork`, and the process id of the parent.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = 0
    try:
        pid = os.fork()
    finally:
        if os.getpid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid, parent


def fork_service(name: str, serve: Callable[[], None], keep: Iterable[int] = ()) -> int:
    """Fork a process that runs `serve` until it is killed or this process is gone.

    Of the open files it has only the standard streams and those to `keep`.

    Returns: its process id, registered in `living`.
    """
    pid, parent = fork()
    if pid == 0:
        code = 1
        try:
            settle(name, parent)
            close_others(keep)
            serve()
            code = 0
        finally:
            os._exit(code)
    living.add(pid)
    return pid


def fork_child(body: Callable[[], int]) -> int:
    """Fork a process that runs `body`, exits with the code it returns, and dies with this one.

    Returns: its process id; the caller reaps it.
    """
    pid, parent = fork()
    if pid == 0:
        code = 3
        try:
            die_with(parent)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the parent may wait for its own
            code = body()
            sys.stdout.flush()
        except BaseException:  # the boundary of the process: nothing may run on above the fork
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def service_end(pid: int) -> str:
    """End of a process started by `fork_service`, as `exit code 1` or `SIGKILL`; it is reaped then.
    Empty while it lives.
    """
    try:
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return "not known how"
    if not reaped:
        return ""
    living.discard(pid)
    code = os.waitstatus_to_exitcode(status)
    return signal_name(-code) if code < 0 else f"exit code {code}"


def stop_service(pid: int) -> None:
    """Kill and reap a process started by `fork_service`."""
    end(pid, patient=False)
    living.discard(pid)


def settle(name: str, parent: int) -> None:
    """Prepare a forked process: die with the parent, own process group, own signals."""
    die_with(parent)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    rename(name)
    signal.set_wakeup_fd(-1)
    for number in (*to_catch(), signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    living.clear()
    with contextlib.suppress(OSError, ValueError):  # a sandbox may refuse it; ValueError: EPERM
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must leave nothing behind


def close_others(keep: Iterable[int]) -> None:
    """Close every file but the standard streams and those to `keep`.

    A reader at the other end of a pipe must not wait for this process, and few open files may be
    allowed.
    """
    first = 3
    for number in sorted({*keep, _FILES}):
        os.closerange(first, number)
        first = max(first, number + 1)


def rename(name: str) -> None:
    """Give this process a name by which it is found in a list of processes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"ncd:{name}".encode()[:15], 0, 0, 0)


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


@contextlib.contextmanager
def outliving_parent() -> Iterator[None]:
    """Let this process outlive its parent for the time of the block, which must not wait."""
    parent, number = os.getppid(), ctypes.c_int(0)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    if not number.value:
        yield
        return
    prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    try:
        yield
    finally:
        die_with(parent)


def outlive() -> None:
    """Let this process live on when its parent is gone: it sees the end of a pipe, and has to
    remove files first.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def end(pid: int, *, patient: bool, by: float | None = None) -> int | None:
    """Reap a child, killing it and its process group; None for one that cannot be killed.

    A patient end lets a child that has closed its pipe leave by itself first. `by`: the
    `time.monotonic()` second at which to give up; without it, a second after the first signal.
    """
    patience = time.monotonic() + (REAP_WAIT_S if patient else 0)
    by = patience + REAP_WAIT_S if by is None else by
    pause = 0.001
    while True:
        try:
            reaped, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if reaped:
            kill(pid, group_only=True)  # whatever it started and left behind
            return status
        now = time.monotonic()
        if now >= by:
            return None
        if now >= patience:
            kill(pid)
        time.sleep(pause)
        pause = min(pause * 2, 0.02)


def kill(pid: int, *, group_only: bool = False) -> None:
    """Kill a child with its process group, or what is left of that group.

    Files that NCCL has made for the child in /dev/shm are removed first: nobody else would.
    """
    if not group_only:
        give_back(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not group_only:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def signal_name(number: int) -> str:
    """`SIGKILL`, or the number of one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Standstill:
    """The time for which a process has been stopped by a signal."""

    def __init__(self) -> None:
        self._since: float | None = None

    def is_too_long(self, state: str) -> bool:
        """True if it has been `STOPPED_S` by now, given the state letter of the process."""
        now = time.monotonic()
        if state != "T":
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since > STOPPED_S


def look_at(pid: int) -> tuple[str, str]:
    """State letter of a process, as /proc/PID/stat has it, and the kernel function it waits in.

    Empty for what cannot be read, as where /proc is that of another PID namespace.
    """
    after_name = _proc_text(pid, "stat").rpartition(")")[2].split()  # the name may hold anything
    return after_name[0] if after_name else "", _proc_text(pid, "wchan")


def _proc_text(pid: int, name: str) -> str:
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return ""
