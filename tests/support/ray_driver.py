"""Driver of Ray Train: runs the lines of a page, first as they are, then with a fault.

Usage: ray_driver.py FOLDER_OF_RAY FILE_WITH_THE_LINES OPTION_OF_THE_DOCTOR …
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

FAULT = """\
import os
    if os.environ["RANK"] == "1":
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
"""
TRIES = 3
"""Ray gives its own processes 30 s to start; a busy machine needs more."""


def start(ray: Any, folder: str) -> None:
    """A Ray of this machine alone, with a processor for each of two workers."""
    for left in reversed(range(TRIES)):
        try:
            ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder)
            return
        except Exception:
            ray.shutdown()
            if not left:
                raise


def main(folder: str, lines: str, *options: str) -> None:
    ray = importlib.import_module("ray")
    train = importlib.import_module("ray.train")
    start(ray, folder)
    for name, fault in (("healthy", "pass"), ("faulty", FAULT)):
        words = [*options, f"--json={Path.cwd() / name}.json"]
        said = Path(lines).read_text(encoding="utf-8")
        said = said.replace('"run"]', f'"run", *{json.dumps(words)}]')
        said = said.replace("def train():\n", f"def train():\n    {fault}\n")
        try:
            exec(said, {"__name__": "__main__"})
            print(f"{name} ended well", flush=True)
        except train.TrainingFailedError:
            print(f"{name} failed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
