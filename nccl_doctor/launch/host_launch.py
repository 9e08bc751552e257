"""Launch records of the own launcher: first of a host, then, once it has its place, of its ranks.

A host knows its flags only. How its ranks are numbered is known when the others have said how many
they start; until then a host speaks as if all hosts were like itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace

from nccl_doctor.model.launch import OPTIONS, OWN, Launch
from nccl_doctor.model.layout import HostPlace
from nccl_doctor.model.options import Flags

DEFAULT_PORT = 29500
"""torchrun's."""

NPROC = "PET_NPROC_PER_NODE"
"""Variable of torchrun's option, which the operators of Kubeflow set."""
_NPROC_WORDS = ("auto", "cpu", "gpu")
_PORTS = 1000
_DERIVED = "derived from the hosts' numbers of ranks"


def free_port() -> int:
    """Free port for the store of one host, below the ephemeral ports; no other host needs to know
    it.

    Where to begin looking differs between processes: two that start together must not both find
    the same one.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    for step in range(_PORTS):
        port = DEFAULT_PORT + (os.getpid() + step) % _PORTS
        try:
            with socket.socket(family) as sock:
                sock.bind(("", port))
        except OSError:
            continue
        return port
    return DEFAULT_PORT


def host_launch(
    flags: Flags, nproc: int, *, is_master: bool = False, port: int = DEFAULT_PORT
) -> Launch:
    """Launch record with which a host signs in: its flags, and the rank of its first process.

    `port` is for the store where the flags name none.

    Where the flags leave node ranks to the sign-in (`flags.any_node_rank`), the master takes
    node 0 and the others have neither node rank nor rank yet.
    """
    nnodes, node_rank = flags.nnodes or 1, flags.node_rank or 0
    spelled = {**OPTIONS[OWN], **(flags.spelled or {})}
    sources = {
        name: option if getattr(flags, name) is not None else "default"
        for name, option in spelled.items()
    }
    launch = Launch(
        launcher=OWN,
        local_rank=0,
        local_world_size=nproc,
        nnodes=nnodes,
        master_addr=flags.master_addr or "localhost",
        master_port=flags.master_port or port,
        run_id=flags.run_id,
        sources={**sources, "local_world_size": "--nproc-per-node", "local_rank": OWN},
    )
    if flags.any_node_rank and not is_master:
        return replace(launch, world_size=nnodes * nproc)
    return _numbered(replace(launch, node_rank=node_rank), node_rank * nproc, nnodes * nproc)


def host_flags(launch: Launch, environ: Mapping[str, str]) -> Flags | None:
    """The topology as a launcher tells it that starts one process per host (Kubeflow).

    None for other launchers, and where it does not tell enough. Its number of ranks may be a word.
    """
    needed = (launch.nnodes, launch.node_rank, launch.master_addr, launch.master_port)
    if not launch.per_host or None in needed:
        return None
    word = environ.get(NPROC, "")
    nproc = str(launch.local_world_size or "") or (word if word in _NPROC_WORDS else None)
    return Flags(
        nnodes=launch.nnodes,
        node_rank=launch.node_rank,
        nproc_per_node=nproc,
        master_addr=launch.master_addr,
        master_port=launch.master_port,
    )


def placed(launch: Launch, place: HostPlace, local_rank: int = 0) -> Launch:
    """The launch record of one rank of a host, now that the host has its place."""
    nnodes = place.nnodes or launch.nnodes
    mine = replace(launch, local_rank=local_rank, node_rank=place.node_rank, nnodes=nnodes)
    return _numbered(mine, place.first_rank + local_rank, place.world_size)


def _numbered(launch: Launch, rank: int, world_size: int) -> Launch:
    # A world size that was told by nobody can contradict nobody: the numbers behind it can.
    sources = {**launch.sources, "rank": OWN, "world_size": _DERIVED}
    return replace(launch, rank=rank, world_size=world_size, sources=sources)


def set_rank_env(launch: Launch, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Set the variables of a rank in this process, as torchrun would.

    Returns: `environ` with them. torch itself reads some from the process, LOCAL_RANK for one.
    """
    values = {
        "RANK": launch.rank,
        "LOCAL_RANK": launch.local_rank,
        "WORLD_SIZE": launch.world_size,
        "LOCAL_WORLD_SIZE": launch.local_world_size,
        "GROUP_RANK": launch.node_rank,
        "GROUP_WORLD_SIZE": launch.nnodes,
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": launch.master_port,
    }
    mine = {name: str(value) for name, value in values.items() if value is not None}
    os.environ.update(mine)
    return {**environ, **mine}
