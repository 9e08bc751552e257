"""Test whether the program of a command exists, before anything is examined."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from nccl_doctor.launch.command_line.job_line import JobLineError
from nccl_doctor.launch.command_line.wrappers import unwrap
from nccl_doctor.system.helpers import send
from nccl_doctor.toolkit.suggest import suggest

_LIKELY = ("torchrun", "accelerate", "deepspeed", "python", "python3", "srun", "mpirun", "env")
_SHELL_WORDS = {"cd", "command", "eval", "exec", "export", "set", "source", "time", "ulimit"}
_DEFAULT_PATH = "/bin:/usr/bin"  # what exec searches where PATH is not set


def which(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> str | None:
    """Say why a line could not be started; None if it could.

    Looks for its first word, and for the program that `env`, `numactl` and their like would become.
    """
    if not argv or not argv[0]:
        return "no command after --"
    try:
        answer = send(
            (cwd / argv[0]).parent, lambda: json.dumps(_which(argv, environ, cwd)).encode()
        )
    except OSError as error:
        return f"{argv[0]}: {error.strerror}"
    problem: str | None = json.loads(answer)
    return problem


def _which(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> str | None:
    """Runs in a child: a folder of PATH may be on a disk that does not answer."""
    problem = _missing(argv[0], environ.get("PATH", _DEFAULT_PATH), cwd)
    if problem:
        return problem
    try:
        line = unwrap(argv, cwd)
    except JobLineError as error:
        return str(error)
    path = line.environ.get("PATH", None if line.clean else environ.get("PATH"))
    return _missing(line.words[0], path or _DEFAULT_PATH, line.cwd)


def _missing(name: str, path: str, cwd: Path) -> str | None:
    if "/" in name:
        return _unusable(name, cwd / name)
    found = [cwd / folder / name for folder in path.split(os.pathsep)]
    if any(_unusable(name, file) is None for file in found):
        return None
    there = next((file for file in found if file.is_file()), None)
    if there:
        return _unusable(str(there), there)
    if name in _SHELL_WORDS:
        return f"{name}: a word of the shell, not a program; leave it out"
    if re.match(r"[A-Za-z_]\w*=", name):
        return f"{name}: a variable, not a program; write it before nccl-doctor, or after env"
    if (cwd / name).is_file():
        return f"{name}: no such program in PATH; write ./{name} for the file here"
    return f"{name}: no such program in PATH{suggest(name, _LIKELY)}"


def _unusable(name: str, file: Path) -> str | None:
    if file.is_dir():
        return f"{name}: a folder, not a program"
    if not file.exists():
        return f"{name}: no such file"
    if not os.access(file, os.X_OK):
        with_python = f", or write `python {name}`" if name.endswith(".py") else ""
        return f"{name}: not executable; chmod +x it{with_python}"
    return None
