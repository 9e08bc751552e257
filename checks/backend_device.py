"""Can the backend use the GPUs: is there one for each rank, and does this torch build fit them?

What it checks
--------------
Whether torch is built with CUDA (or ROCm) and NCCL, whether the driver starts, how many GPUs the
host has, how many of them CUDA_VISIBLE_DEVICES leaves, which GPU each rank would take (by UUID),
whether the build holds code for that GPU, and whether torch, CUDA, NCCL, DeepSpeed, Python and the
driver are the same everywhere. GPUs are counted and asked for their names; no kernel is run.

Why it matters
--------------
A rank without a GPU of its own ends the job at its first collective, often only on that rank: the
others wait for it until the process group times out. Different NCCL versions refuse each other or
hang. A CPU build of torch in one container of many is found late, because everything imports.

How to fix
----------
Start as many ranks per host as it has GPUs, give each its own LOCAL_RANK, and call
torch.cuda.set_device(LOCAL_RANK) before init_process_group. Run one image on every host.

When it is wrong
----------------
The GPU of a rank is taken to be LOCAL_RANK modulo the visible GPUs, which is what torch 2.15 and
most scripts do; a script that chooses otherwise is not seen. Several ranks on one GPU are right
where NCCL_MULTI_RANK_GPU_ENABLE=1, or a NCCL_HOSTID of its own for each rank, says that it is
meant; that is reported as information. Without persistence mode a driver may need longer to start
than this check waits.

References
----------
NVIDIA CUDA driver API (CUresult, cuInit), CUDA compatibility guide, CUDA programming guide (binary
and PTX compatibility), PyTorch documentation of torch.cuda and torch.distributed.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from nccl_doctor.api import (
    ALONE,
    OLDEST_DRIVER,
    VISIBLE,
    Check,
    Cluster,
    Context,
    Difference,
    Evidence,
    Finding,
    Host,
    Kind,
    Layer,
    OutcomeStatus,
    Rank,
    Scope,
    Severity,
    Where,
    arch_runs_on,
    differences,
    host_gpus,
    major,
    minor_of,
    number_range,
    odd_ones_out,
    public,
    start_cuda_driver,
    torch_devices,
)

DRIVER_STEP = "starting the GPU driver"

MISMATCH = Kind(
    "backend-device-mismatch",
    Layer.DEVICE,
    "Backend and torch build or hardware do not fit",
    "NCCL moves data between GPUs only, gloo keeps it in host memory: the wrong one fails at init "
    "or wastes the GPUs.",
    "Install a torch build with CUDA for nccl, or use the backend gloo on machines without GPUs.",
)
NO_NCCL = Kind(
    "nccl-unavailable",
    Layer.DEVICE,
    "This torch build has no NCCL",
    "init_process_group('nccl') fails on this rank while the others wait for it.",
    "Install a torch build with NCCL (the official Linux CUDA wheels have it).",
)
MISSING = Kind(
    "gpu-missing",
    Layer.DEVICE,
    "Fewer GPUs than needed",
    "A rank without a GPU of its own fails, or takes another rank's.",
    "Start as many ranks as the host has GPUs, or bring the missing GPU back: look for Xid in "
    "`dmesg`, compare `nvidia-smi -L` with `lspci`; in a container, ask for all GPUs.",
)
HIDDEN = Kind(
    "gpu-hidden",
    Layer.DEVICE,
    "A variable hides GPUs from ranks",
    "A process sees only the GPUs that CUDA_VISIBLE_DEVICES names, numbered anew from 0.",
    "Set one CUDA_VISIBLE_DEVICES, with a GPU for each rank, for all ranks of a host; or unset it.",
)
SHARED = Kind(
    "gpu-shared-by-ranks",
    Layer.DEVICE,
    "Several ranks on one GPU",
    "NCCL refuses two ranks of one communicator on one GPU (`Duplicate GPU detected`); the ranks "
    "that do not notice hang.",
    "Give each rank of a host its own LOCAL_RANK, and call torch.cuda.set_device(LOCAL_RANK) "
    "before init_process_group.",
)
UNHEALTHY = Kind(
    "gpu-unhealthy",
    Layer.DEVICE,
    "The GPU driver does not work",
    "Every process that touches a GPU on this host fails or hangs with it.",
    "Look for Xid and NVRM in `dmesg`, run `nvidia-smi`; drain and reboot the host.",
)
DRIVER = Kind(
    "driver-mismatch",
    Layer.DEVICE,
    "Driver and torch build do not fit",
    "CUDA cannot be initialised, so no rank on this host has a GPU.",
    "Upgrade the NVIDIA driver, or install a torch build for an older CUDA.",
)
ARCH = Kind(
    "arch-unsupported",
    Layer.DEVICE,
    "This torch build has no code for the GPU",
    "The first kernel fails with `no kernel image is available for execution on the device`.",
    "Install a torch build whose torch.cuda.get_arch_list() covers the GPU.",
)
VERSION = Kind(
    "version-differs",
    Layer.DEVICE,
    "Versions differ between ranks",
    "NCCL refuses or hangs between different versions; different torch versions do not promise to "
    "understand each other.",
    "Run the same image, or the same locked environment, on every host.",
    Severity.WARN,
)
DIFFERS = Kind(
    "gpu-differs",
    Layer.DEVICE,
    "GPUs differ between hosts",
    "The slowest GPU sets the pace, the smallest memory the batch size.",
    "Take hosts with the same GPUs, or accept the pace of the slowest.",
    Severity.WARN,
)

_FABRIC = (
    "systemctl start nvidia-fabricmanager (its version must equal the driver's), then "
    "`nvidia-smi -q | grep -A2 Fabric` until it says Completed"
)
_DRIVER_ERRORS = {
    34: (DRIVER, "take the CUDA `stubs` folder out of LD_LIBRARY_PATH: it hides the real libcuda"),
    35: (DRIVER, ""),
    36: (DRIVER, ""),
    801: (DRIVER, "use a driver that supports this GPU here (vGPU: licence and CUDA enabled)"),
    802: (UNHEALTHY, _FABRIC),
    803: (DRIVER, "reboot, or reload the nvidia modules: kernel module and libcuda must be equal"),
    804: (DRIVER, "take the `cuda/compat` folder out of LD_LIBRARY_PATH, or upgrade the driver"),
}
"""CUresult → what it is and what to type; others are `gpu-unhealthy`."""


class BackendDevice(Check):
    """Backend, torch build, driver and GPUs, by every rank."""

    name = "backend_device"
    layer = Layer.DEVICE
    scope = Scope.RANK
    cost = "seconds"
    kinds = (
        MISMATCH, NO_NCCL, MISSING, HIDDEN, SHARED, UNHEALTHY, DRIVER, ARCH, VERSION, DIFFERS,
    )  # fmt: skip
    deadline_s = 45.0  # eight GPUs without persistence mode need about 20 s to wake

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Build, versions and GPUs as this rank sees them; see `nccl_doctor.gpus` for shapes."""
        import torch
        from torch import distributed

        has_nccl = distributed.is_available() and distributed.is_nccl_available()
        on_host = host_gpus()
        facts: dict[str, Any] = {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "torch_git": torch.version.git_version,
            "cuda": torch.version.cuda,
            "rocm": torch.version.hip,
            "nccl_built": has_nccl,
            "gloo_built": distributed.is_available() and distributed.is_gloo_available(),
            "nccl": None,
            "wheels": _wheels(),
            "visible": {name: ctx.env[name] for name in VISIBLE if name in ctx.env},
            "host_gpus": on_host,
            "driver_cuda": None,
            "driver_error": None,
            "devices": [],
            "device": None,
            "arch_list": [],
        }
        if has_nccl and hasattr(torch._C, "_nccl_version"):
            facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version()[:3])
        if not facts["cuda"] and not facts["rocm"]:
            return facts
        ctx.breadcrumb(DRIVER_STEP, call="cuInit", gpus=_count(facts))
        if facts["cuda"]:
            started = start_cuda_driver()
            facts["driver_cuda"], facts["driver_error"] = started["driver_cuda"], started["error"]
        if facts["driver_error"] is None:
            ctx.breadcrumb(DRIVER_STEP, call="torch.cuda.init", gpus=_count(facts))
            seen = torch_devices()
            facts["devices"], facts["driver_error"] = seen["devices"], seen["error"]
            facts["arch_list"] = list(torch.cuda.get_arch_list())
        if facts["devices"] and ctx.launch.local_rank is not None:
            facts["device"] = ctx.launch.local_rank % len(facts["devices"])
        return facts

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Each rank alone, then the ranks of each host, then hosts against each other."""
        seen = {rank.seat: (rank, facts) for rank, facts in cluster.facts(self.name)}
        yield from _wedged(cluster.evidence(self.name, ALONE))
        for rank, facts in seen.values():
            found = _backend(cluster, facts)
            if found is not None:
                yield found.replaced(where=Evidence.rank_place(rank))
            yield from _arch(cluster, rank, facts)
        short: set[int] = set()
        for host in cluster.present_hosts:
            mine = [item for item in seen.values() if item[0].host.id == host.id]
            lacking = _too_few(cluster, host, mine)
            if lacking is not None:
                short.add(host.id)
                yield lacking
            elif not all(facts["devices"] for _, facts in mine):
                short.add(host.id)
            elif cluster.backend == "nccl":
                yield from _visible_differs(mine)
        if cluster.backend == "nccl":
            yield from _shared(seen.values(), short)
        yield from _versions(cluster, seen)
        yield from _models(cluster, seen, short)


def _wheels() -> dict[str, str]:
    """Installed versions by metadata alone: importing deepspeed may start compilers."""
    names = ("deepspeed", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _count(facts: Mapping[str, Any]) -> int:
    """GPUs of the host, as far as this process's container shows them."""
    gpus = facts["host_gpus"]
    return int(gpus["nodes"] or gpus["proc"] or gpus["kfd"])


def _hiding(facts: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in facts["visible"].items())


def _for_gpus(cluster: Cluster) -> Severity:
    """A job over gloo starts without its GPUs."""
    return Severity.FAIL if cluster.backend == "nccl" else Severity.WARN


def _wedged(evidence: Iterable[Evidence]) -> Iterator[Finding]:
    for item in evidence:
        end = item.outcome
        if end.status not in (OutcomeStatus.HUNG, OutcomeStatus.DIED):
            continue
        if not end.last_step.startswith(DRIVER_STEP):
            continue  # it ended before it touched a GPU: not the driver's fault
        call = end.breadcrumbs[-1].get("call", "cuInit")
        how = "did not return" if end.status is OutcomeStatus.HUNG else "killed the process"
        detail = f", process state {end.state}" if end.state else ""
        detail += f", {end.signal}" if end.signal else ""
        yield Finding(
            UNHEALTHY,
            f"{call} {how}{detail}",
            item.where,
            {"breadcrumb": end.last_step, "wchan": end.wchan, "log_tail": end.log_tail},
        )


def _backend(cluster: Cluster, facts: Mapping[str, Any]) -> Finding | None:
    """What keeps one rank from using the backend; the lowest cause only. The place is added."""
    build, gpus = f"torch {facts['torch']}", _count(facts)
    code = (facts["driver_error"] or {}).get("code", 100)
    if code != 100 and (gpus or (code is not None and cluster.backend == "nccl")):
        return _driver(cluster, facts)
    accelerated = facts["cuda"] or facts["rocm"]
    if cluster.backend == "gloo":
        if not facts["gloo_built"]:
            return Finding(MISMATCH, f"backend gloo, but {build} is built without gloo")
        usable = len(facts["devices"]) or (0 if accelerated else gpus)
        if not usable:
            return None
        text = f"backend gloo, but the host has {usable} {'GPU' if usable == 1 else 'GPUs'}"
        text += "" if accelerated else f" and {build} is built without CUDA"
        fix = "init_process_group(backend='nccl')" if accelerated else MISMATCH.fix
        return Finding(MISMATCH, text, fix=fix, severity=Severity.WARN)
    if cluster.backend != "nccl":
        return None
    if not accelerated:
        text = f"backend nccl, but {build} is built without CUDA"
        fix = f"install the CUDA build of torch {public(facts['torch'])} in this environment"
        return Finding(MISMATCH, text, fix=fix if gpus else "use the backend gloo: no GPU here")
    if not facts["nccl_built"]:
        return Finding(NO_NCCL, f"backend nccl, but {build} is built without NCCL")
    if facts["devices"]:
        return None
    if gpus and facts["visible"]:
        names = " ".join(facts["visible"])
        return Finding(HIDDEN, f"{_hiding(facts)} hides all {gpus} GPUs", fix=f"unset {names}")
    if gpus:
        return Finding(MISSING, f"none of {gpus} GPUs is usable: the driver reports no device")
    fix = "docker run --gpus all, or a pod limit nvidia.com/gpu; without GPUs use the backend gloo"
    return Finding(MISSING, "no GPU: no /dev/nvidia<N>, no /dev/kfd", fix=fix)


def _driver(cluster: Cluster, facts: Mapping[str, Any]) -> Finding:
    error, cuda = facts["driver_error"], facts["cuda"]
    kernel = facts["host_gpus"]["driver"]
    kind, fix = _DRIVER_ERRORS.get(error["code"], (UNHEALTHY, ""))
    number = "" if error["code"] is None else f" ({error['code']})"
    text = f"{error['name']}{number}: {error['text']}"
    runs, needs = major(facts["driver_cuda"]), major(cuda)
    if runs is not None and needs is not None and runs < needs:
        kind = DRIVER
        oldest = OLDEST_DRIVER.get(needs, f"one for CUDA {needs}")
        text = f"driver {kernel} runs CUDA up to {facts['driver_cuda']}, torch needs CUDA {cuda}"
        fix = f"upgrade the NVIDIA driver to {oldest} or newer, or install torch for CUDA {runs}"
    elif error["name"] == "libcuda.so.1":
        kind, text = DRIVER, f"libcuda.so.1 cannot be loaded beside kernel driver {kernel}"
        fix = "install libcuda of that version; in a container NVIDIA_DRIVER_CAPABILITIES=all"
    return Finding(kind, text, fix=fix, severity=_for_gpus(cluster), evidence=dict(error))


def _arch(cluster: Cluster, rank: Rank, facts: Mapping[str, Any]) -> Iterator[Finding]:
    mine = _own(facts)
    built = facts["arch_list"]
    if mine is None or not built:
        return
    sm = mine["arch"] or "sm_" + "".join(str(part) for part in mine["capability"])
    if sm in built or any(arch_runs_on(arch, mine["capability"]) for arch in built):
        return
    where = Evidence.rank_place(rank) | Where(devices=(mine["uuid"],) if mine["uuid"] else ())
    text = f"{mine['name']} is {sm}, torch {facts['torch']} is built for {' '.join(built)}"
    fix = f"install a torch build with {sm} in torch.cuda.get_arch_list()"
    yield Finding(ARCH, text, where, fix=fix, severity=_for_gpus(cluster))


def _own(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The GPU that this rank would take."""
    index = facts["device"]
    return None if index is None else dict(facts["devices"][index])


def _on_host(facts: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """UUID → model, over what all ranks of one host see together."""
    return {
        device["uuid"] or f"cuda:{device['index']}": device["name"]
        for seen in facts
        for device in seen["devices"]
    }


def _sharing_is_meant(ranks: Sequence[Rank]) -> bool:
    allowed = all(rank.env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" for rank in ranks)
    ids = [rank.env["NCCL_HOSTID"] for rank in ranks if "NCCL_HOSTID" in rank.env]
    return allowed or (len(ids) == len(ranks) and len(set(ids)) == len(ids))


def _too_few(
    cluster: Cluster, host: Host, mine: Sequence[tuple[Rank, Mapping[str, Any]]]
) -> Finding | None:
    """Fewer GPUs than local ranks, or than the configuration expects.

    Nothing where nccl sees none at all: then every rank has its own finding.
    """
    ranks = cluster.ranks_on(host)
    gpus = len(_on_host(facts for _, facts in mine))
    wanted = int(cluster.expected.get("gpus_per_host", 0))
    per_rank = cluster.backend == "nccl" and gpus > 0 and not _sharing_is_meant(ranks)
    need = max(len(ranks) if per_rank else 0, wanted)
    if not mine or gpus >= need or (cluster.backend == "nccl" and not gpus):
        return None
    facts = mine[0][1]
    who = f"{len(ranks)} local ranks" if per_rank and need > wanted else f"expected {need} per host"
    without = [r for r in ranks if per_rank and (r.local_rank or 0) >= gpus]
    where = Where(hosts=(host.name,) if host.name else ())
    for rank in without:
        where |= Evidence.rank_place(rank)
    evidence = {"visible": gpus, "needed": need, "host_gpus": facts["host_gpus"]}
    if facts["visible"] and _count(facts) >= need:
        text = f"{_hiding(facts)} leaves {gpus} of {_count(facts)} GPUs; {who}"
        return Finding(HIDDEN, text, where, evidence, f"unset {' '.join(facts['visible'])}")
    text = f"{gpus} visible {'GPU' if gpus == 1 else 'GPUs'}, {who}"
    fix = f"--nproc-per-node {gpus}, or: {MISSING.fix}" if per_rank else ""
    return Finding(MISSING, text, where, evidence, fix)


def _visible_differs(mine: Sequence[tuple[Rank, Mapping[str, Any]]]) -> Iterator[Finding]:
    odd = odd_ones_out({rank.seat: _hiding(facts) or "unset" for rank, facts in mine})
    taken = {(_own(facts) or {}).get("uuid") or rank.seat for rank, facts in mine}
    if odd is None or len(taken) < len(mine):
        return  # ranks that share a GPU because of it have their own finding
    where = Where()
    for rank, _ in mine:
        if rank.seat in odd.places:
            where |= Evidence.rank_place(rank)
    sides = [f"{_hiding(facts) or 'unset'} (local rank {rank.local_rank})" for rank, facts in mine]
    text = f"differs between ranks of one host: {', '.join(sides)}"
    yield Finding(HIDDEN, text, where, severity=Severity.WARN)


def _shared(
    seen: Iterable[tuple[Rank, Mapping[str, Any]]], short: Iterable[int]
) -> Iterator[Finding]:
    """Ranks by UUID. On a host that is short of GPUs sharing is only the consequence."""
    users: dict[str, list[tuple[Rank, Mapping[str, Any]]]] = defaultdict(list)
    for rank, facts in seen:
        mine = _own(facts)
        if mine is not None and mine["uuid"] and rank.host.id not in short:
            users[mine["uuid"]].append((rank, facts))
    for uuid, sharers in users.items():
        ranks = [rank for rank, _ in sharers]
        if len(ranks) < 2:
            continue
        where = Where(devices=(uuid,))
        for rank in ranks:
            where |= Evidence.rank_place(rank)
        one_host = len({rank.host.id for rank in ranks}) == 1
        severity = Severity.FAIL if one_host else Severity.WARN
        model = (_own(sharers[0][1]) or {})["name"]
        yield Finding(
            SHARED,
            f"{len(ranks)} ranks use the same {model}",
            where,
            {
                "local_ranks": [rank.local_rank for rank in ranks],
                "visible": [facts["visible"] for _, facts in sharers],
            },
            severity=Severity.INFO if _sharing_is_meant(ranks) else severity,
        )


def _stack(facts: Mapping[str, Any], same_torch: bool) -> dict[str, str]:
    """Component → version; what a rank does not have is not compared."""
    wheels = facts["wheels"]
    cuda = facts["cuda"] or (f"ROCm {facts['rocm']}" if facts["rocm"] else None)
    stack = {
        "torch": public(facts["torch"]),
        "torch built from": (facts["torch_git"] or "")[:12] if same_torch else "",
        "CUDA": cuda,
        "NCCL": facts["nccl"],
        "DeepSpeed": wheels.get("deepspeed", "not installed"),
        "Python": minor_of(facts["python"]),
        # Releases of one branch are meant to be mixed while a fleet is upgraded.
        "NVIDIA driver branch": (facts["host_gpus"]["driver"] or "").split(".")[0],
    }
    return {name: value for name, value in stack.items() if value}


def _versions(
    cluster: Cluster, seen: Mapping[int, tuple[Rank, Mapping[str, Any]]]
) -> Iterator[Finding]:
    same = len({public(facts["torch"]) for _, facts in seen.values()}) == 1
    stacks = {seat: _stack(facts, same) for seat, (_, facts) in seen.items()}
    for odd in differences(stacks):
        where = Where()
        for seat in odd.places:
            where |= Evidence.rank_place(seen[seat][0])
        sides = {
            name: {value: _ranks(seen[seat][0] for seat in seats) for value, seats in side.items()}
            for name, side in odd.sides.items()
        }
        yield Finding(
            VERSION,
            _tie(sides)
            if odd.tie
            else f"{_words(odd.values)}; the others have {_words(odd.usual)}",
            where,
            {"ranks": sides},
            severity=_severity(cluster, odd),
        )


def _words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _ranks(ranks: Iterable[Rank]) -> str:
    return number_range([rank.seat if rank.rank is None else rank.rank for rank in ranks])


def _tie(components: Mapping[str, Mapping[str, str]]) -> str:
    parts = []
    for name, sides in components.items():
        texts = [f"{version} on {ranks}" for version, ranks in sides.items()]
        parts.append(f"{name} {', '.join(texts)}")
    return f"a tie, by rank: {'; '.join(parts)}"


def _severity(cluster: Cluster, odd: Difference) -> Severity:
    """NCCL refuses another version; torch keeps its wire formats within a minor version."""
    torch_minors = {minor_of(version) for version in odd.sides.get("torch", {})}
    nccl = "NCCL" in odd.sides and cluster.backend == "nccl"
    return Severity.FAIL if nccl or len(torch_minors) > 1 else Severity.WARN


def _models(
    cluster: Cluster, seen: Mapping[int, tuple[Rank, Mapping[str, Any]]], short: Iterable[int]
) -> Iterator[Finding]:
    """Hosts whose GPUs are unlike the others'; those that lack some have their own finding."""
    gpus: dict[int, str] = {}
    names = {host.id: host.name for host in cluster.present_hosts if host.id not in short}
    for host in names:
        models = Counter(_on_host(f for r, f in seen.values() if r.host.id == host).values())
        if models:
            gpus[host] = ", ".join(f"{count} x {name}" for name, count in sorted(models.items()))
    odd = odd_ones_out(gpus)
    for host in odd.places if odd else ():
        usual = f"the others have {odd.usual}" if odd and odd.usual else "a tie between hosts"
        yield Finding(DIFFERS, f"{gpus[host]}; {usual}", Where(hosts=(names[host] or "",)))
