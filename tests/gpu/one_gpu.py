"""Several ranks on one GPU, which NCCL takes for several hosts.

NCCL refuses two ranks on one GPU of one host; ranks with a NCCL_HOSTID of their own are on hosts of
their own, and talk over sockets.
"""

from __future__ import annotations


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
