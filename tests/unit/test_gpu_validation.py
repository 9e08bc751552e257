"""The page of what has run on a GPU, from a made-up JUnit report of pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/gpu_validation.py"
PAGE = """# What has been seen on a GPU

Words.

## Runs

None yet.

## Open questions

| question |
|---|
"""
ABOUT = {
    "gpu": "1 x NVIDIA H200",
    "driver": "580.95.05",
    "cuda": "13.0",
    "torch": "2.13.0+cu130",
    "nccl": "2.28.9",
    "deepspeed": "0.18.2",
}


def case(name: str, inside: str = "") -> str:
    where = 'classname="tests.gpu.test_groups_gpu"'
    return f'<testcase {where} name="{name}" time="1.2">{inside}</testcase>'


def ended(tag: str, message: str) -> str:
    return f"<{tag} message={quoteattr(message)}>the traceback</{tag}>"


RATES = (
    '<properties><property name="rate: half" value="doctor 781.0, plain loop 779.9 TFLOP/s"/>'
    '<property name="other" value="no rate"/></properties>'
)


def report(*cases: str, day: str = "2026-11-21", **about: str) -> str:
    given = "".join(
        f'<property name="{name}" value="{value}"/>' for name, value in {**ABOUT, **about}.items()
    )
    suite = f'<testsuite name="pytest" timestamp="{day}T10:00:00.1+00:00">'
    return (
        f'<?xml version="1.0" encoding="utf-8"?><testsuites>{suite}<properties>{given}'
        f"</properties>{''.join(cases)}</testsuite></testsuites>"
    )


@pytest.fixture
def page(tmp_path: Path) -> Path:
    made = tmp_path / "page.md"
    made.write_text(PAGE)
    return made


def run(xml: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    file = folder / "gpu.xml"
    file.write_text(xml)
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(file), *options],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_run_is_a_dated_table(tmp_path: Path, page: Path) -> None:
    xml = report(
        case("test_a[collectives]"),
        case("test_b", ended("skipped", "no second CUDA device")),
        case("test_c", RATES),
    )
    done = run(xml, tmp_path, "--write", str(page))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    text = page.read_text()
    assert "### 2026-11-21: 1 x NVIDIA H200, torch 2.13.0+cu130" in text
    for words in ("driver 580.95.05", "CUDA 13.0", "NCCL 2.28.9", "DeepSpeed 0.18.2"):
        assert words in text
    assert "2 passed, 1 skipped." in text
    assert "| `tests/gpu/test_groups_gpu.py::test_a[collectives]` | passed |" in text
    assert "::test_b` | skipped: no second CUDA device |" in text
    assert "| half | doctor 781.0, plain loop 779.9 TFLOP/s |" in text
    assert "no rate" not in text
    assert "None yet." not in text
    assert text.startswith(PAGE.partition("## Runs")[0])
    assert text.endswith("|\n\n## Open questions\n\n| question |\n|---|\n")


def test_the_newest_comes_first_and_the_same_again_takes_its_own_place(
    tmp_path: Path, page: Path
) -> None:
    where = ("--write", str(page))
    run(report(case("test_a"), day="2026-11-20"), tmp_path, *where)
    run(report(case("test_a"), gpu="8 x NVIDIA H100 80GB HBM3"), tmp_path, *where)
    before = page.read_text()
    assert before.index("8 x NVIDIA H100") < before.index("2026-11-20: 1 x NVIDIA H200")
    run(report(case("test_a"), gpu="8 x NVIDIA H100 80GB HBM3"), tmp_path, *where)
    assert page.read_text() == before


@pytest.mark.parametrize("tag", ["failure", "error"])
def test_a_failure_is_written_and_is_the_exit_code(tag: str, tmp_path: Path, page: Path) -> None:
    message = "AssertionError: a | b in /home/somebody/job/report.json\n  and more"
    xml = report(case("test_a"), case("test_b", ended(tag, message)))
    assert run(xml, tmp_path, "--write", str(page)).returncode == 1
    row = "::test_b` | **failed**: AssertionError: a \\| b in report.json |"
    assert row in page.read_text()


def test_all_skipped_is_no_success(tmp_path: Path) -> None:
    done = run(report(case("test_a", ended("skipped", "no GPU"))), tmp_path)
    assert done.returncode == 1
    assert "1 skipped." in done.stdout


@pytest.mark.parametrize(
    ("xml", "words"),
    [
        ("", "no XML"),
        ("<testsuites/>", "no <testsuite>"),
        ("<testsuite><testcase name='x'/></testsuite>", "no property `gpu`"),
        ("\x00", "no XML"),
    ],
)
def test_what_is_no_such_report_is_said(xml: str, words: str, tmp_path: Path, page: Path) -> None:
    done = run(xml, tmp_path, "--write", str(page))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert page.read_text() == PAGE


def test_without_a_report_or_a_heading_nothing_is_written(tmp_path: Path, page: Path) -> None:
    page.write_text("# Another page\n")
    done = run(report(case("test_a")), tmp_path, "--write", str(page))
    assert (done.returncode, page.read_text()) == (2, "# Another page\n")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "none.xml")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2


def test_the_page_of_this_project_can_take_one(tmp_path: Path, page: Path) -> None:
    page.write_text((ROOT / "docs/gpu-validation.md").read_text())
    assert run(report(case("test_a")), tmp_path, "--write", str(page)).returncode == 0
    assert "## Open questions" in page.read_text()


def test_where_a_gpu_must_be_there_none_is_a_failure(tmp_path: Path) -> None:
    """The tests of tests/gpu themselves, in an environment without a GPU; and their real report."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *("--basetemp", str(tmp_path / "kept")),
    ]
    command += ["tests/gpu/test_gpu_rates_gpu.py", "--junitxml", str(tmp_path / "real.xml")]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "GPU_REQUIRED": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stdout
    assert "GPU_REQUIRED says" in done.stdout
    written = run((tmp_path / "real.xml").read_text(), tmp_path)
    assert written.returncode == 1
    assert re.match(r"### \d{4}-\d\d-\d\d: none, torch \d", written.stdout)
    row = (
        "tests/gpu/test_gpu_rates_gpu.py::test_the_rates_are_those_of_a_plain_loop` | **failed**: "
    )
    assert row in written.stdout
