"""Building of the process groups of a device mesh, as the job builds them.

For a probe child. Every call that may block is announced first.
"""

from __future__ import annotations

from typing import Any

from nccl_doctor.api import Context
from nccl_doctor.toolkit.groups.attempts import NEW_GROUP
from nccl_doctor.toolkit.mesh import Mesh, mesh_groups, mesh_in_words, mesh_size, own_groups


def build_mesh(ctx: Context, mesh: Mesh, device_type: str) -> tuple[str, list[Any]]:
    """Build a mesh over the default group; `device_type` is that of its devices.

    Returns: the name of the call, and this rank's process group of each dimension; none for a rank
    beyond the mesh, which torch allows to be smaller than the job (device_mesh.py of 2.2 to 2.15).

    Raises:
        RuntimeError: torch's own error, of whatever class, where it cannot be built.
        AssertionError: torch has put other ranks into a group than `meshes` says.
    """
    import torch.distributed as dist

    sizes = tuple(size for _, size in mesh)
    names = tuple(name for name, _ in mesh)
    try:
        from torch.distributed.device_mesh import init_device_mesh
    except ImportError:  # torch before 2.2
        return "new_group", _build_by_hand(ctx, mesh)
    # The same step for every call that forms groups.
    ctx.breadcrumb(NEW_GROUP, group=mesh_in_words(mesh), call="init_device_mesh")
    made = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    if ctx.position >= mesh_size(mesh):
        return "init_device_mesh", []
    group_of = getattr(made, "get_group", None) or made.get_dim_groups  # its name in torch 2.2
    handles = [group_of(at) for at in range(len(mesh))]
    for handle, group in zip(handles, own_groups(mesh, ctx.position), strict=True):
        members = dist.get_process_group_ranks(handle)
        assert sorted(members) == list(group.ranks), f"{group.name} has the ranks {members}"
    return "init_device_mesh", handles


def _build_by_hand(ctx: Context, mesh: Mesh) -> list[Any]:
    """The same groups, in the same order, by `new_group`, which every rank has to call for each."""
    import torch.distributed as dist

    handles = []
    for groups in mesh_groups(mesh).values():
        for group in groups:
            ctx.breadcrumb(NEW_GROUP, group=group.dimension, index=group.index)
            handle = dist.new_group(list(group.ranks))
            if ctx.position in group.ranks:
                handles.append(handle)
    return handles
