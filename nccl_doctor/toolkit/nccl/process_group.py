"""The one of torch's two process groups that the backend name `nccl` means."""

from __future__ import annotations

from nccl_doctor.toolkit.versions import release

USE_NCCL2 = "TORCH_DIST_USE_NCCL2"


def process_group(torch: str, use: str | None) -> str:
    """`nccl2` or `nccl-legacy`, by torch's version and the value of TORCH_DIST_USE_NCCL2.

    Source: `_register_builtin_nccl_backend` in torch/distributed/distributed_c10d.py.
    """
    version = release(torch)
    new = use != "0" if version >= (2, 15) else version >= (2, 14) and use == "1"
    return "nccl2" if new else "nccl-legacy"
