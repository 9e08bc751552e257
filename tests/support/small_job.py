"""A job of one all-reduce: each rank says its sum, and some of its variables."""

from __future__ import annotations

import os
import sys


def main() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    values = torch.ones(1)
    dist.all_reduce(values)
    names = ("RANK", "GROUP_RANK", "TORCH_CPP_LOG_LEVEL")
    words = ("job", values.item(), *(os.environ.get(name) for name in names))
    sys.stdout.write(" ".join(map(str, words)) + "\n")  # at once: two ranks share the stream
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
