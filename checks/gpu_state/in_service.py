"""Programs that take the GPUs of a host out of use for a while: a reset, a test, a new driver.

While one runs, the driver refuses, answers late or is not loaded, on a host that is in order. Only
processes of this PID namespace can be seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from nccl_doctor.toolkit.host import text_of

_ALWAYS = re.compile(r"nvidia-installe|nvidia-dkms|dkms$|nvvs$|nvidia-bug-rep|nvidia-uninsta")
"""Names, as the kernel keeps them: 15 characters."""
_WITH_WORDS = {
    "nvidia-smi": re.compile(r"(--gpu-reset|-r|-mig|--multi-instance-gpu|mig)$"),
    "modprobe": re.compile(r"nvidia"),
    "rmmod": re.compile(r"nvidia"),
    "insmod": re.compile(r".*nvidia"),
}
"""Name → one of its arguments."""
_MOST = 4


def programs_in_service(root: Path = Path("/")) -> list[str]:
    """Names of running programs of this kind, `nvidia-smi --gpu-reset`.

    The arguments of a process that is stuck may never come: ask in a process of its own.
    """
    return sorted(set(_running(root / "proc")))[:_MOST]


def _running(proc: Path) -> Iterator[str]:
    for comm in proc.glob("[0-9]*/comm"):
        name = text_of(comm)
        if _ALWAYS.match(name):
            yield name
        elif name in _WITH_WORDS:
            words = text_of(comm.with_name("cmdline")).split("\0")[1:]
            found = [word for word in words if _WITH_WORDS[name].match(word)]
            if found:
                yield f"{name} {found[0]}"
