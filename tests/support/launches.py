"""Environments as real launchers make them: rank 5 of 2 hosts x 4."""

from __future__ import annotations

from collections.abc import Mapping

from nccl_doctor.launch.detect import detect
from nccl_doctor.launch.ranks import host_launch, placed
from nccl_doctor.model.launch import Launch, LaunchProblem
from nccl_doctor.model.layout import HostPlace
from nccl_doctor.model.options import Flags

MASTER = {"MASTER_ADDR": "nd0", "MASTER_PORT": "29500"}
TORCHRUN = {
    **MASTER,
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "8",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
STANDALONE = {  # rank 1 of a run of 4 on one host
    **TORCHRUN,
    "RANK": "1",
    "WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "4",
}
DEEPSPEED = {
    **MASTER,
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "4",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
}
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "nd[0-1]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NNODES": "2",
}
SRUN = {
    **STEP,
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
ONE_PER_NODE = {
    **STEP,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
BATCH = {  # a batch script: no step, and a SLURM_PROCID that means nothing
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NNODES": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
ONE_HOST_MPI = {  # mpirun -np 4, as Open MPI 4 sets it
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "2071855105",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}
JSRUN = {  # of LSF; made from Open MPI, whose variables are there too
    **OPEN_MPI,
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
}
PALS = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "PALS_RANKID": "5",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4",
    "PALS_NODEID": "1",
    "PBS_JOBID": "4711.pbs-0.site",
}
FLUX = {
    "FLUX_TASK_RANK": "5",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_SIZE": "8",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2oGvGkFVb",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
}
HOROVOD = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}
SUBMITIT = {  # rank 1 of 4: the local executor has one host
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_NTASKS": "4",
    "SUBMITIT_LOCAL_LOCALID": "1",
    "SUBMITIT_LOCAL_NODEID": "0",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
    "SUBMITIT_LOCAL_JOB_ID": "4711",
}
PRTERUN = {
    "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "prterun-nd0-4711@1",
    "PMIX_HOSTNAME": "nd1",
    "PRTE_LAUNCHED": "1",
}
RAY = {
    **MASTER,
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "NODE_RANK": "1",
    "ACCELERATE_TORCH_DEVICE": "cuda:1",
    "RAY_JOB_ID": "01000000",
}
PLAIN = {**MASTER, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
KUBEFLOW_1 = {**MASTER, "RANK": "1", "WORLD_SIZE": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
KUBEFLOW_2 = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "gpu",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def codes(launch: Launch) -> list[str]:
    return [problem.code for problem in launch.problems]


def problem(environ: Mapping[str, str], code: str) -> LaunchProblem:
    launch = detect(environ)
    assert codes(launch) == [code]
    return launch.problems[0]


BY_ENVIRONMENT = {
    "torchrun": TORCHRUN,
    "accelerate": {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"},
    "deepspeed": DEEPSPEED,
    "ray": RAY,
    "env": PLAIN,
    "srun": {**SRUN, **MASTER},
    "mpirun": {**OPEN_MPI, **MASTER},
    "mpi": {**HYDRA, **MASTER},
}
"""Launcher → the environment of rank 5 of 2 hosts x 4; the own one has no variables."""
_NUMBERS = (
    (("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "ROLE_RANK"), "rank"),
    (("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"), "local"),
    (("GROUP_RANK", "CROSS_RANK", "NODE_RANK", "SLURM_NODEID"), "node"),
)


def of_rank(launcher: str, rank: int, master: str = "nd0") -> Launch:
    """The launch record of one rank of 2 hosts x 4, as this launcher starts it."""
    local, node = rank % 4, rank // 4
    if launcher == "own":
        flags = Flags(nnodes=2, node_rank=node, master_addr=master, nproc_per_node="4")
        return placed(host_launch(flags, 4), HostPlace(node, 4 * node, 4, 8), local)
    values = {"rank": rank, "local": local, "node": node}
    environ = {**BY_ENVIRONMENT[launcher], "MASTER_ADDR": master}
    for names, value in _NUMBERS:
        environ |= {name: str(values[value]) for name in names if name in environ}
    return detect(environ)
