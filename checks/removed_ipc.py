"""Would a logout of this user remove the job's files in /dev/shm?

What it checks
--------------
On hosts with systemd-logind: whether logind.conf and its drop-in files say RemoveIPC=yes, for a
user who is neither root nor a system user (user ID 1000 or more) and has no lingering, while this
process runs outside of the user's own sessions (by its control group), as under Slurm's slurmstepd.

Why it matters
--------------
When the last session of a user on a host ends, logind removes all files of that user in /dev/shm,
also those that are in use. Somebody who logs in to a node with ssh, looks at the job and logs out
again takes them from it: DataLoader workers then fail with `unable to open shared memory object`,
NCCL with an error in shm.cc. A job within the user's own session keeps that session open and is
safe.

How to fix
----------
RemoveIPC=no in /etc/systemd/logind.conf.d/keep-ipc.conf (below [Login]), then systemctl restart
systemd-logind; or loginctl enable-linger <user>; or log in to nodes through pam_slurm_adopt alone,
without pam_systemd.

When it is wrong
----------------
It matters only to those who log in to a node while their job runs there, so it is information. It
does not matter where a job has a /dev/shm of its own (containers, Slurm's job_container/tmpfs).
Where no file says yes or no, nothing is said: the default differs between distributions. Lingering
is found by the user's name in USER or LOGNAME.
Not validated on hardware: tested on made-up hosts.

References
----------
logind.conf(5), RemoveIPC; systemd issues 2039 and 2324; loginctl(1); slurm.schedmd.com,
pam_slurm_adopt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Step,
    Where,
    shell,
)
from nccl_doctor.system.shortage import in_user_namespace

REMOVED = Kind(
    "shm-removed-at-logout",
    Layer.HOST,
    "A logout of this user removes the job's files in /dev/shm",
    "logind removes them when the user's last session on the host ends, though the job runs on: "
    "DataLoader workers and NCCL then fail to open them.",
    Fix(
        Step(
            shell("# loginctl enable-linger NAME"),
            undo=shell("# loginctl disable-linger NAME"),
            persists=True,
        ),
        alternatives=[
            Fix(
                Step(
                    shell(
                        "printf '[Login]\\nRemoveIPC=no\\n' "
                        "> /etc/systemd/logind.conf.d/keep-ipc.conf"
                    ),
                    undo=shell("rm /etc/systemd/logind.conf.d/keep-ipc.conf"),
                    note="as root",
                    persists=True,
                ),
                Step(shell("systemctl restart systemd-logind"), persists=True),
            )
        ],
    ),
    Severity.INFO,
    effects=(Effect.JOB_ONLY,),
)

_FOLDERS = ("usr/lib", "usr/local/lib", "run", "etc")
"""Folders of settings; a file in a later one replaces that of the same name in those before it."""
_LINE = re.compile(r"\s*(#?)\s*RemoveIPC\s*=\s*(\S*)\s*")
_YES, _NO = ("1", "yes", "y", "true", "t", "on"), ("0", "no", "n", "false", "f", "off")
_SYSTEM_USERS = 999
"""The highest user ID of a system user: SYS_UID_MAX as all large distributions have it."""


class RemovedIpc(Check):
    """Reads the settings of logind, and where this process runs."""

    name = "removed_ipc"
    layer = Layer.HOST
    kinds = (REMOVED,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`setting`: the file that decides, and its words, None where logind does not run or no
        file says; `removes`: what it means; `user`: whether it applies to this user; `session`:
        whether this process belongs to a session of the user.
        """
        uid = _uid(ctx.root)
        setting = _setting(ctx.root) if (ctx.root / "run/systemd/system").exists() else None
        names = {ctx.env.get(name, "") for name in ("USER", "LOGNAME")} - {""}
        lingers = any((ctx.root / "var/lib/systemd/linger" / name).exists() for name in names)
        return {
            "setting": setting,
            "removes": setting is not None and setting[1].partition("=")[2].lower() in _YES,
            "user": uid is not None
            and uid > _SYSTEM_USERS
            and not in_user_namespace(ctx.root)
            and not lingers,
            "session": _in_session(ctx.root),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each host where a logout would remove the files."""
        for rank, facts in cluster.facts(self.name):
            if facts["removes"] and facts["user"] and facts["session"] is False:
                file, words = facts["setting"]
                yield Finding(
                    REMOVED,
                    f"{words} in {file}, and this process runs outside of the user's sessions",
                    Where(hosts=(rank.host.label,)),
                    confidence=Confidence.POSSIBLE,
                )


def _uid(root: Path) -> int | None:
    """Effective user ID of this process."""
    found = re.search(r"^Uid:\s+\d+\s+(\d+)", _text(root / "proc/self/status"), re.MULTILINE)
    return int(found.group(1)) if found else None


def _in_session(root: Path) -> bool | None:
    """True if the control group of this process is in a user's slice; None if it is not known."""
    text = _text(root / "proc/self/cgroup")
    groups = [line.split(":", 2)[-1] for line in text.splitlines()]
    # `/` is all that a container sees of its group.
    if all(group in ("", "/") for group in groups):
        return None
    return any(re.search(r"/user-\d+\.slice(/|$)", group) for group in groups)


def _setting(root: Path) -> tuple[str, str] | None:
    """The file that decides, and its line: the last of them; else the comment that tells the
    default, as distributions write it into the main file.
    """
    main, drop_ins = [], {}
    for folder in _FOLDERS:
        main += [path for path in [root / folder / "systemd/logind.conf"] if path.exists()]
        for path in (root / folder / "systemd/logind.conf.d").glob("*.conf"):
            drop_ins[path.name] = path
    decided = default = None
    for path in (*main[-1:], *(drop_ins[name] for name in sorted(drop_ins))):
        for line in _text(path).splitlines():
            found = _LINE.fullmatch(line)
            if found and found.group(2).lower() in (*_YES, *_NO):
                said = f"/{path.relative_to(root)}", f"RemoveIPC={found.group(2)}"
                if not found.group(1):
                    decided = said
                elif path in main:
                    default = said
    return decided or default


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
