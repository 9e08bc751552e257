"""Table of launchers: how each is recognised, and the meaning of its variables.

`nccl_doctor.launch.detect` reads it. The traps are written where they bite.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nccl_doctor.launch.ssh.hostfile import MAX_BYTES
from nccl_doctor.model.launch import PER_HOST
from nccl_doctor.system import files
from nccl_doctor.toolkit.slurm import first_address, slurm_hosts

FieldVariables = Mapping[str, tuple[str, ...]]
"""Field of a `Launch` → variables that tell it, the first one set wins."""

# What torch itself reads. It wins over every launcher's own variables, because torch reads it.
TORCH: FieldVariables = {
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
    "master_addr": ("MASTER_ADDR",),
    "master_port": ("MASTER_PORT",),
}


def number(text: str) -> int | None:
    """A decimal integer; beyond nine digits it is 10**9, which is outside every range."""
    match = re.fullmatch(r"\s*([+-]?)0*([0-9]+)\s*", text)
    if match is None:
        return None
    value = int(match[2]) if len(match[2]) < 10 else 10**9
    return -value if match[1] == "-" else value


def tasks_on_node(text: str, node: int) -> int | None:
    """Tasks on one node from Slurm's run-length list: `8(x3),2` is 8, 8, 8, 2."""
    last = 0
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        if match is None:
            return None
        last += int(match[2] or 1)
        if node < last:
            return int(match[1])
    return None


@dataclass(frozen=True)
class Launcher:
    """One row of the table of launchers.

    Recognised when all variables of one of `marks` are set and none of `without`.
    `own` are its own variables, behind torch's. `tasks`: it starts and numbers tasks, which may be
    ranks or may be something that starts ranks. `packed`: ranks are numbered host by host.
    `serves`: its process of rank 0 has a store at MASTER_PORT before the script of any rank runs.
    """

    name: str
    marks: tuple[tuple[str, ...], ...]
    own: FieldVariables
    without: tuple[str, ...] = ()
    tasks: bool = False
    packed: bool = True
    serves: bool = False

    @property
    def per_host(self) -> bool:
        """True if it starts one process on each host, which has its node rank only."""
        return self.name in PER_HOST

    def is_marked(self, environ: Mapping[str, str]) -> bool:
        """True if the variables by which it is recognised are there."""
        found = any(all(name in environ for name in names) for names in self.marks)
        return found and not any(name in environ for name in self.without)

    def own_number(self, environ: Mapping[str, str], name: str) -> int | None:
        """Value of a field in the launcher's own variables."""
        values = (number(environ.get(variable, "")) for variable in self.own.get(name, ()))
        return next((value for value in values if value is not None), None)

    def variables(self, name: str) -> tuple[str, ...]:
        """Names that tell a field, the one to believe first: torch's, then its own."""
        torch = () if self.per_host else TORCH.get(name, ())
        return torch + self.own.get(name, ())


_ELASTIC: FieldVariables = {
    "node_rank": ("GROUP_RANK",),
    "nnodes": ("GROUP_WORLD_SIZE",),
    "run_id": ("TORCHELASTIC_RUN_ID",),
    "restart_count": ("TORCHELASTIC_RESTART_COUNT",),
}
# LSF's jsrun is made from Open MPI, and sets its variables too, but not with --smpiargs=off.
JSRUN = Launcher(
    "jsrun",
    marks=(("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),),
    own={
        "rank": ("JSM_NAMESPACE_RANK",),
        "world_size": ("JSM_NAMESPACE_SIZE",),
        "local_rank": ("JSM_NAMESPACE_LOCAL_RANK",),
        "local_world_size": ("JSM_NAMESPACE_LOCAL_SIZE",),
    },
    tasks=True,
    packed=False,
)
OPEN_MPI = Launcher(
    "mpirun",
    marks=(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),),
    own={  # OMPI_COMM_WORLD_NODE_RANK is a rank on the node, not the number of the node
        "rank": ("OMPI_COMM_WORLD_RANK",),
        "world_size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    },
    tasks=True,
    packed=False,
)
_PMI: FieldVariables = {  # Intel MPI, MPICH hydra, PMIx, PALS, MVAPICH
    "rank": ("PMI_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK"),
    "world_size": ("PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "local_rank": ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "local_world_size": ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
}
# Under Slurm, hydra starts one proxy per host by srun: only its own numbers are those of ranks.
HYDRA = Launcher(
    "mpi", marks=(("PMI_RANK", "MPI_LOCALRANKID"),), own=_PMI, tasks=True, packed=False
)
# Without a step (batch script, salloc shell) SLURM_PROCID is 0 or absent and means nothing.
SRUN = Launcher(
    "srun",
    marks=(("SLURM_PROCID", "SLURM_STEP_ID"), ("SLURM_PROCID", "SLURM_STEPID")),
    own={
        "rank": ("SLURM_PROCID", "PMIX_RANK", "PMI_RANK"),
        "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_rank": ("SLURM_LOCALID",),
        "node_rank": ("SLURM_NODEID",),
        "nnodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        "restart_count": ("SLURM_RESTART_COUNT",),
    },
    tasks=True,
    packed=False,
)
# PALS of HPE, with PBS; PMI_SIZE has all ranks.
PALS = Launcher(
    "pals",
    marks=(("PALS_RANKID",),),
    own={
        "rank": ("PALS_RANKID",),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        "local_world_size": ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        "node_rank": ("PALS_NODEID",),
    },
    tasks=True,
    packed=False,
)
FLUX = Launcher(  # flux-core, src/shell/task.c
    "flux",
    marks=(("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),),
    own={
        "rank": ("FLUX_TASK_RANK",),
        "world_size": ("FLUX_JOB_SIZE",),
        "local_rank": ("FLUX_TASK_LOCAL_ID",),
        "nnodes": ("FLUX_JOB_NNODES",),
    },
    tasks=True,
    packed=False,
)
# PRRTE's own launcher says no number of ranks. Open MPI 5 starts its tasks by it, and says one.
PRTERUN = Launcher(
    "prterun",
    marks=(("PMIX_RANK", "PRTE_LAUNCHED"), ("PMIX_RANK", "PMIX_NAMESPACE")),
    without=("OMPI_COMM_WORLD_SIZE",),
    own={"rank": ("PMIX_RANK",)},
    tasks=True,
    packed=False,
)
_OF_HOSTS: FieldVariables = {
    "node_rank": ("RANK",),
    "nnodes": ("WORLD_SIZE",),
    "local_world_size": ("NPROC_PER_NODE",),
    "master_addr": ("MASTER_ADDR",),
    "master_port": ("MASTER_PORT",),
}
_OF_SCRIPTS: FieldVariables = {
    "node_rank": ("NODE_RANK",),
    "nnodes": ("NNODES", "NUM_NODES"),
}
ONCE_PER_HOST = (JSRUN, OPEN_MPI, PALS, HYDRA, FLUX, SRUN)
"""Launchers of tasks, each of which may be a launcher of ranks: then one on each host."""
LAUNCHERS = (  # in the order in which they are looked for: the innermost first
    Launcher("accelerate", (("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"),), _ELASTIC),
    Launcher("torchrun", (("TORCHELASTIC_RUN_ID",),), _ELASTIC),
    Launcher(
        "deepspeed",
        marks=(("RANK", "CROSS_RANK"),),
        own={
            "local_world_size": ("LOCAL_SIZE",),
            "node_rank": ("CROSS_RANK",),
            "nnodes": ("CROSS_SIZE",),
        },
    ),
    Launcher(  # workers of Ray Train: their process group is up before the train function runs
        "ray",
        marks=(("RANK", "NODE_RANK", "ACCELERATE_TORCH_DEVICE", "RAY_JOB_ID"),),
        own={"node_rank": ("NODE_RANK",)},
        serves=True,
    ),
    JSRUN,
    OPEN_MPI,
    Launcher(  # horovodrun with gloo; with MPI, mpirun's variables are there
        "horovod",
        marks=(("HOROVOD_RANK", "HOROVOD_SIZE"),),
        own={
            "rank": ("HOROVOD_RANK",),
            "world_size": ("HOROVOD_SIZE",),
            "local_rank": ("HOROVOD_LOCAL_RANK",),
            "local_world_size": ("HOROVOD_LOCAL_SIZE",),
            "node_rank": ("HOROVOD_CROSS_RANK",),
            "nnodes": ("HOROVOD_CROSS_SIZE",),
        },
        tasks=True,
        packed=False,
    ),
    Launcher(  # the local executor of submitit 1.5.4, which has one host
        "submitit",
        marks=(("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS"),),
        own={
            "rank": ("SUBMITIT_LOCAL_GLOBALID",),
            "world_size": ("SUBMITIT_LOCAL_NTASKS",),
            "local_rank": ("SUBMITIT_LOCAL_LOCALID",),
            "node_rank": ("SUBMITIT_LOCAL_NODEID",),
            "nnodes": ("SUBMITIT_LOCAL_JOB_NUM_NODES",),
        },
        tasks=True,
    ),
    PALS,
    HYDRA,
    FLUX,
    SRUN,
    PRTERUN,
    Launcher(
        "mpi",
        marks=(("PMI_RANK",), ("PMIX_RANK",), ("MV2_COMM_WORLD_RANK",)),
        own=_PMI,
        tasks=True,
        packed=False,
    ),
    Launcher(  # Alibaba's PAI DLC: RANK and WORLD_SIZE count hosts
        "pai",
        marks=(("RANK", "WORLD_SIZE", "NPROC_PER_NODE"),),
        without=("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        own=_OF_HOSTS,
    ),
    Launcher(  # Vertex AI: the same, and nobody says how many ranks a host has
        "vertex",
        marks=(("RANK", "WORLD_SIZE", "CLUSTER_SPEC"),),
        without=("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        own=_OF_HOSTS,
    ),
    Launcher(  # MosaicML's platform: WORLD_SIZE counts ranks, which its launcher starts
        "mosaicml",
        marks=(("NODE_RANK", "NUM_NODES", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),),
        without=("RANK", "LOCAL_RANK"),
        own={
            "node_rank": ("NODE_RANK",),
            "nnodes": ("NUM_NODES",),
            "local_world_size": ("LOCAL_WORLD_SIZE",),
            "master_addr": ("MASTER_ADDR",),
            "master_port": ("MASTER_PORT",),
        },
    ),
    Launcher(
        "kubeflow",  # RANK and WORLD_SIZE count pods here, the PET_ ones are torchrun's options
        marks=(("PET_NODE_RANK",), ("PET_NNODES",), ("KUBERNETES_SERVICE_HOST", "RANK")),
        without=("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        own={
            "node_rank": ("PET_NODE_RANK", "RANK"),
            "nnodes": ("PET_NNODES", "WORLD_SIZE"),
            "local_world_size": ("PET_NPROC_PER_NODE",),
            "master_addr": ("PET_MASTER_ADDR", "MASTER_ADDR"),
            "master_port": ("PET_MASTER_PORT", "MASTER_PORT"),
        },
    ),
    Launcher("env", marks=(("RANK",), ("LOCAL_RANK",)), own=_OF_SCRIPTS),
    # With a node rank besides, it is a host whose program starts the ranks (Lightning).
    Launcher("env", marks=(("WORLD_SIZE",),), without=("NODE_RANK",), own=_OF_SCRIPTS),
)
TORCHRUN_WORDS = re.compile(r"auto|cpu|gpu|xpu|\d+:\d+")
"""Values of PET_NPROC_PER_NODE and PET_NNODES that are right, but are not one number."""


# --- where ranks meet, when nobody says ---

MASTER_ADDR_LINES = {
    "srun": f"MASTER_ADDR={first_address()}",  # its name may not resolve, and is not known here
    "mpirun": "MASTER_ADDR=$(mpirun -n 1 hostname)",
    "mpi": "MASTER_ADDR=$(mpiexec -n 1 hostname)",
    "pals": 'MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")',
    "prterun": "MASTER_ADDR=$(prterun -n 1 hostname)",
    "flux": "MASTER_ADDR=$(flux run -n 1 hostname)",
    "jsrun": "MASTER_ADDR=$(jsrun -n 1 hostname)",
}
"""How a script tells torch, by launcher."""


LEADERS = ("LWS_LEADER_ADDRESS", "DSTACK_MASTER_NODE_IP")
"""Variables of schedulers with the address of their first host."""
_JOBS = (
    *("PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "SUBMITIT_LOCAL_JOB_ID"),
    *("SLURM_JOB_ID", "SLURM_JOBID"),
)
"""Variables with the number of a job."""
_HOSTS_OF_MPIRUN = {
    "OMPI_MCA_orte_hnp_uri": r"tcp://([0-9.]+)[,:]",
    "PMIX_NAMESPACE": r"^(?:prterun|prte)-([\w.-]+)-\d+@\d+$",
    "AZ_BATCH_MASTER_NODE": r"^([\w.-]+):\d+$",
}
"""Variable → how mpirun's host stands there."""


def meeting_of(
    launcher: Launcher, environ: Mapping[str, str]
) -> Iterator[tuple[str, int | str, str]]:
    """Rendezvous of all tasks of one srun or mpirun, from variables that are the same for all.

    Yields: field of a `Launch`, value, and the variables that it follows from.
    """
    jobs: tuple[str, ...]
    if launcher is SRUN:
        found, jobs = _first_of_the_step(environ), ("SLURM_JOB_ID", "SLURM_JOBID")
    elif launcher in (OPEN_MPI, PRTERUN):
        found = _on_one_host(launcher, environ) or _where_mpirun_runs(environ)
        jobs = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    elif launcher.tasks:
        found, jobs = _on_one_host(launcher, environ) or _first_of_pbs(launcher, environ), _JOBS
    else:
        return
    if found is None:
        return
    yield "master_addr", *found
    if launcher is SRUN and environ.get("SUBMITIT_EXECUTOR") == "slurm":
        yield "master_port", _of_submitit(environ), "submitit's rule"
        return
    for variable in jobs:
        # As Lightning's: 15000 and the last four digits, below the ephemeral ports.
        if digits := re.sub("[^0-9]", "", environ.get(variable, "")):
            yield "master_port", 15000 + int(digits[-4:]), variable
            return
    if jobs is _JOBS:  # MPICH 5.0.2 numbers no jobs: torch's own default
        yield "master_port", 29500, found[1]


def _of_submitit(environ: Mapping[str, str]) -> int:
    """Port of submitit's TorchDistributedEnvironment, two times of three an ephemeral one (1.5.4,
    helpers.py: its range is 20000 to 60000, its seed the job number as text).
    """
    array, job = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_JOB_ID")
    seed = f"{array}_{environ.get('SLURM_ARRAY_TASK_ID')}" if array else job
    return random.Random(seed).randint(20000, 60000)


def _on_one_host(launcher: Launcher, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The host itself, and the variable that says that all ranks are on it."""
    here = launcher.own_number(environ, "local_world_size")
    if launcher.own_number(environ, "nnodes") == 1:
        names = launcher.own["nnodes"]
    elif here is not None and here == launcher.own_number(environ, "world_size"):
        names = launcher.own["local_world_size"]
    else:
        return None
    return "127.0.0.1", next(name for name in names if name in environ)


def _first_of_pbs(launcher: Launcher, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """First line of the file of hosts, where PALS starts rank 0."""
    path = environ.get("PBS_NODEFILE", "")
    if launcher is not PALS or not path:
        return None
    names = first_words(path)
    return (names[0], "PBS_NODEFILE") if names else None


def first_words(path: str) -> list[str]:
    """First word of each line of a scheduler's file of hosts; none if it cannot be read."""
    try:
        lines = files.read(path, MAX_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [words[0] for line in lines if (words := line.split())]


def _first_of_the_step(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Rendezvous on the first host of the list, unless the distribution is arbitrary."""
    for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if hosts := slurm_hosts(environ.get(variable, "")):
            return hosts[0], variable
    return None


def _where_mpirun_runs(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Rank 0 is there, unless the hosts were listed in another order: then it is asked for.

    Open MPI 5 names its host in `prterun-HOST-PID@1` (5.0.11); 4 writes its addresses into
    `JOB.0;tcp://ADDRESS,ADDRESS:PORT`, of which this is the first.
    """
    if hosts := slurm_hosts(environ.get("SLURM_JOB_NODELIST", "")):
        return hosts[0], "SLURM_JOB_NODELIST"
    for variable, form in _HOSTS_OF_MPIRUN.items():
        if match := re.search(form, environ.get(variable, "")):
            return match[1], variable
    return None
