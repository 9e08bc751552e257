"""Kinds of findings on paths, of every check that examines some."""

from __future__ import annotations

from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Effect, Kind, Layer, Severity
from nccl_doctor.model.fixes import Fix, Step, look

_JOB = "The job reads or writes there: a checkpoint, data, a cache."


def path_kind(
    code: str, title: str, why: str, fix: str, severity: Severity = Severity.FAIL
) -> Kind:
    """A kind of a fault that only the job itself feels."""
    return Kind(code, Layer.HOST, title, why, fix, severity, effects=(Effect.JOB_ONLY,))


MISSING = path_kind(
    "path-missing",
    "A path that the job needs is not there",
    f"{_JOB} Where it is missing, a rank stops with FileNotFoundError, and the others hang.",
    Fix(text="mount it", alternatives=[Fix(Step(shell("# mkdir -p FOLDER"), persists=True))]),
)
NOT_READABLE = path_kind(
    "path-not-readable",
    "This user may not read a path that the job needs",
    f"{_JOB} A rank stops with PermissionError, and the others hang.",
    Fix(
        look(
            shell("ls -ld FOLDER"),
            "give this user the right to read it and to enter its parent folders",
        )
    ),
)
NOT_WRITABLE = path_kind(
    "path-not-writable",
    "This user may not write to a path that the job needs",
    f"{_JOB} The first checkpoint ends with PermissionError, after hours of work.",
    Fix(
        look(
            shell("ls -ld FOLDER"),
            "give this user the right to write there (root is nobody on most NFS servers)",
        )
    ),
)
READ_ONLY = path_kind(
    "path-read-only",
    "A path that the job needs is on a file system that is mounted read-only",
    f"{_JOB} The first checkpoint ends with `Read-only file system`.",
    Fix(
        look(shell("dmesg | tail"), "says if the kernel made it read-only after an error"),
        Step(shell("# mount -o remount,rw MOUNT"), undo=shell("# mount -o remount,ro MOUNT")),
    ),
)
FULL = path_kind(
    "path-full",
    "A path that the job needs has no room, or little",
    "Writing ends with `No space left on device` or `Disk quota exceeded`; a checkpoint is then "
    "torn.",
    Fix(
        look(shell("df -h FOLDER")),
        look(shell("df -i FOLDER")),
        look(shell("quota -s"), "remove what is not needed"),
    ),
)
STALE = path_kind(
    "path-stale",
    "The handle of a path that the job needs is stale",
    "The folder was removed or exported anew on the server: every access ends with `Stale file "
    "handle` until it is mounted again.",
    Fix(Step(shell("# umount -l MOUNT && mount MOUNT"), persists=True)),
)
HANGS = path_kind(
    "path-hangs",
    "The disk or file server of a path that the job needs does not answer",
    "A rank that touches it waits in the kernel, and all others wait for that rank in their next "
    "collective, until it times out.",
    Fix(
        look(shell("dmesg | tail"), "says which server does not respond"),
        alternatives=["bring it back, or mount the path again"],
    ),
)
IO_ERROR = path_kind(
    "path-io-error",
    "A path that the job needs answers with an error",
    "The disk, the file server or the process that serves the file system has failed.",
    Fix(look(shell("dmesg | tail")), alternatives=["mount the path again"]),
)
NOT_VISIBLE = path_kind(
    "path-not-visible",
    "What one host writes to a path is not visible on another one",
    "A rank that waits for a file of another one (a checkpoint, a cache, a download) does not find "
    "it, though both have the same mount.",
    Fix(look(shell("mount"), "compare the options of both hosts: actimeo, lookupcache=none")),
    Severity.WARN,
)

PATH_KINDS = (
    MISSING,
    NOT_READABLE,
    NOT_WRITABLE,
    READ_ONLY,
    FULL,
    STALE,
    HANGS,
    IO_ERROR,
    NOT_VISIBLE,
)
