"""Can DeepSpeed find out the rank of each process, or does it need mpi4py?

What it checks
--------------
Only where DeepSpeed is installed: whether each rank has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT. If one of them is missing, deepspeed.init_distributed asks MPI, which needs mpi4py.
Nothing is imported: packages are found by their metadata.

Why it matters
--------------
srun and mpirun do not set these variables, and the job ends at once with "No module named
'mpi4py'", which does not mention the variables. With mpi4py, DeepSpeed takes the first address of
`hostname -I` on rank 0 as MASTER_ADDR, which may be an address of docker.

How to fix
----------
Start with torchrun or the deepspeed launcher, or export the variables in each task: export
RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS, and MASTER_ADDR and
MASTER_PORT for all. Or pip install mpi4py.

When it is wrong
----------------
DeepSpeed may be installed and not used, or the job's own code may set the variables before it calls
DeepSpeed. So this is only information.

References
----------
DeepSpeed source: init_distributed and mpi_discovery in deepspeed/comm/comm.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Evidence,
    Finding,
    Fix,
    Kind,
    Layer,
    Scope,
    Severity,
    Skip,
    Step,
    shell,
)
from nccl_doctor.system.programs import installed
from nccl_doctor.toolkit.relaunch import STARTERS

NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that DeepSpeed reads; torch does not need LOCAL_RANK."""
LEAVE_OUT = (*STARTERS, "submitit", "env")
"""Launchers that do not set all of them; our own launcher sets them later."""
_SET = {
    "RANK": shell("RANK=$SLURM_PROCID"),
    "LOCAL_RANK": shell("LOCAL_RANK=$SLURM_LOCALID"),
    "WORLD_SIZE": shell("WORLD_SIZE=$SLURM_NTASKS"),
    "MASTER_ADDR": shell("MASTER_ADDR=ADDRESS"),
    "MASTER_PORT": shell("MASTER_PORT=29500"),
}

NEEDS_MPI4PY = Kind(
    "deepspeed-needs-mpi4py",
    Layer.LAUNCH,
    "DeepSpeed needs mpi4py, which is not installed",
    "If a launch variable is missing, DeepSpeed asks MPI for it; without mpi4py it ends at once.",
    Fix(
        Step(shell("pip install mpi4py"), persists=True),
        alternatives=["start with torchrun or deepspeed"],
    ),
    Severity.INFO,
)


class DeepspeedLaunch(Check):
    """The launch variables, and the package that replaces them."""

    name = "deepspeed_launch"
    layer = Layer.LAUNCH
    scope = Scope.RANK
    kinds = (NEEDS_MPI4PY,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`missing`: variables that are not set; `mpi4py`: its version or None."""
        if installed("deepspeed") is None:
            raise Skip("DeepSpeed is not installed")
        missing = [name for name in NEEDED if name not in ctx.env]
        return {"missing": missing, "mpi4py": installed("mpi4py")}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each rank by itself."""
        for rank, facts in cluster.facts(self.name):
            launcher = rank.launch.launcher if rank.launch else "none"
            if facts["missing"] and facts["mpi4py"] is None and launcher in LEAVE_OUT:
                yield Finding(
                    NEEDS_MPI4PY,
                    f"{', '.join(facts['missing'])} not set, and mpi4py not installed",
                    Evidence.rank_place(rank),
                    fix=_export(facts["missing"]) if launcher == "srun" else "",
                    confidence=Confidence.POSSIBLE,
                )


def _export(missing: list[str]) -> str:
    words = [_SET[name] for name in missing if name in _SET]
    known = "MASTER_ADDR" not in missing
    return Fix(
        Step(
            shell("export {}", words) if known else shell("# export {}", words),
            note="in each task" + ("" if known else "; ADDRESS is that of rank 0's host"),
        )
    )
