"""A trouble of one GPU. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nccl_doctor.api import Confidence, Kind, Severity

Gpu = Mapping[str, Any]
"""One of the `gpus` of `gather_gpus`."""


@dataclass(frozen=True)
class Trouble:
    """A trouble of one GPU; `severity` None means that of the kind, `drains` as in `Finding`."""

    kind: Kind
    text: str
    fix: str = ""
    severity: Severity | None = None
    confidence: Confidence = Confidence.CERTAIN
    drains: bool = True


def is_readable(gpu: Gpu) -> bool:
    """True if the driver answers for this GPU."""
    return "uuid" in gpu and not gpu["lost"] and not (gpu.get("wedged") or gpu.get("raised"))
