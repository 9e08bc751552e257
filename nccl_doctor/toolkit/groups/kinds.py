"""Kinds of finding about process groups, for every check that forms them."""

from __future__ import annotations

from dataclasses import replace

from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Effect, Kind, Layer
from nccl_doctor.model.fixes import Fix, On, Step, look

_LONG_WAIT = "the job would wait in its first collective until the time-out of the process group"

INIT_FAILED = Kind(
    "group-init-failed",
    Layer.GROUP,
    "A process group cannot be formed",
    "init_process_group or new_group raises an error on these ranks: the job stops before its "
    "first step",
    "read the error in the evidence; it comes from the backend itself",
)
INIT_HANG = Kind(
    "group-init-hang",
    Layer.GROUP,
    "Forming a process group never ends",
    "some member cannot be reached or never arrives; the others wait until the group's time-out",
    "look at the ranks that never entered, then at the network between the hosts of the group",
    effects=(Effect.TIMED_OUT,),
)
HANG = Kind(
    "collective-hang",
    Layer.COLLECTIVE,
    "A collective never ends",
    _LONG_WAIT,
    "look at the ranks that never entered, then at the network between the hosts of the group",
    effects=(Effect.TIMED_OUT,),
)
FAILED = Kind(
    "collective-failed",
    Layer.COLLECTIVE,
    "A collective raises an error",
    "the same collective in the job would fail as well",
    "read the error in the evidence; it comes from the backend itself",
)
WRONG = Kind(
    "collective-wrong-result",
    Layer.COLLECTIVE,
    "A collective gives a wrong result",
    "the job would train on corrupt gradients without any error",
    "take the named ranks' hosts out of the job; test their GPUs, P2P (ACS, IOMMU) and links",
)
FROZEN = Kind(
    "rank-frozen",
    Layer.COLLECTIVE,
    "A rank is frozen during a collective",
    "every other rank of the group waits for it",
    Fix(
        Step(
            shell("# kill -CONT PID"),
            note="if its state is T (stopped); D waits in the kernel: see its stack",
        )
    ),
    effects=(Effect.TIMED_OUT, Effect.ONE_PROCESS),
)
NOT_STARTED = Kind(
    "gpu-not-started",
    Layer.DEVICE,
    "The GPU driver of a rank does not start in time",
    "the other ranks wait for a rank that has no GPU yet; without persistence mode the driver "
    "starts again for each new process; if it never starts, the job stops",
    Fix(
        Step(shell("nvidia-smi -pm 1"), note="as root; the driver then stays up between processes"),
        alternatives=["if it is on already: look for Xid and NVRM in the kernel log"],
    ),
    effects=(Effect.TIMED_OUT,),
)
CRASHED = Kind(
    "rank-crashed",
    Layer.COLLECTIVE,
    "A rank dies during a collective",
    "every other rank of the group gets a connection error or waits",
    Fix(
        look(shell("dmesg -T | grep -i oom"), "after a SIGKILL"),
        alternatives=["other signals: see the stack in the evidence"],
    ),
)
KILLED = replace(CRASHED, effects=(*CRASHED.effects, Effect.ONE_PROCESS))
"""The same of a rank that ended by a signal of somebody else; it died of no setting."""
DEVICE_ID_HANG = Kind(
    "device-id-multi-group-hang",
    Layer.GROUP,
    "A further group hangs where the default group is bound to a device",
    "with a device_id, every later group is a split of the default group that all its ranks "
    "must join; if some ranks never do, the job stops there until the process group's time-out",
    "form the default group without device_id before anything else does (torch before 2.15)",
    effects=(Effect.TIMED_OUT,),
)
ONCE = {
    "title": "A group failed or hung once, and worked when it was tried again",
    "why": "what happens now and then would stop the job sooner or later; a busy host may cause "
    "it as well",
    "fix": Fix(
        Step(shell("# --level full"), On.EVERY, note="run again with it"),
        alternatives=["look at the hosts of the group for load, and at their links for errors"],
    ),
}
"""Words of a variant of any of these kinds, where it did not happen again."""

GROUP_KINDS = (INIT_FAILED, INIT_HANG, HANG, FAILED, WRONG, FROZEN, CRASHED, NOT_STARTED)
"""The kinds that a check may find with `judge_groups`."""

GROUP_NEEDS = (
    Layer.NAME,
    Layer.ROUTE,
    Layer.PORT,
    Layer.RANKS,
    Layer.DEVICE,
    Layer.GROUP,
    Layer.COLLECTIVE,
)
"""Layers that a check of further groups needs: the network, the ranks, and one working group."""
