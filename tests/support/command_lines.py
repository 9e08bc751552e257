"""Reads a line as it was typed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from nccl_doctor.launch.command_line.job_line import JobLine
from nccl_doctor.launch.command_line.reader import read


def job(line: str, cwd: Path = Path("/nonexistent"), **environ: str) -> JobLine:
    return read(shlex.split(line), {"HOME": str(cwd), **environ}, cwd)


def says(found: JobLine, expected: dict[str, Any]) -> None:
    assert {name: getattr(found, name) for name in expected} == expected


def said(found: JobLine, words: str) -> bool:
    return any(words in note for note in found.notes)
