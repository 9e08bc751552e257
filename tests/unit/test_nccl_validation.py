"""The page of `make test-nccl`: what it says of a difference, and that the one in docs is whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.lab.nccl.rows import ROWS
from tests.lab.nccl.trials import Result
from tests.lab.nccl.wheels import QUICK, VERSIONS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("v", ROOT / "scripts/nccl_validation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_difference_is_told_with_its_row(script: ModuleType) -> None:
    same = [Result(row, "eth0 192.0.2.1", ()) for row in ROWS]
    other = [Result(ROWS[0], "lo 127.0.0.1", ("by the rules: eth0 192.0.2.1",)), *same[1:]]
    page = script.page({"1.2.3": same, "1.2.4": same, "1.2.5": other}, "2026-01-02")
    count = 3 * len(ROWS)
    assert f"2026-01-02: {count - 1} of {count} answers are those of the rules." in page
    assert f"| 1.2.5 | {len(ROWS)} | {len(ROWS) - 1} |" in page
    row = "| 1.2.5 | many | nothing set | lo 127.0.0.1 | by the rules: eth0 192.0.2.1 |"
    assert row in page
    assert "| many | nothing set | lo 127.0.0.1 (1.2.5); eth0 192.0.2.1 |" in page
    assert "None." in script.page({"1.2.3": same}, "2026-01-02")


def test_the_page_in_docs_has_every_row_of_every_version(script: ModuleType) -> None:
    page = (ROOT / "docs/nccl-validation.md").read_text("utf-8")
    assert QUICK in VERSIONS
    for version in VERSIONS:
        assert f"| {version} | {len(ROWS)} | {len(ROWS)} |" in page, "make test-nccl"
    written = {line.rpartition(" | ")[0] for line in page.splitlines()}
    for row in ROWS:
        text = row.text.replace("|", "\\|")
        assert f"| {row.host} | {text}" in written, "make test-nccl"
