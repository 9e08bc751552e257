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
import importlib
import json
import os
import runpy
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.broken import is_broken
from tests.support import priority, quick_client, quick_python
from tests.support.huge_pages import use_huge_pages


@functools.cache
def fork_server() -> ForkServer:
    """The one of this test run."""
    return ForkServer()


class ForkServer:
    """The process that they come from, and what it is asked for, one line each way.

    All workers of a test run share it: importing torch costs seconds. It ends with the last of
    them, however that ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines = _connected().makefile("rw")

    def ask(self, **order: Any) -> Any:
        with self._lock:
            self._lines.write(json.dumps(order) + "\n")
            self._lines.flush()
            return json.loads(self._lines.readline())


@functools.cache
def quick_python_path() -> str:
    """Path of a `python` for launchers and scripts that has torch imported as it starts."""
    return str(fork_server().ask(python=True))


_PR_SET_PDEATHSIG = 1
_RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex


def _connected() -> socket.socket:
    """A connection with the server; the first caller starts it."""
    name = f"\0nccl-doctor-tests-{_RUN}"
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
            _start(door)


def _start(door: socket.socket) -> None:
    # A child of nobody: what it forks for one worker is no descendant of another.
    subprocess.run(
        ["sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", sys.executable, "-m", __name__],
        check=True,
        stdin=door.fileno(),
        stdout=subprocess.DEVNULL,
        env={
            **os.environ,
            "RES_OPTIONS": "timeout:1 attempts:1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd=Path(__file__).parents[2],
    )


_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_READ_EARLY = ("PYTHON", "LD_", "OMP_", "TORCH_", "COVERAGE_", "LC_", "LANG")
_MADE_UP = ("_X", "_AUTH_TOKEN")
"""Ends of names that only tests give."""


def read_early(env: Mapping[str, str | None]) -> bool:
    """Whether Python or torch reads one of these variables as it starts.

    They are the same for all that are forked, but for a PYTHONPATH that leads to `tests.broken` or
    hides no module of ours, and an LD_LIBRARY_PATH that leads to `quick_python.stand_ins`.
    """
    late = set()
    if is_broken(env) or not any(map(quick_python.hides_ours, _folders(env.get("PYTHONPATH")))):
        late.add("PYTHONPATH")
    if quick_python.stand_ins(env):
        late.add("LD_LIBRARY_PATH")
    late |= {name for name in env if name.endswith(_MADE_UP)}
    return any(name.startswith(_READ_EARLY) and name not in late for name in env)


def _folders(path: str | None) -> list[Path]:
    return [Path(folder) for folder in (path or "").split(os.pathsep) if folder]


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
        code: str = "",
    ) -> None:
        """`out` and `err` may be pipes; `host`: a process whose namespaces it is to enter; `code`:
        Python to run in place of the program.

        Without root `pid` is that of a process that waits for it there, and ends as it does.
        """
        self.returncode: int | None = None
        for output in (out, err):
            output.touch()  # there for whoever ends it before its first line
        self._server = fork_server()
        self.pid: int = self._server.ask(
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
            self.returncode = self._server.ask(poll=self.pid)
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
    given = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = "FATAL"  # as the program sets it before this import, which reads it
    import torch.distributed  # noqa: F401

    del os.environ[_LOG_LEVEL]  # whose environment differs from this one gets a fresh Python
    if given is not None:
        os.environ[_LOG_LEVEL] = given

    _import_all()
    assert threading.active_count() == 1
    gc.freeze()  # what is imported, no child needs to go through, and so to copy
    use_huge_pages()
    with tempfile.TemporaryDirectory(prefix="nccl-doctor-tests-") as folder:
        python, quick = quick_python.make(Path(folder))
        _listen(socket.socket(fileno=os.dup(0)), quick, str(python))


def _listen(door: socket.socket, quick: socket.socket, python: str) -> None:
    """Serve the workers of a test run at `door` until the last of them has left, and who starts
    the quick `python` at `quick`.
    """
    callers: dict[socket.socket, IO[str]] = {}
    guests: dict[socket.socket, Guest] = {}
    while True:
        ends = {guest.end: sock for sock, guest in guests.items()}
        ready, _, _ = select.select([door, quick, *callers, *guests, *ends], [], [])
        open_here = [door, quick, *callers, *guests]
        for sock in ready:
            if sock is door:
                caller, _ = door.accept()
                callers[caller] = caller.makefile("rw")
            elif sock is quick:
                caller, _ = quick.accept()
                if guest := _receive(caller, [*open_here, caller], python):
                    guests[caller] = guest
            elif sock in ends or sock in guests:
                caller = ends.get(sock, sock)
                if caller in guests and guests[caller].is_over(caller, ended=sock in ends):
                    del guests[caller]
                    caller.close()
            elif not _answer(callers[sock], open_here, python):
                callers.pop(sock).close()
                sock.close()
        if not callers:
            return


@dataclass
class Guest:
    """The process of one that started the quick `python`."""

    pid: int
    end: int

    def is_over(self, caller: socket.socket, *, ended: bool) -> bool:
        """Pass a signal on, or the end of one to the other. Returns whether it has ended."""
        if not ended:
            with contextlib.suppress(ConnectionError):
                if word := caller.recv(100):
                    os.kill(self.pid, int(word))
                    return False
            os.kill(self.pid, signal.SIGKILL)  # as the one that it is for was
        _, status = os.waitpid(self.pid, 0)
        os.close(self.end)
        code = os.waitstatus_to_exitcode(status)
        word = b"ended %d" % code if code >= 0 else b"killed %d" % -code
        with contextlib.suppress(OSError):
            caller.send(word)
        return True


def _receive(caller: socket.socket, sockets: Sequence[socket.socket], python: str) -> Guest | None:
    """Fork what a caller asks for, if a fork can be it."""
    request = quick_python.receive(caller)
    try:
        fresh = request is None or quick_python.needs_fresh(request)
    except (FileNotFoundError, ProcessLookupError):  # whoever asks was killed meanwhile
        fresh = True
    if request is None or fresh:
        with contextlib.suppress(OSError):
            caller.send(b"fresh")
        caller.close()
        if request:
            request.close()
        return None
    pid = _fork_for(request.pid)
    if pid == 0:
        for each in sockets:
            os.close(each.fileno())
        _be_the_guest(request, python)
    request.close()
    return Guest(pid, os.pidfd_open(pid))


def _import_all() -> None:
    """Import what any call may need, and read the largest table: each would spend half a second."""
    import encodings.idna  # noqa: F401 - for names of hosts

    import psutil  # noqa: F401

    import nccl_doctor
    from nccl_doctor.toolkit.variables import table

    package = Path(nccl_doctor.__file__).parent
    checks = package.parent / "checks"
    for folder, name in ((package, "nccl_doctor"), (checks, "nccl_doctor.checks")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            importlib.import_module(".".join([name, *(x for x in parts if x != "__init__")]))
    table.table()


def _answer(lines: IO[str], sockets: Sequence[socket.socket], python: str) -> bool:
    """Do what one caller asks for. Returns whether there was one; no child keeps the `sockets`."""
    try:
        if not (line := lines.readline()):
            return False
        order = json.loads(line)
        if "python" in order:
            answer: Any = python
        elif "poll" in order:
            _, status = os.waitpid(order["poll"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = _fork_for(order["host"])
            if answer == 0:
                for each in sockets:
                    os.close(each.fileno())
                _be_the_program(order)
        lines.write(f"{json.dumps(answer)}\n")
        lines.flush()
    except OSError:  # it is over
        return False
    return True


def _fork_for(host: int | None) -> int:
    """Fork, where this process may into the PID namespace of another one."""
    with contextlib.suppress(OSError):  # it is gone, which the child will say
        moves = {} if host is None else quick_python.namespaces(host)
        if "user" not in moves:
            _enter(*(path for kind, path in moves.items() if kind == "pid"))
    try:
        return os.fork()
    finally:
        _enter("/proc/self/ns/pid")


def _enter(*namespaces: str) -> None:
    """Move to namespaces; into one of PIDs only the children will go. setns(2)."""
    handles = [os.open(path, os.O_RDONLY) for path in namespaces]
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        for handle in handles:
            if libc.setns(handle, 0):
                raise OSError(ctypes.get_errno(), "setns")
    finally:
        for handle in handles:
            os.close(handle)


def _move_to(host: int) -> bool:
    """Go on in the namespaces of another process.

    If its PID namespace is another one, in a child, which returns True: this process stays, passes
    signals on to the child, and ends as it does.
    """
    moves = quick_python.namespaces(host)
    _enter(*moves.values())
    if "pid" not in moves:
        return False
    if child := os.fork():
        for number in quick_client.FORWARDED:
            signal.signal(number, lambda number, _: os.kill(child, number))
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            with contextlib.suppress(OSError):  # as of SIGKILL
                signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.waitstatus_to_exitcode(status))
    return True


def _be_the_program(order: Mapping[str, Any]) -> None:
    def enter() -> None:
        quick_python.ignore()
        if order["host"] is not None:
            _move_to(order["host"])
        os.chdir(order["folder"])

    def streams() -> list[int]:
        flags = os.O_WRONLY | os.O_CREAT
        outputs = [os.open(out, flags, 0o600) for out in order["outputs"]]
        return [os.open(os.devnull, os.O_RDONLY), *outputs]

    def body() -> None:
        from nccl_doctor.__main__ import main

        sys.argv = ["nccl-doctor", *order["arguments"]]
        # As `python -m` has them, behind the folder of the module.
        folders = map(str, _folders(order["env"].get("PYTHONPATH")))
        sys.path[1:1] = [folder for folder in folders if folder not in sys.path]
        if order["code"]:
            exec(order["code"], {"__name__": "__main__"})
        else:
            main()

    _be(enter, order["env"], streams, body)


def _be_the_guest(request: quick_python.Request, python: str) -> None:
    def enter() -> None:
        quick_python.take_over(request.pid)
        if _move_to(request.pid):
            # Its life hangs on that of the process that waits for it.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.fchdir(request.folder)
        os.close(request.folder)

    def body() -> None:
        from nccl_doctor import __main__

        sys.path[:1] = request.path
        sys.executable = python
        module, *words = request.words
        if module == "nccl_doctor":
            sys.argv = [__main__.__file__, *words]
            __main__.main()
        else:
            sys.argv = [module, *words]
            runpy.run_module(module, run_name="__main__", alter_sys=True)

    _be(enter, request.env, lambda: request.streams, body)


_UNFLUSHED = 120
"""Exit code of a Python that cannot write what it has buffered."""


def _be(
    enter: Callable[[], None],
    env: Mapping[str, str],
    streams: Callable[[], list[int]],
    body: Callable[[], None],
) -> None:
    """Become a program; never returns."""
    code: Any = 1
    try:
        enter()
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None  # what TMPDIR says is found out once
        priority.go_first_if_asked()
        for library in quick_python.stand_ins(env):
            ctypes.CDLL(str(library))
        if is_broken(os.environ):
            import tests.broken.sitecustomize  # noqa: F401
        descriptors = [os.dup(number) for number in streams()]
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, max(descriptors) + 1)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, buffering=1, closefd=False)
            for number, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        body()
        code = 0
    except SystemExit as leaves:
        code = leaves.code
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = _UNFLUSHED
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _serve()
