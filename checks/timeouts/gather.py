"""Sources of time-outs on this host: variables, versions, and the defaults of libraries."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.api import Job
from nccl_doctor.system.programs import installed
from nccl_doctor.toolkit.c10d import rendezvous_of
from nccl_doctor.toolkit.versions import USE_NCCL2

VARIABLES = (
    "DEEPSPEED_TIMEOUT",
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    USE_NCCL2,
    "WANDB__SERVICE_WAIT",
)
_RDZV_KEYS = ("timeout", "join_timeout", "read_timeout")
_DEEPSPEED_DEFAULT = re.compile(
    r"^default_pg_timeout\s*=\s*timedelta\(\s*minutes\s*=\s*"
    r"(?P<variable>int\(\s*os\.getenv\(\s*['\"]DEEPSPEED_TIMEOUT['\"],\s*default\s*=\s*)?"
    r"(?P<minutes>\d+)",
    re.MULTILINE,
)


class Gathered(TypedDict):
    """Facts that `gather_timeouts` returns."""

    torch: str
    defaults: dict[str, float | None]
    deepspeed: dict[str, Any] | None
    wandb: str | None
    launcher: str
    rdzv: dict[str, Any]
    variables: dict[str, str]


def gather_timeouts(
    env: Mapping[str, str],
    launcher: str,
    before: Callable[[str], None],
    job: Job | None = None,
) -> Gathered:
    """Facts on time-outs, as plain data.

    Args:
        env: the environment of the job.
        launcher: as in `Launch`.
        before: called with the name of each step that may take long, before it.
        job: may know the options of torchrun, from its command.

    Returns:
        `torch`: its version. `defaults`: seconds of init_process_group's time-out, `nccl` for that
        backend and `other` for the rest; None if this torch does not define it.
        `deepspeed`: None, or `{"version", "minutes", "reads_variable"}`: its default, None where
        unknown, and whether it knows DEEPSPEED_TIMEOUT. `wandb`: version or None.
        `launcher`, `rdzv`: who starts the job; torchrun's `{"backend", "conf", "conf_from"}`.
        `variables`: those of `VARIABLES` that are set.

    Raises:
        ImportError, OSError: torch cannot be imported.
    """
    before("import torch")
    import torch

    given = rendezvous_of(job or Job(), env)
    before("reading the versions of DeepSpeed and wandb")
    return {
        "torch": str(torch.__version__),
        "defaults": _defaults(),
        "deepspeed": _deepspeed(),
        "wandb": installed("wandb"),
        "launcher": launcher,
        "rdzv": {
            "backend": given.backend.lower(),
            "conf": _pairs(given.conf),
            "conf_from": given.conf_from,
        },
        "variables": {name: env[name] for name in VARIABLES if name in env},
    }


def _defaults() -> dict[str, float | None]:
    """Default time-outs of init_process_group in seconds."""
    try:
        from torch.distributed import constants
    except ImportError:  # a torch without distributed, or with other files
        return {"nccl": None, "other": None}
    names = {"nccl": "default_pg_nccl_timeout", "other": "default_pg_timeout"}
    found: dict[str, Any] = {kind: getattr(constants, names[kind], None) for kind in names}
    return {kind: value and value.total_seconds() for kind, value in found.items()}


def _deepspeed() -> dict[str, Any] | None:
    """DeepSpeed's default, read from its source: importing it would start its accelerator."""
    version = installed("deepspeed")
    if version is None:
        return None
    try:
        path = Path(str(metadata.distribution("deepspeed").locate_file("deepspeed/constants.py")))
        found = _DEEPSPEED_DEFAULT.search(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # an editable installation, or a broken one: by version
        found = None
    return {
        "version": version,
        "minutes": int(found["minutes"]) if found else None,
        "reads_variable": found is None or bool(found["variable"]),
    }


def _pairs(text: str) -> dict[str, str]:
    """The keys of torchrun's `k=v,k=v` that are time-outs."""
    pairs = (item.partition("=") for item in text.split(","))
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip() in _RDZV_KEYS}
