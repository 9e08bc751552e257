"""Stand-ins for `dcgmi`, and what DCGM 2, 3 and 4 print as JSON by their source code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

UNREACHABLE = (
    "Error: unable to establish a connection to the specified host: localhost\n"
    "Error: Unable to connect to host engine. Host engine is not running or not reachable."
)
UNWATCHED = "Error: Health watches not enabled. Please enable watches. "


def dcgmi(folder: Path, script: str) -> dict[str, str]:
    """Environment in which `dcgmi` is this shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "dcgmi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def printing(folder: Path, text: str, code: int = 0) -> dict[str, str]:
    """Environment in which `dcgmi` prints a text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "said").write_text(text)
    return dcgmi(folder, f'echo "$@" >> {folder}/asked\ncat {folder}/said\nexit {code}')


def health(overall: str = "Healthy", **gpus: dict[str, tuple[str, str]]) -> str:
    """Output of `dcgmi health -c -j`: `gpu3={"Memory system": ("Failure", "words")}`."""
    body: dict[str, Any] = {"Overall Health": {"value": overall}}
    for name, systems in gpus.items():
        group = "Switch" if name.startswith("switch") else "GPU"
        number = name.removeprefix("switch").removeprefix("gpu")
        errors = {
            system: {"value": state, "overflow": [words]}
            for system, (state, words) in systems.items()
        }
        entities = body.setdefault(group, {"children": {}})["children"]
        entities[number] = {"value": overall, "children": {"Errors": {"children": errors}}}
    return json.dumps({"header": ["Health Monitor Report"], "body": body}, indent=3) + "\n"
