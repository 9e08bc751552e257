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
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@functools.cache
def nursery(library_path: str = "") -> Nursery:
    """The one of this test process, or the one whose calls find libraries in a folder."""
    return Nursery(library_path)


class Nursery:
    """The process that they come from, and what it is asked for, one line each way."""

    def __init__(self, library_path: str = "") -> None:
        # The loader reads it once, as the process starts.
        libraries = {"LD_LIBRARY_PATH": library_path} if library_path else {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forkserver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RES_OPTIONS": "timeout:1 attempts:1",
                "CUDA_VISIBLE_DEVICES": "",
                **libraries,
            },
            cwd=Path(__file__).parents[2],
        )

    def ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


READ_EARLY = ("PYTHON", "LD_", "OMP_", "TORCH_", "COVERAGE_", "LC_", "LANG")
"""Variables that Python and torch read as they start: they are the same for all that are forked."""


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
    ) -> None:
        """`out` and `err` may be pipes; `host`: a process whose namespaces it is to enter.

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
        )

    def poll(self) -> int | None:
        """The exit code, minus the signal of one that was killed; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("nccl-doctor", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve() -> None:
    import torch.distributed  # noqa: F401

    import nccl_doctor.__main__  # noqa: F401

    assert threading.active_count() == 1
    for line in sys.stdin:
        order = json.loads(line)
        if "poll" in order:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                _be_the_program(order)
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


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
