"""Kinds of findings on paths, of every check that examines some."""

from __future__ import annotations

from nccl_doctor.model.findings import Kind, Layer, Severity

_JOB = "The job reads or writes there: a checkpoint, data, a cache."


def _kind(code: str, title: str, why: str, fix: str, severity: Severity = Severity.FAIL) -> Kind:
    return Kind(code, Layer.HOST, title, why, fix, severity, later=True)


MISSING = _kind(
    "path-missing",
    "A path that the job needs is not there",
    f"{_JOB} Where it is missing, a rank stops with FileNotFoundError, and the others hang.",
    "mount it, or create it: mkdir -p <path>",
)
NOT_READABLE = _kind(
    "path-not-readable",
    "This user may not read a path that the job needs",
    f"{_JOB} A rank stops with PermissionError, and the others hang.",
    "ls -ld <path>; give this user the right to read it and to enter its parent folders",
)
NOT_WRITABLE = _kind(
    "path-not-writable",
    "This user may not write to a path that the job needs",
    f"{_JOB} The first checkpoint ends with PermissionError, after hours of work.",
    "ls -ld <path>; give this user the right to write there (root is nobody on most NFS servers)",
)
READ_ONLY = _kind(
    "path-read-only",
    "A path that the job needs is on a file system that is mounted read-only",
    f"{_JOB} The first checkpoint ends with `Read-only file system`.",
    "mount -o remount,rw <mount>; dmesg says if the kernel made it read-only after an error",
)
FULL = _kind(
    "path-full",
    "A path that the job needs has no room, or little",
    "Writing ends with `No space left on device` or `Disk quota exceeded`; a checkpoint is then "
    "torn.",
    "df -h <path>; df -i <path>; quota -s: remove what is not needed",
)
STALE = _kind(
    "path-stale",
    "The handle of a path that the job needs is stale",
    "The folder was removed or exported anew on the server: every access ends with `Stale file "
    "handle` until it is mounted again.",
    "umount -l <mount> && mount <mount>",
)
HANGS = _kind(
    "path-hangs",
    "The disk or file server of a path that the job needs does not answer",
    "A rank that touches it waits in the kernel, and all others wait for that rank in their next "
    "collective, until it times out.",
    "dmesg says which server does not respond; bring it back, or mount the path again",
)
IO_ERROR = _kind(
    "path-io-error",
    "A path that the job needs answers with an error",
    "The disk, the file server or the process that serves the file system has failed.",
    "dmesg; mount the path again",
)
SLOW = _kind(
    "path-slow",
    "Writing to a path is much slower on one host than on the others",
    "A checkpoint takes as long as the slowest host: all others wait for it in a collective, which "
    "may time out.",
    "compare mount options and the network to the file server with those of another host: mount",
    Severity.WARN,
)
NOT_SHARED = _kind(
    "path-not-shared",
    "A path is not the same file system on all hosts",
    "What one host writes there the others never see: a checkpoint is found incomplete when it is "
    "loaded, and a host without the mount fills its own disk.",
    "mount the shared file system on the hosts that lack it",
)
NOT_VISIBLE = _kind(
    "path-not-visible",
    "What one host writes to a path is not visible on another one",
    "A rank that waits for a file of another one (a checkpoint, a cache, a download) does not find "
    "it, though both have the same mount.",
    "compare the mount options of both hosts (mount): actimeo, lookupcache=none",
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
    SLOW,
    NOT_SHARED,
    NOT_VISIBLE,
)
