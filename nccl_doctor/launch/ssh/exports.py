"""Variables that the DeepSpeed launcher exports to other hosts; the job there gets no others.

Read from DeepSpeed 0.19: `deepspeed/launcher/runner.py` (main) and the exports of its CUDA
accelerator. Variables by the beginning of their name, then the lines of .deepspeed_env, first of
the home folder, then of the working directory; later ones win.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from nccl_doctor.toolkit import files

PREFIXES = ("NCCL", "PYTHON", "MLFLOW", "MV2", "UCX")
ENV_FILE = ".deepspeed_env"


class ExportsError(ValueError):
    """A file of exports cannot be used: the text says where and what to write."""


def exported(
    environ: Mapping[str, str], home: Path, cwd: Path, left_out: list[str]
) -> dict[str, str]:
    """Variables that a job on another host would be given.

    References to variables in values of the files are left as they are: they are the other host's.
    `left_out` gets a line for each file that another user may have written: what stands there could
    start their code on every host.

    Raises:
        ExportsError: a file cannot be read, or has a line at which the launcher would stop.
    """
    found = {name: value for name, value in environ.items() if name.startswith(PREFIXES)}
    inherited = found.get("PYTHONPATH")
    found["PYTHONPATH"] = f"{cwd}:{inherited}" if inherited else str(cwd)
    for folder in (home, cwd):
        named = environ.get("DS_ENV_FILE", ENV_FILE)
        file = folder / named
        try:
            found |= _read(file, files.read if os.path.isabs(named) else files.read_found)
        except PermissionError as error:
            left_out.append(
                f"{file} is left out: {error.strerror}; the deepspeed launcher would read it"
            )
    return found


def _read(file: Path, how: Callable[[Path, int], bytes]) -> dict[str, str]:
    try:
        lines = how(file, files.CONFIG_MAX).decode().splitlines()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, PermissionError) and error.errno == errno.EPERM:
            raise  # not this user's, nor root's
        raise ExportsError(f"{file} cannot be read: {error}") from error
    found = {}
    for number, line in enumerate(lines, start=1):
        name, equals, value = line.partition("=")
        name = name.strip()
        if not equals or not name or not name.replace("_", "a").isalnum() or "\0" in value:
            raise ExportsError(
                f"{file}, line {number}: this line is not NAME=value (the deepspeed "
                "launcher takes no comments or empty lines there either)"
            )
        found[name] = value.strip()
    return found


def apply(variables: Mapping[str, str]) -> None:
    """Set exported variables in this process; `$NAME` in them is this host's NAME."""
    for name, value in variables.items():
        os.environ[name] = os.path.expandvars(value)
