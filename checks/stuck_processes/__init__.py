"""Are there processes on this host that are stuck in the kernel?

What it checks
--------------
All visible processes: those in uninterruptible sleep (state D) that neither ran nor got any CPU
time between two looks a fifth of a second apart. Their names, without arguments, and the kernel
function in which they wait, if it may be read. On a healthy host one look is enough. Kernel
threads, frozen processes and the examination's own processes are left out.

Why it matters
--------------
Such a process cannot be killed, and keeps its resources: a GPU's memory, a port, an open file. What
it waits for (a file server that is gone, a driver that hangs) a job will wait for as well, at the
first file that it opens or the first GPU that it uses; and no time-out of torch ends that.

How to fix
----------
Check the mount or the driver that the finding names. `ps -eo pid,stat,wchan:32,comm | grep ' D'`
shows the processes, `dmesg` shows those blocked for more than 120 seconds. Once the server or the
device answers they continue; if it never does, only a reboot ends them.

When it is wrong
----------------
A process that waits for one slow request of a busy disk or file server is taken as stuck: two looks
cannot distinguish a fifth of a second from a day. So it is never a failure. Only processes of this
PID namespace are seen, and only the first thread of each. The kernel function is shown only for
one's own processes, or to root, and is often a general one (a lock, a page): then only the process
name gives a hint, if any, and the finding is information. A paused container, or a process whose
child has not started its program yet (vfork), looks stuck if the function cannot be read. If /proc
hides processes of others (hidepid), the check is skipped unless one's own are stuck. Dead processes
that still hold a GPU are for check `gpu_state`.
Not validated on hardware: tested with made-up folders of /proc.

References
----------
proc(5) (/proc/PID/stat, wchan, hidepid); Kernel documentation, filesystems/proc and
admin-guide/sysctl/kernel (hung_task_timeout_secs); NVIDIA/open-gpu-kernel-modules issue 1333.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Skip,
    Step,
    Untested,
    Where,
    fill,
    look,
    shell,
)
from nccl_doctor.toolkit.kernel_waits import WaitCause as StuckCause
from nccl_doctor.toolkit.kernel_waits import cause_of as stuck_cause

from .stuck import look_for_stuck

PROCESS_STUCK = Kind(
    code="process-stuck",
    layer=Layer.HOST,
    title="Processes of this host are stuck in the kernel",
    why="They cannot be killed, and keep their resources; a job will wait for the same thing that "
    "they wait for.",
    fix=Fix(
        look(shell("dmesg | grep -A 20 'blocked for more than'"), "where they wait"),
        Step(shell("# cat /proc/PID/stack"), note="as root", shows=True),
    ),
    severity=Severity.WARN,
)

_PAUSE_S = 0.2
_YOUNGEST_S = 5.0
_SHOWN = 4


class StuckProcesses(Check):
    """Looks twice at the processes of the host, and names the probable cause."""

    name = "stuck_processes"
    layer = Layer.HOST
    kinds = (PROCESS_STUCK,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """The facts that `look_for_stuck` returns."""
        ctx.breadcrumb("looking at processes")
        found = look_for_stuck(ctx.root, pause_s=_PAUSE_S, youngest_s=_YOUNGEST_S)
        if not found["seen"]:
            raise Untested("/proc cannot be read")
        if found["hidden"] and not found["stuck"]:
            raise Skip("/proc hides the processes of other users (hidepid)")
        return found

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings for each host, one for each cause that its processes wait for."""
        for rank, facts in cluster.facts(self.name):
            by_cause: dict[StuckCause | None, list[Mapping[str, Any]]] = defaultdict(list)
            for one in facts["stuck"]:
                by_cause[stuck_cause(one["name"], one["wchan"])].append(one)
            for cause, stuck in by_cause.items():
                place = Where(hosts=(rank.host.label,))
                yield _finding(cause, stuck, facts["mounts"]).replaced(where=place)


def _finding(
    cause: StuckCause | None, stuck: Sequence[Mapping[str, Any]], mounts: Sequence[Sequence[str]]
) -> Finding:
    many = "1 process is" if len(stuck) == 1 else f"{len(stuck)} processes are"
    evidence = {"processes": [dict(one) for one in stuck]}
    if cause is None:
        text = f"{many} stuck in the kernel: {_names(stuck)}"
        return Finding(
            PROCESS_STUCK,
            text,
            evidence=evidence,
            severity=Severity.INFO,
            confidence=Confidence.POSSIBLE,
        )
    served = [(place, kind) for place, kind in mounts if _serves(cause, kind)]
    places = [f"{place} ({kind})" for place, kind in served]
    shown = ", ".join(places[:_SHOWN])
    shown += f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return Finding(
        PROCESS_STUCK,
        f"{many} stuck in {cause.words}: {_names(stuck)}" + (f", of {shown}" if shown else ""),
        evidence={**evidence, "mounts": places},
        fix=fill(cause.fix, MOUNT=served[0][0]) if len(served) == 1 else cause.fix,
        confidence=Confidence.LIKELY,
    )


def _names(stuck: Sequence[Mapping[str, Any]]) -> str:
    """Names of processes as text: `python x 3 in rpc_wait_bit_killable, df`."""
    counts = Counter((one["name"], one["wchan"]) for one in stuck)
    words = [
        name + (f" x {count}" if count > 1 else "") + (f" in {wchan}" if wchan else "")
        for (name, wchan), count in sorted(counts.items())
    ]
    more = f" and {len(words) - _SHOWN} more names" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more


def _serves(cause: StuckCause, kind: str) -> bool:
    return kind.partition(".")[0] in cause.file_systems
