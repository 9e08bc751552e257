"""torch that is missing or broken is named with its rank, and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nccl_doctor.api import Context
from nccl_doctor.model.launch import Launch
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster

CHECK = CHECKS["torch_import"]
GOOD = {"python": "/opt/python", "version": "2.13.0", "error": None}


def test_torch_everywhere_gives_nothing() -> None:
    cluster = make_cluster(check="torch_import", by_rank=dict.fromkeys(range(4), GOOD))
    assert list(CHECK.judge(cluster)) == []


def test_rank_without_torch_is_named() -> None:
    bad = {**GOOD, "version": None, "error": "ModuleNotFoundError: No module named 'torch'"}
    cluster = make_cluster(check="torch_import", by_rank={0: GOOD, 1: GOOD, 2: GOOD, 3: bad})
    (found,) = CHECK.judge(cluster)
    assert (found.code, found.where.ranks, found.where.hosts) == ("torch-missing", (3,), ("nd1",))
    assert "No module named 'torch'" in found.message


def test_a_torch_that_is_there_and_broken_is_to_be_repaired() -> None:
    bad = {**GOOD, "error": "ImportError: libcudnn.so.9: cannot open shared object file"}
    cluster = make_cluster(check="torch_import", by_rank={0: GOOD, 1: GOOD, 2: GOOD, 3: bad})
    (found,) = CHECK.judge(cluster)
    assert "--force-reinstall" in found.fix


@pytest.mark.xdist_group("torch")
def test_observe_imports_for_real() -> None:
    facts = CHECK.observe(Context(launch=Launch(), env={}))
    assert facts["error"] is None
    assert facts["version"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("raise ImportError('libtorch_cpu.so: cannot open shared object')", "libtorch_cpu.so"),
        ("raise OSError('libcudart.so.13: not found')", "libcudart.so.13"),
    ],
)
def test_whole_run_without_torch_says_so_at_once(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(content)
    launch = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29977",
    }
    done = subprocess.run(
        [sys.executable, "-m", "nccl_doctor", "run", "--join-timeout=3", "--timeout=30"],
        env={**os.environ, **launch, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "torch-missing" in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
