"""The NVIDIA driver of a rank: its kernel module, and the libcuda that CUDA and NCCL go by. Pure.

An image may bring the libcuda of a newer driver in a `compat` folder (forward compatibility): then
cudaDriverGetVersion, by which NCCL decides what the driver can do, answers for that libcuda.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.model.cluster import Cluster, Host, Rank
from nccl_doctor.toolkit.versions import major

_COMPAT = re.compile(r"(^|[-_])compat($|[-_])")
_OLDEST = 300
"""A lower number is no driver release, as in `libcuda.so.1.1` of WSL."""


def is_compat(path: str) -> bool:
    """True if a folder of a library is one of forward compatibility: `compat`, `cuda-compat` of
    conda.
    """
    return any(_COMPAT.search(folder) for folder in path.split("/")[:-1])


def is_stub(path: str) -> bool:
    """True if a library is only one to link with."""
    return "stubs" in path.split("/")[:-1]


def libraries_in(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of the table of driver libraries in facts of check `driver_libraries`."""
    return (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])


def compat_libcuda(cluster: Cluster, rank: Rank) -> Mapping[str, Any] | None:
    """The libcuda of a rank, as a row, if it is one of forward compatibility."""
    for other, facts in cluster.facts_on("driver_libraries", rank.host):
        for library in libraries_in(facts["loaded"]) if other.seat == rank.seat else ():
            if library["library"] == "libcuda" and is_compat(library["path"]):
                return library
    return None


def driver_branch(cluster: Cluster, host: Host, kernel: str | None) -> int | None:
    """Branch of the driver that CUDA reports on a host: that of the kernel module, or of a newer
    libcuda.

    Args:
        cluster: with the facts of check `driver_libraries`, if there are any.
        host: the host.
        kernel: version of its kernel module; None if not known.
    """
    known = [major(kernel)]
    for _, facts in cluster.facts_on("driver_libraries", host):
        for library in libraries_in(facts["loaded"]):
            if library["library"] == "libcuda":
                known.append(major(library["version"]))
    return max((each for each in known if each is not None and each >= _OLDEST), default=None)
