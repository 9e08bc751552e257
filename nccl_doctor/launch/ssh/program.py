"""Command that starts this program again, and the variables that it gets on another host."""

from __future__ import annotations

import errno
import os
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath

import nccl_doctor
from nccl_doctor.system import files

# What the Python of the other host runs first. `python -m` would look for every module in the
# working directory, and then in PYTHONPATH, before it looks at its own: whoever may write to that
# folder could give it a json.py. `-I` would leave out what the user has installed, and `-P` is not
# known to 3.10. So it starts in the home folder, without PYTHONPATH, and puts both where they can
# add modules and replace none of Python's. The words of the shell there may be those of csh: one
# line, and no exclamation mark.
_START = """\
import sys
sys.path[:] = [path for path in sys.path if path]
import os, runpy
folder, given, kind, own = sys.argv[1:5]
del sys.argv[1:5]
standard = os.path.dirname(os.__file__)
there = [standard, os.path.join(standard, "lib-dynload")]
at = max([i for i, path in enumerate(sys.path) if path in there] or [len(sys.path) - 1]) + 1
more = [path for path in os.path.expandvars(given).split(os.pathsep) if path]
more = [os.path.normpath(os.path.join(folder, path)) for path in more]
sys.path[at:at] = [path for path in more if path not in (folder, own)]
try:
    os.chdir(folder)
    there = os.stat(folder)
    safe = there.st_mode & 2 == 0 and there.st_uid in (0, os.geteuid())
except OSError:
    safe = False
if safe and folder not in sys.path:
    sys.path.append(folder)
if kind == "file":
    if not os.path.exists(own):
        words = "%s: can't open file %r: [Errno 2] No such file or directory"
        sys.stderr.write(words % (sys.executable, own) + chr(10))
        sys.exit(2)
    runpy.run_path(own, run_name="__main__")
else:
    sys.path.insert(at, own)
    try:
        import nccl_doctor
        there = getattr(nccl_doctor, "__file__", None)  # none of an empty folder
    except ImportError as error:
        if error.name not in ("nccl_doctor",):
            raise
        there = None
    if there is None:
        sys.exit("%s: No module named nccl_doctor" % sys.executable)
    sys.path.remove(own)
    if own not in sys.path:
        sys.path.append(own)
    runpy.run_module("nccl_doctor", run_name="__main__", alter_sys=True)
"""


def own_words() -> tuple[str, ...]:
    """The Python that runs this and what it is given: `-m nccl_doctor`, or the one file."""
    started = sys.argv[0]
    if zipfile.is_zipfile(started):
        return sys.executable, os.path.abspath(started)
    return sys.executable, "-m", "nccl_doctor"


def start_words(folder: PurePath, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Words that start this program on another host, to be followed by its arguments.

    Nothing in the working directory, or in a relative part of PYTHONPATH, takes the place of a
    module of Python, of this program, or of a package that is installed.

    Args:
        folder: working directory, if it exists there.
        variables: those of the job; PYTHONPATH may be among them.
    """
    own = own_words()
    if len(own) == 2:
        source = "file", own[1]
    else:
        source = "module", os.path.dirname(os.path.dirname(os.path.abspath(nccl_doctor.__file__)))
    given = variables.get("PYTHONPATH", "")
    return own[0], "-c", f"exec({_START!r})", str(folder), given, *source


# Variables that the DeepSpeed launcher exports to other hosts; the job there gets no others.
#
# Read from DeepSpeed 0.19: `deepspeed/launcher/runner.py` (main) and the exports of its CUDA
# accelerator. Variables by the beginning of their name, then the lines of .deepspeed_env, first
# of the home folder, then of the working directory; later ones win.


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
