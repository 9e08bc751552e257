"""Do all hosts have the same kernel, and the same settings of its memory?

What it checks
--------------
On each host the release of the kernel, the setting of transparent huge pages
(/sys/kernel/mm/transparent_hugepage/enabled) and that of automatic NUMA balancing
(kernel.numa_balancing), compared with the other hosts. Governors of CPU clocks are compared by
check `cpus`.

Why it matters
--------------
One host that was installed at another time, or that missed a profile of the others, is often the
one that is slower: its kernel has other drivers and defaults, moves pages between NUMA nodes while
NCCL's threads run, or gathers huge pages at other moments. A collective waits for the slowest host.

How to fix
----------
Give all hosts the same image and settings: sysctl -w kernel.numa_balancing=0; echo madvise >
/sys/kernel/mm/transparent_hugepage/enabled; or one tuned profile for all.

When it is wrong
----------------
A difference breaks nothing by itself, and is often meant while a fleet is upgraded: so it is only
information. Where it does not matter for speed, it does no harm.

References
----------
uname(2); Kernel documentation, admin-guide/mm/transhuge and admin-guide/sysctl/kernel
(numa_balancing).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Command,
    Context,
    Effect,
    Figure,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Severity,
    Skip,
    Step,
    Where,
    odd_ones_out,
    shell,
)
from nccl_doctor.toolkit.hosts import sides_in_words

DIFFERS = Kind(
    code="kernel-settings-differ",
    layer=Layer.HOST,
    title="The kernel, or a setting of it, is another one on some hosts",
    why="A host with another kernel, other huge pages or NUMA balancing may be slower than the "
    "others, which then wait for it.",
    fix="give all hosts the same image and settings",
    severity=Severity.INFO,
    effects=(Effect.DIFFERENCE,),
)
_FILES = {
    "kernel": "proc/sys/kernel/osrelease",
    "transparent huge pages": "sys/kernel/mm/transparent_hugepage/enabled",
    "NUMA balancing": "proc/sys/kernel/numa_balancing",
}
_FIXES = {
    "kernel": "boot the same kernel on every host",
    "transparent huge pages": "echo {} > /sys/kernel/mm/transparent_hugepage/enabled",
    "NUMA balancing": "sysctl -w kernel.numa_balancing={}",
}
_CHOSEN = re.compile(r"\[(\w+)\]")


class KernelSettings(Check):
    """Kernel release, huge pages and NUMA balancing, by host."""

    name = "kernel_settings"
    layer = Layer.HOST
    kinds = (DIFFERS,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Values as text, by the names of `_FILES`; those that this kernel has."""
        seen = {name: _value(ctx.root / path) for name, path in _FILES.items()}
        if not any(seen.values()):
            raise Skip("this kernel shows none of these settings")
        return {name: value for name, value in seen.items() if value}

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """Every value of each host."""
        for rank, facts in cluster.facts(self.name):
            for name in _FILES:
                if name in facts:
                    yield Figure(name, facts[name], Where(hosts=(rank.host.label,)))

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each value that is not the same on all hosts that have one."""
        reports = [(rank.host.label, facts) for rank, facts in cluster.facts(self.name)]
        for name in _FILES:
            values = {host: facts[name] for host, facts in reports if name in facts}
            odd = odd_ones_out(values)
            if odd is None:
                continue
            sides: dict[str, list[str]] = {}
            for host, value in values.items():
                sides.setdefault(value, []).append(host)
            yield Finding(
                DIFFERS,
                f"{name}: {sides_in_words(sides)}",
                Where(hosts=tuple(sorted(odd.places))),
                {name: sides},
                fix=_fix(name, odd.usual, {*values.values()}),
            )


def _fix(name: str, usual: str | None, values: Collection[str]) -> str:
    """The command that sets the usual value; a comment where there is none."""
    command = _FIXES[name]
    if "{}" not in command:
        return command
    if usual is None:
        note = f"one of {', '.join(sorted(values))}, the same on every host"
        return Fix(Step(shell("# {}", shell(command, "NAME")), On.EVERY, note=note))
    (old, *more) = sorted({*values} - {usual})
    return Fix(Step(shell(command, usual), undo=Command() if more else shell(command, old)))


def _value(path: Path) -> str:
    """The text of a file, or the word that is chosen in it; empty where there is none."""
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            text = file.read(200).strip()
    except OSError:
        return ""
    chosen = _CHOSEN.search(text)
    return chosen[1] if chosen else text
