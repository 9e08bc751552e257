"""The libraries that stand in for the vendors', built once for all machines."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.amdsmi import stand_in as amd_stand_in
from tests.nvml import stand_in
from tests.support import fabrics
from tests.support.libraries import compiled

_NET_PLUGIN = "const char ncclNetPlugin_v10[64] = {0}; const char ncclNetPlugin_v9[64] = {0};"
_DEVICES = (
    *(f"mlx5_{number}" for number in range(18)),
    *(f"mlx5_ib{n}" for n in range(8)),
    "irdma0",
)


@dataclass(frozen=True)
class Tools:
    """Name by which a program looks for a library → the stand-in."""

    nvml: Path
    amdsmi: Path
    verbs: Path
    named: dict[str, Path]


def build(folder: Path) -> Tools:
    """All of them. `named` are those that a machine asks for by `Host.libraries`."""
    mtus = dict.fromkeys(_DEVICES, 5)
    return Tools(
        nvml=stand_in.build(folder),
        amdsmi=amd_stand_in.build(folder),
        verbs=compiled(folder / "libibverbs.so.1", fabrics.verbs_source(**mtus)),
        named={"libnccl-net.so": compiled(folder / "libnccl-net.so", _NET_PLUGIN)},
    )


_IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where a file costs a tenth of what it costs on a disk: a host has some 400."""


@contextlib.contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """A folder for hosts in memory, and one for their /dev/shm, which is tried with a large file:
    a disk writes none of it, and memory all of it."""
    with (
        tempfile.TemporaryDirectory(prefix="machines-", dir=_IN_MEMORY) as hosts,
        tempfile.TemporaryDirectory(prefix="machines-shm-") as shm,
    ):
        yield Path(hosts), Path(shm)
