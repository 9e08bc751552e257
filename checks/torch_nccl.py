"""Which NCCL process group will this torch use, and is this release known to hang?

What it checks
--------------
By the version of torch and by TORCH_DIST_USE_NCCL2: which process group the backend name `nccl`
means on each rank, and whether all have the same. And whether the release of torch is known to hang
if the default group is given device_id: in collectives, or (if `--mesh` or `--groups` show that the
job forms several groups) in new_group.

Why it matters
--------------
torch 2.15 has replaced its NCCL process group: init_process_group creates `nccl2`, which connects
at once, and uses GPU LOCAL_RANK (or else RANK) modulo the number of GPUs if no device_id is given.
TORCH_DIST_USE_NCCL2=0 selects the old one; in 2.14 the value 1 selects the new one. The two cannot
connect: ranks that create different ones wait for each other. In torch 2.6.0 to 2.7.0 a process
group that is given device_id uses NCCL in non-blocking mode, and its collectives hang at random.
From 2.3 until 2.15, if the default group has a device_id, ranks that are left out of a further
group split its NCCL communicator, even if that group uses gloo, whose members split nothing: the
ranks that are left out wait for them.

How to fix
----------
nccl-backend-differs: the same torch, and the same TORCH_DIST_USE_NCCL2, for all ranks.
torch-known-hang: no device_id; or torch 2.7.1 or newer, or TORCH_NCCL_USE_COMM_NONBLOCKING=0; for
groups of gloo torch 2.15 or newer, or only groups that have all ranks.

When it is wrong
----------------
Whether the job's code passes device_id is not known before it runs: without it these releases work,
which is why the confidence is `possible`. Groups of gloo that leave out every rank equally often do
not hang; that part is from the source of torch 2.13, and not validated on hardware. A job that uses
`nccl-legacy` or `nccl2` by name is not affected by the variable. A custom build may differ from its
release.

References
----------
pytorch/pytorch on GitHub: issue 153960 and pull request 154055 (hang with device_id), pull requests
191272 and 192281 (the process groups of 2.15); torch/distributed/distributed_c10d.py,
_new_process_group_helper and _get_split_source.
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
    Untested,
    export,
)
from nccl_doctor.toolkit.gpu.devices import torch_build
from nccl_doctor.toolkit.releases import DEVICE_ID_GROUPS, known_faults
from nccl_doctor.toolkit.versions import USE_NCCL2, disagreement, minor_of, process_group

NONBLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"

BACKEND_DIFFERS = Kind(
    "nccl-backend-differs",
    Layer.DEVICE,
    "Ranks use different process groups for NCCL",
    "The old and the new process group of torch cannot connect to each other: init_process_group "
    "hangs.",
    f"the same torch everywhere, and {USE_NCCL2} the same everywhere or nowhere",
)
KNOWN_HANG = Kind(
    "torch-known-hang",
    Layer.DEVICE,
    "This release of torch hangs with device_id",
    "With device_id a process group uses NCCL in another way: collectives hang at random, or "
    "ranks wait in new_group for ranks that never join.",
    Fix(export(TORCH_NCCL_USE_COMM_NONBLOCKING="0"), alternatives=["install torch 2.7.1 or newer"]),
    Severity.WARN,
)


class TorchNccl(Check):
    """Compares the version of torch, and two variables, with releases that are known to hang."""

    name = "torch_nccl"
    layer = Layer.DEVICE
    scope = Scope.RANK
    kinds = (BACKEND_DIFFERS, KNOWN_HANG)
    deadline_s = 60.0  # a cold import from a network file system

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`torch`, the two variables, and `process_group`: `nccl2` or `nccl-legacy`."""
        ctx.breadcrumb("import torch")
        try:
            build = torch_build()
        except (ImportError, OSError) as error:
            raise Untested("torch cannot be imported") from error
        if not build["nccl_built"]:
            raise Skip("this torch is built without NCCL")
        use = ctx.env.get(USE_NCCL2)
        return {
            "torch": build["torch"],
            USE_NCCL2: use,
            NONBLOCKING: ctx.env.get(NONBLOCKING),
            "process_group": process_group(build["torch"], use),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings only for a job over NCCL."""
        seen = list(cluster.facts(self.name)) if cluster.backend == "nccl" else []
        groups = ((rank, facts["process_group"]) for rank, facts in seen)
        story = disagreement(BACKEND_DIFFERS, "nccl", groups, of_host=False)
        if story is not None:
            mixed = len({minor_of(facts["torch"]) for _, facts in seen}) > 1
            yield story.finding.replaced(
                fix="",
                # Another torch on one host is one fault, reported once.
                explained_by="version-differs" if mixed else None,
            )
        for rank, facts in seen:
            for known in known_faults("torch"):
                name, harmless = known.unless
                said = facts.get(name)
                if not known.has(facts["torch"]) or (name and said == harmless):
                    continue
                if known.condition == DEVICE_ID_GROUPS and not cluster.job.has_several_groups:
                    continue
                what = known.symptom or f"{name} is {said or 'not set'}"
                yield Finding(
                    KNOWN_HANG,
                    f"torch {facts['torch']}, {what}",
                    Evidence.rank_place(rank),
                    fix=known.fix,
                    severity=known.severity,
                    confidence=Confidence.POSSIBLE,
                )
