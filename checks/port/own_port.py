"""Findings on MASTER_PORT of the host that serves the store. Pure."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Effect, Finding, Fix, On, Rank, Step, Where, look, shell
from nccl_doctor.toolkit.advice import end_processes
from nccl_doctor.toolkit.net.ports import reserve_port
from nccl_doctor.toolkit.relaunch import BY_NODE_RANK, ONE_LAUNCHER, start_with

from .kinds import (
    PORT_EPHEMERAL,
    PORT_FORBIDDEN,
    PORT_IN_USE,
    PORT_OF_ANOTHER_RANK_0,
    PORT_PRIVILEGED,
)

_FREE = "or another one from 1024 to 32767"
_DOCTOR = re.compile(r"nccl[-_]doctor(?:\.pyz)?$")
ANOTHER_PORT = "choose another MASTER_PORT on every host"


def own_port(rank: Rank, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings on a port that is taken, forbidden, or given to clients too."""
    port, where = facts["port"], Where(hosts=(rank.host.label,))
    other = start_with([rank], "master_port", 29501 if port == 29500 else 29500, On.EVERY)
    if facts["bind_errno"] == errno.EADDRINUSE:
        held = facts["holder"] or {"pid": None, "command": "", "state": "", "uid": None}
        who = f"process {held['pid']} ({held['command']}, user id {held['uid']})"
        if held["pid"] is None:
            who = "a process that this user may not see"
            who += f" (user id {held['uid']})" if held["uid"] is not None else ""
        who_has_it = look(shell("sudo ss -tanp 'sport = :{:number}'", port), "who has this one")
        end = end_processes([held["pid"]]) if held["pid"] else Fix(who_has_it)
        kind, fix = PORT_IN_USE, Fix(*(replace(s, note=_FREE) for s in other), alternatives=[end])
        if _DOCTOR.search(held["command"]):
            kind, fix = PORT_OF_ANOTHER_RANK_0, _one_rank_0(rank, fix)
        yield Finding(
            kind,
            f"MASTER_PORT={port} is held by {who}",
            where,
            {**held, "bind_error": facts["bind_error"]},
            fix=fix,
            effects=(Effect.SHUTS_OUT,),
        )
    elif facts["bind_errno"] in (errno.EACCES, errno.EPERM, errno.ENOSYS):
        reason = "" if facts["may_bind"] else "; this user may not bind such a low port"
        text = f"MASTER_PORT={port}: {facts['bind_error']}{reason}"
        kind = PORT_FORBIDDEN if facts["may_bind"] else PORT_PRIVILEGED
        low = Fix(*(replace(step, note=_FREE) for step in other))
        # A sandbox that refuses every socket, as the message says, refuses netlink too.
        no_socket = "] socket: " in facts["bind_error"]
        yield Finding(
            kind,
            text,
            where,
            fix="" if facts["may_bind"] else low,
            effects=(Effect.SHUTS_OUT,),
            explained_by="netlink-refused" if no_socket else None,
        )
    elif facts["ephemeral"]:
        (low, high), before = facts["ephemeral"], facts.get("reserved", "")
        yield Finding(
            PORT_EPHEMERAL,
            f"MASTER_PORT={port} is in ip_local_port_range {low}–{high}",
            where,
            fix=Fix(
                Step(
                    shell("sysctl -w {}", reserve_port(port, before)),
                    undo=shell('sysctl -w net.ipv4.ip_local_reserved_ports="{:number}"', before),
                ),
                alternatives=[] if low <= 29500 <= high else [Fix(*other)],
            ),
        )


def _one_rank_0(rank: Rank, other_port: Fix) -> Fix:
    """The fix that leaves one rank 0 on the host, by what numbers the tasks here."""
    another = [replace(step, note="if that is of another job") for step in other_port.steps]
    job = Fix(*another)
    launch = rank.launch.launcher if rank.launch else ""
    if "SLURM_LOCALID" not in rank.env:
        own = "start it once on each host, or give each process a RANK of its own"
        return Fix(text=own, alternatives=[job])
    if launch in BY_NODE_RANK:
        rank_of_host = Step(shell("# --node-rank $SLURM_NODEID"), On.EVERY, note="in its line")
        return Fix(ONE_LAUNCHER, rank_of_host, alternatives=[job])
    return Fix(
        Step(shell("export RANK=$SLURM_PROCID"), On.EVERY, note="in each task"), alternatives=[job]
    )
