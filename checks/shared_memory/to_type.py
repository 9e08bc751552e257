"""Fixes for a /dev/shm with too little room. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nccl_doctor.api import Fix, Step

from .left import Group, how_to_remove

_OF_CONTAINER = {
    "kubernetes": "an emptyDir with medium: Memory on /dev/shm",
    "docker": "docker run --shm-size=16g, or --ipc=host",
    "podman": "podman run --shm-size=16g, or --ipc=host",
}


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
    step = Step(remount.format("50%"), undo=remount.format(f"{facts['size'] >> 10}k"))
    return Fix(step, alternatives=[inside or f"in a container: {_OF_CONTAINER['docker']}"])
