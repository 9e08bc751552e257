"""Write a new check and its test: a small but complete one, to be changed into what is needed."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CHECK = '''\
"""Is the kernel release the same on every host?

What it checks
--------------
The kernel release that each host reports.

Why it matters
--------------
Hosts with different kernels have different network drivers and defaults.

How to fix
----------
Boot the same kernel on every host.

When it is wrong
----------------
While a fleet is upgraded, a difference may be meant.

References
----------
uname(2)
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Kind,
    Layer,
    Severity,
    Where,
    odd_ones_out,
)

DIFFERS = Kind(
    "@CODE@",
    Layer.HOST,
    "Kernel release differs between hosts",
    "Hosts with different kernels have different network drivers and defaults.",
    "Boot the same kernel on every host.",
    Severity.INFO,
)


class @CLASS@(Check):
    """Kernel release, by host."""

    name = "@NAME@"
    layer = Layer.HOST
    kinds = (DIFFERS,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`release`: as uname(2) gives it."""
        return {"release": platform.release()}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Blame the minority; on a tie, everybody is named."""
        seen = {rank.host.id: facts["release"] for rank, facts in cluster.facts(self.name)}
        odd = odd_ones_out(seen)
        if odd is None:
            return
        usual = f"the others have {odd.usual}" if odd.usual else "a tie"
        for host in cluster.hosts:
            if host.id in odd.places:
                yield Finding(DIFFERS, f"{seen[host.id]}; {usual}", Where(hosts=(host.label,)))
'''

TEST = """\
from __future__ import annotations

import importlib

from nccl_doctor.api import Context, Launch
from tests.support.clusters import make_cluster

CODE = "@CODE@"
module = importlib.import_module("nccl_doctor.checks.@NAME@")
check = module.@CLASS@()


def test_equal_hosts_give_no_finding() -> None:
    facts = {host: {"release": "6.1.0"} for host in ("nd0", "nd1", "nd2")}
    assert list(check.judge(make_cluster(list(facts), check=check.name, by_host=facts))) == []


def test_the_odd_host_is_blamed_alone() -> None:
    facts = {"nd0": {"release": "6.1.0"}, "nd1": {"release": "5.15.0"}, "nd2": {"release": "6.1.0"}}
    found = list(check.judge(make_cluster(list(facts), check=check.name, by_host=facts)))
    assert [(f.code, f.where.hosts) for f in found] == [(CODE, ("nd1",))]


def test_observe_on_this_machine() -> None:
    assert check.observe(Context(launch=Launch(), env={}))["release"]
"""


def problem(root: Path, name: str) -> str | None:
    """Why a check of this name cannot be written, or None."""
    if not name:
        return "no name: say make new-check NAME=clock_skew"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        return f'"{name}" is no name for a check: lower-case letters, digits and _, e.g. clock_skew'
    if len(name) > 40:
        return f"{len(name)} characters are too many for a name: 40 at most"
    for path in files(root, name):
        if path.exists():
            return f"{path.relative_to(root)} exists already"
    code = code_of(name)
    for path in sorted((root / "checks").glob("*.py")):
        if f'"{code}"' in path.read_text(encoding="utf-8"):
            return f"the finding code {code} is used by {path.relative_to(root)}"
    return None


def files(root: Path, name: str) -> tuple[Path, Path]:
    """The check, and its test."""
    return root / "checks" / f"{name}.py", root / "tests" / "unit" / f"test_check_{name}.py"


def code_of(name: str) -> str:
    """The finding code to start with."""
    return re.sub("_+", "-", name).strip("-") + "-differs"


def main(arguments: list[str]) -> int:
    """Write both files; 2 where that is refused."""
    parser = argparse.ArgumentParser(prog="new_check.py", description=__doc__)
    parser.add_argument("name", help="snake_case, the name of the check and of its file")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the source tree")
    given = parser.parse_args(arguments)
    why_not = problem(given.root, given.name)
    if why_not:
        sys.stderr.write(f"new-check: {why_not}\n")
        return 2
    words = {
        "@NAME@": given.name,
        "@CLASS@": "".join(part.capitalize() for part in given.name.split("_")) + "Check",
        "@CODE@": code_of(given.name),
    }
    for path, text in zip(files(given.root, given.name), (CHECK, TEST), strict=True):
        for mark, word in words.items():
            text = text.replace(mark, word)
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {path.relative_to(given.root)}\n")
    sys.stdout.write(
        "It compares the kernel release between hosts. Change the question, the facts and the\n"
        "judgement; then: make docs && make test ARGS=tests/unit && make lint\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
