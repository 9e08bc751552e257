"""DeepSpeed in a probe child: import it, and let it form the default group or keep one.

Every call that may block is announced first.
"""

from __future__ import annotations

import datetime
import importlib
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from nccl_doctor.api import Context
from nccl_doctor.toolkit.groups.attempts import CONNECT, ENTRY
from nccl_doctor.toolkit.groups.forming import beyond, take_device

IMPORT = "import deepspeed"
"""The breadcrumb of a rank that imports DeepSpeed."""
_SCHEME = "nccldoctor"


def import_deepspeed(ctx: Context) -> Any:
    """The module `deepspeed`, imported so that it writes nothing to disk and compiles nothing.

    Raises:
        Exception: raised by a DeepSpeed that does not fit this host.
    """
    # Empty: the tables of its kernels are not written to any folder.
    os.environ["TRITON_CACHE_DIR"] = ""
    if ctx.backend == "gloo":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    ctx.breadcrumb(IMPORT)
    deepspeed = importlib.import_module("deepspeed")
    # No operator can be compiled: none is needed for a group, and for CPUs init_distributed would
    # compile an all-reduce of its own at first use, for a minute, into the user's cache.
    importlib.import_module("deepspeed.ops").__compatible_ops__ = defaultdict(bool)  # type: ignore[attr-defined]
    return deepspeed


def init_by_deepspeed(ctx: Context, deepspeed: Any) -> Any:
    """Let `deepspeed.init_distributed` form the default group of this round.

    It reads its rank from the environment, as under a launcher, and connects to the store of the
    round instead of MASTER_ADDR:MASTER_PORT.

    Returns: the `torch.device` that tensors of this group belong on, set as the current one.
    """
    from torch.distributed.rendezvous import register_rendezvous_handler

    assert ctx.peers is not None
    peers = ctx.peers
    device = take_device(ctx, ctx.round)

    def meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        ctx.breadcrumb(CONNECT, group=ctx.round)
        store = peers.store()
        ctx.breadcrumb(ENTRY, group=ctx.round, by="deepspeed.init_distributed")
        yield store, ctx.position, len(ctx.group)

    register_rendezvous_handler(_SCHEME, meet)
    _take_place(ctx)
    deepspeed.init_distributed(
        dist_backend=ctx.backend,
        auto_mpi_discovery=False,
        timeout=beyond(ctx),
        init_method=f"{_SCHEME}://",
    )
    return device


def hand_over(ctx: Context, deepspeed: Any, device: Any) -> dict[str, Any]:
    """Call `deepspeed.init_distributed` after torch has formed the default group.

    Returns: `kept`: whether the default group is the same object as before; `backend_kept` and
        `timeout_kept`, the latter None where this torch does not show it.
    """
    import torch.distributed as dist

    _take_place(ctx)
    before = dist.group.WORLD, dist.get_backend(), _timeout_of(device)
    ctx.breadcrumb("deepspeed.init_distributed", group=ctx.round)
    deepspeed.init_distributed(
        dist_backend=ctx.backend,
        auto_mpi_discovery=False,
        timeout=beyond(ctx) + datetime.timedelta(minutes=1),
    )
    after = dist.group.WORLD, dist.get_backend(), _timeout_of(device)
    return {
        "kept": after[0] is before[0],
        "backend_kept": after[1] == before[1],
        "timeout_kept": None if before[2] is None else after[2] == before[2],
    }


def accelerator_name() -> str:
    """DeepSpeed's name of the accelerator that it found: `cuda`, `cpu`, …."""
    get = importlib.import_module("deepspeed.accelerator").get_accelerator
    return str(get().device_name())


def _take_place(ctx: Context) -> None:
    """Set this member's rank in the environment, as a launcher does; else DeepSpeed asks MPI."""
    os.environ["RANK"] = str(ctx.position)
    os.environ["WORLD_SIZE"] = str(len(ctx.group))
    os.environ["LOCAL_RANK"] = str(ctx.launch.local_rank or 0)
    os.environ.setdefault("MASTER_ADDR", ctx.launch.master_addr or "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(ctx.launch.master_port or 29500))


def _timeout_of(device: Any) -> float | None:
    """Time-out of collectives of the default group in seconds, where torch shows it."""
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    options = getattr(world._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return None if timeout is None else float(timeout.total_seconds())
