"""Driver of Ray Train: runs the lines of a page as they are, then with a fault, and then in workers
that Ray starts again, as the first ones fail after the examination.

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
FAILS_ONCE = """\
    import os
    if os.environ["RANK"] == "0" and not os.path.exists("{once}"):
        os.rename("{report}", "{once}")
        raise RuntimeError("the first workers end here")
"""
AGAIN = "from ray.train import FailureConfig, RunConfig\n"
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
    for name, fault in (("healthy", "pass"), ("faulty", FAULT), ("again", "pass")):
        report = Path.cwd() / f"{name}.json"
        words = [*options, f"--json={report}"]
        said = Path(lines).read_text(encoding="utf-8")
        said = said.replace('"run"]', f'"run", *{json.dumps(words)}]')
        said = said.replace("def train():\n", f"def train():\n    {fault}\n")
        if name == "again":
            fails = FAILS_ONCE.format(report=report, once=report.with_name("once.json"))
            said = said.replace("    ...  # the training\n", fails)
            twice = "run_config=RunConfig(failure_config=FailureConfig(max_failures=1))"
            said = AGAIN + said.replace(").fit()", f", {twice}).fit()")
        try:
            exec(said, {"__name__": "__main__"})
            print(f"{name} ended well", flush=True)
        except train.TrainingFailedError:
            print(f"{name} failed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
