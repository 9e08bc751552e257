"""Whole runs beside a disk that does not answer: who writes there cannot even be killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nccl_doctor.system.helpers import PATIENCE_S
from nccl_doctor.system.supervisor import GRACE_S
from nccl_doctor.system.watchdog import LAST_WORDS_S
from tests.ranks.ranks import BASE, Ended, Ranks, is_served
from tests.support import disks
from tests.support.forkserver import quick_python_path
from tests.support.waiting import until

SLACK_S = 3.0  # of a busy machine
RUN_S = 20.0  # of two ranks that are well, on a machine that is not
# Rank 0 may wait for the disk before it opens the store that the other one joins.
OPTIONS = ("--join-timeout=20", "--collective-timeout=5", "--timeout=60")
FEW = "--select=ranks,collectives"
"""Where it is not asked what the checks say."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with disks.frozen(tmp_path) as disk:
        yield disk


def told(tmp_path: Path, *options: str, **env: str) -> tuple[Ranks, Ended]:
    """Two ranks, and how rank 0 ended; rank 1 has ended with the same code."""
    ranks = Ranks(tmp_path, 2, (*OPTIONS, *options), changes={0: env, 1: env})
    ended = ranks.wait(RUN_S + 2 * PATIENCE_S)
    assert ended[1].code == ended[0].code
    return ranks, ended[0]


def test_a_report_that_cannot_be_put_there_is_still_told(tmp_path: Path, disk: Path) -> None:
    """By the own launcher, to pipes: what is left behind keeps neither them nor it."""
    command = [quick_python_path(), "-m", "nccl_doctor", "run", "--nproc-per-node=2", *OPTIONS]
    started = time.monotonic()
    done = subprocess.run(
        [*command, f"--json={disk}/a.json", f"--markdown={disk}/a.md"],
        env={**os.environ, **BASE},
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * RUN_S,
    )
    assert time.monotonic() - started < RUN_S + PATIENCE_S
    assert done.returncode == 3
    assert "PASS: 2 ranks on 1 host are fit to train" in done.stdout
    json, markdown = done.stderr.splitlines()  # one wait, and not for each file
    assert re.search(rf"not saved: {disk}/a.md: no answer within [\d.]+ s$", markdown)
    # The last that is written: it says how the others went.
    assert json.endswith(f"not saved: {disk}/a.json: no answer before, so not tried again")


def test_own_views_that_cannot_be_put_there_do_not_stop_the_run(tmp_path: Path, disk: Path) -> None:
    ranks, first = told(tmp_path, f"--output-dir={disk}", FEW)
    assert first.code == 3
    assert ranks.report()["verdict"] == "pass"
    assert f"the partial report was not saved: {disk}" in first.stderr
    assert first.stderr.count("no answer") == 1


def test_pseudonyms_that_cannot_be_put_there(tmp_path: Path, disk: Path) -> None:
    out = (f"--json={disk}/report.json", f"--output-dir={disk}", "--redact", FEW)
    _, first = told(tmp_path, *out)
    assert first.code == 3
    assert "PASS" in first.stdout + first.stderr
    assert str(disk) in first.stderr


def test_last_words_are_said(tmp_path: Path, disk: Path) -> None:
    ranks = Ranks(
        tmp_path, 2, (*OPTIONS, f"--json={disk}/a.json", f"--html={disk}/a.html"), start=[0]
    )
    until(lambda: is_served(ranks.port))  # by then it is on its guard
    stopped = time.monotonic()
    ranks.processes[0].send_signal(signal.SIGTERM)
    ended = ranks.wait(RUN_S)
    assert time.monotonic() - stopped < LAST_WORDS_S
    assert ended[0].code == 3
    assert "run-interrupted" in ended[0].stdout
    assert f"{disk}/a.html: no answer within " in ended[0].stderr


def test_last_words_are_said_at_the_deadline(tmp_path: Path, disk: Path) -> None:
    limit_s = 7.0
    options = ("--join-timeout=7", "--collective-timeout=5", f"--timeout={limit_s:g}")
    outputs = (f"--json={disk}/a.json", f"--html={disk}/a.html", f"--output-dir={disk}")
    ranks = Ranks(tmp_path, 2, (*options, *outputs), start=[0])
    ended = ranks.wait(RUN_S)
    assert ended[0].seconds < limit_s + GRACE_S + SLACK_S
    assert ended[0].code == 3
    # On a busy machine its own store may not answer in so short a time.
    codes = ("rank-absent", "run-interrupted", "coordinator-lost")
    assert any(code in ended[0].stdout for code in codes), ended[0]
    assert f"{disk}/a.html: no answer" in ended[0].stderr


def test_temporary_files_that_cannot_be_made_are_a_cause(tmp_path: Path, disk: Path) -> None:
    ranks, first = told(tmp_path, TMPDIR=str(disk))
    assert first.code == 1
    (cause,) = ranks.report()["root_causes"]
    assert cause["code"] == "temp-dir-unwritable"
    assert cause["where"]["hosts"] == [os.uname().nodename]
    assert cause["message"].startswith(f"TMPDIR={disk}: creating a file did not end within ")
    assert "process state D" in cause["message"]
    assert {f["code"] for f in ranks.report()["findings"] if f["severity"] != "info"} == {
        "temp-dir-unwritable"
    }
