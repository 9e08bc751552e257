"""docs/tasks.md: what it says is typed here as it stands, and a task takes no more commands.

The Prolog is copied in tests/lab/test_lab_slurmd.py, and called by slurmd there.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nccl_doctor.report.formats import json as json_format
from tests.cli.program import CLEAN, program
from tests.support.exchanges import World
from tests.support.forkserver import quick_python_path
from tests.support.pasts import noisy, saved

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("tasks", "ci", "slurm")
}
MOST = {  # commands
    "From a clone to a first verdict": 2,
    "From a broken job to a working one": 1,  # and what the report says
    "A ticket from a report": 1,
    "What changed since Monday": 1,
    "What a code means": 1,
    "A check of your own": 3,
}
COPIED = (
    "A CI job that stops on a broken runner",
    "A Slurm Prolog that keeps jobs off a broken node",
)
QUICK = "--select ranks --nproc-per-node 1 --backend gloo"


def commands(title: str) -> list[str]:
    """What a task has to be typed, line by line."""
    section = PAGES["tasks"].partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return list(block.splitlines())


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who has installed nccl-doctor, by hand or by make."""
    here = Path(sys.executable).parent
    calls = {name: str(here / name) for name in ("python", "ruff", "lint-imports", "mypy")}
    calls["nccl-doctor"] = f"{quick_python_path()} -m nccl_doctor"
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for name, call in calls.items():
        file = tmp_path / "venv" / "bin" / name
        file.write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        file.chmod(0o755)
    return {
        **CLEAN,
        "PATH": f"{tmp_path / 'venv' / 'bin'}:{CLEAN['PATH']}",
        "VENV": str(tmp_path / "venv"),
        "PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
    }


def nothing_to_install(shell: dict[str, str]) -> None:
    """From now on `make` takes that environment for one that it has made."""
    for name in (".python", ".doctor", ".dev"):
        Path(shell["VENV"], name).touch()


def type_in(line: str, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_every_task_takes_as_many_commands_as_promised() -> None:
    titles = re.findall(r"^## (.*)$", PAGES["tasks"], re.MULTILINE)
    assert sorted(titles) == sorted([*MOST, *COPIED])
    for title, most in MOST.items():
        lines = commands(title)
        assert 0 < len(lines) <= most, title
        assert not [line for line in lines if re.search(r"&&|;|\\$", line)], "one command a line"


def test_from_a_clone_to_a_first_verdict(tmp_path: Path, shell: dict[str, str]) -> None:
    """What `make` would install is there: this environment stands in for the one of the clone."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("no clone can be made of a tree without .git, or without git")
    (address,) = re.findall(r"https://\S+", commands("From a clone to a first verdict")[0])
    clone, examine = commands("From a clone to a first verdict")
    git = {
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": f"url.file://{ROOT}.insteadOf",
        "GIT_CONFIG_VALUE_0": address,
        "GIT_CONFIG_KEY_1": "safe.directory",
        "GIT_CONFIG_VALUE_1": "*",
    }
    done = type_in(clone, tmp_path, {**shell, **git})
    assert done.returncode == 0, done
    nothing_to_install(shell)
    done = type_in(examine, tmp_path, {**shell, "ARGS": QUICK})
    assert done.returncode == 0, done
    assert "\nnccl-doctor: PASS: " in f"\n{done.stdout}"


def test_a_ticket_from_a_report(tmp_path: Path, shell: dict[str, str]) -> None:
    report = saved(World(4).slow([("nd0", "nd2")]).cluster(), 21)
    (tmp_path / "report.json").write_text(json_format.render(report))
    (line,) = commands("A ticket from a report")
    done = type_in(line, tmp_path, shell)
    assert done.returncode == 0, done
    issue = (tmp_path / "issue.md").read_text()
    assert "link-slow" in issue
    assert not re.search(r"\bnd[0-9]\b", issue), "names are pseudonyms"


def test_what_changed_since_monday(tmp_path: Path, shell: dict[str, str]) -> None:
    monday, today = noisy(4, 1, 0.02)[0], saved(World(4).slow([("nd0", "nd2")]).cluster(), 21)
    (tmp_path / "monday.json").write_text(json_format.render(monday))
    (tmp_path / "report.json").write_text(json_format.render(today))
    (line,) = commands("What changed since Monday")
    done = type_in(line, tmp_path, shell)
    assert done.returncode == 0, done
    assert "link-slow" in done.stdout
    assert "nd0 → nd2" in done.stdout


def test_what_a_code_means(tmp_path: Path, shell: dict[str, str]) -> None:
    (line,) = commands("What a code means")
    done = type_in(line, tmp_path, shell)
    assert done.returncode == 0, done
    code = shlex.split(line)[-1]
    page = (ROOT / "docs" / "codes" / f"{code}.md").read_text()
    (whole,) = re.findall(r"^All of it: (.*)$", done.stdout, re.MULTILINE)
    assert page.splitlines()[:3] == done.stdout.splitlines()[:3]
    first, _, checks = type_in(whole, tmp_path, shell).stdout.partition(f"\n\n{'-' * 72}\n")
    assert page.startswith(f"{first.rstrip()}\n\n")
    assert "What it checks" in checks
    # And typed from the screen.
    report = saved(World(4).slow([("nd0", "nd2"), ("nd2", "nd0")]).cluster(), 21)
    text = program("report", "show", "-", input=json_format.render(report)).stdout
    (line,) = re.findall(r"^Next: (.*)$", text, re.MULTILINE)
    done = type_in(line, tmp_path, shell)
    assert done.returncode == 0, done
    assert done.stdout.startswith("link-slow\n")


def test_the_ci_job_copied_without_an_edit(tmp_path: Path, shell: dict[str, str]) -> None:
    """The job for GitLab, on a runner without GPUs: red, and all that it keeps is there.

    tests/cli/test_cli_ci.py runs what the other jobs say.
    """
    yaml = pytest.importorskip("yaml")
    (config,) = re.findall(r"^```toml\n(.*?)^```", PAGES["ci"], re.MULTILINE | re.DOTALL)
    (tmp_path / "nccl-doctor.toml").write_text(config)
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGES["ci"], re.MULTILINE | re.DOTALL)
    (job,) = yaml.safe_load(blocks[1]).values()
    install, examine = job["script"]
    assert install.startswith("python3 -m pip install ")  # it is installed here
    done = type_in(examine, tmp_path, shell)
    assert done.returncode == 1, done
    for name in (*job["artifacts"]["paths"], job["artifacts"]["reports"]["junit"]):
        assert (tmp_path / name).stat().st_size


MADE = (".git", ".venv", "build", "dist", "__pycache__", "*_cache", "*.egg-info")
ABOUT_ALL = ("test_docs_pages.py", "test_readme.py", "test_registry.py", "test_first_lines.py")


@pytest.mark.wide  # mypy, for all; tests/unit/test_new_check.py has the same for the check alone
def test_a_check_of_ones_own(tmp_path: Path, shell: dict[str, str]) -> None:
    """In a copy of the tree; green are the linters, its own tests, and those about all checks."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*MADE))
    others = {path.name for path in (tree / "tests" / "unit").glob("test_*.py")} - set(ABOUT_ALL)
    left_out = " ".join(f"--ignore=tests/unit/{name}" for name in others)
    nothing_to_install(shell)
    for line in commands("A check of your own"):
        env = {**shell, "PYTHONPATH": str(tree), "PYTEST_ADDOPTS": left_out}
        done = type_in(line, tree, env)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert (tree / "docs" / "codes" / "kernel-release-differs.md").is_file()
