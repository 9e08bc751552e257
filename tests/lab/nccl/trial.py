"""Ask NCCL, and the rules, on one host: rows from standard input, results to standard output.

Runs where /etc is a folder of the comparison. Every row is a process of its own that loads the
library as a process with torch would have, and makes the survey of check `interfaces`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.system.helpers import send_foreign
from nccl_doctor.toolkit.nccl.answer import ask_nccl
from nccl_doctor.toolkit.nccl.survey import survey
from nccl_doctor.toolkit.variables.table import table
from nccl_doctor.toolkit.versions import release

LIMIT_S = 60.0
PLUGINS_SINCE = (2, 28, 7)
"""Older releases load no plug-in for variables."""


def main() -> None:
    """Read `{"folder", "library", "rows"}`, and write one result for each row, in order."""
    task = json.load(sys.stdin)
    folder = Path(task["folder"])
    results = [result_of(row, task["library"], folder) for row in task["rows"]]
    json.dump(results, sys.stdout)


def result_of(row: Mapping[str, Any], library: str, folder: Path) -> dict[str, Any]:
    """What NCCL says, what the rules say, and every difference, in words."""
    paths = {
        "@etc": Path("/etc/nccl.conf"),
        "@home": folder / "home/.nccl.conf",
        "@owner": folder / "owner/.nccl.conf",
        "@named": folder / "named.conf",
    }
    log = folder / "log"

    def filled(text: str) -> str:
        for name, path in {**paths, "@log": log, "@plugin": folder / "plugin.so"}.items():
            text = text.replace(name, str(path))
        return text

    env = {"HOME": str(folder / "home"), "PATH": os.environ["PATH"]}
    env |= {name: filled(value) for name, value in row["env"].items()}
    if env["HOME"] == "-":
        del env["HOME"]
    if row["plugin"]:
        name, _, env["PLUGIN_VALUE"] = row["plugin"].partition("=")
        env["PLUGIN_NAME"] = name
    for name, text in row["files"].items():
        paths[name].write_bytes(filled(text).encode())
    try:
        facts = json.loads(send_foreign("row", lambda: _survey(env, library), LIMIT_S))
    finally:
        for name in row["files"]:
            paths[name].unlink()
    found = _compared(facts, bool(row["plugin"]))
    if log.exists():
        log.unlink()
        found["differences"].append("it wrote into the file of the user")
    return found


def _survey(env: Mapping[str, str], library: str) -> bytes:
    ctypes.CDLL(library)
    return json.dumps(survey(env, ask=lambda: ask_nccl(library, env, patience_s=30))).encode()


def _compared(facts: Mapping[str, Any], by_plugin: bool) -> dict[str, Any]:
    asked, counts = facts["asked"], facts["choices"]["nccl-bootstrap"]
    said = f"{asked['interface']} {asked['address']}" if asked["result"] == 0 else "refuses"
    rules = " ".join(asked["expected"]) or "refuses"
    differences = []
    by_plugin = by_plugin and release(asked["version"]) >= PLUGINS_SINCE
    if asked["result"] is None:
        said = "no answer"
        differences.append(asked["error"])
    elif by_plugin:
        # The rules do not know what a plug-in says: then NCCL's answer has to count.
        if not asked["plugin"]:
            differences.append("the plug-in was not loaded")
        if [" ".join(pick) for pick in counts["picks"]] != [said]:
            differences.append("the answer of NCCL does not count")
    elif said != rules or asked["differs"]:
        differences.append(f"by the rules: {rules}")
    differences += [f"{name} is read otherwise" for name in asked["read_otherwise"]]
    missing = [name for name in asked["names"] if name not in table().variables]
    differences += [f"{name} is not in the table of variables" for name in missing]
    return {"said": said, "rules": rules, "error": asked["error"], "differences": differences}


if __name__ == "__main__":
    main()
