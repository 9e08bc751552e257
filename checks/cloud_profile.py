"""Do the job's variables contradict what the cloud installed for its network?

What it checks
--------------
Clouds install a file with the variables of NCCL that fit their network: Google's
/usr/local/gib/scripts/set_nccl_env.sh and nccl-env-profile.sh (in /usr/local/nvidia/lib64 or
/var/lib/tcpxo/lib64), and /etc/nccl.conf in images of other clouds. A variable of the job's
environment that has another value than every line of such a file which sets it is listed with both.
The scripts are read, and not run.

Why it matters
--------------
Values that were copied into a job for another type of machine stay when the machines change: other
names of cards, another protocol or plug-in. The environment wins over /etc/nccl.conf, and over a
script that was sourced before it; the job then runs over a slower network, or not at all.

How to fix
----------
Take the variable out of the job, or source the file of the cloud after the job's own lines.

When it is wrong
----------------
Whoever tuned a job meant its value, so this is only information. Values that a script computes are
not compared, nor what only says how much is logged. A variable that the script has and the job has
not is not listed: the script may be sourced later.

References
----------
Google Cloud, "Deploy and run NCCL" for A3 and A4 machines; NCCL user guide, environment variables
(nccl.conf); NVIDIA/aicr pull request 422.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Skip,
    Step,
    Where,
    shell,
)
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.variables.recorded import allowed

CONTRADICTS = Kind(
    code="env-contradicts-profile",
    layer=Layer.ENV,
    title="A variable of the job has another value than the profile of the cloud",
    why="The file of the cloud fits its network; a value that was copied from elsewhere may not, "
    "and the environment wins.",
    fix="drop the variable, or read the file of the cloud after the job's own lines",
    severity=Severity.INFO,
)
_SCRIPTS = (
    "usr/local/gib/scripts/set_nccl_env.sh",
    "usr/local/nvidia/lib64/nccl-env-profile.sh",
    "var/lib/tcpxo/lib64/nccl-env-profile.sh",
)
_CONF = "etc/nccl.conf"
_LARGEST = 1 << 16
_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Z][A-Z0-9_]*)=(\"[^\"]*\"|'[^']*'|[^\s;#&|\"']*)")
_COMPUTED = re.compile(r"[$`(]")
_OF_LOGS = re.compile(r"DEBUG|_LOG")
_SHOWN = 5


class CloudProfile(Check):
    """Compares the environment with the files of the cloud."""

    name = "cloud_profile"
    layer = Layer.ENV
    kinds = (CONTRADICTS,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`profiles`: path of each file that is there → variable → `[own value, values there]`, of
        those that differ.
        """
        if ctx.backend != "nccl":
            raise Skip("the job does not use NCCL")
        found = {f"/{path}": _of_script(ctx.root / path) for path in _SCRIPTS}
        found[f"/{_CONF}"] = _of_conf(ctx.root)
        there = {path: values for path, values in found.items() if values}
        if not there:
            raise Skip("no file of a cloud with variables of NCCL is installed here")
        own = allowed(ctx.env)
        profiles = {}
        for path, values in there.items():
            known = allowed(dict.fromkeys(values, ""))
            profiles[path] = {
                name: [own[name], values[name]]
                for name in known
                if name in own and own[name] not in values[name] and not _OF_LOGS.search(name)
            }
        return {"profiles": profiles}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each file on each host, with the variables that differ from it."""
        for rank, facts in cluster.facts(self.name):
            for path, differs in facts["profiles"].items():
                if not differs:
                    continue
                said = [
                    f"{name}={own}, there {' or '.join(values)}"
                    for name, (own, values) in sorted(differs.items())
                ]
                more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
                unset = Step(shell("unset {:variable}", sorted(differs)[:_SHOWN]))
                read = Step(shell(". {}", path), note="after the job's own lines")
                yield Finding(
                    CONTRADICTS,
                    f"{path}: {'; '.join(said[:_SHOWN])}{more}",
                    Where(hosts=(rank.host.label,)),
                    {"differs": differs},
                    fix=Fix(unset, alternatives=[Fix(read)] if path[1:] in _SCRIPTS else []),
                )


def _of_script(path: Path) -> dict[str, list[str]]:
    """Variable → values that lines of a shell script give it; none where one is computed."""
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST).decode("utf-8", "replace")
    except OSError:
        return {}
    found: dict[str, list[str]] = {}
    computed = set()
    for line in text.splitlines():
        match = _ASSIGNMENT.match(line)
        if match is None:
            continue
        name, value = match[1], match[2]
        if _COMPUTED.search(value) and not value.startswith("'"):
            computed.add(name)
        else:
            found.setdefault(name, []).append(value.strip("\"'"))
    return {name: values for name, values in found.items() if name not in computed}


def _of_conf(root: Path) -> dict[str, list[str]]:
    """Variable → its value in /etc/nccl.conf, as NCCL reads it."""
    path = str(root / _CONF)
    settings = nccl_settings({}, home=root / "nonexistent", root=root)
    return {name: [each.value] for name, each in settings.items() if each.origin == path}
