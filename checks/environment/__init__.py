"""Are the variables that steer NCCL, torch and gloo right, and the same everywhere?

What it checks
--------------
Every environment variable of NCCL, torch's process groups, gloo, UCX, libfabric and a few
neighbours that is set on a rank, against a table of names, versions, defaults and allowed values,
and against the other ranks. NCCL's configuration files count as they do for NCCL: what the
environment does not set comes from NCCL_CONF_FILE or else ~/.nccl.conf, then from /etc/nccl.conf;
findings name the file and the line. Of proxies (http_proxy and the like) only whether they are set,
and whether no_proxy excepts MASTER_ADDR. Values of all other variables are left alone.

Why it matters
--------------
These libraries say nothing of a name that they do not know, and take most values that make no
sense for 0: NCCL_IB_DISABLE=true leaves InfiniBand on. Other values end the job at its start. Where
ranks differ in what decides how they talk, they wait for each other for ever. And what was set to
find last month's fault still slows this month's training. torch and NCCL heed no proxy; agents that
speak HTTP or gRPC between hosts do, and downloads stall rank 0 where its host alone has none.

How to fix
----------
Type what the finding says. In general: set as little as possible; set it in one place, for all
hosts; take debugging aids out again. The deepspeed launcher takes along only variables that begin
with NCCL, PYTHON, MLFLOW, MV2 or UCX: write others into .deepspeed_env. Some advice that goes round
does not help:

- NCCL_BLOCKING_WAIT=1 bounds no start of a communicator, and turns the watchdog off.
- NCCL_ASYNC_ERROR_HANDLING=1 does nothing under torchrun, which sets the new name, and that wins.
- NCCL_SOCKET_IFNAME=^docker0 lets lo in: name the interface, NCCL_SOCKET_IFNAME==eth0.
- GLOO_SOCKET_IFNAME has another syntax: whole names, separated by commas.
- NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 tell where a fault is; they do not mend it.
- NCCL_TIMEOUT does not exist: the time-out is init_process_group(timeout=...).

When it is wrong
----------------
The table was made from NCCL 2.30.7 and torch 2.15: of newer versions an unknown name is only worth
knowing. A plug-in or a program of one's own may read names with these prefixes. Interfaces, devices
and files may differ between hosts, and are not compared. What the job's own code sets after its
start is not seen, nor is what an NCCL_ENV_PLUGIN answers. Without a GPU the NCCL that the job will
use is not known, so that nothing is said of versions. Variables that only the other backend reads
are never a failure. CUDA_DEVICE_ORDER changes nothing where all GPUs of a host are of one model:
then it is information. What CUDA makes of a value that it does not know is not documented.

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
from nccl_doctor.toolkit.timeouts.rules import told_by_load

from .gather import gather_variables
from .judge_all import judge_variables

UNKNOWN = Kind(
    "env-unknown-variable",
    Layer.ENV,
    "A variable is set that the library does not read",
    "A name that is not known is ignored without a word, and the library does as if it were unset.",
    "Correct the name, or unset it.",
    Severity.WARN,
)
BAD_VALUE = Kind(
    "env-bad-value",
    Layer.ENV,
    "A variable has a value that is not read as it was meant",
    "NCCL reads numbers only, and takes what is none for 0; torch refuses what it cannot read, and "
    "the job ends at its start.",
    "Give it one of the values that the library knows.",
)
DEPRECATED = Kind(
    "env-deprecated",
    Layer.ENV,
    "A variable has an old name",
    "Where the new name is set as well it wins, whoever set it; one day the old name does nothing.",
    "Use the new name.",
    Severity.INFO,
)
CONFLICT = Kind(
    "env-conflict",
    Layer.ENV,
    "Variables contradict each other",
    "One of them does nothing, and which one is seldom what was meant.",
    "Keep one of them.",
    Severity.WARN,
)
LEFTOVER = Kind(
    "env-debug-leftover",
    Layer.ENV,
    "A debugging aid is still set",
    "What helps to find a fault costs speed or hides the fault, long after it is forgotten.",
    "Unset it, unless you are looking for a fault.",
    Severity.WARN,
)
DIFFERS = Kind(
    "env-differs",
    Layer.ENV,
    "Ranks were given different variables",
    "Ranks that reckon with different algorithms, buffers or networks wait for each other for "
    "ever; other differences only make the slowest rank slower.",
    "Set the same value for all ranks, in one place.",
    between=True,
)


PROXIED = Kind(
    "proxy-covers-master",
    Layer.ENV,
    "A proxy is set that also stands before the job's own hosts",
    "torch and NCCL never ask it. What speaks HTTP or gRPC between hosts does (launchers' agents, "
    "Ray, etcd, servers of models and data), and waits for an answer of the proxy.",
    "Name the hosts of the job in no_proxy.",
    Severity.INFO,
)


class Environment(Check):
    """Variables, by every rank: the environment belongs to the process."""

    name = "environment"
    layer = Layer.ENV
    scope = Scope.RANK
    kinds = (
        UNKNOWN, BAD_VALUE, DEPRECATED, CONFLICT, LEFTOVER, DIFFERS, PROXIED, TIMEOUT_TOO_SHORT,
    )  # fmt: skip

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """What is set, where it was set, and what reads it; see `gather_variables`.

        `torch` and `nccl` are versions or None, `deepspeed` whether it is installed, `infiniband`
        whether this host has a verbs device with an active port.
        """
        ctx.breadcrumb("reading NCCL's configuration files")
        return {
            **gather_variables(ctx.env),
            **_versions(),
            "deepspeed": find_spec("deepspeed") is not None,
            "infiniband": has_infiniband(),
        }

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """Every variable that is set."""
        for rank, facts in cluster.facts(self.name):
            for name, setting in facts["variables"].items():
                yield Figure(name, setting["value"], place_of([rank]))

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each thing that is wrong, at all the places where it is."""
        kinds = {kind.code: kind for kind in self.kinds}
        told = told_by_load(cluster)
        for each in judge_variables(cluster, self.name):
            problem = each.problem
            hosts = each.where.hosts
            if hosts and all((problem.variable, host) in told for host in hosts):
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
    """Of torch, and of what it was built with; None where torch cannot say."""
    try:
        build = torch_build()
    except ImportError:  # another check says so
        build = {}
    return {name: build.get(name) for name in ("torch", "nccl", "rocm")}
