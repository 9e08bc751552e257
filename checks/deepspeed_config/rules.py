"""All problems of a DeepSpeed configuration, and of hosts that lack what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nccl_doctor.api import Cluster, Where

from .arithmetic import batch_problems
from .conflicts import conflict_problems
from .keys import key_problems
from .offload import offload_problems
from .table import Problem, Settings


class PlacedProblem(NamedTuple):
    """A problem with its place: a problem of the configuration itself has none."""

    problem: Problem
    where: Where = Where()


def judge_deepspeed(cluster: Cluster, check: str) -> Iterator[PlacedProblem]:
    """Problems of the job's configuration and of the hosts, from the facts of `check`.

    Facts of the check `memory` are used if present.
    """
    config = cluster.job.deepspeed_config
    if config is None:
        return
    seen = list(cluster.facts(check))
    versions = frozenset(facts["deepspeed"] for _, facts in seen if facts["deepspeed"])
    settings, mesh = Settings(config, versions), cluster.job.mesh
    for problem in (
        *key_problems(settings),
        *batch_problems(settings, cluster.world_size, mesh),
        *conflict_problems(settings, mesh),
    ):
        yield PlacedProblem(problem)
    memory = {rank.host.id: facts for rank, facts in cluster.facts("memory")}
    for rank, facts in seen:
        if facts["offload"] is not None:
            room = memory.get(rank.host.id)
            for problem in offload_problems(settings, facts["offload"], room, cluster.nnodes):
                yield PlacedProblem(problem, Where(hosts=(rank.host.label,)))
