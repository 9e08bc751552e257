"""Fixture of a job whose store the test serves."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.strangers.job import Job


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    importlib.import_module("torch.distributed")  # takes seconds, before any time limit
    made = Job(tmp_path)
    yield made
    made.end()
