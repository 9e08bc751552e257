"""Can the backend use the GPUs: is there one for each rank, and does this torch build fit them?

What it checks
--------------
Whether torch is built with CUDA (or ROCm) and NCCL; whether the driver starts; how many GPUs the
host has, and whether nouveau holds them instead of NVIDIA's driver; how many of them
CUDA_VISIBLE_DEVICES leaves; which GPU each rank would take (by UUID), and which one torch would
choose by default; whether LOCAL_RANK is among the visible GPUs; whether the torch build holds code
for the GPU; whether hosts have the same GPUs, and whether local ranks take them in the same order.
The check counts the GPUs and reads their names; it runs no kernel.

Why it matters
--------------
A rank without its own GPU stops the job at its first collective. Often only that rank prints an
error, and the others wait for it until the process group times out. A CPU build of torch in one
container of many is found late, because every import works.

How to fix
----------
Start as many ranks per host as it has GPUs, give each its own LOCAL_RANK, and call
torch.cuda.set_device(LOCAL_RANK) before init_process_group. NCCL alone cannot send CPU tensors (`No
backend type associated with device type cpu`): a job that also sends CPU tensors needs
init_process_group("cpu:gloo,cuda:nccl").

When it is wrong
----------------
The check assumes that a rank takes GPU LOCAL_RANK modulo the number of visible GPUs, as torch 2.15
and Accelerate do; a rank that sees one GPU takes that one. It does not see a script that chooses
differently. Older torch chooses a GPU by itself in a barrier; this matters only for scripts that
call a barrier before they set a device. Parts of one GPU (MIG) are recognised by its PCI address,
which check `gpu_affinity` reads.
Several ranks on one GPU are correct where NCCL_MULTI_RANK_GPU_ENABLE=1, or a different NCCL_HOSTID
for each rank, shows that this is intended; the finding is then only information. Without
persistence mode a driver may need longer to start than this check waits: that it does not work is
then only likely. So is every error of CUDA that not only hardware makes: a device file is missing,
a limit, another program, a library that is being replaced. A process that was stopped or killed
while CUDA started says nothing of a GPU.
Equal GPUs in another order (gpu-order-differs) do no harm where all of them reach each other and
the network equally well. Where RDMA ports are known, check `gpu_affinity` compares those instead.
Not validated on hardware: everything about GPUs here was written from sources and tested on made-up
clusters; no run on a GPU is on record yet.

References
----------
NVIDIA CUDA driver API (CUresult, cuInit), CUDA compatibility guide, CUDA programming guide (binary
and PTX compatibility), PyTorch documentation of torch.cuda and torch.distributed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Evidence,
    Finding,
    Fix,
    Kind,
    Layer,
    OutcomeStatus,
    Scope,
    Setup,
    Severity,
    Where,
    odd_ones_out,
    place_of,
)
from nccl_doctor.toolkit.gpu.devices import (
    VISIBLE,
    HostGpus,
    SeenGpus,
    TorchBuild,
    count_gpus,
    host_gpus,
    index_of_own,
    see_gpus,
    torch_build,
)
from nccl_doctor.toolkit.gpu.driver import compat_libcuda
from nccl_doctor.toolkit.gpu.ends import DRIVER_STEP, certainty_of
from nccl_doctor.toolkit.gpu.lost import (
    facts_by_host,
    hosts_without_gpu,
    manager_is_down,
    unless_serviced,
)
from nccl_doctor.toolkit.hosts import WHO, who_has_what
from nccl_doctor.toolkit.shared_kinds import (
    DRIVER_MISMATCH,
    FABRIC_MANAGER_DOWN,
    GPU_DIFFERS,
    GPU_UNHEALTHY,
)
from nccl_doctor.toolkit.versions import OLDEST_DRIVER, arch_runs_on, major, public

from .mapping import (
    GPU_GUESSED,
    GPU_HIDDEN,
    GPU_SHARED,
    LOCAL_RANK_BEYOND,
    SeenByRank,
    judge_mapping,
    sharing_is_meant,
)
from .missing import HELD, MISSING, fix_of_missing, no_gpu, ranks_for, show_all
from .orders import GPU_ORDER, judge_orders

MISMATCH = Kind(
    "backend-device-mismatch",
    Layer.DEVICE,
    "The backend does not fit the torch build or the hardware",
    "NCCL moves data between GPUs only; gloo works in host memory. The wrong one fails at init "
    "or leaves the GPUs unused.",
    "Install a torch build with CUDA for nccl, or use the backend gloo on hosts without GPUs.",
)
NO_NCCL = Kind(
    "nccl-unavailable",
    Layer.DEVICE,
    "This torch build has no NCCL",
    "init_process_group('nccl') fails on this rank, and the others wait for it.",
    "Install a torch build with NCCL (the official Linux CUDA wheels have it).",
)
ARCH = Kind(
    "arch-unsupported",
    Layer.DEVICE,
    "This torch build has no code for the GPU",
    "The first kernel fails with `no kernel image is available for execution on the device`.",
    "Install a torch build whose torch.cuda.get_arch_list() covers the GPU.",
)
GPU_HELD = GPU_UNHEALTHY.variant(
    title="A setting or another process keeps CUDA from a GPU",
    why="In compute mode Exclusive Process a GPU serves one process: the rank that comes second "
    "fails.",
    fix=HELD,
)
NO_CUDA_HERE = DRIVER_MISMATCH.variant(title="The GPU driver does not offer CUDA on this GPU")
_DRIVER_ERRORS = {
    34: (
        DRIVER_MISMATCH,
        "take the folder cuda/lib64/stubs out of LD_LIBRARY_PATH: it hides the real libcuda",
    ),
    35: (DRIVER_MISMATCH, ""),
    36: (DRIVER_MISMATCH, ""),
    46: (GPU_HELD, ""),
    801: (
        NO_CUDA_HERE,
        "use a driver that supports this GPU here (vGPU: licence and CUDA enabled)",
    ),
    802: (FABRIC_MANAGER_DOWN, ""),
    803: (
        DRIVER_MISMATCH,
        "reboot, or reload the nvidia modules: kernel module and libcuda must have the same "
        "version",
    ),
    804: (
        DRIVER_MISMATCH,
        "take the folder cuda/compat out of LD_LIBRARY_PATH, or upgrade the driver",
    ),
}
"""CUresult → kind and fix; all others are `gpu-unhealthy`."""
_OF_HARDWARE = (214, 220)  # uncorrectable errors of a GPU's memory, and of its NVLinks
"""CUresults that no container, limit, setting or other process makes. Others, such as 999 (unknown
error), also come where /dev/nvidia-uvm is missing, memory is short, or a driver is replaced: then
`gpu-unhealthy` is only likely, unless `gpu_state` has seen why."""


class BackendDeviceFacts(TorchBuild, SeenGpus):
    """Facts that `observe` returns; other checks read them."""

    host_gpus: HostGpus
    visible: dict[str, str]
    device: int | None


class BackendDevice(Check):
    """Backend, torch build, driver and GPUs, as every rank sees them."""

    name = "backend_device"
    layer = Layer.DEVICE
    scope = Scope.RANK
    cost = "seconds"
    instant_without_gpu = True
    kinds = (
        MISMATCH,
        NO_NCCL,
        MISSING,
        GPU_HIDDEN,
        GPU_SHARED,
        LOCAL_RANK_BEYOND,
        GPU_GUESSED,
        GPU_ORDER,
        GPU_UNHEALTHY,
        DRIVER_MISMATCH,
        ARCH,
        FABRIC_MANAGER_DOWN,
        GPU_DIFFERS,
    )
    reads = ("amd_gpus", "driver_libraries", "gpu_affinity", "gpu_state", "mps", "nccl_library")
    deadline_s = 45.0  # eight GPUs without persistence mode need about 20 s to wake

    def observe(self, ctx: Context) -> BackendDeviceFacts:
        """Build and GPUs as this rank sees them; `visible`: the variables that hide GPUs;
        `device`: the index of the GPU that it would take.
        """
        build, on_host, local = torch_build(), host_gpus(ctx.root), ctx.launch.local_rank
        seen = see_gpus(
            build,
            lambda call: ctx.breadcrumb(DRIVER_STEP, call=call, gpus=count_gpus(on_host)),
        )
        own = None
        if seen["devices"] and local is not None:
            own = index_of_own(local, len(seen["devices"]))
        visible = {name: ctx.env[name] for name in VISIBLE if name in ctx.env}
        return {**build, **seen, "host_gpus": on_host, "visible": visible, "device": own}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Each rank alone, then the ranks of each host, then hosts against each other."""
        without, seen = hosts_without_gpu(cluster), facts_by_host(cluster)
        at = {host.label: seen[host.id] for host in cluster.hosts if host.id in seen}
        lost = {host.label for host in cluster.hosts if host.id in without}
        wanted = _wanted(cluster)
        short = {
            rank.host.label
            for rank, facts in (cluster.facts(self.name) if wanted else ())
            if count_gpus(facts["host_gpus"]) < wanted
        }
        for found in self._found(cluster):
            # While one GPU of the host does not answer, CUDA starts on fewer GPUs or on none.
            if found.code in ("gpu-unhealthy", "gpu-missing") and lost & {*found.where.hosts}:
                found = found.replaced(explained_by="gpu-lost")
            if found.code == "gpu-missing" and not short.issuperset(found.where.hosts):
                found = found.replaced(effects=(*found.effects, Effect.STAYS_IN_SERVICE))
            by_nvml = at.get(found.where.hosts[0], {}) if found.where.hosts else {}
            # Without NVSwitches here the fabric is that of other hosts, or of a hypervisor.
            if found.code == "fabric-manager-down" and manager_is_down(
                by_nvml.get("fabric_manager")
            ):
                found = found.replaced(confidence=Confidence.CERTAIN)
            yield unless_serviced(found, by_nvml)

    def sections(self, cluster: Cluster) -> Iterator[Setup]:
        """Models of GPUs and how many of each, as the first rank of a host sees them."""
        for host in cluster.present_hosts:
            first = cluster.first_on(host)
            for outcome in () if first is None else first.facts.get(self.name, {}).values():
                devices = outcome.facts.get("devices") or ()
                names = Counter(str(one.get("name")) for one in devices if isinstance(one, Mapping))
                models = ", ".join(f"{count} x {name}" for name, count in names.items())
                yield Setup("gpus", models or "none", host.id)

    def _found(self, cluster: Cluster) -> Iterator[Finding]:
        yield from _wedged(cluster.ended(self.name), facts_by_host(cluster))
        hosts: dict[int, list[SeenByRank]] = defaultdict(list)
        elsewhere = any(count_gpus(facts["host_gpus"]) for _, facts in cluster.facts(self.name))
        for rank, facts in cluster.facts(self.name):
            one = SeenByRank.of(rank, facts)
            hosts[rank.host.id].append(one)
            for found in (_backend(cluster, one, elsewhere), _arch(cluster, one)):
                if found is not None:
                    yield found.replaced(where=found.where | place_of([rank]))
        fit = []  # where a host lacks GPUs, sharing and another number are the consequence
        models = []
        for mine in hosts.values():
            gpus = _on_host(mine)
            lacking = _too_few(cluster, mine, len(gpus))
            if lacking is not None:
                yield lacking
            elif all(one.uuids for one in mine):
                fit.append(mine)
                models.append(tuple(sorted(gpus.values())))
        if cluster.backend == "nccl":
            yield from judge_mapping(cluster, fit)
            yield from judge_orders(cluster, fit)
        yield from _models(zip(fit, models, strict=True))


_GIVEN = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES")
_NO_GPUS = ("", "-1", "NoDevFiles", "void", "none")


def _for_gpus(cluster: Cluster) -> Severity:
    """The severity of a GPU fault: a job over gloo starts without its GPUs."""
    return Severity.FAIL if cluster.backend == "nccl" else Severity.WARN


def _wedged(
    evidence: Iterable[Evidence], by_nvml: Mapping[int, Mapping[str, Any]]
) -> Iterator[Finding]:
    """Findings on processes that ended in a call to the driver, without a signal from outside."""
    for item in evidence:
        end, sure = item.outcome, certainty_of(item.outcome)
        # A process that ends before it touches a GPU did not end because of the driver.
        if end.last_step == DRIVER_STEP and sure is not None:
            hung, seen = end.status is OutcomeStatus.HUNG, by_nvml.get(item.host.id, {})
            how = "did not return" if hung else "killed the process"
            detail = f", process state {end.state}" if end.state else ""
            detail += f", {end.signal}" if end.signal else ""
            yield Finding(
                GPU_UNHEALTHY,
                f"{end.breadcrumbs[-1]['call']} {how}{detail}",
                item.where,
                {"breadcrumb": end.last_step, "wchan": end.wchan, "log_tail": end.log_tail},
                # A crash may be that of a library that is just being replaced; and GPUs that
                # sleep between jobs are woken one after the other.
                confidence=sure if hung and not _sleeps(seen) else Confidence.LIKELY,
            )


def _sleeps(seen: Mapping[str, Any]) -> bool:
    """True if a GPU has no persistence mode, by what `gpu_state` saw of its host."""
    return any(gpu.get("persistence") == 0 for gpu in seen.get("gpus", ()))


def _backend(cluster: Cluster, one: SeenByRank, elsewhere: bool) -> Finding | None:
    """The lowest cause that keeps one rank from using the backend; the caller adds the place.

    `elsewhere`: some host of the cluster shows GPUs.
    """
    facts, accelerated = one.facts, one.facts["cuda"] or one.facts["rocm"]
    code = (facts["driver_error"] or {"code": 100})["code"]  # 100: it works, but sees no GPU
    if code != 100 and (one.on_host or (code is not None and cluster.backend == "nccl")):
        return _driver(cluster, one)
    cuda_build = f"install the CUDA build of torch {public(facts['torch'])} in this environment"
    if cluster.backend == "gloo":
        if not facts["gloo_built"]:
            fix = "install an official torch build: all of them have gloo"
            return Finding(MISMATCH, f"the backend is gloo, but {one.build} lacks it", fix=fix)
        usable = len(facts["devices"]) or (0 if accelerated else one.on_host)
        text = f"the backend is gloo, but the host has {usable} {'GPU' if usable == 1 else 'GPUs'}"
        text += "" if accelerated else f" and {one.build} is built without CUDA"
        fix = "init_process_group('nccl'), or 'cpu:gloo,cuda:nccl' if the job also sends CPU "
        fix = f"{fix}tensors" if accelerated else f"{cuda_build}, and use nccl"
        return Finding(MISMATCH, text, fix=fix, severity=Severity.WARN) if usable else None
    if not accelerated:
        text = f"the backend is nccl, but {one.build} is built without CUDA"
        fix = cuda_build
        if not one.on_host and _wanted(cluster):  # that is what to repair, and torch after it
            return Finding(MISMATCH, text, fix=fix, explained_by=MISSING.code)
        if not (one.on_host or _should_have_gpus(cluster, one, elsewhere)):
            fix = "use the backend gloo: no GPU here"
        elif not one.on_host:
            text += ", and it sees no GPU"
            fix = Fix(text=fix, alternatives=["in a container: request the GPUs too"])
        return Finding(MISMATCH, text, fix=fix)
    if not facts["nccl_built"]:
        return Finding(NO_NCCL, f"the backend is nccl, but {one.build} is built without NCCL")
    if facts["devices"]:
        return None
    gpus = one.on_host
    if gpus and facts["visible"]:
        fix = show_all(facts)
        return Finding(GPU_HIDDEN, f"{one.hiding} hides all {gpus} GPUs", fix=fix)
    if gpus:
        text = f"none of the {gpus} GPUs is usable: the driver reports no device"
        return Finding(MISSING, text, fix=fix_of_missing(facts))
    return no_gpu(facts, needed=_should_have_gpus(cluster, one, elsewhere))


def _should_have_gpus(cluster: Cluster, one: SeenByRank, elsewhere: bool) -> bool:
    """True if a host without a visible GPU should have some: as the configuration says, or other
    hosts have (`elsewhere`), or the scheduler gave it some.
    """
    given = {name: one.rank.env.get(name, "") for name in _GIVEN}
    if given["SLURM_GPUS_ON_NODE"] == "0":
        del given["SLURM_GPUS_ON_NODE"]
    return elsewhere or bool(_wanted(cluster)) or not set(given.values()).issubset(_NO_GPUS)


def _driver(cluster: Cluster, one: SeenByRank) -> Finding:
    facts = one.facts
    error, kernel = facts["driver_error"], facts["host_gpus"]["driver"]
    kind, fix = _DRIVER_ERRORS.get(error["code"], (GPU_UNHEALTHY, ""))
    number = "" if error["code"] is None else f" ({error['code']})"
    text = f"{error['name']}{number}: {error['text']}"
    runs, needs = major(facts["driver_cuda"]), major(facts["cuda"])
    if runs is not None and needs is not None and runs < needs:
        kind, newest = DRIVER_MISMATCH, facts["driver_cuda"]
        compat = compat_libcuda(cluster, one.rank)
        driver = f"driver {kernel}"
        if compat is not None:  # it answers in place of the driver's own
            driver = f"{compat['path']} ({compat['version']}; the kernel module is {kernel})"
        text = f"{driver} supports CUDA up to {newest}, torch needs CUDA {facts['cuda']}"
        oldest = OLDEST_DRIVER.get(needs, f"one for CUDA {needs}")
        fix = f"upgrade the NVIDIA driver to {oldest} or newer, or install torch for CUDA {runs}"
    elif error["name"] == "libcuda.so.1":
        kind, text = DRIVER_MISMATCH, f"libcuda.so.1 cannot be loaded; kernel driver is {kernel}"
        fix = "install that libcuda; in a container, set NVIDIA_DRIVER_CAPABILITIES to all"
    sure = Effect.DRAINS not in kind.effects or error["code"] in _OF_HARDWARE
    return Finding(
        kind,
        text,
        fix=fix,
        severity=_for_gpus(cluster),
        evidence=dict(error),
        confidence=Confidence.CERTAIN if sure else Confidence.LIKELY,
    )


def _arch(cluster: Cluster, one: SeenByRank) -> Finding | None:
    own, built = one.own, one.facts["arch_list"]
    if own is None or not built:
        return None
    sm = own["arch"] or _sm(*own["capability"])
    if sm in built or any(arch_runs_on(arch, own["capability"]) for arch in built):
        return None
    text = f"{own['name']} is {sm}, torch {one.facts['torch']} is built for {' '.join(built)}"
    where = Where(devices=(own["uuid"],) if own["uuid"] else ())
    fix = f"install a torch build with {sm} in torch.cuda.get_arch_list()"
    return Finding(ARCH, text, where, fix=fix, severity=_for_gpus(cluster))


@lru_cache(maxsize=64)
def _sm(*capability: int) -> str:
    return "sm_" + "".join(str(part) for part in capability)


def _on_host(mine: Iterable[SeenByRank]) -> dict[str, str]:
    """UUID → model of every GPU that any rank of one host sees."""
    lists = {one.uuids: one.facts["devices"] for one in mine}  # mostly all see the same
    return {
        device["uuid"] or f"cuda:{device['index']}": device["name"]
        for devices in lists.values()
        for device in devices
    }


def _wanted(cluster: Cluster) -> int:
    """Number of GPUs that the configuration expects on every host; 0 if it says nothing."""
    return int(cluster.expected.get("gpus_per_host", 0))


def _too_few(cluster: Cluster, mine: Sequence[SeenByRank], gpus: int) -> Finding | None:
    """The finding on a host with fewer GPUs than local ranks, or than the configuration expects;
    `gpus`: how many its ranks see together.

    None where nccl sees no GPU at all: then every rank has its own finding, but for a torch that is
    not built for GPUs.
    """
    facts, host = mine[0].facts, mine[0].rank.host
    ranks, wanted = cluster.ranks_on(host), _wanted(cluster)
    if gpus >= max(len(ranks), wanted):
        return None
    all_gpus = count_gpus(facts["host_gpus"])
    per_rank = cluster.backend == "nccl" and not sharing_is_meant(ranks)
    need = max(len(ranks) if per_rank else 0, wanted)
    said = cluster.backend == "nccl" and not gpus
    if said and wanted and not all_gpus and not (facts["cuda"] or facts["rocm"]):
        text = f"no GPU, expected {wanted} per host"
        evidence = {"visible": 0, "needed": wanted, "host_gpus": facts["host_gpus"]}
        return Finding(MISSING, text, Where(hosts=(host.label,)), evidence, fix_of_missing(facts))
    if gpus >= need or said:
        return None
    if per_rank and all_gpus >= need and _are_apart(mine):
        return None  # who shares a GPU, or has none, is named
    who = f"{len(ranks)} local ranks" if per_rank and need > wanted else f"expected {need} per host"
    without = place_of(r for r in ranks if per_rank and (r.local_rank or 0) >= gpus)
    where = Where(hosts=(host.label,)) | without
    evidence = {"visible": gpus, "needed": need, "host_gpus": facts["host_gpus"]}
    if facts["visible"] and all_gpus >= need:
        text = f"{mine[0].hiding} leaves {gpus} of {all_gpus} GPUs; {who}"
        return Finding(GPU_HIDDEN, text, where, evidence, show_all(facts))
    text = f"{gpus} visible {'GPU' if gpus == 1 else 'GPUs'}, {who}"
    words = fix_of_missing(facts)
    launch = mine[0].rank.launch
    launcher = launch.launcher if launch else ""
    fix = ranks_for(gpus, launcher, cluster.nnodes, words) if per_rank else words
    return Finding(MISSING, text, where, evidence, fix)


def _are_apart(mine: Iterable[SeenByRank]) -> bool:
    """True if ranks of one host were given GPUs of their own, and do not see those of others."""
    return len({one.sees for one in mine if one.sees}) > 1


def _models(hosts: Iterable[tuple[Sequence[SeenByRank], tuple[str, ...]]]) -> Iterator[Finding]:
    """Findings on hosts whose GPUs differ from those of most hosts; each with its sorted models."""
    gpus: dict[int, tuple[str, ...]] = {}
    labels = {}
    for mine, models in hosts:
        if len(models) < len(mine) and _are_apart(mine):
            continue  # one of them has the GPU of another, and nobody sees its own
        host = mine[0].rank.host
        gpus[host.id] = models
        labels[host.id] = host.label
    odd = odd_ones_out(gpus)
    if odd is None:
        return
    shown = {models: _in_words(models) for models in set(gpus.values())}
    who = who_has_what((labels[host], shown[models]) for host, models in gpus.items())
    for place in odd.places:
        text = who
        if odd.usual:
            text = f"{shown[gpus[place]]}; the others have {shown[odd.usual]}"
        yield Finding(GPU_DIFFERS, text, Where(hosts=(labels[place],)), {WHO: who})


def _in_words(models: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(models).items())
