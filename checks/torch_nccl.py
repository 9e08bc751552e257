"""How will this torch speak NCCL: through which process group, and is that release known to hang?

What it checks
--------------
By the version of torch and by TORCH_DIST_USE_NCCL2: which process group the backend name `nccl`
stands for on each rank, and whether all have the same. And whether the release of torch is one in
which collectives are known to hang.

Why it matters
--------------
torch 2.15 has replaced its NCCL process group: what init_process_group builds is `nccl2`, which
connects at once, and takes GPU LOCAL_RANK (or else RANK) modulo the number of GPUs where no
device_id is given. TORCH_DIST_USE_NCCL2=0 brings the old one back; in 2.14 the value 1 chooses the
new one. The two do not meet: ranks that build different ones wait for each other.
In torch 2.6.0 to 2.7.0 a process group that is given device_id uses NCCL without blocking, and its
collectives hang at random.

How to fix
----------
nccl-backend-differs: the same torch, and the same TORCH_DIST_USE_NCCL2, for all ranks.
torch-known-hang: torch 2.7.1 or newer, or TORCH_NCCL_USE_COMM_NONBLOCKING=0, or no device_id.

When it is wrong
----------------
Whether the job's code passes device_id is not known before it runs: without it these releases are
sound, which is why the confidence is `possible`. A job that asks for `nccl-legacy` or `nccl2` by
name is not steered by the variable. A build of one's own may differ from its release.

References
----------
pytorch/pytorch on GitHub: issue 153960 and pull request 154055 (hang with device_id), pull requests
191272 and 192281 (the process groups of 2.15).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    USE_NCCL2,
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
    Skip,
    Untested,
    disagreement,
    minor_of,
    process_group,
    release,
    torch_build,
)

NONBLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"

BACKEND_DIFFERS = Kind(
    "nccl-backend-differs",
    Layer.DEVICE,
    "Ranks build different process groups for NCCL",
    "The old and the new process group of torch do not meet: init_process_group hangs.",
    f"the same torch everywhere, and {USE_NCCL2} the same everywhere or nowhere",
)
KNOWN_HANG = Kind(
    "torch-known-hang",
    Layer.DEVICE,
    "This release of torch hangs with device_id",
    "A process group that is given device_id uses NCCL without blocking there, and collectives "
    "hang at random.",
    f"install torch 2.7.1 or newer, or export {NONBLOCKING}=0 on every rank",
    Severity.WARN,
)


class TorchNccl(Check):
    """Compare the version of torch, and two variables, with what is known of its releases."""

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
        """Nothing of it matters to a job over gloo."""
        seen = list(cluster.facts(self.name)) if cluster.backend == "nccl" else []
        groups = ((rank, facts["process_group"]) for rank, facts in seen)
        story = disagreement(BACKEND_DIFFERS, "nccl", groups, of_host=False)
        if story is not None:
            mixed = len({minor_of(facts["torch"]) for _, facts in seen}) > 1
            yield story.finding.replaced(
                fix="",
                # One host with another torch has one fault.
                explained_by="version-differs" if mixed else None,
            )
        for rank, facts in seen:
            if (2, 6, 0) <= release(facts["torch"]) < (2, 7, 1) and facts[NONBLOCKING] != "0":
                yield Finding(
                    KNOWN_HANG,
                    f"torch {facts['torch']}, {NONBLOCKING} is {facts[NONBLOCKING] or 'not set'}",
                    Evidence.rank_place(rank),
                    confidence=Confidence.POSSIBLE,
                )
