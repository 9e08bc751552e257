"""What this process may do, as the kernel sees it where it lifts a limit.

Sources: user_namespaces(7), capabilities(7); `capable` in the kernel's kernel/capability.c.
"""

from __future__ import annotations

from pathlib import Path

_BITS = {"ipc_lock": 14, "sys_admin": 21, "sys_resource": 24}
_EVERY_USER = ["0", "0", "4294967295"]
"""What /proc/self/uid_map says of who is in no user namespace but the first."""


def in_user_namespace(root: Path = Path("/")) -> bool:
    """Whether this process is in a user namespace of a container, such as Podman's without root."""
    try:
        words = (root / "proc/self/uid_map").read_text(encoding="ascii").split()
    except OSError:  # a kernel without them
        return False
    return words != _EVERY_USER


def privileges(root: Path = Path("/")) -> frozenset[str]:
    """What lifts a limit for this process: of `ipc_lock`, `sys_admin`, `sys_resource` those
    capabilities that it has, and `root` where its real user is that.

    Empty in a user namespace: `CapEff` is full there, and yet `capable()`, which asks the first
    one, says no.
    """
    if in_user_namespace(root):
        return frozenset()
    try:
        text = (root / "proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    lines = dict(line.partition(":")[::2] for line in text.splitlines())
    mask = int(lines.get("CapEff", "").strip() or "0", 16)
    found = {name for name, bit in _BITS.items() if mask >> bit & 1}
    return frozenset(found | ({"root"} if lines.get("Uid", "").split()[:1] == ["0"] else set()))
