"""Would DeepSpeed accept its configuration, for this many ranks and on these hosts?

What it checks
--------------
Only with --deepspeed-config FILE. That train_batch_size is the micro batch × the accumulation × the
ranks that have data of their own: the world size, divided by the sizes of sequence, tensor and
pipeline parallelism that --mesh and the file name. That every key is one that DeepSpeed knows, is
not an old name, and has a value that it takes. That no keys contradict each other: two precisions,
offloading without the stage of ZeRO that can, an old name beside its new one. And where something
is offloaded, on every host: whether nvme_path can be written to, with direct I/O; whether the
buffers for swapping fit into memory, and may be locked; whether DeepSpeed's operators were built,
or can be.

Why it matters
--------------
DeepSpeed looks at its configuration after the model was loaded: minutes of all GPUs, for an assert.
An unknown key at the outermost level is ignored without a word, and the job then runs without what
was asked for.

How to fix
----------
As the finding says: it gives the sizes next to the given ones that work.

When it is wrong
----------------
Which ranks have data of their own is decided by the mpu that the job gives to DeepSpeed: say it by
--mesh. Where several answers are possible, only what fits none of them is a finding. A value "auto"
is filled in by Transformers or Accelerate, so nothing is said of it, and a framework may take out
keys of its own before DeepSpeed sees them. Where DeepSpeed is not installed on the hosts, the rules
are those of 0.19.8. A version newer than that may know more keys, an older one fewer. How much
memory an offloaded model takes cannot be known here. The rules are read from DeepSpeed's source;
those for offloading are Not validated on hardware.

References
----------
https://www.deepspeed.ai/docs/config-json/; DeepSpeed source: runtime/config.py, runtime/engine.py,
runtime/zero/config.py, runtime/zero/offload_config.py, ops/op_builder/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import Check, Cluster, Context, Finding, Kind, Layer, Severity, Skip

from .gather import gather_deepspeed
from .rules import judge_deepspeed

BATCH = Kind(
    "batch-does-not-divide",
    Layer.GROUP,
    "The batch size does not come out",
    "DeepSpeed insists that train_batch_size is the micro batch per GPU × the steps of gradient "
    "accumulation × the data-parallel ranks, and ends with an error where it is not.",
    "choose a train_batch_size that micro batch × data-parallel ranks divides",
    later=True,
)
WORLD = Kind(
    "world-size-config-mismatch",
    Layer.GROUP,
    "The DeepSpeed configuration is made for another number of ranks",
    "Its sizes multiply to a world size that is not the job's: DeepSpeed ends with an error, or "
    "leaves ranks out.",
    "start as many ranks as the configuration is made for, or change it",
    later=True,
)
UNKNOWN = Kind(
    "deepspeed-config-unknown-key",
    Layer.LAUNCH,
    "DeepSpeed does not know a key of its configuration",
    "At the outermost level it is ignored without a word; in a section that DeepSpeed checks, the "
    "job ends with `Extra inputs are not permitted`.",
    "correct the key, or remove it",
    Severity.WARN,
    later=True,
)
OLD = Kind(
    "deepspeed-config-deprecated-key",
    Layer.LAUNCH,
    "An old key in the DeepSpeed configuration",
    "It has another name by now, or was removed: newer versions end with an error at it.",
    "write the new name, or remove it",
    Severity.INFO,
    later=True,
)
BAD_VALUE = Kind(
    "deepspeed-config-bad-value",
    Layer.LAUNCH,
    "DeepSpeed does not take a value of its configuration",
    "It ends with an error where a value is of another kind, out of range, or a name that it does "
    "not know.",
    "correct the value",
    later=True,
)
CONFLICT = Kind(
    "deepspeed-config-conflict",
    Layer.LAUNCH,
    "Keys of the DeepSpeed configuration contradict each other",
    "DeepSpeed ends with an error, or one of them has no effect.",
    "keep one of them",
    later=True,
)
PATH = Kind(
    "offload-path-unusable",
    Layer.HOST,
    "DeepSpeed cannot swap to its nvme_path",
    "Every rank makes its files there: one host on which it cannot ends the job.",
    "give nvme_path a folder on a local NVMe disk of every host",
    later=True,
)
MEMORY = Kind(
    "offload-memory-low",
    Layer.HOST,
    "Too little memory for what DeepSpeed offloads to this host",
    "Buffers for swapping are locked in memory, and optimizer states take 16 bytes for each "
    "parameter: the kernel kills the rank that goes over the limit.",
    "raise the limit of the container or of the Slurm job, or use smaller buffers",
    Severity.WARN,
    later=True,
)
OPERATOR = Kind(
    "offload-operator-unavailable",
    Layer.HOST,
    "DeepSpeed cannot build an operator that offloading needs",
    "Operators that were not built at the installation are built when the job starts, by ninja and "
    "a C++ compiler; swapping to NVMe needs libaio besides.",
    "pip install ninja; apt install g++ libaio-dev",
    later=True,
)


class DeepspeedConfig(Check):
    """The configuration by itself, and what it needs of every host."""

    name = "deepspeed_config"
    layer = Layer.GROUP
    kinds = (BATCH, WORLD, UNKNOWN, OLD, BAD_VALUE, CONFLICT, PATH, MEMORY, OPERATOR)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """The version of DeepSpeed, and what there is for offloading; see `gather_deepspeed`."""
        config = ctx.job.deepspeed_config
        if config is None:
            raise Skip("no --deepspeed-config was given")
        return gather_deepspeed(config, ctx.env, ctx.breadcrumb)

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each thing that is wrong."""
        kinds = {kind.code: kind for kind in self.kinds}
        for problem, where in judge_deepspeed(cluster, self.name):
            yield Finding(
                kinds[problem.code],
                problem.message,
                where,
                {"file": cluster.job.deepspeed_path},
                problem.fix,
                problem.severity,
                problem.confidence,
            )
