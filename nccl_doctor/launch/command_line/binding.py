"""CPUs to which `taskset` and `numactl` bind the program behind them.

torchrun counts the CPUs that it may use where `--nproc-per-node` is `cpu`, or `auto` without a GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

from nccl_doctor.launch.command_line.job_line import JobLineError
from nccl_doctor.system.helpers import send
from nccl_doctor.system.masking import masked_command
from nccl_doctor.toolkit.host import cpu_list

_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6}))?)?")
_NODES = Path("/sys/devices/system/node")
_CPUS = ("-C", "--physcpubind")
_NODE_OPTIONS = ("-N", "--cpunodebind")


class _Unread(Exception):
    """The form of a list is not known here."""


def bound_cpus(front: Sequence[str]) -> int | None:
    """CPUs that the program behind these words may use, as the kernel answers in a child.

    Returns: None where they bind to none, 0 where it cannot be told.

    Raises:
        JobLineError: the kernel refuses the binding, and so ends the wrapper.
    """
    reader = {"taskset": _of_taskset, "numactl": _of_numactl}.get(PurePath(front[0]).name)
    try:
        cpus = reader(front[1:]) if reader else None
    except _Unread:
        return 0
    if cpus is None:
        return None
    try:
        return int(send("/proc", lambda: _bind(cpus)))
    except (OSError, OverflowError, RuntimeError) as error:
        raise JobLineError(f"{masked_command(front)}: this host has no such CPU") from error


def _bind(cpus: Iterable[int]) -> bytes:
    """Runs in a child."""
    os.sched_setaffinity(0, cpus)
    return str(len(os.sched_getaffinity(0))).encode()


def _of_taskset(words: Sequence[str]) -> set[int]:
    """`[-a] MASK` or `[-a] -c LIST`."""
    *options, last = words or [""]
    if any(word.startswith("--cpu-list") or re.fullmatch(r"-a?c", word) for word in options):
        return _listed(last)
    mask = last.replace(",", "").lower().removeprefix("0x")
    if not re.fullmatch(r"[0-9a-f]{1,4096}", mask):
        raise _Unread
    return {bit for bit in range(4 * len(mask)) if int(mask, 16) >> bit & 1}


def _of_numactl(words: Sequence[str]) -> set[int] | None:
    """`-C CPUS`, `-N NODES`, or neither."""
    cpus: set[int] | None = None
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if re.fullmatch(r"-[CN].+", word):
            name, value, equals = word[:2], word[2:], "="
        value = value if equals else (words[at + 1] if at + 1 < len(words) else "")
        if name in _CPUS:
            cpus = _listed(value)
        elif name in _NODE_OPTIONS:
            cpus = {cpu for node in _listed(value) for cpu in _of_node(node)}
    return cpus


def _of_node(node: int) -> set[int]:
    """CPUs of a NUMA node, as the kernel lists them."""
    if not _NODES.exists():
        raise _Unread
    folder = _NODES / f"node{node}"
    if not folder.exists():
        raise JobLineError(f"this host has no NUMA node {node}")
    return set(cpu_list(folder / "cpulist"))


def _listed(text: str) -> set[int]:
    """Numbers of `0-3,8,16-31:2`."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _Unread
        first, last, step = (int(match[i] or 0) for i in (1, 2, 3))
        found |= set(range(first, (last if match[2] else first) + 1, step or 1))
    return found
