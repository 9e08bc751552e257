"""What the engine itself may find.

`ENGINE_KINDS`: an examination that could not be completed. None of these says that the cluster is
broken, and none says that it is fit: a run with one of them is `unknown` unless something else
failed.

`REMOTE_KINDS`: what keeps a host of a hostfile from being started on, by the doctor as by the job.

`HISTORY_KINDS`: what is not as it was in earlier runs.
"""

from __future__ import annotations

from nccl_doctor.model.findings import Kind, Layer, Severity

CHECK_UNUSABLE = Kind(
    code="check-unusable",
    layer=Layer.LAUNCH,
    title="A check could not be loaded and was left out",
    why="What it looks for was not looked for, so the run cannot vouch for it.",
    fix="repair or uninstall the named distribution, or run with --ignore check-unusable",
    severity=Severity.WARN,
)

CHECK_BROKE = Kind(
    code="check-broke",
    layer=Layer.LAUNCH,
    title="The rules of a check broke on what was observed",
    why="Its facts were gathered but could not be judged completely, so a fault may be hidden.",
    fix="report it with the JSON report of this run (--json); --ignore CHECK leaves the check out",
    severity=Severity.WARN,
)

RANK_SILENT = Kind(
    code="rank-silent",
    layer=Layer.RANKS,
    title="A participant signed in and then fell silent",
    why="It was killed, frozen or cut off during the examination; the job would lose it the same "
    "way, and the other ranks would wait for it until a time-out.",
    fix="look at that process and its host: `dmesg -T | tail`, the scheduler's log, and whether "
    "the process is stopped (state T in `ps`)",
    severity=Severity.WARN,
)

RUN_INTERRUPTED = Kind(
    code="run-interrupted",
    layer=Layer.RANKS,
    title="The run was stopped before it was complete",
    why="What was not examined by then is not known to be good.",
    fix="run again, with a longer --timeout if it was the deadline that ended it",
    severity=Severity.WARN,
)

COORDINATOR_LOST = Kind(
    code="coordinator-lost",
    layer=Layer.STORE,
    title="This host never reached the coordinator, or lost it",
    why="These findings are this host's own view; the other hosts were not compared with it.",
    fix="read the report of rank 0, and the findings about MASTER_ADDR and MASTER_PORT here",
    severity=Severity.WARN,
)

STORE_LOST = Kind(
    code="store-lost",
    layer=Layer.STORE,
    title="The store that ranks meet at went away during the run",
    why="The job's own rendezvous lives in the same store; ranks that lose it abort.",
    fix="find out why the process that serves MASTER_PORT ended: the launcher's log on the master",
    severity=Severity.WARN,
)

MERGE_DOUBTFUL = Kind(
    code="merge-doubtful",
    layer=Layer.LAUNCH,
    title="The merged reports may not belong to one run",
    why="Hosts are compared as they were at different times, or by different rules; what does not "
    "fit may have been mended since.",
    fix="merge the reports of one run, made by one version of nccl-doctor; if they are, set the "
    "clocks of the hosts",
    severity=Severity.WARN,
)

ENGINE_KINDS = (
    CHECK_UNUSABLE,
    CHECK_BROKE,
    RANK_SILENT,
    RUN_INTERRUPTED,
    COORDINATOR_LOST,
    STORE_LOST,
    MERGE_DOUBTFUL,
)
ENGINE_CODES = frozenset(kind.code for kind in ENGINE_KINDS)

SSH_FAILED = Kind(
    code="ssh-failed",
    layer=Layer.LAUNCH,
    title="A host cannot be reached by ssh",
    why="Launchers that read a hostfile (deepspeed, mpirun) start the job's ranks by ssh: none "
    "would start there, and the other hosts would wait for them.",
    fix="make `ssh -o BatchMode=yes HOST true` work from the host that launches the job",
)

REMOTE_COMMAND_FAILED = Kind(
    code="remote-command-failed",
    layer=Layer.LAUNCH,
    title="A command could not be run on a host that ssh reached",
    why="The launcher starts the same Python on every host, by the same path: where it, or a "
    "package, is missing or broken, no rank starts.",
    fix="install the same Python environment at the same path there, or put it on a file system "
    "that all hosts share",
)

CONFIG_BAD_VALUE = Kind(
    code="config-bad-value",
    layer=Layer.LAUNCH,
    title="A host refuses its configuration",
    why="The doctor was started there, and could not begin with what its options, its "
    "configuration file or its environment say.",
    fix="correct there what its words name",
)

REMOTE_KINDS = (SSH_FAILED, REMOTE_COMMAND_FAILED, CONFIG_BAD_VALUE)

SLOWER = Kind(
    code="slower-than-before",
    layer=Layer.SPEED,
    title="It is slower than in earlier runs, by more than they differ among themselves",
    why="The same hosts were faster with the same measurement: something has changed since then, "
    "and the job waits for its slowest part at every step.",
    fix="nccl-doctor report diff OLD NEW: see what else has changed; then as for a slow link or "
    "host: negotiated speed, errors and counters, clocks, other work there",
    severity=Severity.WARN,
    by_deadline=True,  # what is slow beside its like in this very run, says why
)

SETUP_CHANGED = Kind(
    code="setup-changed",
    layer=Layer.ENV,
    title="Versions, variables, interfaces or GPUs are not those of earlier runs",
    why="What worked before worked with the others: where something is broken or slow now, look "
    "here first.",
    fix="if it was not meant, put back what the earlier runs had",
    severity=Severity.INFO,
)

BASELINE_SHORT = Kind(
    code="baseline-too-short",
    layer=Layer.SPEED,
    title="There are too few earlier runs to tell a change from noise",
    why="Speeds differ from run to run; how far, only several runs can say.",
    fix="keep the reports of these hosts in the folder that --baseline names: "
    "--json DIR/<date>.json",
    severity=Severity.INFO,
)

HISTORY_KINDS = (SLOWER, SETUP_CHANGED, BASELINE_SHORT)
