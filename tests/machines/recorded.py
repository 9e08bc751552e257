"""What no made-up machine can answer: made-up facts, as a healthy machine would give them.

Torch with CUDA, a CUDA driver and groups of NCCL need a GPU; interfaces of IP, CPUs and limits are
those of the process that asks. A machine changes what differs there by `Host.tell`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from nccl_doctor.api import ALONE, Outcome, OutcomeStatus, Rank
from nccl_doctor.checks.group_speed.measured import NVLS
from nccl_doctor.model.codec import encode
from nccl_doctor.model.findings import Round
from nccl_doctor.toolkit.fabric.ports import rdma_ports
from nccl_doctor.toolkit.fabric.road import admitted, choose_road
from nccl_doctor.toolkit.gpu.devices import host_gpus, index_of_own
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.nccl.interface_choice import chosen, gloo_choice, nccl_choices
from nccl_doctor.toolkit.nccl.release import NcclRelease
from nccl_doctor.toolkit.nccl.survey import lacking_cards
from tests.machines.host import Gpu, Host
from tests.support import gpu_facts
from tests.support.timed_rounds import IDLE


class Build(NamedTuple):
    """A build of torch: its version, and of CUDA, ROCm and NCCL (or RCCL)."""

    torch: str
    cuda: str | None
    rocm: str | None
    nccl: str


_FOR_NVIDIA = Build("2.13.0+cu130", "13.0", None, "2.28.9")
_FOR_AMD = Build("2.13.0+rocm7.2", None, "7.2.26015", "2.27.7")
_PREFIX = 24
Facts = Mapping[str, Any]

NOT_HERE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "advertised_addresses",
            "clock",
            "duplicate_address",
            "firewall",
            "held_connections",
            "links",
            "master_addr",
            "master_firewall",
            "master_network",
            "own_address",
            "own_name",
            "port",
            "rail_reach",
            "rendezvous_endpoint",
            "retransmissions",
            "rp_filter",
            "uplink",
        ),
        "names, ports and links between hosts: the lab tests them with real sockets",
    ),
    **dict.fromkeys(
        ("compile_caches", "deepspeed_launch", "libraries", "temp_dir", "timeouts", "torch_import"),
        "the Python environment: the same on every machine",
    ),
}
"""Checks that are left out, and why: what they look at is no part of a made-up machine."""

OVER = ("cpus", "environment", "limits", "numa_calls")
"""Checks that are observed too: only some of their facts are those of the process that asks."""


def build_of(host: Host) -> Build:
    """The torch of a host."""
    return _FOR_AMD if host.amdsmi else _FOR_NVIDIA


def visible(host: Host, local: int) -> list[Gpu]:
    """The GPUs that a local rank sees."""
    if host.parts:
        gpu, uuid, size = host.parts[local]
        return [replace(gpu, name=f"{gpu.name} MIG 3g.40gb", uuid=uuid, memory=size)]
    if host.seen_by_rank is not None:
        return [host.gpus[index] for index in host.seen_by_rank(local)]
    told = host.env_of_rank(local).get("CUDA_VISIBLE_DEVICES", host.env.get("CUDA_VISIBLE_DEVICES"))
    if told is None:
        return host.gpus
    by_uuid = {gpu.uuid: gpu for gpu in host.gpus}
    words = [word for word in told.split(",") if word]
    return [by_uuid[w] if w in by_uuid else host.gpus[int(w)] for w in words]


def _devices(host: Host, local: int) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "name": gpu.name,
            "uuid": gpu.uuid,
            "memory_bytes": gpu.memory,
            "capability": list(gpu.capability),
            "arch": gpu.arch or None,
            "compute_mode": None if gpu.arch else 0,
            "bus_id": gpu.slot,
        }
        for index, gpu in enumerate(visible(host, local))
    ]


def alone(host: Host, local: int, ranks: int) -> dict[str, Facts | Outcome]:
    """Check → facts of a rank, or of its host; over what is observed where that is observed too."""
    devices, build = _devices(host, local), build_of(host)
    own = index_of_own(local, len(devices))
    gpu = visible(host, local)[own] if devices else None
    on_host = host_gpus(host.root)
    driver = on_host["driver"]
    columns = ["library", "version", "path", "from", "wheel", "by"]
    cpus = {"affinity": f"0–{host.cpus - 1}", "count": host.cpus, "allowed": host.cpus}
    limits = {"files": 1 << 20, "files_hard": 1 << 20, "locked": None, "processes": None}
    made: dict[str, Any] = {
        "software": {
            **build._asdict(),
            "torch_git": "0" * 40,
            "deepspeed": None,
            "accelerate": None,
            "transformers": None,
            "python": "3.12.3",
            "driver": driver,
        },
        "torch_nccl": {
            "torch": build.torch,
            "TORCH_DIST_USE_NCCL2": None,
            "TORCH_NCCL_USE_COMM_NONBLOCKING": None,
            "process_group": "nccl-legacy",
        },
        "nccl_library": {
            "built": build.nccl,
            "cuda": build.cuda,
            "wheels": [],
            "loaded": None,
            "in_front": [],
        },
        "driver_libraries": {"kernel": driver, "loaded": {"columns": columns, "rows": []}},
        "backend_device": gpu_facts.facts(
            host.node,
            local,
            devices=devices,
            device=own if devices else None,
            **build._asdict(),
            driver_cuda=build.cuda,
            arch_list=["gfx90a", "gfx942", "gfx950"] if build.rocm else gpu_facts.ARCHS,
            host_gpus=on_host,
            visible={k: v for k, v in host.env_of_rank(local).items() if k.endswith("_DEVICES")},
        ),
        "environment": {
            **{name: getattr(build, name) for name in ("torch", "nccl", "rocm")},
            "deepspeed": False,
        },
        "cpus": {**cpus, "quota": None, "machine": "x86_64"},
        "limits": {**limits, "tasks": None, "addresses": None, "stack": 8 << 20},
        "numa_calls": {"refused": None},
        "interfaces": _interfaces(host),
    }
    other, why = ("gpu_affinity", "without CUDA") if build.rocm else ("amd_gpus", "without ROCm")
    words = f"torch {build.torch} is built {why}"
    made[other] = Outcome(OutcomeStatus.SKIPPED, reason=words)
    if gpu is not None and gpu.uuid in host.gone:
        none = Outcome(OutcomeStatus.UNTESTED, reason="the GPU driver does not start")
        made |= {"gpu_work": none, "seeds": none}
    elif gpu is not None:
        made["gpu_work"] = gpu_facts.worked(0, device=own, model=gpu.name, uuid=gpu.uuid)
        is_ = {"exact": "0" * 16, "normal": "0" * 16}
        made["seeds"] = {
            "torch": build.torch,
            "cpu": {"is": "AVX512", **is_},
            "gpu": {"is": gpu.name, **is_},
        }
    for check, told in host.told.items():
        base = made.get(check, {})
        made[check] = {**base, **told} if isinstance(base, dict) else told
    return made


def _interfaces(host: Host) -> dict[str, Any]:
    """As `survey` has it, of the interfaces that the machine is said to have."""
    build = build_of(host)
    release = NcclRelease.parse(build.nccl, rccl=build.rocm is not None)
    settings = nccl_settings(host.env, root=host.root, release=release)
    prefixes = {address: _PREFIX for nic in host.nics for address in nic.addresses}
    ports = rdma_ports(host.root / "sys/class/infiniband")
    both = nccl_choices(host.nics, settings, prefixes, release)
    gloo = gloo_choice(host.nics, host.env, host.name, (host.address,))
    choices = (*both, gloo)
    nets = {a: f"{a.rpartition('.')[0]}.0/{_PREFIX}" for nic in host.nics for a in nic.addresses}
    return {
        "interfaces": [
            {**encode(nic), "subnets": [nets[a] for a in nic.addresses]} for nic in host.nics
        ],
        "choices": {each.library: encode(each) for each in choices},
        "listen": chosen(choices, host.nics),
        "nccl_data": choose_road(settings, admitted(settings, ports)).name,
        "lacking": lacking_cards(settings, host.nics),
        "asked": None,
    }


def together(check: str, round_: Round, group: tuple[int, ...], rank: Rank) -> Outcome:
    """What a member of a group observes in which all goes well."""
    if check == "deepspeed_groups":
        return Outcome(OutcomeStatus.SKIPPED, reason="DeepSpeed is not installed")
    return Outcome(OutcomeStatus.OK, facts=_together(check, round_, group, rank))


def _together(check: str, round_: Round, group: tuple[int, ...], rank: Rank) -> dict[str, Any]:
    if check not in ("group_speed", "network_speed"):
        return {
            "steps": ["init_process_group", "all_reduce"],
            "wrong": [],
            "lacking": {},
            "made": {},
        }
    facts: dict[str, Any] = {"slowing": {}, "nvls_off": {}}
    if round_.name in ("world", "again-ranks"):
        facts["compute"] = {"what": "a product", "seconds": 0.01, "cpu": dict(IDLE)}
    if rails := round_.params.get("rails"):
        seen = rank.host.facts["rails"][ALONE].facts["rails"]
        number = rails[str(rank.local_rank)]
        facts |= {"rail": number, "nic": seen[number]["name"]}
    if len(group) > 1:
        inside = round_.name in ("each-host", NVLS)
        size, seconds = 256 << 20, 0.0012 if inside else 0.003
        algbw = size / seconds
        one = {"bytes": size, "seconds": seconds, "times": 5, "cpu": dict(IDLE), "algbw": algbw}
        one["busbw"] = algbw * 2 * (len(group) - 1) / len(group)
        facts["all_reduce"] = [one]
    return facts
