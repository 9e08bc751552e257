"""Do the GPUs pass DCGM's diagnosis of the level that --with-dcgm gives?

What it checks
--------------
Only with `--with-dcgm LEVEL`: `dcgmi diag -r LEVEL -j` on every host at the same time, after all
hosts have signed in and while no other check uses the GPUs. Each test that DCGM reports as failed,
or with a warning, is named with the GPU and in DCGM's words. It needs `dcgmi` and a running host
engine (nv-hostengine). By NVIDIA's words level 1 takes seconds, 2 about two minutes, 3 about
fifteen, and 4 longer; the run has to have that time: `--timeout 600` for level 2, 2400 for level 3.

Why it matters
--------------
Level 2 and above put load on memory, PCIe, NVLink and the compute units for minutes, and so find
what shows only under load. Before a job of days that is time well spent, and before a job of hours
often not.

How to fix
----------
As the finding says; `dcgmi diag -r LEVEL` on the host repeats the test.

When it is wrong
----------------
DCGM's tests also fail for reasons that are not the GPU's: another program uses it, clocks or power
are limited by hand, a variable of CUDA, a missing library or permission. So a finding is only
likely, and takes no host out of service. Tests of rates (PCIe, bandwidth, targeted stress and
power) and of the software are warnings; failed tests of memory and of compute units are failures.
Tests that DCGM skips, because the model or the level has them not, are not counted. Where the run
has less time left than the level needs, the diagnosis is not started, and the check is unknown; one
that does not end in time is stopped (SIGTERM, on which dcgmi stops it on the host engine, too), and
the check is unknown. If the examination itself is killed meanwhile, the host engine may go on.
An earlier diagnosis is not read: `dcgmi` has no question for it. Its JSON goes to whoever started
it, nvvs.log is a debug log, and `dcgmi health` (check `dcgm`) knows nothing of it. Since DCGM 4.0
the host engine keeps the last error code of each test in memory (fields 350 to 363), but without
the GPU, the level and the words, until it ends.
Not validated on hardware: tested with a stand-in for `dcgmi` that prints what DCGM 2, 3 and 4 print
by their source code; no run beside DCGM is on record yet.

References
----------
NVIDIA DCGM user guide (DCGM Diagnostics); NVIDIA/DCGM, dcgmi/Diag.cpp and CommandLineParser.cpp of
2.4.7, 3.3.9 and 4.6.0; modules/diag/DcgmDiagManager.cpp (`UpdateDiagStatus`) of 4.6.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Layer,
    Round,
    Severity,
    Skip,
    Untested,
    Where,
    look,
    shell,
)
from nccl_doctor.system.programs import run_program
from nccl_doctor.toolkit.gpu.dcgm import (
    DiagResult,
    find_dcgmi,
    json_in,
    results_of,
    runtime_error,
)
from nccl_doctor.toolkit.gpu.kinds import DCGM_UNHEALTHY
from nccl_doctor.toolkit.shared_kinds import GPU_UNHEALTHY

DIAGNOSE = "diagnose"
_NEEDS_S = {1: 10.0, 2: 120.0, 3: 900.0, 4: 3600.0}
"""Seconds that a level takes at least, by the help of `dcgmi diag`; of level 4 it says only that it
is longer."""
_AT_MOST = 4
"""Times as long as that a level may take."""
_LEAST_S = 60.0
_RESERVE_S = 8.0
"""Time to stop a diagnosis, and to report."""
_OF_THE_GPU = ("memory", "memtest", "diagnostic", "sm stress", "pulse", "eud", "context create")
"""Tests of whether a GPU works at all; the others are about rates, or about the software."""
_GOOD = ("pass", "skip")
_MOST = 100


class DiagFacts(TypedDict):
    """Facts that `observe` returns: how many tests had a result, and those that did not pass."""

    level: int
    tests: int
    results: list[DiagResult]


class DcgmDiag(Check):
    """Runs DCGM's diagnosis on every host, where the user asks for it."""

    name = "dcgm_diag"
    layer = Layer.DEVICE
    cost = "minutes"
    kinds = (GPU_UNHEALTHY, DCGM_UNHEALTHY)
    together = True

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round, in which each host is a group of its own."""
        level = cluster.job.dcgm_level
        if level is None:
            raise Skip("--with-dcgm was not given")
        firsts = [cluster.first_on(host) for host in cluster.present_hosts]
        groups = tuple((rank.seat,) for rank in firsts if rank is not None)
        deadline_s = max(_LEAST_S, _AT_MOST * _NEEDS_S[level]) + _RESERVE_S
        return [Round(DIAGNOSE, groups, deadline_s, {"level": level})]

    def observe(self, ctx: Context) -> DiagFacts:
        """The results of `dcgmi diag`.

        Raises:
            Untested: there is no DCGM here, too little time, or no result.
        """
        level = int(ctx.params["level"])
        program = find_dcgmi(ctx.env)
        if program is None:
            raise Untested("dcgmi is not installed here")
        limit_s = ctx.left() - _RESERVE_S
        if limit_s < _NEEDS_S[level]:
            raise Untested(
                f"dcgmi diag -r {level} takes {_NEEDS_S[level]:.0f} s or more, and the run has "
                f"{max(0.0, limit_s):.0f} s left for it: give a longer --timeout"
            )
        ctx.breadcrumb("running DCGM's diagnosis", call=f"dcgmi diag -r {level} -j")
        said = run_program(program, ("diag", "-r", str(level), "-j"), ctx.env, limit_s)
        if said.problem:
            raise Untested(said.problem)
        answer = json_in(said.text)
        if answer is not None and (why := runtime_error(answer)):
            raise Untested(f"DCGM did not run the diagnosis: {why}")
        found = results_of(answer) if answer is not None else []
        if not any(one["status"] != "skip" for one in found):
            end = f"ended with {said.code}" if said.code else "ended"
            raise Untested(f"dcgmi diag -r {level} -j {end} without a result: {said.first_line}")
        bad = [one for one in found if one["status"] not in _GOOD]
        return {"level": level, "tests": len(found), "results": bad[:_MOST]}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each test of each GPU that did not pass."""
        for item in cluster.evidence(self.name, DIAGNOSE):
            facts = item.outcome.facts
            for one in facts.get("results", ()):
                yield _finding(item.rank.host.label, int(facts["level"]), one)


def _finding(host: str, level: int, one: DiagResult) -> Finding:
    name = one["test"].lower().replace("_", " ").removeprefix("gpu ").removesuffix(" test")
    broken = one["status"] == "fail" and bool(one["entity"]) and name in _OF_THE_GPU
    text = f"DCGM's diagnosis, level {level}, {one['test']}: {one['status']}"
    return Finding(
        GPU_UNHEALTHY if broken else DCGM_UNHEALTHY,
        f"{text}: {one['words']}" if one["words"] else text,
        Where(hosts=(host,), devices=(one["entity"],) if one["entity"] else ()),
        fix=Fix(
            look(
                shell("dcgmi diag -r {}", level), "while no program uses the GPUs: repeats the test"
            )
        ),
        severity=Severity.FAIL if broken else Severity.WARN,
        confidence=Confidence.LIKELY,
        # A limit, another program or a setting may have failed it.
        effects=(Effect.STAYS_IN_SERVICE,),
    )
