"""Names of files that this process reads itself.

The program sends a child for each file of the user (`nccl_doctor.system.helpers`), but not for
what lies below /proc/self/fd. Where what is read matters, and not how, hundreds of tests and
examples need no fork each: a process that runs tests has a large memory.
"""

from __future__ import annotations

from pathlib import Path


def unsent(path: Path) -> Path:
    """The same file, by such a name."""
    return Path("/proc/self/fd/../../..", *path.absolute().parts[1:])
