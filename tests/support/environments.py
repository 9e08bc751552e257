"""Made-up hosts by their environment variables alone, and what check `environment` finds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nccl_doctor.api import Cluster, Finding, Severity
from nccl_doctor.checks.environment.gather import gather_variables
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster

CHECK = CHECKS["environment"]
NOWHERE = Path("/nonexistent")
READERS = {
    "torch": "2.13.0+cu130",
    "nccl": "2.30.7",
    "rocm": None,
    "deepspeed": True,
    "infiniband": False,
}

Env = Mapping[str, str]


def facts_of(env: Env, root: Path = NOWHERE, **readers: Any) -> dict[str, Any]:
    gathered = gather_variables(env, home=NOWHERE, root=root)
    seen: dict[str, Any] = json.loads(json.dumps({**READERS, **gathered, **readers}))
    return seen


def cluster_of(
    envs: Sequence[Env],
    *,
    nproc: int = 1,
    backend: str = "nccl",
    launcher: str = "torchrun",
    root: Mapping[int, Path] | None = None,
    of_rank: Mapping[int, Mapping[str, Any]] | None = None,
    **readers: Any,
) -> Cluster:
    """One participant for each environment, `nproc` on each host; `of_rank`: facts of one alone."""
    cluster = make_cluster(
        [f"nd{node}" for node in range(len(envs) // nproc)],
        nproc,
        check=CHECK.name,
        by_rank={
            rank: facts_of(
                env, (root or {}).get(rank, NOWHERE), **{**readers, **(of_rank or {}).get(rank, {})}
            )
            for rank, env in enumerate(envs)
        },
        backend=backend,
    )
    for rank in range(len(envs)):
        cluster = change_rank(cluster, rank, launch={"launcher": launcher})
    return cluster


def judge(envs: Sequence[Env], **how: Any) -> list[Finding]:
    return findings.judge(CHECK, cluster_of(envs, **how))


def told(found: Sequence[Finding]) -> set[tuple[str, str]]:
    return {(each.code, each.level.value) for each in found}


def only(found: Sequence[Finding], code: str) -> Finding:
    """The one finding of that code; all others are worth knowing at most."""
    (one,) = (each for each in found if each.code == code)
    assert all(each is one or each.level is Severity.INFO for each in found), found
    return one


def both(**env: str) -> list[Env]:
    """The same on two hosts."""
    return [env, env]
