"""Pseudonyms of paths, part by part: what is the same everywhere stays. Pure.

`/home/bob/proj/.venv/lib/python3.11/site-packages/torch/x.py` keeps all but `bob` and `proj`: the
rest says which library was loaded from where. Parts with one name have one pseudonym, so that
folders stay the folders that they were.
"""

from __future__ import annotations

from nccl_doctor.report.redaction.addresses import Ids
from nccl_doctor.report.redaction.book import Book
from nccl_doctor.report.redaction.names import (
    ENDINGS,
    GROUP_FILE,
    GROUP_PART,
    LOCAL_ROOTS,
    PACKAGES,
    PATH_PATTERN,
    PATH_WORDS,
    PYTHON_HOME,
    KnownNames,
)

HOMES = frozenset(("home", "Users", "users", "u"))
"""Folders whose folders are named after users."""
GROUPS = "/sys/fs/cgroup/"
UNITS = ("service", "scope", "slice")


class Paths:
    """Pseudonyms of paths."""

    def __init__(self, book: Book, names: KnownNames, ids: Ids) -> None:
        self._book = book
        self._names = names
        self._ids = ids

    def path(self, text: str) -> str:
        """The pseudonym of a path, absolute or relative, or of several with colons between them."""
        return ":".join(map(self._one, text.split(":")))

    def group(self, part: str) -> str:
        """The pseudonym of a control group or unit of systemd; its type stays."""
        made = self._ids.replaced(part, known=self._names.knows_host)
        if made != part or len(part) < 2 or GROUP_PART.fullmatch(part):
            return made
        stem, dot, ending = part.rpartition(".")
        if dot and stem and ending in UNITS:
            return f"{self._book.pseudonym('dir', stem)}.{ending}"
        return self._book.pseudonym("dir", part)

    def _one(self, text: str) -> str:
        if text.startswith(GROUPS):
            return GROUPS + "/".join(map(self.group, text.removeprefix(GROUPS).split("/")))
        if text[:1] not in "/~" and GROUP_FILE.fullmatch(text.rpartition("/")[2]):
            return "/".join(map(self.group, text.split("/")))
        if is_systems_own(text):
            known = self._names.knows_host
            named = (self._ids.replaced(part, known=known) for part in text.split("/"))
            return "/".join(map(self._names.in_word, named))
        parts = text.split("/")
        out: list[str] = []
        in_python = False
        for i, part in enumerate(parts):
            before = parts[i - 1] if i else ""
            if in_python:
                out.append(part)
                continue
            if PYTHON_HOME.fullmatch(before) and part in PACKAGES:
                in_python = True
                out.append(part)
                continue
            out.append(self._part(part, before, i == len(parts) - 1))
        return "/".join(out)

    def _part(self, part: str, before: str, is_last: bool) -> str:
        if len(part) < 2 or part[0] == "$" or part.startswith("${"):
            return part
        if before in HOMES and part != "..":
            return self._names.user(part)
        if part[0] == "~":
            return "~" + self._names.user(part[1:])
        if part.lower() in PATH_WORDS or PATH_PATTERN.fullmatch(part):
            return part
        stem, dot, ending = part.rpartition(".")
        if dot and stem and ending.lower() in ENDINGS:
            if stem.lower() in PATH_WORDS:
                return part
            return f"{self._book.pseudonym('file', stem)}.{ending}"
        return self._book.pseudonym("file" if is_last and dot else "dir", part)


def is_systems_own(path: str) -> bool:
    """True if a path is one that the operating system names."""
    if path.startswith("/usr/local") or ".." in path.split("/"):
        return False
    return any(path == root or path.startswith(root + "/") for root in LOCAL_ROOTS)
