"""NCCL's settings, for checks of RDMA."""

from __future__ import annotations

from nccl_doctor.model.check import Context, Skip
from nccl_doctor.toolkit.fabric.hca import rdma_off
from nccl_doctor.toolkit.nccl.conf import Setting, nccl_settings


def rdma_settings(ctx: Context) -> dict[str, Setting]:
    """The settings from `nccl_settings`, for a job that may use RDMA.

    Raises:
        Skip: it does not use NCCL, or a setting turns RDMA off.
    """
    if ctx.backend != "nccl":
        raise Skip("the job does not use NCCL")
    settings = nccl_settings(ctx.env, root=ctx.root)
    if off := rdma_off(settings):
        raise Skip(f"{off} turns RDMA off")
    return settings
