"""Every path that an option names, on a file server that is gone: one line, exit 2, in time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nccl_doctor.cli.config import ConfigError, load
from nccl_doctor.system import helpers
from nccl_doctor.system.supervisor import GRACE_S
from tests.cli.program import CLEAN
from tests.support import disks
from tests.support.forkserver import Forked

TIMEOUT_S = 9.0
START_S = 20.0  # of so many at once
RUN = (
    "--config {0}/x",
    "--baseline {0}/x",
    "--redact --redact-key {0}/x",
    "--deepspeed-config {0}/x",
    "--hostfile {0}/x",
    "--topology {0}/x",
    "--output-dir {0}",
    "--json {0}/x.json",
)
OTHERS = (
    "env --config {0}/x",
    "env --html {0}/x.html",
    "report show {0}/x",
    "report judge {0}/x",
    "report merge {0}/x {0}/y",
    "report diff {0}/x {0}/y",
    "report issue nccl {0}/x",
    "report bundle --no-tools {0}/x",
)


def test_every_path_of_a_server_that_is_gone(tmp_path: Path) -> None:
    lines = [f"run --timeout {TIMEOUT_S} --collective-timeout 5 {words}" for words in RUN]
    lines = [*lines, *OTHERS]
    with disks.silent(tmp_path) as place:
        began = time.monotonic()
        running = []
        for number, words in enumerate(lines):
            out, err = tmp_path / f"{number}.out", tmp_path / f"{number}.err"
            arguments = words.format(place).split()
            process = Forked(arguments, CLEAN, folder=tmp_path, out=out, err=err)
            running.append((words, process, out, err))
        try:
            for words, process, out, err in running:
                left = began + TIMEOUT_S + GRACE_S + START_S - time.monotonic()
                assert process.wait(left) == 2, (words, err.read_text())
                assert out.read_text() == "", words
                line, *usage = err.read_text().splitlines()
                assert len(usage) <= 1, words
                assert line.startswith("nccl-doctor: error: "), words
                assert str(place) in line, words
                assert "no answer within" in line, words
        finally:
            for _, process, _, _ in running:
                process.kill()


def test_a_working_directory_of_a_server_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "PATIENCE_S", 0.5)
    with disks.silent(tmp_path) as place, pytest.raises(ConfigError) as caught:
        load(None, place)
    assert str(caught.value) == (
        f"cannot look for a configuration in {place}: no answer within 0.5 s"
    )
