"""Can torch be imported here at all?

What it checks
--------------
That `import torch` and `import torch.distributed` work in the Python that runs the doctor, on
every rank.

Why it matters
--------------
A rank whose Python has no torch, or a broken one, stops at its first line. The others wait for
it until the rendezvous times out, and none of them says why.

How to fix
----------
torch-missing: activate the environment that the job runs in before both the doctor and the job
(`source .../bin/activate`, `conda activate`, the container image), or install the doctor into
that environment: it never changes the torch that is there.

When it is wrong
----------------
When the doctor runs in another environment than the job: then it examines the wrong one, and
this finding is how you notice.

References
----------
https://docs.pytorch.org/get-started/locally/
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import Check, Cluster, Context, Evidence, Finding, Kind, Layer, Scope

MISSING = Kind(
    code="torch-missing",
    layer=Layer.HOST,
    title="torch cannot be imported",
    why="the rank stops at its first line, and the others wait for it until the rendezvous ends",
    fix="activate the environment that the job runs in, or install nccl-doctor into it",
)


class TorchImport(Check):
    """Imports torch in a child."""

    name = "torch_import"
    layer = Layer.HOST
    scope = Scope.RANK
    kinds = (MISSING,)
    deadline_s = 60.0  # a cold import from a network file system

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Returns: `{"python", "version", "error"}`; error is None where the import worked."""
        ctx.breadcrumb("import torch")
        facts: dict[str, Any] = {"python": sys.executable, "version": None, "error": None}
        try:
            import torch
            import torch.distributed
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            facts["error"] = f"{type(error).__name__}: {error}"
        else:
            facts["version"] = str(torch.__version__)
            if not torch.distributed.is_available():
                facts["error"] = "this torch was built without torch.distributed"
        return facts

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Every rank whose torch does not load."""
        for rank, facts in cluster.facts(self.name):
            if facts["error"]:
                yield Finding(
                    MISSING,
                    f"{facts['error']} ({facts['python']})",
                    Evidence.rank_place(rank),
                    dict(facts),
                )
