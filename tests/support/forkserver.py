"""Calls of the program that are forked from a process that has imported it and torch already.

Importing takes most of the time of a test. A forked one starts in some 20 ms and is the same
program from `main` on, with an environment, a folder and outputs of its own; where asked for, on a
host of the lab. What happens before, and what an environment does to torch as it is imported, needs
a program that is started afresh.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


@functools.cache
def nursery(library_path: str = "") -> Nursery:
    """The one of this test run, or the one whose calls find libraries in a folder."""
    return Nursery(library_path)


class Nursery:
    """The process that they come from, and what it is asked for, one line each way.

    All workers of a test run share it: importing torch costs seconds. It ends with the last of
    them, however that ends.
    """

    def __init__(self, library_path: str = "") -> None:
        self._lock = threading.Lock()
        self._lines = _connected(library_path).makefile("rw")

    def ask(self, **order: Any) -> Any:
        with self._lock:
            self._lines.write(json.dumps(order) + "\n")
            self._lines.flush()
            return json.loads(self._lines.readline())


_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex


def _connected(library_path: str) -> socket.socket:
    """A connection with the server; the first caller starts it."""
    name = f"\0nccl-doctor-tests-{_RUN}-{hashlib.sha256(library_path.encode()).hexdigest()[:8]}"
    while True:
        caller = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(ConnectionRefusedError):  # nobody listens, or not yet
            caller.connect(name)
            return caller
        caller.close()
        with socket.socket(socket.AF_UNIX) as door:
            try:
                door.bind(name)
            except OSError:  # another worker was faster
                time.sleep(0.01)
                continue
            door.listen()
            _start(door, library_path)


def _start(door: socket.socket, library_path: str) -> None:
    # The loader reads it once, as the process starts.
    libraries = {"LD_LIBRARY_PATH": library_path} if library_path else {}
    subprocess.Popen(
        [sys.executable, "-m", "tests.support.forkserver"],
        stdin=door.fileno(),
        stdout=subprocess.DEVNULL,
        env={
            **os.environ,
            "RES_OPTIONS": "timeout:1 attempts:1",
            "CUDA_VISIBLE_DEVICES": "",
            **libraries,
        },
        cwd=Path(__file__).parents[2],
    )


_READ_EARLY = ("PYTHON", "LD_", "OMP_", "TORCH_", "COVERAGE_", "LC_", "LANG")


def read_early(env: Mapping[str, str | None]) -> bool:
    """Whether Python or torch reads one of these variables as it starts.

    They are the same for all that are forked, but for a PYTHONPATH that leads to `tests.broken`.
    """
    breaks = ("PYTHONPATH",) if "TEST_BREAK" in env else ()
    return any(name.startswith(_READ_EARLY) and name not in breaks for name in env)


class Forked:
    """One call, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        *,
        folder: Path,
        out: Path,
        err: Path,
        host: int | None = None,
        library_path: str = "",
        code: str = "",
    ) -> None:
        """`out` and `err` may be pipes; `host`: a process whose namespaces it is to enter; `code`:
        Python to run in place of the program.

        There `pid` is that of a process that waits for it, and ends as it does, as `nsenter` would.
        """
        self.returncode: int | None = None
        self._nursery = nursery(library_path)
        self.pid: int = self._nursery.ask(
            arguments=arguments,
            env=env,
            folder=str(folder),
            outputs=[str(out), str(err)],
            host=host,
            code=code,
        )
        handle = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, handle)
        self._end = select.poll()
        self._end.register(handle, select.POLLIN)

    def poll(self) -> int | None:
        """The exit code, minus the signal of one that was killed; None while it runs."""
        return self._code(0.0)

    def _code(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._end.poll(timeout and timeout * 1000):
            self.returncode = self._nursery.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._code(timeout)) is None:
            raise subprocess.TimeoutExpired("nccl-doctor", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve() -> None:
    import torch.distributed  # noqa: F401

    _import_all()
    assert threading.active_count() == 1
    gc.freeze()  # what is imported, no child needs to go through, and so to copy
    _use_huge_pages()
    door = socket.socket(fileno=os.dup(0))
    callers: dict[socket.socket, IO[str]] = {}
    while True:
        ready, _, _ = select.select([door, *callers], [], [])
        for sock in ready:
            if sock is door:
                caller, _ = door.accept()
                callers[caller] = caller.makefile("rw")
            elif not _answer(callers[sock], [door, *callers]):
                callers.pop(sock).close()
                sock.close()
        if not callers:
            return


_MADV_COLLAPSE = 25  # Linux 6.1
_HUGE = 2 << 20


def _use_huge_pages() -> None:
    """Put this process's memory on huge pages, where the kernel can: a fork copies 512 times less.

    With torch imported a fork takes some 18 ms, and 4 ms then; every run forks dozens of times.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _, _, inode, *_ = line.split()
        if mode == "rw-p" and inode == "0":
            first, end = (int(number, 16) for number in span.split("-"))
            first, end = -(-first // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if first < end:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_COLLAPSE)


def _import_all() -> None:
    """Import what any call may need, and read the largest table: each would spend half a second."""
    import nccl_doctor
    from nccl_doctor.toolkit.variables import table

    package = Path(nccl_doctor.__file__).parent
    checks = package.parent / "checks"
    for folder, name in ((package, "nccl_doctor"), (checks, "nccl_doctor.checks")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            importlib.import_module(".".join([name, *(x for x in parts if x != "__init__")]))
    table.table()


def _answer(lines: IO[str], sockets: Sequence[socket.socket]) -> bool:
    """Do what one caller asks for. Returns whether there was one; no child keeps the `sockets`."""
    try:
        if not (line := lines.readline()):
            return False
        order = json.loads(line)
        if "poll" in order:
            _, status = os.waitpid(order["poll"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                for each in sockets:
                    os.close(each.fileno())
                _be_the_program(order)
        lines.write(f"{json.dumps(answer)}\n")
        lines.flush()
    except OSError:  # it is over
        return False
    return True


def _move_to(host: int) -> None:
    """Go on, in a child of this process, in the namespaces of another one; setns(2)."""
    user = ["user"] if os.geteuid() else []
    kinds = [*user, "net", "uts", "ipc", "mnt", "pid"]
    handles = [os.open(f"/proc/{host}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    libc = ctypes.CDLL(None, use_errno=True)
    for handle in handles:
        if libc.setns(handle, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(handle)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            with contextlib.suppress(OSError):  # as of SIGKILL
                signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.waitstatus_to_exitcode(status))


def _be_the_program(order: Mapping[str, Any]) -> None:
    from nccl_doctor.__main__ import main

    code: Any = 1
    try:
        if order["host"] is not None:
            _move_to(order["host"])
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["env"])
        tempfile.tempdir = None  # what TMPDIR says is found out once
        if "TEST_BREAK" in os.environ:
            import tests.broken.sitecustomize  # noqa: F401
        descriptors = [os.open(os.devnull, os.O_RDONLY)]
        descriptors += [os.open(out, os.O_WRONLY | os.O_CREAT, 0o600) for out in order["outputs"]]
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, buffering=1, closefd=False)
            for number, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        sys.argv = ["nccl-doctor", *order["arguments"]]
        if order["code"]:
            exec(order["code"], {"__name__": "__main__"})
        else:
            main()
        code = 0
    except SystemExit as leaves:
        code = leaves.code
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _serve()
