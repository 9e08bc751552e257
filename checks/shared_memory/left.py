"""Files that dead processes left in /dev/shm: their owners, and the room that they take."""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypedDict

from nccl_doctor.api import Command, shell

_OURS = re.compile(r"nccl-|torch_|cuda\.shm|sem\.mp-|psm_|sgl_shm_")
"""NCCL, torch, CUDA, locks and shared memory of Python's multiprocessing (vLLM), SGLang."""
_NUMBER = re.compile(r"(?:^|[_.-])([1-9]\d{1,6})(?=[_.-]|$)")
"""What may be a process id in a name."""
_ENDING = re.compile(r"(?<=[_.-])(?:[^_.-]*\d|[A-Za-z0-9]{6}$|[0-9a-f]{8}$)")
"""Where the part of a name begins that is another one for each file."""
_PLAIN = re.compile(r"[A-Za-z0-9_.*-]+")
_MOST_PIDS = 3


class File(NamedTuple):
    """A file that is not held; `gone`: the id in its name, of a process that ended."""

    name: str
    bytes: int
    owner: str = ""
    gone: int | None = None


class Group(TypedDict):
    """Facts of files with names of one pattern and of one owner; `gone`: some process ids;
    `named`: whether NCCL, torch, SGLang or Python's multiprocessing give such names.
    """

    pattern: str
    files: int
    bytes: int
    owner: str
    gone: list[int]
    named: bool


def files_left(folder: Path, proc: Path, *, whatever: bool, sees_all: bool) -> list[File]:
    """Files that no visible process has open or mapped, by name.

    Files of this user; as root, which can read every process, those of all users; and those of
    other users whose name has the number of a process that is gone.

    Args:
        folder: /dev/shm.
        proc: of this host.
        whatever: also files whose name tells nothing of who made them: somebody may keep data in
            them, which no process needs to have open.
        sees_all: whether all processes of the machine are visible. If /dev/shm is shared with other
            containers, theirs are not, and the numbers are others.
    """
    found: dict[str, File] = {}
    for path in folder.iterdir():
        try:
            status = path.lstat()
        except OSError:  # gone by now
            continue
        numbers = [int(text) for text in _NUMBER.findall(path.name)]
        alive = any((proc / str(number)).exists() for number in numbers)
        ours = _OURS.match(path.name) is not None
        mine = os.geteuid() in (0, status.st_uid)
        if not stat.S_ISREG(status.st_mode) or not (ours or whatever):
            continue
        gone = numbers[0] if numbers and sees_all and not alive else None
        if (ours and alive) or not (mine or (ours and gone is not None)):
            continue
        used = status.st_blocks * 512
        found[str(path)] = File(path.name, used, _owner(status.st_uid), gone)
    for process in proc.glob("[0-9]*") if found else ():
        for name in _in_use(process) & found.keys():
            del found[name]
    return sorted(found.values())


def grouped(files: Iterable[File]) -> list[Group]:
    """Files by pattern and owner, the largest groups first."""
    found: dict[tuple[str, str], Group] = {}
    for file in files:
        pattern = pattern_of(file.name)
        new = Group(pattern=pattern, files=0, bytes=0, owner=file.owner, gone=[], named=False)
        group = found.setdefault((pattern, file.owner), new)
        group["named"] = _OURS.match(file.name) is not None
        group["files"] += 1
        group["bytes"] += file.bytes
        if file.gone is not None and file.gone not in group["gone"]:
            group["gone"] = [*group["gone"], file.gone][:_MOST_PIDS]
    return sorted(found.values(), key=lambda each: (-each["bytes"], each["pattern"]))


def in_words(groups: Sequence[Group], most: int = 3) -> str:
    """The groups, as `852 files sgl_shm_mm_* of root (process 4711 is gone)`."""
    said = []
    for group in groups[:most]:
        several = group["files"] > 1
        text = f"{group['files']} files {group['pattern']}" if several else group["pattern"]
        text += f" of {group['owner']}" if group["owner"] else ""
        if group["gone"]:
            pids = ", ".join(map(str, group["gone"]))
            are = "processes" if len(group["gone"]) > 1 else "process"
            text += f" ({are} {pids} gone)"
        said.append(text)
    more = f" and {len(groups) - most} more kinds" if len(groups) > most else ""
    return ", ".join(said) + more


def how_to_remove(groups: Sequence[Group], most: int = 3) -> Command:
    """Command that removes files of the largest groups, if no process has them open; empty if none
    has a name that a shell takes as it is.
    """
    plain = [group["pattern"] for group in groups if _PLAIN.fullmatch(group["pattern"])]
    names = [shell("/dev/shm/{:pattern}", pattern) for pattern in dict.fromkeys(plain[:most])]
    each = 'for f in {}; do fuser -s "$f" || rm "$f"; done'
    return shell(each, names) if names else Command()


def pattern_of(name: str) -> str:
    """Name with `*` for the part that differs from file to file."""
    found = _ENDING.search(name)
    return f"{name[: found.start()]}*" if found else name


def _owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name if uid in (0, os.geteuid()) else f"user {uid}"
    except KeyError:
        return f"user {uid}"


def _in_use(process: Path) -> set[str]:
    """Paths that a process has open or mapped; empty if it may not be read."""
    paths = set()
    try:
        handles = list((process / "fd").iterdir())
        maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # of another user, or gone
        return set()
    for handle in handles:
        with suppress(OSError):  # closed by now
            paths.add(os.readlink(handle))
    return paths | {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
