"""Privileges of this process that lift limits, as the kernel sees them.

Sources: user_namespaces(7), capabilities(7); `capable` in the kernel's kernel/capability.c.
"""

from __future__ import annotations

from pathlib import Path

NET_BIND_SERVICE, SYS_ADMIN = 10, 21
_BITS = {"ipc_lock": 14, "sys_admin": SYS_ADMIN, "sys_resource": 24}
_EVERY_USER = ["0", "0", "4294967295"]
"""Content of /proc/self/uid_map in the first user namespace."""


def in_user_namespace(root: Path = Path("/")) -> bool:
    """Whether this process is in a user namespace of a container, such as Podman's without root."""
    try:
        words = (root / "proc/self/uid_map").read_text(encoding="ascii").split()
    except OSError:  # a kernel without them
        return False
    return words != _EVERY_USER


def privileges(root: Path = Path("/")) -> frozenset[str]:
    """Privileges of this process that lift a limit: the capabilities that it has of `ipc_lock`,
    `sys_admin`, `sys_resource`, and `root` if that is its real user.

    Empty in a user namespace: `CapEff` is full there, but `capable()`, which checks the first
    namespace, denies them.
    """
    if in_user_namespace(root):
        return frozenset()
    found = {name for name, bit in _BITS.items() if has_capability(bit, root)}
    return frozenset(found | ({"root"} if _status(root, "Uid").split()[:1] == ["0"] else set()))


def has_capability(number: int, root: Path = Path("/")) -> bool:
    """Whether this process has a capability in its own user namespace, by its number in
    include/uapi/linux/capability.h.
    """
    return bool(int(_status(root, "CapEff").strip() or "0", 16) >> number & 1)


def _status(root: Path, name: str) -> str:
    try:
        text = (root / "proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return dict(line.partition(":")[::2] for line in text.splitlines()).get(name, "")
