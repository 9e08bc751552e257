"""Finding on hosts that the command of the job names and that were not examined. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Finding
from nccl_doctor.model.fixes import Fix, On, Step
from nccl_doctor.model.job import TAKE_A_COMMAND, UnreadHosts
from nccl_doctor.model.kinds import HOSTS_NOT_EXAMINED

_NOTE = "in the line of nccl-doctor, on each host of the job"
_ALONE = Fix(Step(shell("# --nnodes 1"), note="if the job has this host only"))


def unread_hosts(unread: UnreadHosts) -> Iterator[Finding]:
    """One finding if there are any; its fix gives what the command leaves unknown."""
    if not unread.said:
        return
    options = shell(
        "# --nnodes {:number} --node-rank NUMBER --master-addr {}",
        unread.nnodes or "NUMBER",
        unread.master_addr or "ADDRESS",
    )
    step = Step(options, On.EVERY, note=_NOTE)
    by_hand, fix = Fix(step), Fix(step, alternatives=[_ALONE])
    if unread.starter in TAKE_A_COMMAND:
        line = shell("# {:name} nccl-doctor run -- COMMAND", unread.starter)
        note = f"with the options of {unread.starter} as they are"
        fix = Fix(Step(line, note=note), alternatives=[_ALONE])
    elif unread.starter:
        where = "start nccl-doctor where the job starts its ranks"
        fix = Fix(text=where, alternatives=[by_hand, _ALONE])
    elif unread.hostfile:
        line = shell("# --hostfile {}", unread.hostfile)
        fix = Fix(Step(line, note="in the line of nccl-doctor"), alternatives=[by_hand, _ALONE])
    yield Finding(
        HOSTS_NOT_EXAMINED,
        f"only this host was examined: {unread.said}",
        fix=fix,
    )
