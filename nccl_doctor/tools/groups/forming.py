"""The default process group of one round, formed as the job forms its own.

Runs in a probe child. Every call that may block is announced first.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from nccl_doctor.contract import Context
from nccl_doctor.tools.groups.attempts import CONNECT, ENTRY

_LOUD = ("WARN", "INFO", "ABORT", "TRACE")


def form_world(
    ctx: Context,
    *,
    name: str = "",
    bind: bool = False,
    rank: int | None = None,
    size: int | None = None,
) -> Any:
    """Form the default group of this round, over the round's own store.

    Args:
        ctx: of a round with peers.
        name: of the group, for messages; the round's name where it is empty.
        bind: give `init_process_group` the device (`device_id`), so that the group is bound to it.
        rank: of this member, where it is not its position in the round's group.
        size: of a group of fewer than all members of the round; None: all of them.

    Returns: the `torch.device` that tensors of this group belong on, set as the current one.

    Raises:
        RuntimeError: torch's own error, of whatever class, where the group cannot be formed.
    """
    import torch
    import torch.distributed as dist

    assert ctx.peers is not None
    name = name or ctx.round
    speak_up()
    device = torch.device("cpu")
    if ctx.backend == "nccl":
        device = torch.device("cuda", ctx.launch.local_rank or 0)
        ctx.breadcrumb(f"set device {device}", group=name)
        torch.cuda.set_device(device)
    ctx.breadcrumb(CONNECT, group=name)
    store = ctx.peers.store()
    ctx.breadcrumb(ENTRY, group=name)
    dist.init_process_group(
        ctx.backend,
        store=store,
        rank=ctx.position if rank is None else rank,
        world_size=len(ctx.group) if size is None else size,
        timeout=beyond(ctx),
        **({"device_id": device} if bind else {}),
    )
    return device


def beyond(ctx: Context) -> datetime.timedelta:
    """A time-out longer than this child may live: the engine's deadline speaks, not torch's, so
    that a victim's error never comes before the culprit is seen.
    """
    return datetime.timedelta(seconds=2 * ctx.left() + 60)


def speak_up() -> None:
    """Let NCCL say in this child's output why it fails: at least warnings, and into no file.

    What a child prints is kept as the end of its log.
    """
    os.environ.pop("NCCL_DEBUG_FILE", None)
    if os.environ.get("NCCL_DEBUG", "").upper() not in _LOUD:
        os.environ["NCCL_DEBUG"] = "WARN"
