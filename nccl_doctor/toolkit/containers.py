"""The runtime of this process's container, by the marks that it leaves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def container_of(root: Path, env: Mapping[str, str]) -> str:
    """`kubernetes`, `podman` or `docker`.

    Empty outside a container, and in one that leaves no such mark (Enroot, Apptainer, LXC).
    """
    if "KUBERNETES_SERVICE_HOST" in env:
        return "kubernetes"
    if os.path.exists(root / "run/.containerenv"):
        return "podman"
    return "docker" if os.path.exists(root / ".dockerenv") else ""
