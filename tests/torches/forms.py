"""The ways in which people start the doctor, as lines for the Python of another torch."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

FORM_S = 300
"""Longest time for one of them."""
_ROOT = Path(__file__).resolve().parents[2]
_DOCTOR = (
    "{python} -m nccl_doctor run --backend gloo --join-timeout 30 --timeout 90 --json {report}"
)
_TORCHRUN = "{python} -m torch.distributed.run --nproc-per-node 2 --master-port {port}"
_TWO = "--nproc-per-node 2 --master-port {port}"
FORMS = {
    "alone": f"{_DOCTOR} {_TWO}",
    "under torchrun": f"{_TORCHRUN} -m {_DOCTOR.removeprefix('{python} -m ')}",
    "in front of torchrun": f"{_DOCTOR} -- {_TORCHRUN} -m tests.support.small_job",
    "plain variables": (
        "export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}; "
        f"RANK=1 LOCAL_RANK=1 {_DOCTOR} & RANK=0 LOCAL_RANK=0 {_DOCTOR}; code=$?; "
        "wait $! && exit $code"
    ),
    "--groups many": f"{_DOCTOR} {_TWO} --groups many",
    "--groups weight-sync": f"{_DOCTOR} {_TWO} --groups weight-sync",
    "--mesh": f"{_DOCTOR} {_TWO} --mesh dp=1,tp=2",
    "--level full": f"{_DOCTOR} {_TWO} --level full",
}
"""Way to start the doctor → the line."""


def start(form: str, python: Path, port: int) -> str:
    """Start the doctor with another Python. Returns: `pass (4 s)`, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        begun = time.monotonic()
        code, told = run(["sh", "-c", FORMS[form].format(python=python, port=port, report=report)])
        took = f"({time.monotonic() - begun:.0f} s)"
        if not report.exists():
            return f"exit {code} {took}: {' '.join(told.splitlines()[-1:])}"
        answer = json.loads(report.read_text(encoding="utf-8"))
    loud = sorted({each["code"] for each in answer["findings"] if each["severity"] != "info"})
    verdict = "pass" if code == 0 and answer["verdict"] == "pass" else answer["verdict"]
    return f"{verdict} {took}{': ' if loud else ''}{', '.join(loud)}"


def run(
    argv: Sequence[str], limit_s: float = FORM_S, more: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit code, -1 for one that was late, and both outputs. `more`: variables."""
    environ = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONPATH": str(_ROOT)}
    environ |= more or {}
    try:
        done = subprocess.run(
            argv,
            cwd=_ROOT,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return -1, f"{error.stdout or ''}\nnot ended after {limit_s:g} s"
    return done.returncode, done.stdout or "-"
