"""`run --autopsy DIR -- COMMAND`: the job is as it was, and its death is explained."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.program import CLEAN, error_of, program

pytestmark = pytest.mark.xdist_group("torch")

EXAMINE = ("run", "--level=quick", "--select=kernel_limits", "--nproc-per-node=1", "--quiet")
LIMIT_S = 100.0


def run(folder: Path, *job: str) -> subprocess.CompletedProcess[str]:
    return program(*EXAMINE, "--autopsy=kept", "--", *job, cwd=folder, timeout_s=LIMIT_S)


def kept(folder: Path) -> Path:
    """The folder of this host."""
    (own,) = (each for each in (folder / "kept").iterdir() if each.is_dir())
    return own


def test_a_job_that_dies_is_explained_on_stderr(tmp_path: Path) -> None:
    script = "import sys; print('step 1', flush=True); raise KeyError('labels')"
    done = run(tmp_path, sys.executable, "-c", script)
    assert done.returncode == 1, done
    assert done.stdout.splitlines()[-1] == "step 1"
    assert "[rank-raised]" in done.stderr
    assert "KeyError: 'labels'" in done.stderr
    report = json.loads((kept(tmp_path) / "autopsy.json").read_text())
    assert [cause["code"] for cause in report["root_causes"]] == ["rank-raised"]
    assert (report["run"]["before"]["verdict"], report["run"]["after"]["verdict"]) == ("pass",) * 2
    assert report["run"]["before"]["id"] != report["run"]["after"]["id"]
    assert (report["run"]["files"], report["exit_code"]) == (2, 1)


def test_a_job_that_ends_well_leaves_only_its_output(tmp_path: Path) -> None:
    for number in range(2):  # the second one replaces what the first one left
        done = run(tmp_path, "sh", "-c", f"echo job {number}")
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"job {number}")
        assert "the job ended" not in done.stderr
    names = {path.name for path in kept(tmp_path).iterdir()}
    assert names == {"before.json", "stderr.log", "stdout.log"}
    assert (kept(tmp_path) / "stdout.log").read_text() == "job 1\n"


def test_a_job_that_is_told_to_end_is_not_examined_again(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "nccl_doctor", *EXAMINE, "--autopsy=kept", "--"]
    job = ["sh", "-c", "echo ready; read x"]
    with subprocess.Popen(
        [*line, *job],
        cwd=tmp_path,
        env=CLEAN,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        assert process.wait(LIMIT_S) == -signal.SIGTERM
    assert "the job ended by SIGTERM" in said
    assert "again" not in said
    assert not (kept(tmp_path) / "after.json").exists()


def test_what_is_wrong_with_the_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = error_of(program("run", "--autopsy=file", "--", "true", cwd=tmp_path))
    assert "--autopsy file: " in words
    assert "Not a directory" in words
    alone = error_of(program("run", "--autopsy=kept", cwd=tmp_path))
    assert "--autopsy is for the COMMAND behind --" in alone
