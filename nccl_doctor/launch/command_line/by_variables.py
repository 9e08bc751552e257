"""Programs that start torchrun with options from variables: LLaMA-Factory and ms-swift.

The rules are those of llamafactory/launcher.py (0.9.4) and of swift/cli/main.py (3.9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nccl_doctor.launch.command_line import torchrun
from nccl_doctor.launch.command_line.job_line import JobLine, JobLineError, LineValue, number
from nccl_doctor.launch.identity import num_gpus

_TRUE = ("true", "y", "1")
_TRAINS = ("pt", "sft", "rlhf", "infer", "dpo", "orpo", "simpo")
"""Commands of swift that torchrun starts; all of its `megatron` are."""


def read_llamafactory(environ: Mapping[str, str]) -> JobLine | None:
    """Read what `llamafactory-cli train` makes of its variables.

    Returns: None where it starts one process, or leaves that to Ray.

    Raises:
        JobLineError: torchrun would refuse what it makes, or its hosts could not meet.
    """
    gpus = num_gpus(environ)
    others = _is_on(environ, "USE_RAY") or _is_on(environ, "USE_KT")
    forced = _is_on(environ, "FORCE_TORCHRUN") or _is_on(environ, "USE_MCA")
    if not (forced or (gpus > 1 and not others)):
        return None
    flags = _given(environ, ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"))
    flags.setdefault("nproc_per_node", LineValue(str(gpus), "NPROC_PER_NODE"))
    several = number(flags.get("nnodes", LineValue("1", "NNODES")), 1) > 1
    if several and "master_port" not in flags:
        raise JobLineError(
            "MASTER_PORT is not set: each host takes a free port of its own, and they do not meet; "
            "set it on all of them"
        )
    if "RDZV_ID" in environ:
        return _elastic(flags, environ)
    return _static(flags, environ)


def read_swift(
    words: Sequence[str], environ: Mapping[str, str], *, megatron: bool = False
) -> JobLine | None:
    """Read what `swift` or `megatron`, both of ms-swift, make of their variables.

    Returns: None where they start one process.

    Raises:
        JobLineError: torchrun would refuse what they make, or it is not what is meant.
    """
    trains = megatron or (words and words[0].replace("_", "-") in _TRAINS)
    if not trains or not {"NPROC_PER_NODE", "NNODES"} & set(environ):
        return None
    names = ("NPROC_PER_NODE", "MASTER_PORT", "NNODES", "NODE_RANK", "MASTER_ADDR")
    return _static(_given(environ, names), environ)


def _given(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, LineValue]:
    return {name.lower(): LineValue(environ[name], name) for name in names if name in environ}


def _static(flags: dict[str, LineValue], environ: Mapping[str, str]) -> JobLine:
    """Job with a node rank for each host; a default counts as the value of its variable."""
    notes: tuple[str, ...] = ()
    if number(flags.get("nnodes", LineValue("1", "NNODES")), 1) > 1:
        rank = environ.get("RANK", "0")
        if "node_rank" not in flags and rank != "0":
            raise JobLineError(
                f"RANK={rank} is not read, and NODE_RANK is not set: this host would be node 0; "
                "set NODE_RANK on each host, from 0"
            )
        if "node_rank" not in flags:
            notes = ("NODE_RANK is not set: every host then has node rank 0",)
        flags.setdefault("node_rank", LineValue("0", "NODE_RANK"))
        flags.setdefault("master_addr", LineValue("127.0.0.1", "MASTER_ADDR"))
    return torchrun.resolve("torchrun", flags, notes)


def _elastic(flags: dict[str, LineValue], environ: Mapping[str, str]) -> JobLine:
    """Job whose hosts meet by c10d, where RDZV_ID is set."""
    if {"MIN_NNODES", "MAX_NNODES"} <= set(environ):
        hosts = f"{environ['MIN_NNODES']}:{environ['MAX_NNODES']}"
        flags["nnodes"] = LineValue(hosts, "MIN_NNODES")
    address, port = flags.pop("master_addr", None), flags.pop("master_port", None)
    flags.pop("node_rank", None)
    place = f"{address.text if address else '127.0.0.1'}:{port.text if port else '0'}"
    job = torchrun.resolve(
        "torchrun",
        {
            **flags,
            **_given(environ, ("RDZV_ID", "MAX_RESTARTS")),
            "rdzv_backend": LineValue("c10d", "RDZV_ID"),
            "rdzv_endpoint": LineValue(place, "MASTER_ADDR"),
        },
    )
    return replace(job, sources={**job.sources, "master_port": "MASTER_PORT"})


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in _TRUE
