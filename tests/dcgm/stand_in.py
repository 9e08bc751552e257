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


def diagnosis(release: int, *results: tuple[str, int | None, str, str]) -> str:
    """Output of `dcgmi diag -j` of DCGM 2, 3 or 4: test, GPU or None, status, words."""
    tests: dict[str, list[dict[str, Any]]] = {"a test that all pass": [{"status": "Pass"}]}
    for name, gpu, status, words in results:
        one: dict[str, Any] = {"status": status}
        if gpu is not None:
            one |= {
                2: {"gpu_ids": str(gpu)},
                3: {"gpu_id": str(gpu)},
                4: {"entity_group": "GPU", "entity_group_id": 1, "entity_id": gpu},
            }[release]
        if words:
            record = {"warning": words, "error_id": 1, "error_category": 1, "error_severity": 2}
            one["warnings"] = words if release == 2 else [record]
        tests.setdefault(name, []).append(one)
    category = {
        "category": "Hardware",
        "tests": [{"name": name, "results": found} for name, found in tests.items()],
    }
    name = "DCGM Diagnostic" if release == 4 else "DCGM GPU Diagnostic"
    said: dict[str, Any] = {name: {"test_categories": [category]}}
    if release == 4:
        entities = [{"entity_id": 0, "device_id": "2330"}]
        said["entity_groups"] = [{"entity_group": "GPU", "entities": entities}]
        said["metadata"] = {"version": "4.6.0"}
    return json.dumps(said, indent=3) + "\n"


def refused(words: str) -> str:
    """Output of `dcgmi diag -j` that did not run."""
    said = {"DCGM Diagnostic": {"version": "4.6.0", "runtime_error": words}}
    return json.dumps(said, indent=3) + "\n"
