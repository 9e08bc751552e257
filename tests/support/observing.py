"""Facts of a check on a made-up machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import Check, Context, Launch


def observe(
    check: type[Check],
    env: Mapping[str, str] | None = None,
    *,
    backend: str = "gloo",
    params: Mapping[str, Any] | None = None,
    root: Path = Path("/"),
    **fields: Any,
) -> dict[str, Any]:
    """Facts as JSON carries them; `root`: what it reads; `fields`: of the class."""
    here = type("Here", (check,), fields)()
    context = Context(
        launch=Launch(), env=env or {}, backend=backend, params=params or {}, root=root
    )
    return dict(json.loads(json.dumps(here.observe(context))))
