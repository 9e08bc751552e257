"""Run with the newest of everything that the index offers, and say what changed.

Where a release is newer than the one that the tests pin: packages of Python take the place of
theirs while the tests of rules run, torch goes through all of scripts/torch_versions.py, NCCL
through all rows of scripts/nccl_validation.py, and launchers start ranks. Needs what the lab needs,
and a package index; no GPU.

    python scripts/newest.py
    python scripts/newest.py --only torch --only nccl

Exit code 0 if nothing that is newer fails, 1 if something does, 2 if there is no lab or no index.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.torch_versions import TESTS_S, examine, failed_tests
from tests.lab.hosts import trouble
from tests.lab.nccl.wheels import VERSIONS as NCCLS
from tests.support.wheels import NoWheel, newest, pip
from tests.torches.forms import run
from tests.torches.installs import NEWEST as TORCH

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("accelerate", "click", "deepspeed", "psutil", "tabulate")
NCCL = "nvidia-nccl-cu13"
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-n", "4", "--dist", "loadgroup")


def pins() -> dict[str, str]:
    """Package → release, of constraints-dev.txt."""
    text = (ROOT / "constraints-dev.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)$", text, re.MULTILINE))


def packages() -> Iterator[str]:
    """What fails with newer packages of Python, all at once."""
    pinned = pins()
    newer = {name: release for name in PACKAGES if (release := newest(name)) != pinned[name]}
    for name in PACKAGES:
        _say(name, pinned[name], newer.get(name, pinned[name]))
    if not newer:
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DS_BUILD_OPS"] = "0"  # deepspeed compiles nothing
        options = ("--no-deps", "--no-build-isolation", "--target", folder)
        pip("install", *options, *(f"{name}=={release}" for name, release in newer.items()))
        more = {"PYTHONPATH": f"{ROOT}:{folder}"}
        yield from _failed("-m", "not wide", "tests/unit", "tests/cli", more=more)


def torch() -> Iterator[str]:
    """What fails with a newer torch."""
    release = newest("torch")
    _say("torch", TORCH, release)
    if release == TORCH:
        return
    done = examine(release)
    yield from (f"{form}: {said}" for form, said in done.forms.items() if said[:5] != "pass ")
    yield from done.failed
    yield from (f"judged wrong: {name}" for name in done.not_right)


def nccl() -> Iterator[str]:
    """Rows that a newer NCCL answers in another way than the rules."""
    release = newest(NCCL)
    _say("NCCL", NCCLS[-1], release)
    if release != NCCLS[-1]:
        asked = [sys.executable, "scripts/nccl_validation.py", "--version", release]
        code, told = run(asked, limit_s=TESTS_S)
        if code:
            yield from told.splitlines()


def launchers() -> Iterator[str]:
    """Tests that newer launchers fail."""
    yield from _failed("tests/ranks/test_launchers_of_wheels.py", more={"NEWEST": "1"})


PARTS: Mapping[str, Callable[[], Iterator[str]]] = {
    each.__name__: each for each in (packages, torch, nccl, launchers)
}


def _failed(*words: str, more: Mapping[str, str]) -> list[str]:
    code, told = run([*_PYTEST, *words], limit_s=TESTS_S, more=more)
    return failed_tests(told) or ([told.splitlines()[-1]] if code else [])


def _say(name: str, pinned: str, release: str) -> None:
    known = "as in the tests" if release == pinned else f"in the tests {pinned}"
    sys.stdout.write(f"{name} {release}, {known}\n")


def main() -> int:
    """Try each part, and print what fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="leave the others out")
    args = parser.parse_args()
    if reason := trouble():
        sys.stderr.write(f"newest: {reason}\n")
        return 2
    failed = 0
    for name in args.only or PARTS:
        try:
            for line in PARTS[name]():
                failed += 1
                sys.stdout.write(f"  {line}\n")
        except NoWheel as error:
            sys.stderr.write(f"newest: {error}\n")
            return 2
    sys.stdout.write(f"{failed} failures\n" if failed else "nothing that is newer fails\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
