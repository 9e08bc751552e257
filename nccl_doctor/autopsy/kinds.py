"""Kinds of findings about a job that died or hangs.

A fact that `run` finds before a job as well has the same code here, in words for a job that is
over: `SHARED_KINDS`. `AUTOPSY_KINDS` are those that only a job itself can show.
"""

from __future__ import annotations

from dataclasses import replace

from nccl_doctor.model import kinds as engine
from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Effect, Kind, Layer, Severity
from nccl_doctor.model.fixes import Fix, On, Step, look
from nccl_doctor.toolkit.groups import kinds as groups
from nccl_doctor.toolkit.shared_kinds import ADDR_UNRESOLVABLE as _ADDR_UNRESOLVABLE

_OTHERS = "The other ranks lost it in a collective and ended after it: their errors follow."

RANK_RAISED = Kind(
    code="rank-raised",
    layer=Layer.RANKS,
    title="A rank ended with an exception of its own",
    why=_OTHERS,
    fix="correct what the exception names; the innermost frame of the job's own code is in the "
    "message",
)
RANK_EXITED = Kind(
    code="rank-exited",
    layer=Layer.RANKS,
    title="A rank ended itself with an exit code, without an exception",
    why=f"sys.exit, os._exit or a library ended the process. {_OTHERS}",
    fix="look for sys.exit and os._exit in the job's code, and at the last lines of this rank",
)
RANK_ENDED_EARLY = Kind(
    code="rank-ended-early",
    layer=Layer.RANKS,
    title="A rank ended with exit code 0 before the others",
    why="It had fewer steps than the other ranks, or left the loop by itself. They call a "
    "collective to which it does not come any more.",
    fix="give every rank the same number of steps: drop_last=True in its DistributedSampler, or "
    "torch.distributed.algorithms.Join around the loop",
)
STORAGE_FULL = Kind(
    code="storage-full",
    layer=Layer.HOST,
    title="A rank could not write a file: the disk or the quota is full",
    why=f"torch.save does not say so; its error is about a position in the file. {_OTHERS}",
    fix=Fix(
        look(shell("df -h FOLDER; df -i FOLDER; quota -s"), "FOLDER: where checkpoints are written")
    ),
)
GPU_OUT_OF_MEMORY = Kind(
    code="gpu-out-of-memory",
    layer=Layer.DEVICE,
    title="A rank needs more GPU memory than there is",
    why=_OTHERS,
    fix=Fix(
        look(shell("nvidia-smi"), "does another process use this GPU?"),
        alternatives=[
            "make the batch of a rank smaller, or checkpoint activations",
            Fix(
                Step(
                    shell("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
                    On.EVERY,
                    note="if much memory is reserved and not allocated",
                )
            ),
        ],
    ),
)
GPU_XID = Kind(
    code="gpu-xid",
    layer=Layer.DEVICE,
    title="The driver reported an error of a GPU (Xid)",
    why="The process on that GPU ends or its kernels never end, and all others wait for it.",
    fix=Fix(
        look(shell("dmesg -T | grep -i xid"), "which GPU, and how often"),
        alternatives=["take the host out of service, and examine it with nccl-doctor run"],
    ),
)
JOB_STOPPED = Kind(
    code="job-stopped",
    layer=Layer.LAUNCH,
    title="The job was stopped from outside",
    why="The launcher, or every rank, got a signal. A scheduler sends it at a time limit, before "
    "preemption or for a job that somebody cancels; a terminal sends it when it closes.",
    fix="ask the scheduler why it ended the job; start the launcher where no terminal can end it",
)
COLLECTIVE_MISMATCH = Kind(
    code="collective-mismatch",
    layer=Layer.COLLECTIVE,
    title="A rank calls a collective with another operation, size or type than the others",
    why="They never agree: some wait, some read what was not meant for them and abort. The rank "
    "that prints an error need not be the one that differs.",
    fix="find out why this rank calls another collective, or has a tensor of another size or type",
)
COLLECTIVE_MISSING = Kind(
    code="collective-missing",
    layer=Layer.COLLECTIVE,
    title="A rank leaves out a collective that the others call",
    why="The others wait for it until the time-out, or meet it at a later collective.",
    fix="let every rank take the same way: look for a condition on the rank, or on its data, "
    "around the collective",
)
COLLECTIVE_ORDER = Kind(
    code="collective-order",
    layer=Layer.COLLECTIVE,
    title="Ranks call the collectives of two groups in a different order",
    why="Each waits in one group for a rank that waits in the other: none of them can go on.",
    fix="call the collectives of all groups in the same order on every rank",
)
COLLECTIVE_UNFINISHED = Kind(
    code="collective-unfinished",
    layer=Layer.COLLECTIVE,
    title="A GPU does not end a collective that it has started",
    why="All ranks came to the collective. The GPU, its link or a kernel in front of it stands "
    "still, and the others wait.",
    fix=Fix(
        look(shell("dmesg -T | grep -i -e xid -e mlx5"), "on the host of this rank"),
        alternatives=["examine the host with nccl-doctor run before the next job"],
    ),
)
LOADER_STALLED = Kind(
    code="loader-stalled",
    layer=Layer.RANKS,
    title="A rank did not come to the collective in time",
    why="It was alive and did something else for longer than the time-out: it read data, wrote a "
    "checkpoint, compiled, or never called this collective. The ranks that print the time-out are "
    "not at fault.",
    fix="find out what this rank did; give its data loader a timeout, or let torch.distributed "
    "wait longer than its slowest step",
)
CAUSE_NOT_TOLD = Kind(
    code="cause-not-told",
    layer=Layer.RANKS,
    title="The given text does not tell who failed first",
    why="Every rank whose text is here lost another one, or waited for it.",
    fix=Fix(
        Step(
            shell("export TORCH_DISTRIBUTED_DEBUG=DETAIL"),
            On.EVERY,
            note="in the next run: ranks then compare their collectives before each call",
        ),
        Step(
            shell("# --log-dir FOLDER --tee 3"),
            On.EVERY,
            note="in the line of torchrun: keeps the text of each rank in a file of its own",
        ),
        look(shell("nccl-doctor run"), "on the hosts of this job"),
    ),
    severity=Severity.WARN,
)

AUTOPSY_KINDS = (
    RANK_RAISED,
    RANK_EXITED,
    RANK_ENDED_EARLY,
    STORAGE_FULL,
    GPU_OUT_OF_MEMORY,
    GPU_XID,
    JOB_STOPPED,
    COLLECTIVE_MISMATCH,
    COLLECTIVE_MISSING,
    COLLECTIVE_ORDER,
    COLLECTIVE_UNFINISHED,
    LOADER_STALLED,
    CAUSE_NOT_TOLD,
)

# What `run` finds as well, in words for a job that is over.

RANK_KILLED = replace(
    engine.RANK_KILLED.variant(
        title="A rank was killed",
        why="It did not end by itself: the kernel killed it for lack of memory, or a scheduler or "
        f"a person did. {_OTHERS}",
    ),
    severity=Severity.FAIL,
)
RANK_SILENT = replace(
    engine.RANK_SILENT.variant(
        title="A rank was gone, and nothing here says how it ended",
        why="The others lost it. It was killed, it crashed, or it ended with exit code 0.",
        fix=Fix(
            look(shell("dmesg -T | grep -i -e oom -e killed -e segfault"), "on its host"),
            alternatives=["give the text of the launcher as well: it holds the exit codes"],
        ),
    ),
    severity=Severity.FAIL,
)
HOST_SILENT = RANK_SILENT.variant(
    title="The ranks of one host were gone or stood still, and its text does not say why",
    why="The ranks of the other hosts lost them, or waited for them. The host lost its power or "
    "its network, everything on it was stopped or killed, or all its ranks did something else.",
    fix=Fix(
        look(shell("uptime; dmesg -T | tail -n 50"), "on that host, if it answers"),
        alternatives=["ask the scheduler, or the cloud, what became of the node"],
    ),
)
GPU_SHARED = Kind(
    code="gpu-shared-by-ranks",
    layer=Layer.DEVICE,
    title="Ranks of one host use the same GPU",
    why="NCCL refuses to form a group with two ranks on one GPU.",
    fix="call torch.cuda.set_device(LOCAL_RANK) before the first collective, and start no more "
    "ranks than there are GPUs",
)
OUT_OF_MEMORY_KILL = Kind(
    code="out-of-memory-kill",
    layer=Layer.HOST,
    title="The kernel killed a rank for lack of memory",
    why=f"The process ends by SIGKILL, without a word of its own. {_OTHERS}",
    fix="give the job more memory on this host, or start fewer ranks or data-loader workers there",
)
RANK_CRASHED = replace(
    groups.CRASHED.variant(
        title="A rank crashed",
        why=f"A signal of its own ended it, often in a library. {_OTHERS}",
        fix=Fix(
            Step(
                shell("export PYTHONFAULTHANDLER=1"),
                On.EVERY,
                note="in the next run: prints the Python stack of the crash",
            )
        ),
    ),
    layer=Layer.RANKS,
)
RANK_FROZEN = groups.FROZEN.variant(
    title="A rank stood still",
    why="It did not react to SIGTERM for 30 s: it was stopped, or waits in the kernel. The others "
    "waited for it.",
    fix=Fix(
        look(
            shell("ps -eo pid,stat,wchan:30,args | grep ' [TD]'"),
            "on its host: processes that are stopped, or wait in the kernel",
        )
    ),
)
RANK_ABSENT = Kind(
    code="rank-absent",
    layer=Layer.RANKS,
    title="A rank never joined",
    why="The store waits for exactly WORLD_SIZE ranks; the others give up at their time-out.",
    fix="look at that rank's own text: did it start, and did it reach MASTER_ADDR?",
    effects=(Effect.LOSS,),
)
HOST_ABSENT = Kind(
    code="host-absent",
    layer=Layer.RANKS,
    title="A host never joined",
    why="The launcher waits for --nnodes hosts, and gives up at its time-out.",
    fix="look at the launcher's text on the other hosts: was it started there, with the same "
    "--nnodes, another --node-rank and this MASTER_ADDR?",
)
MISSING_VARIABLE = Kind(
    code="launch-missing-variable",
    layer=Layer.LAUNCH,
    title="A launch variable was missing",
    why="init_process_group reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and raises if one "
    "is missing. srun and mpirun set others, and plain python none.",
    fix="start the processes with torchrun, or set the four variables for each",
)
PORT_IN_USE = Kind(
    code="port-in-use",
    layer=Layer.PORT,
    title="Another process holds MASTER_PORT",
    why="Rank 0 could not serve the store. It may be an earlier run that has not ended.",
    fix=Fix(
        look(shell("# ss -ltnp"), "on the host of rank 0: the process that listens there"),
        alternatives=["start the job with another MASTER_PORT on every host"],
    ),
)
PORT_REFUSED = Kind(
    code="port-refused",
    layer=Layer.PORT,
    title="The store at MASTER_ADDR:MASTER_PORT could not be reached",
    why="Nothing answered there until the time-out: rank 0 is not running or runs elsewhere, or a "
    "firewall drops its packets.",
    fix=Fix(look(shell("nccl-doctor run"), "says which of these, with the options of the job")),
)
NO_ROUTE = Kind(
    code="no-route",
    layer=Layer.ROUTE,
    title="This host has no route to the master",
    why="The kernel answers that MASTER_ADDR cannot be reached from here.",
    fix=Fix(look(shell("nccl-doctor run"), "says why, with the options of the job")),
)
GROUP_INIT_FAILED = groups.INIT_FAILED.variant(
    title="Ranks could not connect to each other",
    why="The store was reached; the connections between ranks use other ports, and often another "
    "interface. The rank that prints it need not be on the host that is at fault.",
    fix=Fix(look(shell("nccl-doctor run"), "finds the link and the cause, with the job's options")),
)
ADDR_UNRESOLVABLE = _ADDR_UNRESOLVABLE
COLLECTIVE_FAILED = groups.FAILED.variant(
    title="A collective failed as another rank had gone",
    why="These ranks were still there when the other one ended.",
)
COLLECTIVE_HANG = groups.HANG.variant(
    title="A collective timed out as another rank did not come",
    why="These ranks waited for the other one.",
)

SHARED_KINDS = (
    RANK_KILLED,
    RANK_SILENT,
    GPU_SHARED,
    OUT_OF_MEMORY_KILL,
    RANK_CRASHED,
    RANK_FROZEN,
    RANK_ABSENT,
    HOST_ABSENT,
    MISSING_VARIABLE,
    PORT_IN_USE,
    PORT_REFUSED,
    NO_ROUTE,
    GROUP_INIT_FAILED,
    ADDR_UNRESOLVABLE,
    COLLECTIVE_FAILED,
    COLLECTIVE_HANG,
)
