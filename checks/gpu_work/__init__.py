"""Does each rank's GPU compute and copy without an error, and as fast as others of its model?

What it checks
--------------
Every rank makes a context on the GPU that it would take (LOCAL_RANK modulo the visible ones),
multiplies matrices whose product is known exactly (float32 and bfloat16), and copies memory to the
GPU, within it, and back, and to the GPU of the next rank of its host, unless NCCL_P2P_DISABLE=1 or
a GPU that allows one process at a time forbids it; where each rank sees only its own GPU, that
cannot be tried, and gpu-p2p-untested reports it.
Each rank does this in its own process: a GPU that hangs costs the deadline, and the others
continue. With --level full it keeps the GPU busy for about ten seconds, and measures twice:
bfloat16 products, copies within the GPU, and copies from and to pinned memory. During the products
the driver is asked for the clock, the temperature, and what holds the clock down (NVIDIA GPUs, with
nvidia-ml-py).

Why it matters
--------------
A GPU that hangs, or that fell off the bus, stops the first collective of the whole job, and the
other ranks only print that they wait. A GPU that computes wrongly silently spoils a run. A slow one
sets the speed of all. With an IOMMU or ACS in the way, and on some desktop boards, data from one
GPU to another never arrives, or arrives changed: then NCCL hangs right after its start, or adds up
wrong numbers.

How to fix
----------
Look for Xid and NVRM in `dmesg` of the host, run `nvidia-smi` and `dcgmi diag -r 3`; drain the
host. A slow GPU: `nvidia-smi -q -d PERFORMANCE,CLOCK,POWER` shows what holds it back. Two GPUs that
cannot send to each other: see check `gpu_direct`; NCCL_P2P_DISABLE=1 avoids it, but is slower.

When it is wrong
----------------
Another process that takes the GPU's memory or time makes it fail or look slow; with --level full
other checks of the run may do so in the first seconds, so the better of two measurements counts. A
GPU is compared with those of the same model: it is slow at 1.2 times their median time and far
outside their spread (copies from and to the host: at twice the time, because GPUs share switches
and memory there). Fewer than three GPUs of a model are compared only with published values, and so
are all where all are slow: below 0.5 of the published rate of products or 0.7 of that of memory;
and copies from and to the host below 0.3 of the PCIe link, where the driver reports it, divided by
the GPUs of the host that copy at once. A power limit set on purpose looks the same, and is named.
Ranks that share a GPU are not compared. Only neighbours copy to each other, in the way that torch
uses: NCCL may use another one. On a GPU with less than 2 GiB of free memory, or in a run with too
little time left, no speed is measured; the report says so.
That a GPU hangs, crashes or has an error is certain only where nothing but hardware makes the error
(uncorrectable ECC or NVLink errors); that it computes wrongly, where another GPU of its model does
not: otherwise the fault may be a library's, or another program's. A process that somebody stopped
or killed says nothing of its GPU.
Not validated on hardware: everything about GPUs here was written from sources, and tested with
torch on the CPU and on made-up clusters; no run on a GPU is on record yet.

References
----------
CUDA runtime API (cudaError, cudaGetErrorString), NVIDIA Xid catalogue, PyTorch documentation
(torch.cuda.Event, CUDA semantics); datasheets named in nccl_doctor/toolkit/gpu/gpupeaks.toml.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Evidence,
    Figure,
    Finding,
    Fix,
    Layer,
    Level,
    OutcomeStatus,
    Scope,
    Skip,
    Untested,
    Where,
    look,
    shell,
)
from nccl_doctor.toolkit.gpu.devices import (
    EXCLUSIVE_PROCESS,
    Device,
    index_of_own,
    see_gpus,
    torch_build,
)
from nccl_doctor.toolkit.gpu.ends import DRIVER_STEP as DRIVER
from nccl_doctor.toolkit.gpu.ends import certainty_of
from nccl_doctor.toolkit.gpu.nvml import STEP as ASKING_NVML
from nccl_doctor.toolkit.gpu.tables import gpu_error
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.shared_kinds import GPU_SLOW, GPU_UNHEALTHY

from .peers import P2P_BROKEN, P2P_UNTESTED, judge_peers
from .rates import judge_gpu_rates, rate_figures, rates_table
from .under_load import LoadReader
from .work import GPU_STEPS, DeviceWork, WrongElements, is_gpu_error

_TRY_S = 5.0
_PAUSE_S = 1.0
_RESERVE_S = 6.0
"""Part of the deadline for making contexts and buffers, and for reporting."""
_LEAST_S = 1.0
"""A shorter measurement is not reliable."""


class StepError(TypedDict):
    """The step that failed, and the text of the error."""

    step: str
    text: str


class PeerCopy(TypedDict):
    """The result of a copy to the GPU of the next rank."""

    uuid: str | None
    wrong: list[WrongElements]
    error: str | None


class _Rates(TypedDict, total=False):
    """The measurements as a table, if there are any."""

    rates: dict[str, Any]


class WorkFacts(_Rates):
    """The work of one GPU and its results.

    `peer` is None without another GPU to copy to; `under_load` is what the driver said during each
    of `tries`.
    """

    device: int
    model: str
    uuid: str | None
    context_s: float | None
    wrong: list[WrongElements]
    error: StepError | None
    peer: PeerCopy | None
    tries: list[dict[str, float]]
    under_load: list[dict[str, int]]


class GpuWorkFacts(WorkFacts):
    """Facts that `observe` returns; other checks read them."""

    start_s: float


class GpuWork(Check):
    """Some work for the GPU of every rank."""

    name = "gpu_work"
    layer = Layer.DEVICE
    scope = Scope.RANK
    cost = "seconds"
    instant_without_gpu = True
    level = Level.STANDARD
    kinds = (GPU_UNHEALTHY, P2P_BROKEN, P2P_UNTESTED, GPU_SLOW)
    reads = ("backend_device", "gpu_direct", "gpu_state")
    deadline_s = 45.0  # as long as a driver may take to start

    def observe(self, ctx: Context) -> GpuWorkFacts:
        """Let the GPU compute and copy, and with --level full measure it twice.

        Raises:
            Untested: the driver does not start, the GPU is taken, or all is well but its speed
                could not be measured though it was asked for.
        """
        if ctx.backend != "nccl":
            raise Skip(f"the backend is {ctx.backend}: the job's collectives use no GPU")
        ctx.breadcrumb("importing torch")
        build = torch_build()
        if not (build["cuda"] or build["rocm"]):
            raise Skip(f"torch {build['torch']} is built without CUDA")
        seen = see_gpus(build, lambda call: ctx.breadcrumb(DRIVER, call=call))
        if seen["driver_error"]:
            # backend_device starts the driver too, and its finding has the fix.
            raise Untested(f"the GPU driver does not start: {seen['driver_error']['text']}")
        if not seen["devices"]:
            raise Untested("torch sees no GPU")
        import torch

        torch.set_num_threads(1)  # a forked pool of threads would hang
        own = seen["devices"][index_of_own(ctx.launch.local_rank, len(seen["devices"]))]
        crumb = partial(ctx.breadcrumb, uuid=own["uuid"], model=own["name"])
        peer = _neighbour(ctx, seen["devices"], own)
        work = DeviceWork(crumb, torch.device("cuda", own["index"]))
        return {**_work(ctx, own, peer, work), "start_s": seen["start_s"]}

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """The GPU of each rank, and with --level full its rates."""
        for rank, facts in cluster.facts(self.name):
            name = f"GPU {facts['uuid'] or facts['device']}"
            yield Figure(name, facts["model"], Evidence.rank_place(rank))
        yield from rate_figures(cluster.facts(self.name))

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on every GPU by itself, then on the speeds of those that work."""
        ended = list(cluster.ended(self.name))
        said = _with_bad_driver(cluster) if ended else set()
        for item in ended:
            if not (item.rank.seat in said and item.outcome.last_step == DRIVER):
                yield from _ended(item)
        faulty, right = [], set()
        for rank, facts in cluster.facts(self.name):
            if facts["error"] or facts["wrong"]:
                faulty.append((rank, facts))
            else:
                right.add(facts["model"])
        for rank, facts in faulty:
            where = Evidence.rank_place(rank) | _device(facts["uuid"])
            yield from _faulty(where, facts, right)
        yield from judge_peers(cluster)
        yield from judge_gpu_rates(cluster.facts(self.name))


# Observing ----------------------------------------------------------------------------------------


def _neighbour(ctx: Context, devices: Sequence[Device], own: Device) -> Device | None:
    """The GPU of the next rank of the host; None without one, or if NCCL will not copy directly."""
    local, count = ctx.launch.local_rank or 0, ctx.launch.local_world_size or 1
    off = nccl_settings(ctx.env, root=ctx.root).get("NCCL_P2P_DISABLE")
    peer = devices[(local + 1) % count % len(devices)]
    if count < 2 or peer["index"] == own["index"] or (off is not None and off.value == "1"):
        return None
    # Our context there would keep out the rank that uses that GPU.
    return None if peer.get("compute_mode") == EXCLUSIVE_PROCESS else peer


def _work(ctx: Context, own: Device, peer: Device | None, work: DeviceWork) -> WorkFacts:
    facts: WorkFacts = {
        "device": own["index"],
        "model": own["name"],
        "uuid": own["uuid"],
        "context_s": None,
        "wrong": [],
        "error": None,
        "peer": None,
        "tries": [],
        "under_load": [],
    }
    unmeasured = ""
    try:
        facts["context_s"] = round(work.context(), 3)
        facts["wrong"] += work.products()
        facts["wrong"] += work.copies()
        if peer is not None and not facts["wrong"]:
            facts["peer"] = _copy_to(peer, work)
        if ctx.level is Level.FULL and not facts["wrong"]:
            load = LoadReader(own["uuid"], work.breadcrumb)
            try:
                _measure_twice(ctx, work, load, facts)
            except Untested as reason:
                unmeasured = str(reason)
            facts["wrong"] += work.products()  # once more, now that it is warm
    except RuntimeError as error:
        if not is_gpu_error(error):
            raise  # a mistake of this check: the engine reports it
        text = str(error).strip().splitlines()[0]
        meaning = gpu_error(text)
        if meaning is not None and meaning.healthy:
            unmeasured = f"{meaning.means}: {text}"
        else:
            facts["error"] = {"step": work.step, "text": text}
    copied = facts["peer"]
    is_bad_copy = copied is not None and bool(copied["error"] or copied["wrong"])
    if unmeasured and not (facts["wrong"] or facts["error"] or is_bad_copy):
        raise Untested(unmeasured)
    if facts["tries"]:
        facts["rates"] = rates_table(facts["model"], facts["tries"], facts["under_load"])
    return facts


def _copy_to(peer: Device, work: DeviceWork) -> PeerCopy | None:
    """The result of a copy to the other GPU; None if it has no free memory for it."""
    import torch

    facts: PeerCopy = {"uuid": peer["uuid"], "wrong": [], "error": None}
    try:
        facts["wrong"] = work.peer_copy(torch.device("cuda", peer["index"]), peer["uuid"])
    except RuntimeError as error:
        if not is_gpu_error(error):
            raise
        text = str(error).strip().splitlines()[0]
        meaning = gpu_error(text)
        if meaning is not None and meaning.healthy:
            return None
        facts["error"] = text
    return facts


def _measure_twice(ctx: Context, work: DeviceWork, load: LoadReader, facts: WorkFacts) -> None:
    """Two measurements with a pause between, into `tries` and `under_load`.

    Raises:
        Untested: too little time is left, or too little memory free.
    """
    import time

    left = ctx.left()
    budget = min(_TRY_S, (left - _RESERVE_S - _PAUSE_S) / 2)
    if budget < _LEAST_S:
        raise Untested(f"the speed of the GPU was not measured: only {left:.0f} s were left")
    tries: list[dict[str, float]] = []
    seen: list[dict[str, int]] = []
    for pause_s in (0.0, _PAUSE_S):
        time.sleep(pause_s)
        tries.append(work.measure(budget, lambda: seen.append(load.read())))
    facts["tries"], facts["under_load"] = tries, seen


# Judging ------------------------------------------------------------------------------------------


def _device(uuid: str | None) -> Where:
    return Where(devices=(uuid,) if uuid else ())


def _with_bad_driver(cluster: Cluster) -> set[int]:
    """Seats where backend_device reports that the driver does not start."""
    ended = {
        item.rank.seat
        for item in cluster.ended("backend_device")
        if item.outcome.last_step == DRIVER and certainty_of(item.outcome) is not None
    }
    facts = cluster.facts("backend_device")
    return ended | {rank.seat for rank, seen in facts if seen.get("driver_error")}


def _ended(item: Evidence) -> Iterator[Finding]:
    """The finding on a child that hung or died in a step that only GPU or driver can block."""
    end = item.outcome
    if end.last_step not in (DRIVER, ASKING_NVML, *GPU_STEPS):
        return
    if certainty_of(end) is None:
        return  # somebody stopped or killed the process: not a fault of the GPU
    if end.status is OutcomeStatus.HUNG:
        words = f"stuck in {end.last_step}: no end within {end.duration_s:.0f} s"
        words += f", process state {end.state}" if end.state else ""
        words += f", kernel wait {end.wchan}" if end.wchan not in ("", "0") else ""
    else:
        how = end.signal or f"exit code {end.exit_code}"
        words = f"the process died by {how} in {end.last_step}"
    crumb = end.breadcrumbs[-1]
    yield Finding(
        GPU_UNHEALTHY,
        words,
        item.where | _device(crumb.get("uuid")),
        {"breadcrumb": dict(crumb), "wchan": end.wchan, "log_tail": end.log_tail},
        confidence=Confidence.LIKELY,  # another program on the GPU may hold it up
    )


def _faulty(where: Where, facts: Mapping[str, Any], right: Collection[str]) -> Iterator[Finding]:
    """Errors and wrong results of one GPU.

    An error is certainly the GPU's where only hardware makes it; others also come from another
    program (MPS), or from what a container allows. A wrong result is, where another GPU of the
    model got it `right`; otherwise it may be a library's.
    """
    error = facts["error"]
    if error is not None:
        meaning = gpu_error(error["text"])
        means = f"; this means: {meaning.means}" if meaning else ""
        yield Finding(
            GPU_UNHEALTHY,
            f"{error['step']}: {error['text']}{means}",
            where,
            dict(error),
            fix=meaning.ask if meaning else "",
            confidence=Confidence.CERTAIN if meaning and meaning.hardware else Confidence.LIKELY,
        )
    for wrong in facts["wrong"]:
        yield Finding(
            GPU_UNHEALTHY,
            f"wrong {wrong['what']}: {wrong['count']} of {wrong['of']} elements, "
            f"{wrong['example']}",
            where,
            dict(wrong),
            fix=Fix(
                look(shell("dcgmi diag -r 3"), "drain the host before"),
                alternatives=["have the GPU replaced"],
            ),
            confidence=Confidence.CERTAIN if facts["model"] in right else Confidence.LIKELY,
        )
