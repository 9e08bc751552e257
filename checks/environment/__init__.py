"""Are the variables that control NCCL, torch and gloo right, and the same everywhere?

What it checks
--------------
Every environment variable of NCCL, torch's process groups, gloo, UCX, libfabric and a few related
libraries that is set on a rank: against a table of names, versions, defaults and allowed values,
and against the other ranks. NCCL's configuration files count as they do for NCCL: what the
environment does not set comes from NCCL_CONF_FILE or else ~/.nccl.conf, then from /etc/nccl.conf;
findings name the file and the line. Files that variables name are opened as their readers do, each
in a process of its own: there, readable, of a form that NCCL reads, the same on all hosts; for one
that is written, its folder. Where NCCL itself says how it reads a value (since 2.30.3, of
some variables; check `interfaces` asks it), that counts. For proxies (http_proxy and the like) the
check only looks whether they are set, and whether no_proxy excludes MASTER_ADDR. It does not read
the values of any other variable.

Why it matters
--------------
These libraries silently ignore a name that they do not know, and read most invalid values as 0:
NCCL_IB_DISABLE=true leaves InfiniBand on. Other invalid values stop the job at its start. Where
ranks differ in settings of their communication, they wait for each other forever. A variable that
was set to find last month's fault still slows this month's training. torch and NCCL use no proxy;
agents that use HTTP or gRPC between hosts do, and downloads stall rank 0 if only its host has no
proxy.

How to fix
----------
Type what the finding says. In general: set as few variables as possible; set them in one place, for
all hosts; remove debugging variables again. The deepspeed launcher passes on only variables that
begin with NCCL, PYTHON, MLFLOW, MV2 or UCX: write others into .deepspeed_env. Some common advice
does not help:

- NCCL_BLOCKING_WAIT=1 does not limit the time to start a communicator, and turns the watchdog off.
- NCCL_ASYNC_ERROR_HANDLING=1 does nothing under torchrun, which sets the new name; the new name
  wins.
- NCCL_SOCKET_IFNAME=^docker0 allows lo: name the interface, NCCL_SOCKET_IFNAME==eth0.
- GLOO_SOCKET_IFNAME has another syntax: whole names, separated by commas.
- NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 show where a fault is; they do not repair it.
- NCCL_TIMEOUT does not exist: the time-out is init_process_group(timeout=...).

When it is wrong
----------------
The table was made from NCCL 2.32.3 and torch 2.15: with newer versions an unknown name is only
information, and none if NCCL itself lists it (since 2.30.3 it lists some). A plug-in or your own
program may read names with these prefixes. Interfaces, devices and files may differ between hosts,
and are not compared; of the cards of Google's plug-ins (NCCL_FASTRAK_IFNAME) there must be as many,
and in one order where hosts use the same names. What the job's own code sets after its start is not
seen, nor what an NCCL_ENV_PLUGIN returns. Encryption of NCCL's sockets (TLS, since 2.32) has no
variable: a program turns it on by ncclSetEncryption, so whether all ranks do that is not seen
before they connect. Without a GPU the NCCL of the job is unknown, so versions are not judged.
Variables that only the other backend reads are never a failure. CUDA_DEVICE_ORDER changes nothing
where all GPUs of a host are of one model: then it is information. What CUDA does with an unknown
value is not documented.

References
----------
NCCL user guide, environment variables; NCCL src/misc/param.cc; PyTorch documentation of
ProcessGroupNCCL environment variables and c10d/Utils.hpp; DeepSpeed documentation, launching and
.deepspeed_env.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Effect,
    Figure,
    Finding,
    Kind,
    Layer,
    Scope,
    Severity,
    place_of,
)
from nccl_doctor.toolkit.gpu.devices import torch_build
from nccl_doctor.toolkit.nccl.interface_choice import has_infiniband
from nccl_doctor.toolkit.shared_kinds import TIMEOUT_TOO_SHORT
from nccl_doctor.toolkit.timeouts.rules import too_short_for_load

from .gather import Gathered, gather_variables
from .named_files import look_at_files
from .problems import judge_variables
from .tried import try_values

UNKNOWN = Kind(
    "env-unknown-variable",
    Layer.ENV,
    "A variable is set that the library does not know",
    "An unknown name is silently ignored: the library works as if it were not set.",
    "Correct the name, or unset it.",
    Severity.WARN,
)
BAD_VALUE = Kind(
    "env-bad-value",
    Layer.ENV,
    "A variable has a value that the library does not read as intended",
    "Where NCCL wants a number, it reads anything else as 0; it leaves out or refuses a word that "
    "it does not know. torch refuses what it cannot read, and the job ends at its start.",
    "Give it one of the values that the library knows.",
)
DEPRECATED = Kind(
    "env-deprecated",
    Layer.ENV,
    "A variable has an old name, or is no longer read",
    "If the new name is also set, it wins; a version that does not know the old name ignores it.",
    "Use the new name, or unset it.",
    Severity.INFO,
)
CONFLICT = Kind(
    "env-conflict",
    Layer.ENV,
    "Variables do not fit together",
    "One of them has no effect, and often not the one that you expect.",
    "Keep one of them.",
    Severity.WARN,
)
LEFTOVER = Kind(
    "env-debug-leftover",
    Layer.ENV,
    "A debugging variable is still set",
    "Debugging variables cost speed or hide faults, long after they are forgotten.",
    "Unset it, unless you are debugging.",
    Severity.WARN,
)
MISLEADS = Kind(
    "env-debug-misleads",
    Layer.ENV,
    "A debugging variable makes a healthy job fail",
    "With TORCH_DISTRIBUTED_DEBUG=DETAIL torch numbers the collectives of each rank and compares "
    "them. A monitored_barrier counts other numbers on rank 0 than on the rest, so the next "
    "collective fails on three ranks or more.",
    "Unset it: it says nothing true of a job that calls monitored_barrier.",
    Severity.WARN,
)
DIFFERS = Kind(
    "env-differs",
    Layer.ENV,
    "Ranks have different values of a variable",
    "Ranks that use different algorithms, buffers or networks wait for each other forever; "
    "other differences only slow the slowest rank down.",
    "Set the same value for all ranks, in one place.",
    effects=(Effect.DIFFERENCE,),
)


PROXIED = Kind(
    "proxy-covers-master",
    Layer.ENV,
    "A proxy is set that also covers the job's own hosts",
    "torch and NCCL never use it. Programs that use HTTP or gRPC between hosts do (launchers' "
    "agents, Ray, etcd, servers of models and data), and wait for the proxy.",
    "Add the hosts of the job to no_proxy.",
    Severity.INFO,
)


FILE_UNUSABLE = Kind(
    "env-file-unusable",
    Layer.ENV,
    "A variable names a file that its reader cannot use",
    "NCCL and its neighbours go on without most such files and say nothing: the job runs with "
    "other settings than intended, or ends as it makes its first communicator.",
    "Put the file there, or unset the variable.",
    Severity.WARN,
)
FILE_DIFFERS = Kind(
    "env-file-differs",
    Layer.ENV,
    "A file that a variable names has another content on some hosts",
    "Hosts that see other hardware or take other settings choose other rings and algorithms; on "
    "hosts of several models this may be meant.",
    "Copy one file to all hosts.",
    Severity.WARN,
    effects=(Effect.DIFFERENCE,),
)


class EnvironmentFacts(Gathered):
    """Facts that `observe` returns; other checks read them."""

    torch: str | None
    nccl: str | None
    rocm: str | None
    deepspeed: bool
    infiniband: bool
    tried: dict[str, dict[str, str]]
    files: list[dict[str, Any]]


class Environment(Check):
    """Variables of every rank: each process has its own environment."""

    name = "environment"
    layer = Layer.ENV
    scope = Scope.RANK
    kinds = (
        UNKNOWN, BAD_VALUE, DEPRECATED, CONFLICT, LEFTOVER, MISLEADS, DIFFERS, PROXIED,
        TIMEOUT_TOO_SHORT, FILE_UNUSABLE, FILE_DIFFERS,
    )  # fmt: skip
    reads = ("backend_device", "gpu_state", "interfaces", "nccl_library", "timeouts")

    def observe(self, ctx: Context) -> EnvironmentFacts:
        """Read what is set, where it was set, and what reads it.

        Returns: see `gather_variables`; `torch` and `nccl` (versions or None), `deepspeed` (whether
        it is installed), `infiniband` (whether a verbs device here has an active port), `tried`
        (see `try_values`), `files` (see `look_at_files`).
        """
        ctx.breadcrumb("reading NCCL's configuration files")
        versions = _versions()
        gathered = gather_variables(ctx.env, root=ctx.root)
        ctx.breadcrumb("looking at files that variables name")
        return {
            **gathered,
            "torch": versions["torch"],
            "nccl": versions["nccl"],
            "rocm": versions["rocm"],
            "deepspeed": find_spec("deepspeed") is not None,
            "infiniband": has_infiniband(ctx.root),
            "tried": try_values(ctx.env),
            "files": look_at_files(gathered["variables"], ctx.root),
        }

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """Every variable that is set."""
        for rank, facts in cluster.facts(self.name):
            for name, setting in facts["variables"].items():
                yield Figure(name, setting["value"], place_of([rank]))

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each problem, with all its places."""
        kinds = {kind.code: kind for kind in self.kinds}
        too_short = too_short_for_load(cluster)
        for each in judge_variables(cluster, self.name):
            problem = each.problem
            hosts = each.where.hosts
            is_short = hosts and problem.code == TIMEOUT_TOO_SHORT.code
            if is_short and all((problem.variable, host) in too_short for host in hosts):
                continue  # `timeouts` measures it against more than a limit
            yield Finding(
                kinds[problem.code],
                problem.message,
                each.where,
                each.evidence,
                problem.fix,
                problem.severity,
                problem.confidence,
                problem.explained_by,
            )


def _versions() -> dict[str, Any]:
    """The versions of torch and of what it was built with; None where torch does not report it."""
    try:
        build: Mapping[str, Any] = torch_build()
    except ImportError:  # another check reports it
        build = {}
    return {name: build.get(name) for name in ("torch", "nccl", "rocm")}
