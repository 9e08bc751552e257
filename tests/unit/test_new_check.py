"""`make new-check`, on a copy of the source tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """As much of the source tree as a check and its test need."""
    for folder in ("checks", "nccl_doctor"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for folder in ("tests/unit", "tests/support"):
        (tmp_path / folder).mkdir(parents=True)
    for name in (
        "pyproject.toml",
        "tests/__init__.py",
        "tests/support/__init__.py",
        "tests/support/clusters.py",
        "tests/unit/__init__.py",
        "tests/unit/test_registry.py",
    ):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def new_check(root: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "scripts/new_check.py")
    command = [sys.executable, script, "--root", str(root), *options, "--", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def succeeds(root: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


FORMS = {
    "kernel_release": ((), ("checks/kernel_release.py",)),
    "other_release": (
        ("--folder",),
        ("checks/other_release/__init__.py", "checks/other_release/rules.py"),
    ),
}


def test_new_checks_pass_lint_and_their_own_tests(tree: Path) -> None:
    checked, tests = [], []
    for name, (options, files) in FORMS.items():
        done = new_check(tree, name, *options)
        assert done.returncode == 0, done.stderr
        test = f"tests/unit/test_check_{name}.py"
        assert [line for line in done.stdout.splitlines() if line.startswith("wrote")] == [
            f"wrote {path}" for path in (*files, test)
        ]
        checked += files
        tests.append(test)
    succeeds(tree, "ruff", "check", "--no-cache", *checked, *tests)
    succeeds(tree, "ruff", "format", "--no-cache", "--check", *checked, *tests)
    succeeds(tree, "mypy", "--cache-dir", str(tree / "cache"), *checked)
    succeeds(tree, "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", "kept", *tests)


def test_its_code_is_held(tree: Path) -> None:
    held = tree / "tests" / "unit" / "test_registry.py"
    before = held.read_text("utf-8").splitlines()
    assert new_check(tree, "kernel_release").returncode == 0
    after = held.read_text("utf-8").splitlines()
    new = "    kernel-release-differs"
    assert [line for line in after if line != new] == before
    assert new in after[after.index('CODES = """') : after.index('    """')]


def test_every_step_to_green_is_told_and_exists(tree: Path) -> None:
    said = new_check(tree, "kernel_release").stdout
    makefile = (ROOT / "Makefile").read_text("utf-8")
    lines = re.findall(r"^ +(?:\d\. )?make ((?:[a-z-]+ ?)+)", said, re.MULTILINE)
    targets = [target for line in lines for target in line.split()]
    assert targets == ["docs", "lint", "test", "doctor"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    made = {"checks/kernel_release.py", "tests/unit/test_check_kernel_release.py"}
    files = set(re.findall(r"\b[\w/]+\.(?:py|md)\b", said))
    assert made <= files
    assert all((ROOT / file).exists() for file in files - made), files


def test_a_folder_is_shipped(tree: Path) -> None:
    before = (tree / "pyproject.toml").read_text("utf-8").splitlines()
    assert new_check(tree, "kernel_release", "--folder").returncode == 0
    after = (tree / "pyproject.toml").read_text("utf-8").splitlines()
    new = '    "nccl_doctor.checks.kernel_release",'
    assert [line for line in after if line != new] == before
    listed = [line for line in after if line.startswith('    "nccl_doctor.checks.')]
    assert new in listed
    assert listed == sorted(listed)


@pytest.mark.parametrize("options", [(), ("--folder",)], ids=["file", "folder"])
@pytest.mark.parametrize("name", ["torch_import", "rdma"])
def test_neither_form_takes_the_name_of_the_other(
    tree: Path, name: str, options: tuple[str, ...]
) -> None:
    done = new_check(tree, name, *options)
    assert done.returncode == 2
    assert "exists already" in done.stderr


def test_the_longest_name_passes_lint(tree: Path) -> None:
    name = "a" * 40
    assert new_check(tree, name).returncode == 0
    made = (f"checks/{name}.py", f"tests/unit/test_check_{name}.py")
    succeeds(tree, "ruff", "check", "--no-cache", *made)
    succeeds(tree, "ruff", "format", "--no-cache", "--check", *made)


@pytest.mark.parametrize(
    "name", ["", "Clock", "clock-skew", "2fast", "class", "a/b", "../x", "backend_device", "a" * 41]
)
def test_a_bad_or_taken_name_is_one_line_and_exit_2(tree: Path, name: str) -> None:
    before = sorted(tree.rglob("*.py"))
    done = new_check(tree, name)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert sorted(tree.rglob("*.py")) == before


def test_a_second_check_does_not_take_the_code_of_the_first(tree: Path) -> None:
    assert new_check(tree, "kernel_release").returncode == 0
    done = new_check(tree, "kernel__release")
    assert done.returncode == 2
    assert "kernel-release-differs" in done.stderr
