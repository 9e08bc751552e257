"""Does every rank know who it is: are the launcher's variables there, sound and in agreement?

What it checks
--------------
What the launcher's variables say on each rank: missing, malformed, out of range, or contradicted by
another launcher; several ranks on one host without LOCAL_RANK; whether all hosts belong to one
torchrun job; and whether --backend names the same one on all hosts. srun and mpirun set no
MASTER_ADDR and MASTER_PORT: where nobody else does, the ranks of the examination meet on the first
host of Slurm's list, or on mpirun's, at a port made of the number of the job, and a note says so.

Why it matters
--------------
torch reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT before anything else. A rank with a wrong
one fails or joins in the wrong place, and every other rank waits for it.

How to fix
----------
Start all ranks by one launcher, with one command, and let it set the variables.

When it is wrong
----------------
Only variables are read: a script that takes its rank from elsewhere may not need them. Where
launchers are nested (torchrun within srun) the inner one counts, and the outer one's variables are
compared with it only where both mean the same. A program that takes its backend from elsewhere does
not mind what --backend says.

References
----------
PyTorch documentation of torchrun and of torch.distributed (environment variable initialization);
srun(1), section "output environment variables"; mpirun(1), section "exported environment
variables".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Evidence,
    Finding,
    Kind,
    Layer,
    Scope,
    Severity,
    place_of,
)
from nccl_doctor.toolkit.gpu.devices import see_other_gpus
from nccl_doctor.toolkit.versions import disagreement

MISSING_VARIABLE = Kind(
    "launch-missing-variable",
    Layer.LAUNCH,
    "A launch variable is missing",
    "init_process_group raises on this rank, and every other rank waits for it.",
    "Start the processes with torchrun, or export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
)
BAD_VALUE = Kind(
    "launch-bad-value",
    Layer.LAUNCH,
    "A launch variable has an impossible value",
    "torch cannot read it, or reads something else than was meant.",
    "Correct the variable where the job is started.",
)
DISAGREE = Kind(
    "launch-sources-disagree",
    Layer.LAUNCH,
    "Two launchers tell different stories",
    "torch reads RANK and WORLD_SIZE; other libraries read the variables of Slurm or MPI.",
    "Set RANK, WORLD_SIZE and LOCAL_RANK from one launcher only.",
)
OUT_OF_RANGE = Kind(
    "rank-out-of-range",
    Layer.LAUNCH,
    "A rank is not below the world size",
    "Ranks count from 0 to WORLD_SIZE - 1; torch refuses this one and waits for another.",
    "Count ranks and node ranks from 0.",
)
LOCAL_OUT_OF_RANGE = Kind(
    "local-rank-out-of-range",
    Layer.LAUNCH,
    "A local rank is not below the local world size",
    "LOCAL_RANK chooses the GPU: this one does not exist, or is another rank's.",
    "Count local ranks from 0 on every host.",
)
RUN_ID = Kind(
    "launch-run-id-differs",
    Layer.LAUNCH,
    "Hosts belong to different torchrun jobs",
    "torchrun keeps jobs apart by --rdzv-id: hosts with different ones never meet.",
    "Give every host the same --rdzv-id.",
)
NOT_SET = Kind(
    "master-not-set",
    Layer.LAUNCH,
    "Nobody says where the ranks meet: the scheduler's own variables served the examination",
    "torch's env:// needs MASTER_ADDR and MASTER_PORT; a job whose script sets them itself is fine "
    "without, and may meet elsewhere than was examined.",
    'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) and '
    "MASTER_PORT, before srun; mpirun -x MASTER_ADDR -x MASTER_PORT",
    Severity.INFO,
)
BACKEND = Kind(
    "backend-option-differs",
    Layer.LAUNCH,
    "Hosts were told different backends",
    "All ranks of a process group need one backend: a job that is started so fails, or waits until "
    "its time-out, in init_process_group.",
    "Give every host the same --backend, the one that the job's init_process_group names.",
)
_ELASTIC = ("torchrun", "accelerate", "nccl-doctor")
"""Launchers whose run id keeps jobs apart; our own has that of the torchrun that it stands for."""


class LaunchRecord(Check):
    """Reads each rank's launch record, and the records of all together."""

    name = "launch_record"
    layer = Layer.LAUNCH
    scope = Scope.RANK
    kinds = (
        MISSING_VARIABLE,
        BAD_VALUE,
        DISAGREE,
        OUT_OF_RANGE,
        LOCAL_OUT_OF_RANGE,
        RUN_ID,
        BACKEND,
        NOT_SET,
    )

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`launcher`, and `sources`: field of the launch record → where its value came from. The
        values themselves are in the record, which every rank brings when it signs in.
        """
        return {"launcher": ctx.launch.launcher, "sources": dict(ctx.launch.sources)}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """What each rank says by itself, then, if all could be asked, what they say together."""
        yield from _problems(cluster)
        yield from _met_by_a_rule(cluster)
        if cluster.complete:
            yield from _without_local_rank(cluster)
            claims = (
                (rank, rank.launch.told("run_id"))
                for rank in cluster.present
                if rank.launch is not None and rank.launch.launcher in _ELASTIC
            )
            story = disagreement(RUN_ID, "--rdzv-id", claims, of_host=True)
            if story is not None:
                yield story.finding
            yield from _backends(cluster)


def _problems(cluster: Cluster) -> Iterator[Finding]:
    kinds = {kind.code: kind for kind in LaunchRecord.kinds}
    for rank in cluster.present:
        for problem in rank.launch.problems if rank.launch else ():
            yield Finding(
                kinds.get(problem.code, BAD_VALUE),
                problem.message,
                Evidence.rank_place(rank),
                evidence={"variables": dict(problem.variables)},
                fix=problem.fix,
                severity=Severity.FAIL if problem.fatal else Severity.WARN,
            )


def _met_by_a_rule(cluster: Cluster) -> Iterator[Finding]:
    """Where ranks met that nobody told where to meet; one note for all that met there."""
    places: dict[tuple[str, ...], dict[str, str]] = {}
    for rank in cluster.present:
        launch = rank.launch
        if launch is None or None in (launch.master_addr, launch.master_port):
            continue
        guessed = {
            variable: launch.sources[name].removeprefix("derived from ")
            for name, variable in (("master_addr", "MASTER_ADDR"), ("master_port", "MASTER_PORT"))
            if launch.told(name) is None
        }
        if guessed:
            places[str(launch.master_addr), str(launch.master_port)] = guessed
    for (address, port), guessed in places.items():
        values = {"MASTER_ADDR": address, "MASTER_PORT": port}
        yield Finding(
            NOT_SET,
            "; ".join(f"{name} not set, {values[name]} by {by}" for name, by in guessed.items()),
            evidence={"derived_from": guessed},
            fix="export " + " ".join(f"{name}={values[name]}" for name in guessed),
        )


def _backends(cluster: Cluster) -> Iterator[Finding]:
    """Backends that were told by name; what `auto` comes to is for check backend_device."""
    claims = ((r, r.backend) for r in cluster.present if r.backend in ("nccl", "gloo"))
    story = disagreement(BACKEND, "--backend", claims, of_host=False)
    if story is not None:
        yield story.finding.replaced(
            message=f"{story.finding.message}; {cluster.backend} was examined"
        )


def _without_local_rank(cluster: Cluster) -> Iterator[Finding]:
    """Ranks of one host that would all take its first GPU, unless each sees only one of its own."""
    claims = Counter(rank.rank for rank in cluster.present)
    for host in cluster.present_hosts if cluster.backend == "nccl" else ():
        ranks = [
            rank
            for rank in cluster.ranks_on(host)
            if rank.launch is not None
            and rank.launch.told("local_rank") is None
            and claims[rank.rank] == 1  # one that is there twice has a worse fault
        ]
        if len(ranks) > 1 and not see_other_gpus(rank.env for rank in ranks):
            yield Finding(
                MISSING_VARIABLE,
                f"LOCAL_RANK is not set, and {len(ranks)} ranks share a host",
                place_of(ranks),
                fix="start with torchrun, or export LOCAL_RANK=0, 1, … on each host",
                severity=Severity.WARN,
                confidence=Confidence.LIKELY,
            )
