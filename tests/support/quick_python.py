"""The server's half of `quick_client`: a `python` that launchers, ssh and scripts may start.

Torch takes two seconds to import, and a launcher starts many. What the caller's process has of its
own (namespaces, environment, working directory, standard streams, processors, limits, ignored
signals), the forked one gets; where it has anything else of its own (a user, a control group, a
variable that Python or torch reads as it starts, a module in the way of one of ours), it gets a
fresh Python.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import struct
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.quick_client import FORWARDED

LAUNCHERS = {
    "accelerate": "accelerate.commands.accelerate_cli",
    "deepspeed": "deepspeed.launcher.runner",
}
"""Script → the module whose `main` it calls."""
MODULES = (
    "nccl_doctor",
    "torch.distributed.run",
    "tests.support.small_job",
    "deepspeed.launcher.launch",
    *LAUNCHERS.values(),
)
_READ_EARLY = ("PYTHON", "LD_", "OMP_", "TORCH_", "COVERAGE_", "LC_", "LANG", "GLIBC_", "MALLOC_")
_HARMLESS = (
    "LANG",
    "LC_CTYPE",
    "OMP_NUM_THREADS",
    "PYTHON_EXEC",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPATH",
)
STAND_INS = ("libnvidia-ml.so.1", "libibverbs.so")
_OWN = re.compile(r"^(?:Uid|Gid|Umask|Cap\w+|NoNewPrivs|Seccomp):.*", re.MULTILINE)
_SIZE = 1 << 20


def make(folder: Path) -> tuple[Path, socket.socket]:
    """The program, and where it asks."""
    python, door = folder / "python", folder / "door"
    client = Path(__file__).with_name("quick_client.py").read_text(encoding="utf-8")
    call = f"\nmain({sys.executable!r}, {str(door)!r})\n"
    python.write_text(f"#!{sys.executable} -IS\n{client}{call}", encoding="utf-8")
    python.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(door))
    listener.listen(64)
    return python, listener


@dataclass
class Request:
    """One who asks: its process, the words after `-m`, and what it has of its own."""

    pid: int
    words: list[str]
    env: dict[str, str]
    streams: list[int]
    folder: int
    path: list[str]
    """Folders of modules that the server does not have: the working directory first."""

    def close(self) -> None:
        """Drop the server's copies of its files."""
        for handle in (*self.streams, self.folder):
            os.close(handle)


def receive(caller: socket.socket) -> Request | None:
    """Request of a caller; None of one that is gone already."""
    credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid = struct.unpack("3i", credentials)[0]
    try:
        message, handles, _, _ = socket.recv_fds(caller, _SIZE, 4)
    except ConnectionError:
        return None
    if len(handles) < 4:
        return None
    count, *fields = message.decode(errors="surrogateescape").split("\0")
    words = fields[: int(count)]
    env = dict(field.partition("=")[::2] for field in fields[int(count) :])
    path = [os.readlink(f"/proc/self/fd/{handles[3]}")]
    path += [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return Request(pid, words, env, handles[:3], handles[3], path)


def stand_ins(env: Mapping[str, str | None]) -> list[Path]:
    """Made-up libraries of LD_LIBRARY_PATH; none where it leads to any others.

    The loader reads that variable once, as a process starts. But whoever asks for a library by name
    gets the one of that SONAME that the process has loaded already.
    """
    folders = (env.get("LD_LIBRARY_PATH") or "").split(":")
    found = [file for each in folders if each for file in Path(each).glob("*.so*")]
    return found if {file.name for file in found} <= {*STAND_INS} else []


def needs_fresh(request: Request) -> bool:
    """Whether a fork of this process would not be what the caller asks for."""
    if request.words[0] not in MODULES or _of_its_own("self") != _of_its_own(str(request.pid)):
        return True
    names = {name for name in {*os.environ, *request.env} if name.startswith(_READ_EARLY)}
    names.discard("PYTHON")
    harmless = {name for name in names if name.startswith("TORCH_NCCL_")} | {*_HARMLESS}
    if stand_ins(request.env):
        harmless.add("LD_LIBRARY_PATH")
    if any(os.environ.get(name) != request.env.get(name) for name in names - harmless):
        return True
    return any(hides_ours(Path(folder)) for folder in {*request.path} - {*sys.path})


def _of_its_own(pid: str) -> tuple[str, ...]:
    """User, rights and control groups of a process."""
    folder = Path("/proc", pid)
    status = (folder / "status").read_text()
    files = [(folder / name).read_text() for name in ("cgroup", "oom_score_adj")]
    return (*_OWN.findall(status), *files)


def hides_ours(folder: Path) -> bool:
    """Whether a module there would be taken in place of one that the server has imported."""
    if folder == Path(__file__).parents[2]:
        return False
    with contextlib.suppress(OSError):
        names = {path.name.partition(".")[0] for path in folder.iterdir()}
        early = {"sitecustomize", "usercustomize", *sys.stdlib_module_names}
        return bool(names & (early | {name.partition(".")[0] for name in sys.modules}))
    return False


def take_over(pid: int) -> None:
    """Take the processors, the limits and the ignored signals of another process, which /proc shows
    as `pid`.
    """
    (ignored,) = re.findall(r"^SigIgn:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    ignore([number for number in FORWARDED if int(ignored, 16) >> (number - 1) & 1])
    # This process may be in the other's PID namespace already; /proc is still that of the server.
    depth = len(_numbers("self"))
    pid = _numbers(str(pid))[depth - 1]
    os.sched_setaffinity(0, os.sched_getaffinity(pid))
    for name in (name for name in dir(resource) if name.startswith("RLIMIT_")):
        kind = getattr(resource, name)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, resource.prlimit(pid, kind))


def ignore(numbers: Collection[int] = ()) -> None:
    """Ignore these of the signals that end a program, and no others: the server was started by a
    shell, in the background, and so ignores some.
    """
    for number in FORWARDED:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in numbers else usual)


def _numbers(pid: str) -> list[int]:
    """Number of a process in each PID namespace that it is in, from that of /proc inwards."""
    status = Path("/proc", pid, "status").read_text()
    (line,) = re.findall(r"^NSpid:(.*)$", status, re.MULTILINE)
    return [int(number) for number in line.split()]


def namespaces(pid: int) -> Mapping[str, str]:
    """Kind → path of the namespaces of a process that are not this one's, as `setns` wants them."""
    kinds = ["user"] if os.geteuid() else []
    found = {}
    kinds += [kind for kind in ("time",) if os.path.exists(f"/proc/self/ns/{kind}")]
    for kind in (*kinds, "net", "uts", "ipc", "mnt", "pid"):
        path = f"/proc/{pid}/ns/{kind}"
        if os.readlink(path) != os.readlink(f"/proc/self/ns/{kind}"):
            found[kind] = path
    return found
