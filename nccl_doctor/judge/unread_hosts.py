"""Finding on hosts that the command of the job names and that were not examined. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Finding
from nccl_doctor.model.fixes import Fix, On, Step
from nccl_doctor.model.job import UnreadHosts
from nccl_doctor.model.kinds import HOSTS_NOT_EXAMINED

_TAKES_A_COMMAND = ("srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun")
"""Starters that have the program right behind their options."""
_NOTE = "on each host of the job, before `--`; --nnodes 1 if it has this host only"


def unread_hosts(unread: UnreadHosts) -> Iterator[Finding]:
    """One finding if there are any; its fix gives what the command leaves unknown."""
    if not unread.said:
        return
    options = shell(
        "# --nnodes {:number} --node-rank NUMBER --master-addr {}",
        unread.nnodes or "NUMBER",
        unread.master_addr or "ADDRESS",
    )
    by_hand = Fix(Step(options, On.EVERY, note=_NOTE))
    fix = by_hand
    if unread.starter in _TAKES_A_COMMAND:
        line = shell("# {:name} nccl-doctor run -- COMMAND", unread.starter)
        fix = Fix(Step(line, note=f"with the options of {unread.starter} as they are"))
    elif unread.starter:
        fix = Fix(text="start nccl-doctor where the job starts its ranks", alternatives=[by_hand])
    elif unread.hostfile:
        line = shell("# --hostfile {}", unread.hostfile)
        fix = Fix(Step(line, note="before `--`"), alternatives=[by_hand])
    yield Finding(
        HOSTS_NOT_EXAMINED,
        f"only this host was examined: {unread.said}",
        fix=fix,
    )
