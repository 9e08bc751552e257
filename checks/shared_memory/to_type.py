"""Fixes for a /dev/shm with too little room. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nccl_doctor.api import Fix, Step, shell

from .left import Group, how_to_remove

_OF_CONTAINER: Mapping[str, str] = {
    "kubernetes": "an emptyDir with medium: Memory on /dev/shm",
    "docker": Fix(Step(shell("# docker run --shm-size=16g"))),
    "podman": Fix(Step(shell("# podman run --shm-size=16g"))),
}
MORE_ROOM = Fix(
    Step(shell("mount -o remount,size=50% /dev/shm"), note="as root, on the host"),
    alternatives=[_OF_CONTAINER["docker"], f"in Kubernetes: {_OF_CONTAINER['kubernetes']}"],
)
MOUNT = Fix(
    Step(
        shell("mkdir -p /dev/shm && mount -t tmpfs -o size=50% tmpfs /dev/shm"),
        undo=shell("umount /dev/shm"),
        note="as root",
    ),
    alternatives=["in a container: Docker and Kubernetes mount one if nothing hides /dev"],
)


def without(left: Sequence[Group]) -> str:
    """The fix that removes files which no process has open; empty if none can be named."""
    command = how_to_remove(left)
    return Fix(Step(command, persists=True)) if command else ""


def more_room(facts: Mapping[str, Any]) -> str:
    """The fix for a /dev/shm that is too small: of the container, or of the host."""
    inside = _OF_CONTAINER.get(facts.get("container", ""), "")
    if inside and not facts.get("may_mount", False):
        return inside
    remount = "mount -o remount,size={} /dev/shm"
    step = Step(shell(remount, "50%"), undo=shell(remount, f"{facts['size'] >> 10}k"))
    return Fix(step, alternatives=[inside or _OF_CONTAINER["docker"]])
