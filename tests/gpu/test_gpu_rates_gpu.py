"""The rates that the doctor measures beside those of a plain loop: benchmarks/gpu_rates.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

BENCHMARK = Path(__file__).parents[2] / "benchmarks/gpu_rates.py"


def test_the_rates_are_those_of_a_plain_loop(
    record_property: Callable[[str, object], None],
) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--seconds", "3"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    for line in done.stdout.splitlines():
        name, colon, said = line.partition(": ")
        if colon:
            record_property(f"rate: {name}", said)
    assert done.returncode == 0, done.stdout + done.stderr
