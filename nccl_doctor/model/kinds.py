"""Kinds of findings of the engine itself.

`ENGINE_KINDS`: an examination that could not be completed. None of these says that the cluster is
broken, and none says that it is fit: a run with one of them is `unknown` unless something else
failed.

`REMOTE_KINDS`: faults that stop the doctor, and so the job, from starting on a host of a hostfile.

`BESIDE_KINDS`: what others did, and the run did not take: it says nothing of the cluster, and
changes no verdict.

`HISTORY_KINDS`: differences from earlier runs.
"""

from __future__ import annotations

from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Effect, Kind, Layer, Severity
from nccl_doctor.model.fixes import Fix, On, Step, look

CHECK_UNUSABLE = Kind(
    code="check-unusable",
    layer=Layer.LAUNCH,
    title="A check could not be loaded and was left out",
    why="The faults that this check looks for were not looked for, so PASS is not possible.",
    fix=Fix(
        text="repair or uninstall the named distribution",
        alternatives=[
            Fix(Step(shell("# --ignore check-unusable"), note="in the line of nccl-doctor"))
        ],
    ),
    severity=Severity.WARN,
)

CHECK_BROKE = Kind(
    code="check-broke",
    layer=Layer.LAUNCH,
    title="A check raised an error while it judged the facts",
    why="The facts were gathered but not all of them were judged, so a fault may be missed.",
    fix=Fix(
        text="report it with the JSON report of this run",
        alternatives=[
            Fix(Step(shell("# --ignore NAME"), note="leaves the check of that name out"))
        ],
    ),
    severity=Severity.WARN,
)

RANK_SILENT = Kind(
    code="rank-silent",
    layer=Layer.RANKS,
    title="A participant signed in and then stopped responding",
    why="It was killed, frozen or cut off during the examination. The job would lose it in the "
    "same way, and the other ranks would wait for it until a time-out.",
    fix=Fix(
        look(shell("dmesg -T | tail")),
        look(
            shell("ps -eo pid,stat,wchan:30,args | grep ' [TD]'"),
            "processes that are stopped, or wait in the kernel",
        ),
        alternatives=["look at the scheduler's log"],
    ),
    severity=Severity.WARN,
    effects=(Effect.LOSS,),
)

RANK_KILLED = Kind(
    code="rank-killed",
    layer=Layer.RANKS,
    title="A participant was killed during the examination",
    why="Its parent process saw it end by a signal that nobody sent to the whole run. SIGKILL most "
    "often comes from the kernel, when memory runs out; the job would lose the rank in the same "
    "way, and the other ranks would wait for it until a time-out.",
    fix=Fix(
        look(shell("dmesg -T | grep -i -e oom -e killed"), "who killed it"),
        alternatives=["look at the memory limit of the job's cgroup, and the scheduler's log"],
    ),
    severity=Severity.WARN,
)

RUN_INTERRUPTED = Kind(
    code="run-interrupted",
    layer=Layer.RANKS,
    title="The run was stopped before it was complete",
    why="Whatever had not been examined by then is not verified.",
    fix=Fix(
        text="run again",
        alternatives=[Fix(Step(shell("# --timeout NUMBER"), note="if it had no time"))],
    ),
    severity=Severity.WARN,
)

COORDINATOR_LOST = Kind(
    code="coordinator-lost",
    layer=Layer.STORE,
    title="This host never reached the coordinator, or lost the connection to it",
    why="These findings come from this host alone; it was not compared with the other hosts.",
    fix="read the report of rank 0, and the findings about MASTER_ADDR and MASTER_PORT here",
    severity=Severity.WARN,
    effects=(Effect.LOSS, Effect.TIMED_OUT),
)

STORE_LOST = Kind(
    code="store-lost",
    layer=Layer.STORE,
    title="The TCPStore at MASTER_ADDR:MASTER_PORT ended during the run",
    why="The rendezvous of the job uses the same store; ranks that lose it abort.",
    fix="find out why the process that serves MASTER_PORT ended: read the launcher's log on the "
    "master",
    severity=Severity.WARN,
    effects=(Effect.LOSS,),
)

MESSAGE_REFUSED = Kind(
    code="message-refused",
    layer=Layer.STORE,
    title="A message in the store of the run was not valid and was not taken",
    why="Whoever reaches MASTER_PORT can write to the store. What is malformed, or larger than any "
    "message of nccl-doctor, comes from a broken participant or from a stranger. What its sender "
    "had to say is not known.",
    fix=Fix(
        Step(shell("# --key FILE"), On.EVERY, note="the same file for all hosts"),
        alternatives=["let only the hosts of the job reach MASTER_PORT"],
    ),
    severity=Severity.WARN,
)

KEY_DIFFERS = Kind(
    code="key-differs",
    layer=Layer.LAUNCH,
    title="A participant does not have the key of this run",
    why="With --key, only messages made with the same key are taken: nothing that this participant "
    "says can be believed, and it believes nobody. Or a stranger took its name.",
    fix=Fix(
        Step(shell("# --key FILE"), On.EVERY, note="the same file for all hosts"),
        look(shell("sha256sum FILE"), "prints the same on all", on=On.EVERY),
    ),
    severity=Severity.WARN,
)

STRANGER_WRITES = Kind(
    code="stranger-writes",
    layer=Layer.STORE,
    title="Somebody without the key of this run wrote to its store",
    why="Whoever reaches MASTER_PORT can write to the store. With --key nothing of that is taken, "
    "and it changes no verdict. It may be a process of the job that has another key, or none; or a "
    "stranger, who could also write to the store of the job, which has no key.",
    fix=Fix(text="let only the hosts of the job reach MASTER_PORT"),
    severity=Severity.WARN,
)

DOCTOR_DIFFERS = Kind(
    code="doctor-version-differs",
    layer=Layer.LAUNCH,
    title="Hosts run different versions of nccl-doctor",
    why="They may understand each other's messages wrongly, or not at all.",
    fix=Fix(look(shell("nccl-doctor --version"), "install the same one everywhere", on=On.EVERY)),
    severity=Severity.WARN,
)

MERGE_DOUBTFUL = Kind(
    code="merge-doubtful",
    layer=Layer.LAUNCH,
    title="The merged reports may not belong to one run",
    why="The hosts are compared as they were at different times, or by different rules. A "
    "difference between them may have been repaired since.",
    fix="merge the reports of one run, made by one version of nccl-doctor; if they are from one "
    "run, set the clocks of the hosts",
    severity=Severity.WARN,
)

HOSTS_NOT_EXAMINED = Kind(
    code="hosts-not-examined",
    layer=Layer.LAUNCH,
    title="The job has other hosts, and only this one was examined",
    why="The command names other hosts, or the scheduler has allocated several. Which of them take "
    "part is read from the lines of torchrun, accelerate, deepspeed and some others, but not from "
    "this one. What is wrong on another host, or between the hosts, was not looked for, so PASS is "
    "not possible. The job is started all the same, except with --strict.",
    fix=Fix(
        Step(
            shell("# --nnodes NUMBER --node-rank NUMBER --master-addr ADDRESS"),
            On.EVERY,
            note="in the line of nccl-doctor, on each host of the job",
        ),
        alternatives=[Fix(Step(shell("# --nnodes 1"), note="if the job has this host only"))],
    ),
    severity=Severity.WARN,
)

ENGINE_KINDS = (
    CHECK_UNUSABLE,
    CHECK_BROKE,
    RANK_SILENT,
    RANK_KILLED,
    RUN_INTERRUPTED,
    COORDINATOR_LOST,
    STORE_LOST,
    MESSAGE_REFUSED,
    KEY_DIFFERS,
    DOCTOR_DIFFERS,
    MERGE_DOUBTFUL,
    HOSTS_NOT_EXAMINED,
)
ENGINE_CODES = frozenset(kind.code for kind in ENGINE_KINDS)

BESIDE_KINDS = (STRANGER_WRITES,)
BESIDE_CODES = frozenset(kind.code for kind in BESIDE_KINDS)

LAUNCHING = ("the host that launches",)
"""Where a step for ssh is typed: which one that is, is not known here."""
SSH_FAILED = Kind(
    code="ssh-failed",
    layer=Layer.LAUNCH,
    title="A host cannot be reached by ssh",
    why="Launchers that read a hostfile (deepspeed, mpirun) start the job's ranks by ssh. No rank "
    "would start on this host, and the other hosts would wait for it.",
    fix=Fix(look(shell("ssh -o BatchMode=yes NAME true"), "has to work", on=LAUNCHING)),
)

REMOTE_COMMAND_FAILED = Kind(
    code="remote-command-failed",
    layer=Layer.LAUNCH,
    title="ssh reached the host, but the command could not be run there",
    why="The launcher starts the same Python on every host, by the same path. Where Python or a "
    "package is missing or broken, no rank starts.",
    fix="install the same Python environment at the same path on this host, or put it on a file "
    "system that all hosts share",
)

CONFIG_BAD_VALUE = Kind(
    code="config-bad-value",
    layer=Layer.LAUNCH,
    title="nccl-doctor refuses its configuration on a host",
    why="It was started on this host, and stopped because of an error in its options, its "
    "configuration file or its environment.",
    fix="correct on this host what the message names",
)

REMOTE_KINDS = (SSH_FAILED, REMOTE_COMMAND_FAILED, CONFIG_BAD_VALUE)

SLOWER = Kind(
    code="slower-than-before",
    layer=Layer.SPEED,
    title="Slower than in earlier runs, by more than normal variation",
    why="The same measurement on the same hosts gave better values before, so something has "
    "changed. At every step the job waits for its slowest part.",
    fix=Fix(
        look(
            shell("nccl-doctor report diff FILE NAME"), "what else has changed; NAME is this report"
        ),
        alternatives=["check negotiated speed, errors, counters, clocks, and load of the host"],
    ),
    severity=Severity.WARN,
    # A finding of this run about a slow link, host or rank explains it.
    effects=(Effect.TIMED_OUT,),
)

SETUP_CHANGED = Kind(
    code="setup-changed",
    layer=Layer.ENV,
    title="Versions, variables, interfaces or GPUs differ from earlier runs",
    why="Earlier runs worked with other values. If something is broken or slow now, look at these "
    "changes first.",
    fix="if the change was not intended, restore the value of the earlier runs",
    severity=Severity.INFO,
)

BASELINE_SHORT = Kind(
    code="baseline-too-short",
    layer=Layer.SPEED,
    title="Too few earlier runs to tell a change from noise",
    why="Speeds vary from run to run; several runs are needed to know by how much.",
    fix=Fix(
        Step(
            shell('# --baseline FOLDER --json FOLDER/"$(date +%F)".json'),
            note="keeps the reports of these hosts, one for each day",
        )
    ),
    severity=Severity.INFO,
)

HISTORY_KINDS = (SLOWER, SETUP_CHANGED, BASELINE_SHORT)
