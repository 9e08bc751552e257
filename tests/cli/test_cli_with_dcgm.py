"""`--with-dcgm`, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.program import error_of, program

HERE = ("--backend", "gloo", "--nproc-per-node", "1", "--select", "dcgm_diag")


@pytest.mark.parametrize("value", ["0", "5", "r3", "-1", ""])
def test_another_level_is_a_usage_error(value: str) -> None:
    line = error_of(program("run", f"--with-dcgm={value}"))
    assert f"{value!r} is not a whole number, 1 to 4" in line


def test_the_level_may_stand_in_the_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "nccl-doctor.toml").write_text("with-dcgm = 1\n")
    done = program("run", *HERE, cwd=tmp_path, timeout_s=150)
    assert done.returncode == 3, done
    assert "dcgmi is not installed here" in done.stdout
