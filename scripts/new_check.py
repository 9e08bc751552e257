"""Write a new check and its test: a small but complete one, to be changed into what is needed."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODES = Path("tests/unit/test_registry.py")
"""The test that holds the set of codes."""

PAGE = '''\
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

'''

KIND = """\
DIFFERS = Kind(
    "@CODE@",
    Layer.HOST,
    "Kernel release differs between hosts",
    "Hosts with different kernels have different network drivers and defaults.",
    "Boot the same kernel on every host.",
    Severity.INFO,
)
"""

CLASS = '''\
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
'''

RULE = """\
seen = {rank.host.id: facts["release"] for rank, facts in cluster.facts(self.name)}
odd = odd_ones_out(seen)
if odd is None:
    return
usual = f"the others have {odd.usual}" if odd.usual else "a tie"
for host in cluster.hosts:
    if host.id in odd.places:
        yield Finding(DIFFERS, f"{seen[host.id]}; {usual}", Where(hosts=(host.label,)))
"""

FILE = (
    PAGE
    + """\
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

"""
    + KIND
    + "\n\n"
    + CLASS
    + textwrap.indent(RULE, " " * 8)
)

FOLDER = (
    PAGE
    + """\
from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any

from nccl_doctor.api import Check, Cluster, Context, Finding, Layer

from .rules import DIFFERS, judge_releases


"""
    + CLASS
    + "        return judge_releases(cluster, self.name)\n"
)

RULES = (
    '''\
"""The kernel releases of hosts, compared. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nccl_doctor.api import Cluster, Finding, Kind, Layer, Severity, Where, odd_ones_out

'''
    + KIND
    + '''

def judge_releases(cluster: Cluster, check: str) -> Iterator[Finding]:
    """One finding for each host that differs."""
'''
    + textwrap.indent(RULE.replace("self.name", "check"), " " * 4)
)

STEPS = """\

    It is a small check that works: it compares the kernel release between hosts. To green:

      make docs lint
      make test ARGS=tests/unit

    Then make it yours:
      1. {check}: the question, the facts, the kinds, the rule. A code that you rename or
         add stands in tests/unit/test_registry.py too; one that users know, in CHANGELOG.md.
      2. {test}: the rule on made-up clusters, code and place.
      3. make doctor ARGS="--select {name} -v" tries it on this machine.
      4. The two lines above, again. `make docs` makes pages: commit them.
    Only if it applies:
      - it skips on a healthy cluster without GPUs: its name in ELSEWHERE of tests/lab/reading.py
      - it listens on a port: a row in SECURITY.md
      - a fault that the lab can make: a record in tests/lab/corpus/faults
    """

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


def problem(root: Path, name: str, parts: dict[Path, str]) -> str | None:
    """Why a check of this name cannot be written, or None."""
    if not name:
        return "no name: say make new-check NAME=clock_skew"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        return f'"{name}" is no name for a check: lower-case batches, digits and _, e.g. clock_skew'
    if len(name) > 40:
        return f"{len(name)} characters are too many for a name: 40 at most"
    checks = root / "checks"
    for path in (checks / name, checks / f"{name}.py", *parts):
        if path.exists():
            return f"{path.relative_to(root)} exists already"
    code = code_of(name)
    for path in sorted(checks.rglob("*.py")):
        if f'"{code}"' in path.read_text(encoding="utf-8"):
            return f"the finding code {code} is used by {path.relative_to(root)}"
    return None


def parts_of(root: Path, name: str, *, folder: bool) -> dict[Path, str]:
    """File → template: the check, as one file or as a folder with its rules, and its test."""
    test = {root / "tests" / "unit" / f"test_check_{name}.py": TEST}
    at = root / "checks"
    if folder:
        return {at / name / "__init__.py": FOLDER, at / name / "rules.py": RULES, **test}
    return {at / f"{name}.py": FILE, **test}


def with_package(text: str, name: str) -> str:
    """pyproject.toml with the folder of a check in its list of packages, in order."""
    lines = text.splitlines(keepends=True)
    start = '    "nccl_doctor.checks'
    new = f'{start}.{name}",\n'
    places = [i for i, line in enumerate(lines) if line.startswith(start) and line < new]
    lines.insert(places[-1] + 1, new)
    return "".join(lines)


def with_code(text: str, code: str) -> str:
    """The test that holds the set of codes, with one more."""
    head, begin, rest = text.partition('\nCODES = """\n')
    codes, end, tail = rest.partition('    """\n')
    return f"{head}{begin}{codes}    {code}\n{end}{tail}"


def code_of(name: str) -> str:
    """The finding code to start with."""
    return re.sub("_+", "-", name).strip("-") + "-differs"


def main(arguments: list[str]) -> int:
    """Write the files; 2 where that is refused."""
    parser = argparse.ArgumentParser(prog="new_check.py", description=__doc__)
    parser.add_argument("name", help="snake_case, the name of the check and of its file")
    parser.add_argument("--folder", action="store_true", help="a folder, with rules.py in it")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the source tree")
    given = parser.parse_args(arguments)
    parts = parts_of(given.root, given.name, folder=given.folder)
    why_not = problem(given.root, given.name, parts)
    if why_not:
        sys.stderr.write(f"new-check: {why_not}\n")
        return 2
    words = {
        "@NAME@": given.name,
        "@CLASS@": "".join(part.capitalize() for part in given.name.split("_")) + "Check",
        "@CODE@": code_of(given.name),
    }
    for path, text in parts.items():
        for mark, word in words.items():
            text = text.replace(mark, word)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {path.relative_to(given.root)}\n")
    if given.folder:
        project = given.root / "pyproject.toml"
        listed = with_package(project.read_text(encoding="utf-8"), given.name)
        project.write_text(listed, encoding="utf-8")
        sys.stdout.write("entered the folder in the list of packages of pyproject.toml\n")
    held = given.root / CODES
    held.write_text(with_code(held.read_text("utf-8"), words["@CODE@"]), encoding="utf-8")
    sys.stdout.write(f"entered the code {words['@CODE@']} in {CODES}\n")
    files = [path.relative_to(given.root) for path in parts]
    sys.stdout.write(textwrap.dedent(STEPS).format(name=given.name, check=files[0], test=files[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
