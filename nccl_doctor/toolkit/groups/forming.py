"""Forming of the default process group of one round, as the job forms its own.

For a probe child. Every call that may block is announced first.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import warnings
from typing import Any

from nccl_doctor.model.check import Context
from nccl_doctor.system.leaving import at_end
from nccl_doctor.toolkit.gpu.devices import own_device
from nccl_doctor.toolkit.groups.attempts import CONNECT, ENTRY, TAKE_DEVICE
from nccl_doctor.toolkit.groups.culprits import AGAIN
from nccl_doctor.toolkit.groups.recorder import record
from nccl_doctor.toolkit.groups.witness import watch
from nccl_doctor.toolkit.nccl.ras import ADDRESS, own_address

_WARNS, _TELLS = ("WARN", "INFO", "ABORT", "TRACE"), ("INFO", "ABORT", "TRACE")
"""Levels of NCCL_DEBUG that show warnings, and those that show every step."""
_FORMED, _ALL_FORMED = "nccl-doctor/formed", "nccl-doctor/all-formed"
"""Keys in the store of a round: how many have formed its group, and that all have."""
_IOLBF = 1
"""Line buffering, in <stdio.h> of glibc and musl."""


def form_world(
    ctx: Context,
    *,
    name: str = "",
    bind: bool = False,
    size: int | None = None,
) -> Any:
    """Form the default group of this round, over the round's own store.

    Args:
        ctx: of a round with peers.
        name: of the group, for messages; the round's name where it is empty.
        bind: give `init_process_group` the device (`device_id`), so that the group is bound to it.
        size: of a group of fewer than all members of the round; None: all of them.

    Returns: the `torch.device` that tensors of this group belong on, set as the current one.

    Raises:
        RuntimeError: torch's own error, of whatever class, where the group cannot be formed.
    """
    import torch.distributed as dist

    assert ctx.peers is not None
    # Under PYTHONWARNINGS=error, torch's word on a function that is called here would be a failure,
    # and the job may never call it.
    warnings.simplefilter("default")
    name = name or ctx.round
    device = take_device(ctx, name)
    ctx.breadcrumb(CONNECT, group=name)
    store = ctx.peers.store()
    ctx.breadcrumb(ENTRY, group=name)
    dist.init_process_group(
        ctx.backend,
        store=store,
        rank=ctx.position,
        world_size=len(ctx.group) if size is None else size,
        timeout=beyond(ctx),
        **({"device_id": device} if bind else {}),
    )
    return device


def stay_until_all_have_formed_it(ctx: Context) -> None:
    """Keep the connections of the default group until every member has formed it.

    gloo forms the group on a rank as soon as all connections of that rank stand. To one that is
    still connecting to others, the end of this process would be a peer that closed its connection,
    and the group would fail there. Ends a second before the deadline, whoever does not come.
    """
    assert ctx.peers is not None
    store = ctx.peers.store()
    if store.add(_FORMED, 1) == len(ctx.group):
        store.set(_ALL_FORMED, "1")
    with contextlib.suppress(RuntimeError):  # not all came: that is found on those
        store.wait([_ALL_FORMED], datetime.timedelta(seconds=max(0.001, ctx.left() - 1)))


def take_device(ctx: Context, name: str) -> Any:
    """Set and return the `torch.device` of this rank, before it enters group `name`.

    From here on the evidence about a hang is recorded: see `speak_up` and `watch`.
    """
    import torch

    speak_up(ctx)
    watch(ctx)
    # As torchrun does it. With a pool on every core for each rank of the host, the threads wait for
    # each other in busy loops, for longer than the work takes.
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if ctx.backend == "nccl":
        ctx.breadcrumb(TAKE_DEVICE, group=name)  # counting GPUs starts the driver, too
        device = own_device(ctx.launch.local_rank)
        ctx.breadcrumb(f"{TAKE_DEVICE} {device}", group=name)
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # CUDA 11 makes no context before
        at_end(end_groups)
    return device


def end_groups() -> None:
    """End every group of this process, in the order in which all its peers end theirs.

    Only for NCCL, which would leave files in /dev/shm. gloo leaves nothing, and its end takes a
    tenth of a second.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def beyond(ctx: Context) -> datetime.timedelta:
    """A time-out longer than the life of this child: the deadline of the engine comes first, so
    that no victim raises an error before the culprit is seen.
    """
    return datetime.timedelta(seconds=2 * ctx.left() + 60)


def speak_up(ctx: Context) -> None:
    """Set NCCL and torch, in this child, to record evidence about a hang.

    The output of a child is kept as the end of its log, so NCCL writes there and into no file:
    warnings, and every step where a hang is tried again. Lines are written at once: NCCL uses C
    stdio and does not flush, so its last lines before a child is killed would be lost in a buffer.
    The child has its own RAS port, unless the user gave one: by default every NCCL process of a
    host answers at the same port, also those of other jobs. NCCL's Inspector, a profiler plug-in,
    would leave files of the examination. In some versions of torch the flight recorder is off by
    default.
    """
    os.environ["NCCL_DEBUG_FILE"] = ""  # not unset: a file of NCCL's own could then set it
    again = ctx.round.endswith(AGAIN)
    if os.environ.get("NCCL_DEBUG", "").upper() not in (_TELLS if again else _WARNS):
        os.environ["NCCL_DEBUG"] = "INFO" if again else "WARN"
    with contextlib.suppress(AttributeError, OSError, ValueError):
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)
    if ctx.backend == "nccl":
        os.environ["NCCL_INSPECTOR_ENABLE"] = "0"
        if ADDRESS not in os.environ:
            with contextlib.suppress(OSError):
                os.environ[ADDRESS] = own_address()
    record()
