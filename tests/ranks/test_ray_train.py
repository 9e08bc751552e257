"""Workers of Ray Train: their process group is up, so rank 0's own process holds MASTER_PORT."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nccl_doctor.gather.opening import MEETING, opened
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.toolkit.net.ports import ephemeral_range
from tests.ranks.ranks import BASE, Ranks
from tests.support.reports import validate

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("torch")

WAIT_S = 60
JOIN_S = 25.0
OPTIONS = (
    *("--timeout=60", f"--join-timeout={JOIN_S:g}"),
    "--select=ranks,launch_record,port,environment",
)


def test_ranks_meet_in_the_store_of_the_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again: the store stays. Its port is any free one, mostly an ephemeral one."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    torch = importlib.import_module("torch.distributed")
    store = torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ephemeral_range(store.port)
    ray = {
        "MASTER_PORT": str(store.port),
        "NODE_RANK": "0",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "RAY_JOB_ID": "01000000",
    }
    for odd in ({}, {"WORLD_SIZE": "3"}):
        ranks = Ranks(tmp_path, 2, OPTIONS, changes={0: ray, 1: {**ray, **odd}})
        ended = ranks.wait(WAIT_S)
        worse = [each for each in ranks.report()["findings"] if each["severity"] != "info"]
        assert [each.code for each in ended.values()] == [int(bool(odd))] * 2, ended
        assert [each["code"] for each in worse] == ["world-size-differs"][: len(odd)]
        assert [each["where"]["ranks"] for each in worse] == [[0, 1]][: len(odd)]
        assert max(each.seconds for each in ended.values()) < JOIN_S
    store.set("job", "goes on")


def test_workers_that_ray_starts_again_meet_in_their_new_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure, or with another number of workers: the train function begins anew."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    torch = importlib.import_module("torch.distributed")
    stores = [
        torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)
    ]
    ray = {"NODE_RANK": "0", "ACCELERATE_TORCH_DEVICE": "cpu", "RAY_JOB_ID": "01000000"}
    old, new = ({**ray, "MASTER_PORT": str(store.port)} for store in stores)
    first = Ranks(tmp_path, 3, OPTIONS, changes=dict.fromkeys(range(3), old), start=[0, 1])
    opened(ControlStore("127.0.0.1", stores[0].port, timeout_s=5, prefix=MEETING), WAIT_S)
    first.kill()
    again = Ranks(tmp_path, 2, OPTIONS, changes=dict.fromkeys(range(2), new))
    ended = again.wait(WAIT_S)
    assert [each.code for each in ended.values()] == [0, 0], ended
    report = again.report()
    assert (report["verdict"], report["run"]["world_size"]) == ("pass", 2)


@pytest.mark.wide
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="no ray: .venv/bin/pip install 'ray[train]'"
)
def test_two_workers_of_ray_train(tmp_path: Path) -> None:
    """The lines of docs/launchers.md, under a Ray of this machine without GPUs; at last in workers
    that fail after the examination, so that Ray starts all of them again.
    """
    page = (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "block.py").write_text(block)
    folder = tempfile.mkdtemp(prefix="ray")  # short: Ray puts sockets below it
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        **BASE,
        **{"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        **{"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
    }
    try:
        done = subprocess.run(
            [sys.executable, ROOT / "tests/support/ray_driver.py", folder, "block.py", *OPTIONS],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    said = [
        line for line in done.stdout.splitlines() if line.startswith(("healthy", "faulty", "again"))
    ]
    assert said == ["healthy ended well", "faulty failed", "again ended well"], done
    ports = {}
    for name in ("healthy", "faulty", "once", "again"):
        report = json.loads((tmp_path / f"{name}.json").read_text())
        validate(report)
        worse = [each for each in report["findings"] if each["severity"] != "info"]
        odd = name == "faulty"
        assert [each["code"] for each in worse] == ["env-differs"][: int(odd)]
        assert [each["where"]["ranks"] for each in worse] == [[0, 1]][: int(odd)]
        assert [each["launch"]["launcher"] for each in report["ranks"]] == ["ray", "ray"]
        assert report["run"]["duration_s"] < WAIT_S
        ports[name] = report["ranks"][0]["launch"]["master_port"]
    assert ports["once"] != ports["again"], "a new process group has another port"
