"""Output of vendor and system tools on this host, for support tickets.

All of them run at once, without a shell, until one deadline. A tool that does not end is killed,
and left alone where even that does not end it: a wedged driver must not keep anybody waiting.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

DEADLINE_S = 30.0
"""`nvidia-smi` takes seconds on a host of eight GPUs without persistence mode, and `collect_env`
imports torch.
"""
_KILL_S = 1.0
_LARGEST = 4 * 1024 * 1024
"""Bytes of one tool's output that are kept."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "nvidia-smi-q": ("nvidia-smi", "-q"),
    "nvidia-smi-topo": ("nvidia-smi", "topo", "-m"),
    "nvidia-smi-nvlink": ("nvidia-smi", "nvlink", "-s"),
    "rocm-smi": ("rocm-smi", "--showtopo", "--showdriverversion"),
    "ibstat": ("ibstat",),
    "ibv_devinfo": ("ibv_devinfo", "-v"),
    "rdma-link": ("rdma", "link"),
    "lspci-nvidia": ("lspci", "-vv", "-d", "10de:"),
    "lspci-mellanox": ("lspci", "-vv", "-d", "15b3:"),
    "lspci-efa": ("lspci", "-vv", "-d", "1d0f:"),
    "lspci-tree": ("lspci", "-tv"),
    "ip-addr": ("ip", "addr"),
    "ip-route": ("ip", "route", "show", "table", "all"),
    "ip-6-route": ("ip", "-6", "route"),
}
"""Name in the bundle → command. They only read."""
COLLECT_ENV = {"collect_env": (sys.executable, "-m", "torch.utils.collect_env")}
"""What PyTorch's issue form asks for. It says something only on a host of the job."""


@dataclass(frozen=True)
class Printed:
    """Result of one command: its output, or the reason why there is none (`problem`)."""

    command: tuple[str, ...]
    text: str = ""
    problem: str = ""


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    output: IO[bytes]


def run_tools(
    commands: Mapping[str, Sequence[str]] = COMMANDS,
    *,
    deadline_s: float = DEADLINE_S,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Printed]:
    """Run all commands at once, and return what each has printed, stdout and stderr together.

    Returns within `deadline_s` and little more. What fails after it printed something is both text
    and problem.
    """
    path = f"{(environ or os.environ).get('PATH', '')}:{_PATH}"
    found: dict[str, Printed] = {}
    running: dict[str, _Running] = {}
    for name, command in commands.items():
        tool = shutil.which(command[0], path=path)
        if tool is None:
            found[name] = Printed(tuple(command), problem="not installed")
            continue
        try:
            running[name] = _start([tool, *command[1:]], path)
        except OSError as error:
            found[name] = Printed(tuple(command), problem=f"not started: {error.strerror}")
    deadline = time.monotonic() + deadline_s
    while any(each.process.poll() is None for each in running.values()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for name, each in running.items():
        found[name] = _end(tuple(commands[name]), each, deadline_s)
    return {name: found[name] for name in commands}


def _start(command: Sequence[str], path: str) -> _Running:
    output = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe would fill, and stop the tool
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"LC_ALL": "C", "PATH": path},
            start_new_session=True,
        )
    except BaseException:
        output.close()
        raise
    return _Running(process, output)


def _end(command: tuple[str, ...], running: _Running, deadline_s: float) -> Printed:
    problem = ""
    process = running.process
    if process.poll() is None:
        problem = f"no answer within {deadline_s:g} s"
        try:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_KILL_S)
        except (subprocess.TimeoutExpired, ProcessLookupError, PermissionError):
            problem += ", and it cannot be killed"
    elif process.returncode:
        problem = f"exit code {process.returncode}"
    with running.output as output:
        data = os.pread(output.fileno(), _LARGEST + 1, 0)  # it may still be writing
    if len(data) > _LARGEST:
        problem = "; ".join(filter(None, (problem, f"cut after {_LARGEST >> 20} MiB")))
    return Printed(command, data[:_LARGEST].decode("utf-8", "replace"), problem)
