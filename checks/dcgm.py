"""Does DCGM, where it watches this host, find its GPUs healthy?

What it checks
--------------
On a host with `dcgmi` and a running host engine (nv-hostengine) that watches the GPUs' health:
`dcgmi health -c -j`, which says what the engine has seen so far of memory, PCIe, NVLink, heat,
power, InfoROM, driver and NVSwitches. It reads samples that are there; it starts no test and sets
no watch, and a job that runs on the GPUs is not disturbed. Its diagnosis is check `dcgm_diag`.

Why it matters
--------------
DCGM watches all the time, and so has seen what happened while nobody examined the host: links that
recovered from errors, heat under the load of the last job.

How to fix
----------
As the finding says, in DCGM's own words; `dcgmi health -c` shows the same, `dcgmi diag -r 2` tests
the GPUs while no job uses them.

When it is wrong
----------------
DCGM counts from when its watches began: what it saw may be over, or have been the fault of an
earlier job. So each finding is only likely, a warning at most, and takes no host out of service;
what is wrong now, check `gpu_state` reads from the driver itself. DCGM numbers GPUs as the driver
did when the host engine started. Where no rank uses the GPU, the finding is information. The check
is skipped where there is no `dcgmi`, where no host engine answers (as in most containers), where
health watches are off, and where `dcgmi` itself says that it cannot answer.
Not validated on hardware: tested with a stand-in for `dcgmi` that prints what DCGM 3 and 4 print by
their source code; no run beside DCGM is on record yet.

References
----------
NVIDIA DCGM user guide (Health and Diagnostics); NVIDIA/DCGM, dcgmi/Health.cpp of 2.4.7, 3.3.9 and
4.6.0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    Severity,
    Skip,
    Untested,
    Where,
    look,
    shell,
)
from nccl_doctor.system.programs import run_program
from nccl_doctor.toolkit.gpu.dcgm import (
    UNWATCHED,
    Incident,
    find_dcgmi,
    incidents_of,
    is_unreachable,
    json_in,
    overall_health,
    refusal,
)
from nccl_doctor.toolkit.gpu.kinds import DCGM_UNHEALTHY, GPU_THROTTLED, NVLINK_DOWN, NVLINK_ERRORS
from nccl_doctor.toolkit.shared_kinds import GPU_UNHEALTHY, PCIE_ERRORS

_RESERVE_S = 5.0
_LIMIT_S = 10.0
_FIX = Fix(
    look(shell("dcgmi health -c"), "as it is now"),
    look(shell("dcgmi diag -r 2"), "while no job uses the GPUs"),
)


class DcgmFacts(TypedDict):
    """Facts that `observe` returns."""

    overall: str
    incidents: list[Incident]


class Dcgm(Check):
    """The health of the GPUs as DCGM has seen it, once per host."""

    name = "dcgm"
    layer = Layer.DEVICE
    cost = "seconds"
    instant_without_gpu = True
    kinds = (GPU_UNHEALTHY, GPU_THROTTLED, NVLINK_DOWN, NVLINK_ERRORS, PCIE_ERRORS, DCGM_UNHEALTHY)
    reads = ("backend_device", "gpu_state")
    deadline_s = _LIMIT_S + _RESERVE_S

    def observe(self, ctx: Context) -> DcgmFacts:
        """The answer of `dcgmi health -c -j`.

        Raises:
            Skip: there is no DCGM here, or it watches nothing.
            Untested: it did not answer, or not as this version expects.
        """
        if ctx.backend != "nccl":
            raise Skip(f"the backend is {ctx.backend}: the job's collectives use no GPU")
        program = find_dcgmi(ctx.env)
        if program is None:
            raise Skip("dcgmi is not installed here")
        ctx.breadcrumb("asking DCGM", call="dcgmi health -c -j")
        limit_s = max(1.0, min(_LIMIT_S, ctx.left() - _RESERVE_S))
        said = run_program(program, ("health", "-c", "-j"), ctx.env, limit_s)
        if said.problem:
            raise Untested(said.problem)
        if is_unreachable(said):
            raise Skip(f"no DCGM host engine answers here: {said.first_line}")
        if UNWATCHED in said.text.lower():
            raise Skip("DCGM watches no GPU here (dcgmi health -s a, by the administrator)")
        answer = json_in(said.text)
        overall = overall_health(answer) if answer is not None else None
        if answer is None and (why := refusal(said)):
            raise Skip(f"DCGM does not answer the question here: {why}")
        if answer is None or overall is None:
            end = f"ended with {said.code}" if said.code else "ended"
            raise Untested(f"dcgmi health -c -j {end} and said: {said.first_line}")
        return {"overall": overall, "incidents": incidents_of(answer)}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each system of each GPU that DCGM does not find healthy."""
        names = {
            rank.host.id: {
                str(gpu["index"]): str(gpu["uuid"]) for gpu in facts["gpus"] if "uuid" in gpu
            }
            for rank, facts in cluster.facts("gpu_state")
        }
        taken: dict[int, list[str]] = defaultdict(list)
        for rank, facts in cluster.facts("backend_device"):
            own = facts["device"]
            if own is not None and facts["devices"][own]["uuid"]:
                taken[rank.host.id].append(facts["devices"][own]["uuid"])
        for rank, facts in cluster.facts(self.name):
            host = rank.host
            # Only where the GPU of every rank is known, another one is nobody's.
            whole = len(taken[host.id]) == len(cluster.ranks_on(host))
            for seen in facts["incidents"]:
                yield _finding(
                    host, seen, names.get(host.id, {}), taken[host.id] if whole else None
                )
            if not facts["incidents"] and facts["overall"] != "Healthy":
                text = f"DCGM: overall health {facts['overall']}, and no incident is listed"
                yield _likely(DCGM_UNHEALTHY, text, Where(hosts=(host.label,)))


def _finding(
    host: Host, seen: Incident, names: Mapping[str, str], taken: Collection[str] | None
) -> Finding:
    """The finding on one incident.

    Args:
        host: where it is.
        seen: what DCGM says.
        names: number of a GPU → its UUID, as far as known.
        taken: UUIDs of the GPUs that ranks take; None if not known of each rank.
    """
    uuid = names.get(seen["entity"]) if seen["group"] == "GPU" else None
    device = uuid or f"{seen['group']} {seen['entity']}"
    text = f"DCGM, {seen['system']}: {seen['health']}"
    text += f": {seen['words']}" if seen["words"] else ""
    found = _likely(_kind(seen), text, Where(hosts=(host.label,), devices=(device,)))
    if uuid and taken is not None and uuid not in taken:
        return found.replaced(
            message=f"{text}; no rank uses this GPU",
            fix="nothing for this job: inform the administrator of the host",
            severity=Severity.INFO,
        )
    return found


def _likely(kind: Kind, text: str, where: Where) -> Finding:
    return Finding(
        kind,
        text,
        where,
        fix=_FIX,
        severity=Severity.WARN,
        confidence=Confidence.LIKELY,
        effects=(Effect.STAYS_IN_SERVICE,),  # it may be long over
    )


def _kind(seen: Incident) -> Kind:
    """The kind of the same cause, where there is one."""
    system, words = seen["system"].lower(), seen["words"].lower()
    if seen["group"] != "GPU":
        return DCGM_UNHEALTHY
    if system.startswith("memory"):
        return GPU_UNHEALTHY
    if system.startswith("thermal") or (system.startswith("power") and "violation" in words):
        return GPU_THROTTLED
    if system.startswith("nvlink"):
        return NVLINK_DOWN if "down" in words or "are up out of" in words else NVLINK_ERRORS
    return PCIE_ERRORS if system.startswith("pcie") and "replay" in words else DCGM_UNHEALTHY
