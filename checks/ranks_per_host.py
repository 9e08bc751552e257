"""Do all hosts run the same number of ranks, and does their sum equal the world size?

What it checks
--------------
LOCAL_WORLD_SIZE of every host, compared with the other hosts and with the ranks that signed in
there, and the sum compared with WORLD_SIZE.

Why it matters
--------------
torch allows uneven hosts, and torchrun numbers ranks accordingly. Code that computes the host as
rank // ranks-per-host, or builds process groups from it, then groups the wrong ranks: they wait for
each other, or sum tensors that do not belong together.

How to fix
----------
Give every host the same --nproc-per-node. If hosts have different numbers of GPUs on purpose, build
process groups from host names, not from arithmetic on ranks.

When it is wrong
----------------
Uneven hosts may be intended: they are reported as information only. Numbers that do not add up are
a failure: the GPUs that ranks choose, and groups within a host, depend on them.

References
----------
PyTorch documentation of torchrun (--nproc-per-node, LOCAL_WORLD_SIZE).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Severity,
    Step,
    Where,
    number_range,
    odd_ones_out,
    shell,
)

NPROC = Kind(
    "nproc-differs",
    Layer.RANKS,
    "Hosts run different numbers of ranks",
    "torch allows it; code that computes the host as rank // ranks-per-host breaks.",
    Fix(
        Step(
            shell("# --nproc-per-node NUMBER"),
            On.EVERY,
            note="the same, unless it is meant otherwise",
        )
    ),
    Severity.INFO,
)
WRONG_SUM = NPROC.variant(
    title="LOCAL_WORLD_SIZE is not the number of ranks of its host",
    why="Programs that compute the place of a rank, or the data of a host, from LOCAL_WORLD_SIZE "
    "take the wrong one, or wait for ranks that do not exist.",
    fix="set LOCAL_WORLD_SIZE to the number of ranks on the host",
)


class RanksPerHost(Check):
    """Compares the numbers of ranks of the hosts with each other and with the world size."""

    name = "ranks_per_host"
    layer = Layer.RANKS
    kinds = (NPROC,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`local_world_size` that the launcher gave to this host, or None."""
        return {"local_world_size": ctx.launch.given("local_world_size")}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """A failure if the sum is not the world size; information if hosts are uneven."""
        if not cluster.complete and len(cluster.present_hosts) < 2:
            return  # only one host's own report
        hosts = [(host, cluster.ranks_on(host)) for host in cluster.present_hosts]
        said: dict[int, Any] = {}
        for rank in cluster.present:
            if rank.launch is not None:
                said.setdefault(rank.host.id, rank.launch.given("local_world_size"))
        if None in said.values() or len(said) < len(hosts):
            return
        total, odd = sum(said.values()), odd_ones_out(said)
        everybody = not cluster.absent and len(cluster.present) == cluster.world_size
        if everybody and total != cluster.world_size:
            blamed = [host for host, ranks in hosts if said[host.id] != len(ranks)]
            text = f"LOCAL_WORLD_SIZE adds up to {total}, WORLD_SIZE is {cluster.world_size}"
            kind, severity = WRONG_SUM, Severity.FAIL
        elif odd is not None:
            blamed = [host for host, _ in hosts if host.id in odd.places]
            text = f"ranks per host: {number_range([said[host.id] for host in blamed])}"
            text += "" if odd.tie else f", elsewhere {odd.usual}"
            kind, severity = NPROC, Severity.INFO
        else:
            return
        where = Where(hosts=tuple(sorted({host.label for host in blamed})))
        evidence = {"values": {host.label: said[host.id] for host, _ in hosts}}
        yield Finding(kind, text, where, evidence, severity=severity)
