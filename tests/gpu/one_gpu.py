"""Several ranks on one GPU, which NCCL takes for several hosts.

NCCL refuses two ranks on one GPU of one host; ranks with a NCCL_HOSTID of their own are on hosts of
their own, and talk over sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.ranks.ranks import Ranks

WORLD = 4
COLLECTIVE_S = 40.0
WALL_S = 420.0


def one_gpu(world: int) -> dict[int, dict[str, str | None]]:
    """Changes to the environment of each rank: every one is local rank 0 of a host of its own."""
    return {
        rank: {
            "CUDA_VISIBLE_DEVICES": "0",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank),
            "NCCL_HOSTID": f"one-gpu-{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
        }
        for rank in range(world)
    }


def examine(
    folder: Path,
    codes: int | set[int],
    *options: str,
    world: int = WORLD,
    **broken_ranks: Mapping[str, str | None],
) -> dict[str, Any]:
    """The report of ranks that all leave with this code, or with one of these.

    `rank1={…}` changes the environment of one of them.
    """
    changes = one_gpu(world)
    for name, more in broken_ranks.items():
        changes[int(name.removeprefix("rank"))].update(more)
    times = ("--collective-timeout", f"{COLLECTIVE_S:g}", "--timeout", "400")
    ranks = Ranks(folder, world, ["--backend", "nccl", *times, *options], changes=changes)
    ended = ranks.wait(WALL_S)
    allowed = {codes} if isinstance(codes, int) else codes
    seen = {each.code for each in ended.values()}
    assert len(seen) == 1, ended
    assert seen <= allowed, ended
    return ranks.report()
