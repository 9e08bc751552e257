"""`--hold-idle`, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.program import error_of, program


@pytest.mark.parametrize("value", ["0", "-5", "ten"])
def test_what_is_no_length_of_time_is_a_usage_error(value: str) -> None:
    line = error_of(program("run", f"--hold-idle={value}"))
    assert f"'--hold-idle': {value!r} is not a positive number of seconds" in line


def test_a_silence_that_does_not_fit_is_refused_with_the_time_that_does(tmp_path: Path) -> None:
    (tmp_path / "nccl-doctor.toml").write_text("hold-idle = 300\n")
    line = error_of(program("run", cwd=tmp_path))
    assert "--hold-idle 300 does not fit into --timeout 120: give --timeout 390 or more" in line
    line = error_of(program("run", "--timeout", "389", cwd=tmp_path))
    assert "does not fit into --timeout 389" in line
