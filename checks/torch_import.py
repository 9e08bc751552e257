"""Can torch be imported on every rank?

What it checks
--------------
That `import torch` and `import torch.distributed` work in the Python that runs nccl-doctor, on
every rank.

Why it matters
--------------
A rank whose Python has no torch, or a broken one, stops at its first line. The others wait for it
until the rendezvous times out, and none of them reports why.

How to fix
----------
torch-missing: activate the environment of the job before both nccl-doctor and the job (`source
.../bin/activate`, `conda activate`, the container image), or install nccl-doctor into that
environment: it never changes the installed torch.

It is examined where torch is missing though other checks were selected: without torch no host can
sign in, and nothing else is known of it.

When it is wrong
----------------
If nccl-doctor runs in another environment than the job: then it examines the wrong one, and this
finding shows it.

References
----------
https://docs.pytorch.org/get-started/locally/
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Evidence,
    Finding,
    Fix,
    Kind,
    Layer,
    Scope,
    Step,
    shell,
)
from nccl_doctor.system.shortage import is_of_memory
from nccl_doctor.toolkit.load_torch import TORCH_MISSING, load_torch

MISSING = Kind(
    code=TORCH_MISSING,
    layer=Layer.HOST,
    title="torch cannot be imported",
    why="the rank stops at its first line, and the others wait for it until the rendezvous times "
    "out",
    fix="activate the environment that the job runs in, or install nccl-doctor into it",
)
_AGAIN = Fix(
    Step(shell("pip install --force-reinstall torch"), note="in that environment", persists=True)
)


class TorchImportFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    python: str
    version: str | None
    error: str | None


class TorchImport(Check):
    """Imports torch in a child process."""

    name = "torch_import"
    layer = Layer.HOST
    scope = Scope.RANK
    kinds = (MISSING,)
    vital = True
    deadline_s = 60.0  # a cold import from a network file system
    reads = ("limits",)

    def observe(self, ctx: Context) -> TorchImportFacts:
        """`python`, `version` and `error`, which is None if the import worked."""
        ctx.breadcrumb("import torch")
        error = load_torch() or None
        facts: TorchImportFacts = {"python": sys.executable, "version": None, "error": error}
        if error is None:
            import torch
            import torch.distributed

            facts["version"] = str(torch.__version__)
            if not torch.distributed.is_available():
                facts["error"] = "this torch was built without torch.distributed"
        return facts

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each rank whose torch cannot be imported."""
        for rank, facts in cluster.facts(self.name):
            if facts["error"]:
                limits = [each for _, each in cluster.facts_on("limits", rank.host)]
                limited = any(each.get("addresses") for each in limits)
                # Installed, but broken: another environment would not be the first thing to try.
                broken = "No module named 'torch'" not in facts["error"]
                yield Finding(
                    MISSING,
                    f"{facts['error']} ({facts['python']})",
                    Evidence.rank_place(rank),
                    dict(facts),
                    fix=_AGAIN if broken else "",
                    explained_by="address-space-limit-low"
                    if limited and is_of_memory(facts["error"])
                    else None,
                )
