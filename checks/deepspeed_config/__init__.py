"""Would DeepSpeed accept its configuration, for this many ranks and on these hosts?

What it checks
--------------
Only with --deepspeed-config FILE. Whether train_batch_size is the micro batch × the accumulation ×
the ranks that have their own data: the world size, divided by the sizes of sequence, tensor and
pipeline parallelism that --mesh and the file name. Whether DeepSpeed knows every key, under its
current name, and accepts its value. Whether keys contradict each other: two precisions, offloading
with a stage of ZeRO that cannot do it, an old name beside its new one. Where something is
offloaded, on every host also: whether nvme_path can be written to, with direct I/O; whether the
buffers for swapping fit into memory and may be locked; whether DeepSpeed's operators are built, or
can be built.

Why it matters
--------------
DeepSpeed checks its configuration after the model is loaded: an assert then costs minutes of all
GPUs. An unknown key at the outermost level is silently ignored, and the job runs without that
setting.

How to fix
----------
As the finding says: it gives the nearest sizes that work.

When it is wrong
----------------
Which ranks have their own data depends on the mpu that the job gives to DeepSpeed: describe it with
--mesh. Where several answers are possible, only what fits none of them is a finding. Transformers
or Accelerate fill in a value "auto", so it is not judged; a framework may also remove its own keys
before DeepSpeed sees them. Where DeepSpeed is not installed on the hosts, the rules are those of
0.19.8. A newer version may know more keys, an older one fewer. How much memory an offloaded model
takes cannot be known here. The rules are read from DeepSpeed's source; those for offloading are Not
validated on hardware.

References
----------
https://www.deepspeed.ai/docs/config-json/; DeepSpeed source: runtime/config.py, runtime/engine.py,
runtime/zero/config.py, runtime/zero/offload_config.py, ops/op_builder/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Skip,
    Step,
    shell,
)

from .gather import gather_deepspeed
from .rules import judge_deepspeed

BATCH = Kind(
    "batch-does-not-divide",
    Layer.GROUP,
    "The batch size does not divide evenly",
    "DeepSpeed requires that train_batch_size is the micro batch per GPU × the steps of "
    "gradient accumulation × the data-parallel ranks, and ends with an error if it is not.",
    "choose a train_batch_size that is a multiple of micro batch × data-parallel ranks",
    effects=(Effect.JOB_ONLY,),
)
WORLD = Kind(
    "world-size-config-mismatch",
    Layer.GROUP,
    "The DeepSpeed configuration is made for another number of ranks",
    "Its sizes multiply to another world size than the job's: DeepSpeed ends with an error, or "
    "leaves ranks out.",
    "start as many ranks as the configuration is made for, or change it",
    effects=(Effect.JOB_ONLY,),
)
UNKNOWN = Kind(
    "deepspeed-config-unknown-key",
    Layer.LAUNCH,
    "DeepSpeed does not know a key of its configuration",
    "At the outermost level it is silently ignored; in a section that DeepSpeed checks, the "
    "job ends with `Extra inputs are not permitted`.",
    "correct the key, or remove it",
    Severity.WARN,
    effects=(Effect.JOB_ONLY,),
)
OLD = Kind(
    "deepspeed-config-deprecated-key",
    Layer.LAUNCH,
    "The DeepSpeed configuration uses an old key",
    "It was renamed or removed: newer versions end with an error at it.",
    "use the new name, or remove the key",
    Severity.INFO,
    effects=(Effect.JOB_ONLY,),
)
BAD_VALUE = Kind(
    "deepspeed-config-bad-value",
    Layer.LAUNCH,
    "DeepSpeed does not accept a value of its configuration",
    "It ends with an error where a value has the wrong type, is out of range, or is an unknown "
    "name.",
    "correct the value",
    effects=(Effect.JOB_ONLY,),
)
CONFLICT = Kind(
    "deepspeed-config-conflict",
    Layer.LAUNCH,
    "Keys of the DeepSpeed configuration contradict each other",
    "DeepSpeed ends with an error, or one of them has no effect.",
    "keep one of them",
    effects=(Effect.JOB_ONLY,),
)
PATH = Kind(
    "offload-path-unusable",
    Layer.HOST,
    "DeepSpeed's nvme_path is not fit to swap to",
    "Every rank writes its files there: one host where it cannot stops the job.",
    "give nvme_path a folder on a local NVMe disk of every host",
    effects=(Effect.JOB_ONLY,),
)
MEMORY = Kind(
    "offload-memory-low",
    Layer.HOST,
    "Too little memory, or too low a limit, for what DeepSpeed offloads to this host",
    "Buffers for swapping are locked in memory, and optimizer states take 16 bytes for each "
    "parameter: the kernel kills the rank that goes over the limit.",
    "raise the limit of the container or of the Slurm job, or use smaller buffers",
    Severity.WARN,
    effects=(Effect.JOB_ONLY,),
)
OPERATOR = Kind(
    "offload-operator-unavailable",
    Layer.HOST,
    "DeepSpeed cannot build an operator that offloading needs",
    "Operators that were not built at installation are built when the job starts, with ninja "
    "and a C++ compiler; swapping to NVMe also needs libaio.",
    Fix(
        Step(shell("pip install ninja"), persists=True),
        Step(shell("apt install g++ libaio-dev"), persists=True),
    ),
    effects=(Effect.JOB_ONLY,),
)


class DeepspeedConfig(Check):
    """The configuration itself, and what it needs on every host."""

    name = "deepspeed_config"
    layer = Layer.GROUP
    kinds = (BATCH, WORLD, UNKNOWN, OLD, BAD_VALUE, CONFLICT, PATH, MEMORY, OPERATOR)
    reads = ("memory",)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """The version of DeepSpeed, and what is there for offloading; see `gather_deepspeed`."""
        config = ctx.job.deepspeed_config
        if config is None:
            raise Skip("--deepspeed-config is not given")
        return gather_deepspeed(config, ctx.env, ctx.breadcrumb, ctx.root)

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each problem."""
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
