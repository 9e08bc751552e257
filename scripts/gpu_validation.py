"""Write what the tests on a GPU gave, from pytest's JUnit report, as a dated section in Markdown.

    python scripts/gpu_validation.py build/gpu.xml [--write docs/gpu-validation.md]

Prints the section, or puts it at the head of those under `## Runs` of a page; one of the same day,
GPU and torch takes the place of the earlier one. Leaves with 1 where a test failed or none passed,
and with 2 where the report cannot be read.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

HEADING = "## Runs"
NONE_YET = "None yet."
VERSIONS = {
    "driver": "driver",
    "cuda": "CUDA",
    "torch": "torch",
    "nccl": "NCCL",
    "deepspeed": "DeepSpeed",
}
_RATE = "rate: "
_LONGEST = 160
_PATH = re.compile(r"(?<![\w.])/(?:[\w.+@-]+/)+")


class Case(NamedTuple):
    """One test: its id as pytest takes it, what became of it, and why."""

    test: str
    result: str
    reason: str
    rates: tuple[tuple[str, str], ...]


class Run(NamedTuple):
    """One run; `about` has `gpu` and the versions."""

    day: str
    about: dict[str, str]
    cases: list[Case]


def read_run(text: str) -> Run:
    """The run that a JUnit report is of.

    Raises:
        ValueError: it is no such report, or not of tests on a GPU.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"no XML: {error}") from error
    suite = root if root.tag == "testsuite" else root.find("testsuite")
    if suite is None:
        raise ValueError("no <testsuite> in it")
    about = _properties(suite)
    if "gpu" not in about:
        raise ValueError("no property `gpu`: it is not of the tests in tests/gpu")
    cases = [_case(each) for each in suite.iter("testcase")]
    return Run(suite.get("timestamp", "")[:10] or "undated", about, cases)


def section(run: Run) -> str:
    """A run as Markdown, without a newline at its end."""
    versions = ", ".join(
        f"{words} {run.about[name]}" for name, words in VERSIONS.items() if name in run.about
    )
    counts = Counter(case.result for case in run.cases)
    said = ", ".join(f"{counts[result]} {result}" for result in sorted(counts)) or "no tests"
    lines = [
        _title(run),
        "",
        f"`make gpu-validation` on {run.about['gpu']}: {versions}. {said}.",
        "",
        "| test | result |",
        "|---|---|",
    ]
    for case in run.cases:
        reason = f": {case.reason}" if case.reason else ""
        lines.append(f"| `{_cell(case.test)}` | {case.result}{_cell(reason)} |")
    rates = [rate for case in run.cases for rate in case.rates]
    if rates:
        lines += ["", "| measured by `benchmarks/gpu_rates.py` | |", "|---|---|"]
        lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in rates]
    return "\n".join(lines)


def put(page: str, run: Run) -> str:
    """A page with the section of a run as the first under `## Runs`.

    Raises:
        ValueError: the page has no such heading.
    """
    head, found, rest = page.partition(f"{HEADING}\n")
    if not found:
        raise ValueError(f"the page has no heading `{HEADING}`")
    mine, _, after = rest.partition("\n## ")
    sections = re.split(r"^(?=### )", mine, flags=re.M)
    before, *held = sections
    before = before.replace(NONE_YET, "").strip("\n")
    kept = [each.strip("\n") for each in held if each.splitlines()[0] != _title(run)]
    body = "\n\n".join(filter(None, [before, section(run), *kept]))
    return f"{head}{HEADING}\n\n{body}\n" + (f"\n## {after}" if after else "")


def _title(run: Run) -> str:
    return f"### {run.day}: {run.about['gpu']}, torch {run.about.get('torch', 'unknown')}"


def _case(element: ElementTree.Element) -> Case:
    path, name = element.get("classname", "").replace(".", "/"), element.get("name", "")
    result, reason = "passed", ""
    for tag, word in (("failure", "**failed**"), ("error", "**failed**"), ("skipped", "skipped")):
        found = element.find(tag)
        if found is not None:
            result, reason = word, found.get("message", "")
            break
    rates = tuple(
        (key.removeprefix(_RATE), value)
        for key, value in _properties(element).items()
        if key.startswith(_RATE)
    )
    return Case(f"{path}.py::{name}", result, _line(reason), rates)


def _properties(element: ElementTree.Element) -> dict[str, str]:
    return {
        str(each.get("name")): str(each.get("value"))
        for each in element.findall("properties/property")
    }


def _line(text: str) -> str:
    """The first line of a reason, short, and without the folders of the machine."""
    first = next(iter(text.strip().splitlines()), "")
    return _PATH.sub("", first)[:_LONGEST]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Read, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="what pytest wrote with --junitxml")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page to put it into")
    args = parser.parse_args()
    try:
        run = read_run(args.report.read_text(encoding="utf-8"))
        if args.write is None:
            sys.stdout.write(section(run) + "\n")
        else:
            page = args.write.read_text(encoding="utf-8")
            args.write.write_text(put(page, run), encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        sys.stderr.write(f"gpu_validation: {args.report}: {error}\n")
        return 2
    results = {case.result for case in run.cases}
    return int("**failed**" in results or "passed" not in results)


if __name__ == "__main__":
    sys.exit(main())
