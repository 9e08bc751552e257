"""Can temporary files be created where this job will create them?

What it checks
--------------
The folder that TMPDIR, TEMP or TMP names, or else /tmp: whether a file can really be created there,
how much room is left, and whether a path in it is short enough for a socket. All test files are
removed at once. A folder whose disk or file server does not answer is reported as well.

Why it matters
--------------
torchrun keeps its error files there, torch.compile and Triton their compiled code, DataLoader
workers and multiprocessing their sockets. If no temporary folder is writable, Python ends the
program with `No usable temporary directory found`; a variable that names a bad folder is silently
ignored by Python, but not by other programs.

How to fix
----------
mkdir -p the folder, or export TMPDIR=/tmp (a folder on a local disk with some gigabytes free).

When it is wrong
----------------
Variables of single libraries (TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR) may name other folders,
which are not examined. Quotas do not show in the free space. Without NCCL, little room and a path
too long for sockets are only information: a job that compiles nothing and has no workers needs
neither.

References
----------
Python documentation, tempfile.gettempdir; unix(7) (length of sun_path).
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    OutcomeStatus,
    Severity,
    Step,
    Where,
    export,
    look,
    shell,
)


def _another(which: str) -> Step:
    """The step that names another folder."""
    return Step(shell("# export TMPDIR=FOLDER"), undo=shell("unset TMPDIR"), note=f"one {which}")


TEMP_DIR_UNWRITABLE = Kind(
    code="temp-dir-unwritable",
    layer=Layer.HOST,
    title="The folder for temporary files cannot be used",
    why="torchrun, torch.compile, Triton and DataLoader workers keep files and sockets there.",
    fix=Fix(_another("that exists, is writable for you and has room")),
)
NO_ROOM = TEMP_DIR_UNWRITABLE.variant(
    title="The folder for temporary files has almost no room",
    why="torch.compile, Triton and DataLoader workers keep files there, and end with `No space "
    "left on device`.",
    fix=Fix(
        look(shell("du -xsh /tmp/* | sort -h | tail"), "remove what is not needed"),
        alternatives=[Fix(_another("with room"))],
    ),
)
NO_SOCKET = TEMP_DIR_UNWRITABLE.variant(
    title="No socket can be made in the folder for temporary files",
    why="DataLoader workers and torch's shared tensors meet at a socket there.",
    fix=Fix(_another("with a short path (a socket's may have 107 bytes), on a local disk")),
)

_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_MAKING = "making a file"
_STOPPED = ("T", "t")
_MIB = 1 << 20
_ROOM = 100 * _MIB
"""Less than the files that compiling one model leaves."""
_SOCKET = "pymp-12345678/listener-12345678"
"""The socket of multiprocessing in the folder; the first batch of a DataLoader worker needs it."""


class TempDir(Check):
    """Creates a file and a socket in the folder that Python will use."""

    name = "temp_dir"
    layer = Layer.HOST
    kinds = (TEMP_DIR_UNWRITABLE,)
    usual: ClassVar[tuple[str, ...]] = ("/tmp", "/var/tmp", "/usr/tmp")

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`tried`: [variable or empty, folder, error or empty] in Python's order, up to the first
        folder that works. `free`: bytes there. `socket`: the error of a socket there, or empty.
        """
        named = [(name, ctx.env[name]) for name in _VARIABLES if ctx.env.get(name)]
        tried = []
        for name, folder in [*named, *(("", folder) for folder in (*self.usual, os.curdir))]:
            ctx.breadcrumb(_MAKING, variable=name, folder=folder)
            error = _make_file(folder)
            tried.append([name, folder, error])
            if not error:
                room = os.statvfs(folder)
                free = room.f_bavail * room.f_frsize
                return {"tried": tried, "free": free, "socket": _make_socket(folder)}
        return {"tried": tried, "free": None, "socket": ""}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """A failure if no folder works, or one does not answer; a warning if a requested folder is
        not used, or is full.
        """
        for item in cluster.ended(self.name):
            end = item.outcome
            if (
                end.status is OutcomeStatus.HUNG
                and end.last_step == _MAKING
                and end.state not in _STOPPED
            ):
                crumb = end.breadcrumbs[-1]
                waits = f" in {end.wchan}" if end.wchan not in ("", "0") else ""
                yield Finding(
                    TEMP_DIR_UNWRITABLE,
                    f"{_named(crumb['variable'])}{crumb['folder']}: creating a file did not end "
                    f"within {end.duration_s:.0f} s, without an error (process state "
                    f"{end.state}{waits})",
                    Where(hosts=(item.host.label,)),
                    {"folder": crumb["folder"], "state": end.state, "wchan": end.wchan},
                    fix=Fix(
                        look(shell("dmesg | tail"), "why the disk or file server does not answer"),
                        alternatives=[Fix(_another("on a local disk"))],
                    ),
                )
        for rank, facts in cluster.facts(self.name):
            bad = [f"{_named(name)}{folder}: {error}" for name, folder, error in facts["tried"]]
            used = facts["tried"][-1][1]
            named = [entry for entry in facts["tried"] if entry[0] and entry[2]]
            # A job on CPUs is often a test that compiles nothing and has no workers.
            severity = Severity.WARN if cluster.backend == "nccl" or named else Severity.INFO
            kind, said = TEMP_DIR_UNWRITABLE, ""
            if facts["free"] is None:
                severity, said = Severity.FAIL, "; ".join(bad)
            elif named:
                said = f"{'; '.join(bad[: len(named)])} (Python uses {used} instead)"
            elif facts["free"] < _ROOM:
                kind, said = NO_ROOM, f"{facts['free'] / _MIB:.0f} MiB free in {used}"
            elif facts["socket"]:
                kind, said = NO_SOCKET, f"no socket can be created in {used}: {facts['socket']}"
            if said:
                yield Finding(
                    kind,
                    said,
                    Where(hosts=(rank.host.label,)),
                    {"tried": facts["tried"], "free": facts["free"]},
                    fix=_fix(named[0], used if facts["free"] is not None else "") if named else "",
                    severity=severity,
                )


def _fix(tried: Sequence[str], good: str) -> Fix:
    """The fix for a folder that a variable names: [variable, folder, error]; `good`: one that
    works, if any.
    """
    name, folder, error = tried
    step = export(**{name: good or "FOLDER"})
    command = step.command if good else shell("# {}", step.command)
    other = Fix(
        replace(
            step, command=command, on=On.HERE, undo=shell("export {:variable}={}", name, folder)
        )
    )
    if os.strerror(errno.ENOENT) in error:
        make = Step(shell("mkdir -p {}", folder), undo=shell("rmdir {}", folder), persists=True)
        return Fix(make, alternatives=[other])
    full, read_only = (os.strerror(each) in error for each in (errno.ENOSPC, errno.EROFS))
    see = "df -h {}" if full else "findmnt -T {}" if read_only else "ls -ld {}"
    return Fix(*other.steps, alternatives=[Fix(look(shell(see, folder), "repair the folder"))])


def _named(variable: str) -> str:
    return f"{variable}=" if variable else ""


def _make_file(folder: str) -> str:
    """The error of creating a file, or empty."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"nccl-doctor")
            file.flush()
    except FileNotFoundError as error:
        # /proc and its like say so of a file that nobody can make in them.
        return "it takes no files" if os.path.isdir(folder) else str(error.strerror)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _make_socket(folder: str) -> str:
    """The error of creating a socket, or empty."""
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        try:
            with tempfile.TemporaryDirectory(dir=folder) as inside:
                length = len(os.fsencode(os.path.join(os.path.abspath(folder), _SOCKET)))
                # As long as the real one, whatever this folder is called.
                path = Path(inside) / "x"
                path = path.with_name("x" * max(1, length - len(os.fsencode(inside)) - 1))
                sock.bind(str(path))
        except OSError as error:
            return error.strerror or str(error)
    return ""
