"""Finding on hosts that the job has and that were not examined. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Finding
from nccl_doctor.model.fixes import Fix, On, Step
from nccl_doctor.model.job import TAKE_A_COMMAND, UnreadHosts
from nccl_doctor.model.kinds import HOSTS_NOT_EXAMINED

_NOTE = "in the line of nccl-doctor, on each host of the job"
_BY_VARIABLES = {
    "SKYPILOT_NUM_NODES": shell(
        "# --nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK "
        '--master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
    ),
    "DSTACK_NODES_NUM": shell(
        "# --nnodes $DSTACK_NODES_NUM --node-rank $DSTACK_NODE_RANK "
        "--master-addr $DSTACK_MASTER_NODE_IP"
    ),
    "LWS_GROUP_SIZE": shell(
        "# --nnodes $LWS_GROUP_SIZE --node-rank $LWS_WORKER_INDEX --master-addr $LWS_LEADER_ADDRESS"
    ),
    "AWS_BATCH_JOB_NUM_NODES": shell(  # the main node alone has no address of the main node
        "# --nnodes $AWS_BATCH_JOB_NUM_NODES --node-rank $AWS_BATCH_JOB_NODE_INDEX "
        '--master-addr "${{AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-$(hostname -I | '
        "cut -d ' ' -f 1)}}\""
    ),
    "SM_HOSTS": shell(  # ["algo-1", "algo-2"]; the first is SageMaker's master
        "# --nnodes $(echo $SM_HOSTS | tr , '\\n' | wc -l) "
        "--node-rank $(echo $SM_HOSTS | tr -d '[]\" ' | tr , '\\n' | grep -nx $SM_CURRENT_HOST | "
        "awk -F: '{{print $1 - 1}}') "
        "--master-addr $(echo $SM_HOSTS | tr -d '[]\" ' | cut -d , -f 1)"
    ),
}
"""Variable of a scheduler that starts a process on each host → the options that follow."""
_NODE_RANKS = {
    "_CONDOR_NPROCS": "_CONDOR_PROCNO",
    **{name: name for name in ("JOB_COMPLETION_INDEX", "NODE_RANK")},
}
"""Variable of a scheduler that says no address → the one with the number of the host."""
_FILES = {
    **{name: name for name in ("PBS_NODEFILE", "OAR_NODEFILE", "PE_HOSTFILE")},
    "LSB_MCPU_HOSTS": "LSB_DJOB_HOSTFILE",
}
"""Variable of a scheduler that starts a script on the first → the one that names its file of hosts,
of which the first word of a line counts."""
_BY_SSH = "on this host: it starts the others by ssh"
_ALL_HERE = Fix(Step(shell("unset OMPI_MCA_orte_default_hostfile"), note="if one host is meant"))
_ALONE = Fix(Step(shell("# --nnodes 1"), note="if the job has this host only"))


def unread_hosts(unread: UnreadHosts) -> Iterator[Finding]:
    """One finding if there are any; its fix gives what the command leaves unknown."""
    if not unread.said:
        return
    variable = _NODE_RANKS.get(unread.variable)
    options = shell(
        "# --nnodes {:number} --node-rank {} --master-addr {}",
        unread.nnodes or "NUMBER",
        shell("${:variable}", variable) if variable else "NUMBER",
        unread.master_addr or "ADDRESS",
    )
    step = Step(_BY_VARIABLES.get(unread.variable, options), On.EVERY, note=_NOTE)
    by_hand, fix = Fix(step), Fix(step, alternatives=[_ALONE])
    if unread.variable in _FILES:
        names = shell(
            "awk '!seen[$1]++ {{print $1}}' \"${:variable}\" > hosts", _FILES[unread.variable]
        )
        line = shell("# nccl-doctor run --hostfile hosts --nproc-per-node NUMBER")
        fix = Fix(
            Step(names, persists=True), Step(line, note=_BY_SSH), alternatives=[by_hand, _ALONE]
        )
    elif unread.variable == "OMPI_MCA_orte_default_hostfile":
        name = shell('export PRTE_MCA_prte_default_hostfile="${:variable}"', unread.variable)
        fix = Fix(Step(name, note="before mpirun"), alternatives=[_ALL_HERE])
    elif unread.variable == "SLURM_JOB_NUM_NODES":
        line = shell("# srun nccl-doctor run")
        fix = Fix(Step(line, note="with the options of the job's srun"), alternatives=[_ALONE])
    elif unread.starter in TAKE_A_COMMAND:
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
