"""Does every rank know its place: are the launcher's variables set, valid and consistent?

What it checks
--------------
The launcher's variables on each rank: missing, malformed, out of range, or contradicted by another
launcher; several ranks on one host without LOCAL_RANK; whether all hosts belong to one torchrun
job; and whether --backend is the same on all hosts. srun and mpirun set no MASTER_ADDR and
MASTER_PORT: if nothing else sets them, the ranks of the examination meet on the first host of
Slurm's list, or of mpirun's, at a port made from the job number, and a note reports this. If they
do not meet there, the note is a warning: mpirun may run where no rank does, as in the launcher pod
of an MPIJob. It is one, too, where Lightning is installed and reads another host out of Slurm's
list: n1 of n[1-2]r[3-4]. Nor do they set RANK and WORLD_SIZE: what torch lacks is always shown
beside the verdict, with a line that sets it.

Why it matters
--------------
torch reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT before anything else. A rank with a wrong
one fails or joins in the wrong place, and every other rank waits for it.

How to fix
----------
Start all ranks with one launcher and one command, and let it set the variables.

When it is wrong
----------------
Only variables are read: a script that takes its rank from elsewhere may not need them. If launchers
are nested (torchrun within srun), the inner one counts, and the outer one's variables are compared
with it only where both mean the same. Several launchers that each run for one host are taken for
independent runs, which is information. A program that takes its backend from elsewhere does not
depend on --backend.

References
----------
PyTorch documentation of torchrun and of torch.distributed (environment variable initialization);
srun(1), section "output environment variables"; mpirun(1), section "exported environment
variables".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Evidence,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Scope,
    Severity,
    Step,
    likely_address,
    master_host,
    place_of,
    shell,
)
from nccl_doctor.system.programs import installed
from nccl_doctor.toolkit.advice import fix_of
from nccl_doctor.toolkit.gpu.devices import see_other_gpus
from nccl_doctor.toolkit.hosts import MASTER_NOT_SET, everybody_came_in
from nccl_doctor.toolkit.relaunch import STARTERS
from nccl_doctor.toolkit.slurm import slurm_hosts
from nccl_doctor.toolkit.versions import disagreement, release

MISSING_VARIABLE = Kind(
    "launch-missing-variable",
    Layer.LAUNCH,
    "A launch variable is missing",
    "init_process_group raises on this rank, and every other rank waits for it.",
    "Start the processes with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
)
NO_LOCAL_RANK = MISSING_VARIABLE.variant(
    why="LOCAL_RANK chooses the GPU: without it, all these ranks take the first GPU of their host, "
    "which NCCL refuses.",
)
BAD_VALUE = Kind(
    "launch-bad-value",
    Layer.LAUNCH,
    "A launch variable has an impossible value",
    "torch cannot read it, or reads another value than intended.",
    "Correct the variable where the job is started.",
)
DISAGREE = Kind(
    "launch-sources-disagree",
    Layer.LAUNCH,
    "Variables of two launchers contradict each other",
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
    "LOCAL_RANK chooses the GPU: this GPU does not exist, or belongs to another rank.",
    "Count local ranks from 0 on every host.",
)
RUN_ID = Kind(
    "launch-run-id-differs",
    Layer.LAUNCH,
    "Hosts belong to different torchrun jobs",
    "torchrun keeps jobs apart by --rdzv-id: hosts with different ones never meet.",
    Fix(
        Step(
            shell("# --rdzv-id NAME"), On.EVERY, note="in the line of torchrun, the same everywhere"
        )
    ),
)
NOT_SET = Kind(
    MASTER_NOT_SET,
    Layer.LAUNCH,
    "MASTER_ADDR or MASTER_PORT is not set: the examination derived it from the scheduler's "
    "variables",
    "torch's env:// needs MASTER_ADDR and MASTER_PORT. A job whose script sets them itself needs "
    "no change, but may meet at another address than the one examined.",
    Fix(
        Step(
            shell(
                'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) '
                "MASTER_PORT=29500"
            ),
            note="before srun",
        ),
        alternatives=[Fix(Step(shell("# mpirun -x MASTER_ADDR=ADDRESS -x MASTER_PORT=29500")))],
    ),
    Severity.INFO,
)
NO_RANK = Kind(
    "rank-not-set",
    Layer.LAUNCH,
    "The tasks have no RANK and WORLD_SIZE: the examination took those of srun or mpirun",
    "init_process_group reads RANK and WORLD_SIZE unless it is given both, or another init_method, "
    "and raises without them. A job that sets them itself (Lightning, mpi4py) needs no change.",
    "Start the processes with torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK in each task.",
    Severity.INFO,
    effects=(Effect.SHOWN,),
)
BY_NODE = NO_RANK.variant(
    title="The tasks have no RANK: the examination numbered them by their hosts",
    why="init_process_group reads RANK unless it is given it, or another init_method, and raises "
    "without it. A job that numbers its ranks itself (Lightning) needs no change.",
)
INDEPENDENT = Kind(
    "launch-runs-independent",
    Layer.LAUNCH,
    "Each task of srun or mpirun is a run of its own",
    "Right for independent runs of one host (torchrun --standalone): they never wait for each "
    "other, and each is examined by itself, though they share the host. It is also what a torchrun "
    "without --nnodes does.",
    Fix(
        text="nothing, if that is meant",
        alternatives=[
            Fix(
                Step(
                    shell("# srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES"),
                    note="for one job of all hosts",
                )
            )
        ],
    ),
    Severity.INFO,
)
BACKEND = Kind(
    "backend-option-differs",
    Layer.LAUNCH,
    "--backend differs between hosts",
    "All ranks of a process group need the same backend: with different ones init_process_group "
    "fails, or waits until its time-out.",
    Fix(
        Step(
            shell("# --backend NAME"),
            On.EVERY,
            note="the same everywhere, the one that the job's init_process_group names",
        )
    ),
)
NOT_SERVED = Kind(
    "init-method-not-served",
    Layer.LAUNCH,
    "Nobody serves the store that init_method names",
    "torchrun's agent serves a store at MASTER_PORT, and tells the ranks so. Before torch 2.14, "
    "rank 0 then serves none at another HOST:PORT either: all ranks are clients of a store that is "
    "not there, and end at the time-out.",
    Fix(
        text="leave init_method out, which is env://",
        alternatives=[
            Fix(
                Step(
                    shell("# --master-port NUMBER"),
                    On.EVERY,
                    note="in the line of torchrun, the port of init_method",
                )
            )
        ],
    ),
    effects=(Effect.JOB_ONLY,),
)
_SERVED_SINCE = (2, 14)
_ADDRESS_OF_0 = "before the launch; ADDRESS is that of rank 0's host"
_ELASTIC = ("torchrun", "accelerate", "nccl-doctor")
"""Launchers whose run id separates jobs; our own launcher has that of the torchrun it replaces."""


class LaunchRecord(Check):
    """Checks the launch record of each rank, and compares the records of all."""

    name = "launch_record"
    layer = Layer.LAUNCH
    scope = Scope.RANK
    reads = ("master_addr",)
    at_once = (MISSING_VARIABLE, BAD_VALUE, DISAGREE, OUT_OF_RANGE, LOCAL_OUT_OF_RANGE)
    kinds = (
        MISSING_VARIABLE,
        BAD_VALUE,
        DISAGREE,
        OUT_OF_RANGE,
        LOCAL_OUT_OF_RANGE,
        RUN_ID,
        BACKEND,
        NO_RANK,
        NOT_SET,
        INDEPENDENT,
        NOT_SERVED,
    )

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`launcher`, `sources`: field of the launch record → where its value came from, and
        `lightning`, `torch`: their versions or None. The values themselves are in the record, which
        every rank sends when it signs in.
        """
        found = (installed(name) for name in ("lightning", "pytorch-lightning"))
        return {
            "launcher": ctx.launch.launcher,
            "sources": dict(ctx.launch.sources),
            "lightning": next(filter(None, found), None),
            "torch": installed("torch"),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each rank's record, and on differences between ranks if all reported."""
        yield from _problems(cluster)
        yield from _met_by_a_rule(cluster)
        yield from _without_rank(cluster)
        yield from _not_served(cluster)
        if cluster.complete:
            yield from _without_local_rank(cluster)
            claims = (
                (rank, rank.launch.given("run_id"))
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
            kind = kinds.get(problem.code, BAD_VALUE)
            severity = Severity.FAIL if problem.fatal else Severity.WARN
            yield Finding(
                kind,
                problem.message,
                Evidence.rank_place(rank),
                evidence={"variables": dict(problem.variables)},
                fix=fix_of(problem.fix, On.HERE, of_host=True),
                severity=None if kind.severity is Severity.INFO else severity,
            )


def _met_by_a_rule(cluster: Cluster) -> Iterator[Finding]:
    """Notes on derived master addresses and ports, one for all ranks that met at the same one."""
    places: dict[tuple[str, ...], dict[str, str]] = {}
    by_mpirun = any(rank.launch and rank.launch.launcher == "mpirun" for rank in cluster.present)
    better = _better_place(cluster)
    lightning = _of_lightning(cluster)
    for rank in cluster.present:
        launch = rank.launch
        if launch is None or None in (launch.master_addr, launch.master_port):
            continue
        guessed = {
            variable: launch.sources[name].removeprefix("derived from ")
            for name, variable in (("master_addr", "MASTER_ADDR"), ("master_port", "MASTER_PORT"))
            if launch.given(name) is None
        }
        if guessed:
            places[str(launch.master_addr), str(launch.master_port)] = guessed
    for (address, port), guessed in places.items():
        values = {"MASTER_ADDR": address, "MASTER_PORT": port}
        told = {**values, **better}
        exports = [shell("{:variable}={}", name, told[name]) for name in guessed]
        said = [f"{name} not set, {values[name]} by {by}" for name, by in guessed.items()]
        if better:
            said.append("not all ranks met there")
        if "MASTER_ADDR" in guessed and lightning:
            said.append(lightning)
        hole = "ADDRESS" in told.values()
        if by_mpirun:
            line = shell("# mpirun {}", [shell("-x {}", each) for each in exports])
        else:
            line = shell("# export {}" if hole else "export {}", exports)
        step = Step(
            line,
            On.EVERY,
            note=_ADDRESS_OF_0 if hole else "before the launch",
        )
        yield Finding(
            NOT_SET,
            "; ".join(said),
            evidence={"derived_from": guessed},
            fix=Fix(step),
            severity=Severity.WARN if said[-1] == lightning else None,
        )


def _of_lightning(cluster: Cluster) -> str:
    """Name that Lightning makes of a list of hosts, if it is none of them; else empty.

    It takes what stands before the first comma or hyphen of the first bracket, and drops the rest
    up to the last bracket (2.6.6, resolve_root_node_address of its environment for Slurm).
    """
    for rank, facts in cluster.facts(LaunchRecord.name):
        version = facts.get("lightning")
        nodes = rank.env.get("SLURM_NODELIST") or rank.env.get("SLURM_JOB_NODELIST", "")
        if not version or rank.launch is None or rank.launch.launcher != "srun":
            continue
        first = re.sub(r"\[(.*?)[,-].*\]", r"\1", nodes)
        first = re.split("[ ,]", re.sub(r"\[(.*?)\]", r"\1", first))[0]
        if first not in (*slurm_hosts(nodes), ""):
            return f"Lightning {version} makes {first} of {nodes}, and no host has that name"
    return ""


def _better_place(cluster: Cluster) -> Mapping[str, str]:
    """MASTER_ADDR and MASTER_PORT to set if not all ranks met at the derived ones; else empty.

    The address is that of rank 0's host; the derived one is left out if it is known to be that on
    every host.
    """
    if everybody_came_in(cluster):
        return {}
    master = master_host(cluster)
    seen = {rank.host.id: facts for rank, facts in cluster.facts("master_addr")}
    facts = seen.get(master.id) if master else None
    better = {"MASTER_ADDR": "ADDRESS", "MASTER_PORT": "29500"}
    if master is None or facts is None:
        return better
    resolves = all(others["master"]["answers"] for others in seen.values())
    if resolves and set(facts["master"]["answers"]) & set(master.addresses):
        del better["MASTER_ADDR"]
    elif likely := likely_address(facts["interfaces"], facts.get("source", "")):
        better["MASTER_ADDR"] = likely[1]
    return better


def _without_rank(cluster: Cluster) -> Iterator[Finding]:
    """A note on tasks whose rank is known from variables that torch does not read."""
    launches = [rank.launch for rank in cluster.present if rank.launch is not None]
    if any(each.launcher == "env" and each.rank != each.given("rank") for each in launches):
        line = shell("# export RANK=$((NODE_RANK * NUMBER + LOCAL_RANK))")
        yield Finding(
            BY_NODE,
            "RANK is not set: NODE_RANK and LOCAL_RANK say it",
            fix=Fix(Step(line, On.EVERY, note="NUMBER is that of the ranks of a host")),
        )
    launch = next((each for each in launches if each.launcher in STARTERS), None)
    if launch is None:
        return
    names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE"}
    theirs = {
        variable: own
        for name, variable in names.items()
        if (own := launch.sources.get(name, variable)) != variable
        and launch.given(name) is not None
    }
    if not {"RANK", "WORLD_SIZE"} & set(theirs):
        return
    needed = [shell("{:variable}=${:variable}", mine, own) for mine, own in theirs.items()]
    for name in ("master_addr", "master_port"):
        if getattr(launch, name) is not None and launch.given(name) is None:
            value = getattr(launch, name)
            if not everybody_came_in(cluster):
                value = _better_place(cluster).get(name.upper(), value)
            needed.append(shell("{:variable}={:plain}", name.upper(), value))
    starter = STARTERS[launch.launcher]
    yield Finding(
        NO_RANK,
        f"{starter} sets {', '.join(theirs.values())}, and not {', '.join(theirs)}",
        fix=Fix(
            Step(
                shell("# {:plain} bash -c '{} exec COMMAND'", starter, needed),
                On.EVERY,
                note=f"COMMAND is the job, {starter} has its options",
            )
        ),
    )


def _not_served(cluster: Cluster) -> Iterator[Finding]:
    """A store of init_method that the ranks of torchrun expect its agent to serve."""
    told = cluster.job.launcher == "torchrun" and not _has_own_store(cluster)
    launches = [rank.launch for rank in cluster.present if rank.launch is not None]
    asked = any(each.agent_store and each.launcher != "ray" for each in launches)
    old = {
        facts["torch"]
        for _, facts in cluster.facts(LaunchRecord.name)
        if facts.get("torch") and () < release(facts["torch"]) < _SERVED_SINCE
    }
    if cluster.job.init_store and old and (told or asked):
        yield Finding(
            NOT_SERVED,
            f"tcp://{cluster.job.init_store} is not at MASTER_PORT, and torch is "
            f"{min(old, key=release)}",
        )


def _has_own_store(cluster: Cluster) -> bool:
    """True if the ranks of a c10d rendezvous have a store apart from that of the agents."""
    apart = any(r.env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1" for r in cluster.present)
    return apart and cluster.job.rendezvous.backend == "c10d"


def _backends(cluster: Cluster) -> Iterator[Finding]:
    """Differences between backends given by name; check backend_device judges what `auto` means."""
    claims = ((r, r.backend) for r in cluster.present if r.backend in ("nccl", "gloo"))
    story = disagreement(BACKEND, "--backend", claims, of_host=False)
    if story is not None:
        yield story.finding.replaced(
            message=f"{story.finding.message}; {cluster.backend} was examined"
        )


def _without_local_rank(cluster: Cluster) -> Iterator[Finding]:
    """Ranks of one host that would all take its first GPU, unless each sees only its own GPU."""
    claims = Counter(rank.rank for rank in cluster.present)
    for host in cluster.present_hosts if cluster.backend == "nccl" else ():
        ranks = [
            rank
            for rank in cluster.ranks_on(host)
            if rank.launch is not None
            and rank.launch.given("local_rank") is None
            and claims[rank.rank] == 1  # a duplicate rank has a worse fault
        ]
        if len(ranks) > 1 and not see_other_gpus(rank.env for rank in ranks):
            yield Finding(
                NO_LOCAL_RANK,
                f"LOCAL_RANK is not set, and {len(ranks)} ranks share a host",
                place_of(ranks),
                fix="start with torchrun, or set LOCAL_RANK to 0, 1, … on each host",
                severity=Severity.WARN,
                confidence=Confidence.LIKELY,
            )
