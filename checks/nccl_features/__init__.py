"""Does a collective that fails with NCCL work with one of its features turned off?

What it checks
--------------
Nothing, if all groups that check `collectives` tried are good. If a group with NCCL hung, failed,
died of a signal or gave wrong sums every time, and no single rank was found to be the cause, the
smallest such group (within one host, if there is one) repeats the same collectives in new
processes, with one variable set each time: NCCL_NVLS_ENABLE=0 (groups of more than two ranks),
NCCL_CUMEM_HOST_ENABLE=0, then NCCL_P2P_DISABLE=1 within a host, or NCCL_IB_DISABLE=1 across hosts.
If it then works, it is tried once more without the variable: only a feature without which it works
and with which it fails again is reported. At most four rounds, none longer than
`--collective-timeout` and the start of a GPU driver.

Why it matters
--------------
An IOMMU between GPUs, a fabric manager that was restarted, a container without the right capability
and a broken RDMA fabric all look the same: a hang, or an error on a rank that is only a victim. The
feature that must be turned off shows which one it is.

How to fix
----------
The finding names what to check. Until that is fixed, export the variable that it names on all
ranks; the job then runs, but slower.

When it is wrong
----------------
A group that fails only sometimes may by chance fail with the variable unset and work with it set;
such a finding does not appear again in the next run. If two features are broken, turning off one
alone does not help, and nothing is reported. If finding the failing group took all of `--timeout`,
this check has no time left and is `unknown`: raise that option.
Not validated on hardware: tested with real ranks over gloo that failed unless a variable was set;
not with NCCL.

References
----------
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Level,
    Round,
    Scope,
    Skip,
    Step,
    export,
    look,
    shell,
)
from nccl_doctor.toolkit.groups.attempts import (
    FIRST,
    GROUP_READS,
    Attempt,
    attempt_deadline,
    attempts_of,
)
from nccl_doctor.toolkit.groups.exercise import SIZES, Exercise, ExerciseFacts
from nccl_doctor.toolkit.groups.forming import form_world

from .rules import Feature, failing_groups, judge_features, rounds_without

FEATURE_BROKEN = Kind(
    "nccl-feature-broken",
    Layer.DEVICE,
    "NCCL fails with one of its features, and works without it",
    "Every job that uses the feature hangs, fails or computes wrongly on these ranks.",
    "set the variable that the finding names, on all ranks, until its cause is fixed",
)

_UNTIL = "until it is fixed"
FEATURES = (
    Feature(
        "nvls",
        ("NCCL_NVLS_ENABLE", "0"),
        "NVLink SHARP (NVLS)",
        Fix(
            replace(export(NCCL_NVLS_ENABLE="0"), note=_UNTIL),
            look(
                shell("systemctl status nvidia-fabricmanager"),
                "restarted while GPUs were in use? Then reset the GPUs, or reboot the host",
            ),
        ),
        least=3,
    ),
    Feature(
        "cumem-host",
        ("NCCL_CUMEM_HOST_ENABLE", "0"),
        "host memory by CUDA's cuMem calls",
        Fix(
            replace(export(NCCL_CUMEM_HOST_ENABLE="0"), note=_UNTIL),
            alternatives=[
                Fix(
                    Step(
                        shell("# docker run --cap-add SYS_NICE"), note="in a container: NUMA calls"
                    )
                ),
                "upgrade the driver",
            ],
        ),
    ),
    Feature(
        "p2p",
        ("NCCL_P2P_DISABLE", "1"),
        "direct copies between GPUs of a host (P2P)",
        Fix(
            replace(export(NCCL_P2P_DISABLE="1"), note=_UNTIL),
            look(shell("nvidia-smi topo -p2p r"), "what the driver allows"),
            alternatives=["boot with iommu=pt, turn ACS off on PCIe switches, upgrade the driver"],
        ),
        least=2,
        across=False,
    ),
    Feature(
        "ib",
        ("NCCL_IB_DISABLE", "1"),
        "InfiniBand or RoCE",
        Fix(
            replace(export(NCCL_IB_DISABLE="1"), note=f"{_UNTIL}; sockets are much slower"),
            look(
                shell("ib_write_bw"),
                "on one of these hosts, and on another one with its name behind",
            ),
            alternatives=["look at GID index, PFC, and GPUDirect (NCCL_NET_GDR_LEVEL=LOC)"],
        ),
        least=2,
        inside=False,
    ),
)
"""The most specific one first: a broader one may turn off more."""


class NcclFeatures(Check):
    """Repeats what failed, with one feature of NCCL off at a time."""

    name = "nccl_features"
    layer = Layer.COLLECTIVE
    scope = Scope.RANK
    cost = "seconds"
    kinds = (FEATURE_BROKEN,)
    reads = GROUP_READS
    level = Level.STANDARD
    together = True
    forms_groups = True
    needs = (Layer.NAME, Layer.ROUTE, Layer.PORT, Layer.RANKS, Layer.DEVICE)
    of: ClassVar[str] = "collectives"
    """Name of the check whose groups these are."""

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """Rounds with one feature off each, and a last one with all on again.

        Raises:
            Skip: NCCL is not used, or nothing fails that this could explain.
        """
        if cluster.backend != "nccl":
            raise Skip(f"the backend is {cluster.backend}")
        before = self._before(cluster)
        if not cluster.complete or not failing_groups(before):
            raise Skip(
                f"check {self.of} found no group that fails every time without a known cause"
            )
        here = attempts_of(cluster, self.name)
        return list(rounds_without(before, here, FEATURES, attempt_deadline(cluster)))

    def observe(self, ctx: Context) -> ExerciseFacts:
        """Run what check `collectives` runs, with the variables of this round."""
        os.environ.update(ctx.params["env"])
        tester = Exercise(ctx.breadcrumb, form_world(ctx))
        tester.alone(ctx.round, None, ctx.position, len(ctx.group), SIZES[ctx.level])
        return tester.facts()

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on features without which a group works, and with which it fails."""
        if not cluster.complete or cluster.backend != "nccl":
            return
        before, here = self._before(cluster), attempts_of(cluster, self.name)
        limit_s = attempt_deadline(cluster)
        yield from judge_features(FEATURE_BROKEN, before, here, FEATURES, limit_s)

    def _before(self, cluster: Cluster) -> dict[str, list[Attempt]]:
        """The groups of several ranks that were tried; one rank alone is no measure for these."""
        found = attempts_of(cluster, self.of)
        return {name: attempts for name, attempts in found.items() if name != FIRST}
