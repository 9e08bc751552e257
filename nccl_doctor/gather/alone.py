"""Whether this process alone claims its place in the job, among those that live on its host.

A process that was killed as hosts signed in, and is started again, makes a second claim of one
place. It is told from two that claim it at once by a name that the kernel gives to one socket only,
and frees when its last holder ends: an abstract one, for all processes of one network namespace, in
whatever container. A pod that is made anew has another one, but it has the name of the first, and
two pods of one name do not live at once.
"""

from __future__ import annotations

import hashlib
import resource
import socket
from collections.abc import Mapping

from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.toolkit.host import host_name
from nccl_doctor.toolkit.shortage import soft_limit

_held: list[socket.socket] = []
_FEW_FILES = 64
"""With fewer open files allowed, the sign-in needs every one of them."""


def alone_as(launch: Launch, environ: Mapping[str, str], key: str) -> str:
    """The place that no other living process here claims, with this host: of a rank, or of a host
    that has yet to start its ranks. Empty if another one does, if the kernel has no such names, or
    if few open files are allowed.

    It is held as long as this process lives.

    Args:
        launch: of this process.
        environ: unfiltered.
        key: `identity.host_key`.
    """
    host = launch.launcher == OWN and not launch.local_rank
    number = launch.node_rank if host else launch.rank
    files = soft_limit(resource.RLIMIT_NOFILE)
    few = files is not None and files < _FEW_FILES
    if few or (number is None and not host):
        return ""
    place = f"{'host' if host else 'rank'} {'' if number is None else number}"
    meeting = f"{launch.master_addr} {launch.master_port} {launch.run_id} {place}"
    name = hashlib.sha256(meeting.encode()).hexdigest()
    try:
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return ""
    try:
        holder.bind(f"\0nccl-doctor {name}")
    except OSError:
        holder.close()
        return ""
    _held.append(holder)
    home = host_name() if "KUBERNETES_SERVICE_HOST" in environ else key
    return f"{place} of {home}"
