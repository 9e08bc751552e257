"""Run nccl-doctor with other releases of torch, and write docs/torch-versions.md.

Every release of tests/torches/installs.py starts the doctor in each way, runs the tests of real
ranks and of two healthy hosts, judges three faults in the lab, and answers the questions of
tests/torches/questions.py. Needs what the lab needs, and a package index or the wheels in the
cache (10 GB); no GPU.

    python scripts/torch_versions.py --write docs/torch-versions.md
    python scripts/torch_versions.py --version 2.4.1 --keep build/torches.json

Exit code 0 if all is as with the release that the tests pin, 1 if not, 2 if there is no lab.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab.hosts import trouble
from tests.support.wheels import NoWheel
from tests.torches.forms import FORMS, run, start
from tests.torches.installs import VERSIONS, python_of

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/ranks", "tests/lab/test_lab_healthy.py")
FAULTS = ("firewall-drops-port", "own-name-loopback-last", "interface-missing-last")
TESTS_S = 2400
"""Longest time for the tests of one release."""


@dataclass
class Release:
    """What one release of torch did.

    Attributes:
        build: its version with the build, as `2.4.1+cu121`.
        forms: way to start the doctor → `pass (4 s)`.
        passed: tests that did.
        failed: names of tests that did not.
        faults: of those judged, the ones that were right.
        answers: question → answer.
    """

    build: str
    forms: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)

    @property
    def not_right(self) -> list[str]:
        """The faults that were judged wrong."""
        return [name for name in FAULTS if name not in self.faults]

    @property
    def is_good(self) -> bool:
        """Whether every form passed, every test did, and every fault was judged right."""
        forms = all(said.startswith("pass ") for said in self.forms.values())
        return forms and not self.failed and not self.not_right


def passed_tests(told: str) -> int:
    """Number in the last line of what pytest printed."""
    return sum(map(int, re.findall(r"(\d+) passed", told.splitlines()[-1])))


def failed_tests(told: str) -> list[str]:
    """Names in what pytest printed, without the group that each worker got them in."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+?)(?:@\w+)?(?:\s|$)", told, re.MULTILINE)


def examine(version: str) -> Release:
    """Run everything with one release.

    Raises:
        NoWheel: it cannot be installed.
    """
    python = python_of(version)
    release = Release(run([str(python), "-c", "import torch; print(torch.__version__)"])[1].strip())
    for number, form in enumerate(FORMS):
        release.forms[form] = start(form, python, 29500 + 10 * number)
        _say(f"{version} {form}: {release.forms[form]}")
    words = [str(python), "-m", "pytest", "-q", "-m", "not wide"]
    _, told = run([*words, "-n", "4", "--dist", "loadgroup", *TESTS], limit_s=TESTS_S)
    release.passed = passed_tests(told)
    if failed_tests(told):  # some only show that they had too little of the machine
        _, told = run([*words, "-n", "0", *_last_failed()], limit_s=TESTS_S)
        release.passed += passed_tests(told)
        release.failed = failed_tests(told)
    _say(f"{version} {release.passed} tests passed, {len(release.failed)} did not")
    words = [str(python), "benchmarks/accuracy.py", "--no-stock", "--blind", "0", "--healthy", "0"]
    _, told = run([*words, "--only", *FAULTS], limit_s=TESTS_S)
    release.faults = re.findall(r"^right .*  (\S+)$", told, re.MULTILINE)
    _say(f"{version} faults judged right: {', '.join(release.faults)}")
    code, told = run([str(python), "-m", "tests.torches.questions"])
    release.answers = json.loads(told.splitlines()[-1]) if not code else {}
    return release


def _last_failed() -> list[str]:
    """Tests that failed in the last run, as arguments: without the group of their worker."""
    kept = json.loads((ROOT / ".pytest_cache/v/cache/lastfailed").read_text(encoding="utf-8"))
    return [re.sub(r"@\w+$", "", name) for name in kept]


def page(releases: Mapping[str, Release], missing: Mapping[str, str], day: str) -> str:
    """The whole page, as Markdown."""
    good = sum(each.is_good for each in releases.values())
    lines = [
        "# Releases of torch",
        "",
        "`make test-torch` writes this page. The wheel of each release runs on a machine without "
        "a GPU: the doctor in every way in which it can be started, the tests of real ranks "
        "(`tests/ranks`) and of healthy hosts in the lab, and three faults.",
        "",
        f"{day}: {good} of {len(releases)} releases are good in all of it.",
        "",
        _row(["", *(each.build for each in releases.values())]),
        _row(["---"] * (len(releases) + 1)),
        *(_row([form, *(each.forms[form] for each in releases.values())]) for form in FORMS),
        _row(["tests", *(_tests(each) for each in releases.values())]),
        _row(["faults", *(f"{len(e.faults)} of {len(FAULTS)}" for e in releases.values())]),
        "",
        *(f"- torch {version} was not examined: {why}" for version, why in missing.items()),
        "",
        "## Tests that did not pass",
        "",
    ]
    failed = [
        f"- torch {name}: `{test}`" for name, each in releases.items() for test in each.failed
    ]
    lines += failed or ["None."]
    lines += [
        "",
        "## What differs",
        "",
        "Asked of each release by `tests/torches/questions.py`.",
        "",
    ]
    questions = next((list(each.answers) for each in releases.values() if each.answers), [])
    for question in questions:
        lines += [f"**{question[0].upper()}{question[1:]}**", ""]
        by_answer: dict[str, list[str]] = {}
        for version, each in releases.items():
            by_answer.setdefault(each.answers.get(question, "no answer"), []).append(version)
        lines += [f"- {', '.join(said)}: {answer}" for answer, said in by_answer.items()]
        lines.append("")
    return "\n".join(lines)


def _tests(release: Release) -> str:
    return f"{release.passed} of {release.passed + len(release.failed)}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(each.replace('|', '/') for each in cells)} |"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main() -> int:
    """Examine, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="append", help="of torch; by default all of them")
    parser.add_argument("--keep", type=Path, help="keep results in this file, and go on with it")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page to write")
    args = parser.parse_args()
    if reason := trouble():
        _say(reason)
        return 2
    kept = json.loads(args.keep.read_text()) if args.keep and args.keep.exists() else {}
    releases, missing = {name: Release(**each) for name, each in kept.items()}, {}
    for version in args.version or VERSIONS:
        if version in releases:
            continue
        try:
            releases[version] = examine(version)
        except NoWheel as error:
            missing[version] = str(error)
            _say(f"torch {version}: {error}")
        if args.keep:
            args.keep.write_text(json.dumps({name: asdict(e) for name, e in releases.items()}))
    releases = {version: releases[version] for version in VERSIONS if version in releases}
    if args.write:
        day = datetime.now(timezone.utc).date().isoformat()
        args.write.write_text(page(releases, missing, day), encoding="utf-8")
    return 0 if releases and not missing and all(each.is_good for each in releases.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
