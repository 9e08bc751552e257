"""The processes that use a path: what they leave behind, and that nobody waits for them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Context, Launch, Untested
from nccl_doctor.checks.paths import Paths
from nccl_doctor.system import forks
from nccl_doctor.toolkit.storage import examine as examining
from nccl_doctor.toolkit.storage.examine import NeededPath, examine
from nccl_doctor.toolkit.storage.steps import PathDesk
from nccl_doctor.toolkit.storage.worker import Desk, StorageWorker, ask, close_all
from tests.support import disks
from tests.support.clusters import make_cluster
from tests.support.findings import only


class Sleeper(Desk):
    """Does one thing that does not end, or ends its process."""

    def __init__(self) -> None:
        self.steps = {"sleep": lambda: time.sleep(60) or {}, "die": self.die}

    @staticmethod
    def die() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}


class Board:
    """The other host of a round, which has written before and always answers."""

    def __init__(self, files: dict[str, Any]) -> None:
        self.files = files
        self.posted: dict[str, Any] = {}

    def post(self, tag: str, value: Any) -> None:
        self.posted[tag] = value

    def collect(self, tag: str, timeout_s: float, of: Any = None) -> dict[int, Any]:
        assert timeout_s > 0
        return {0: self.posted[tag], 7: self.files if tag == "written" else True}

    def store(self) -> Any:
        raise NotImplementedError


def context(**fields: Any) -> Context:
    return Context(launch=Launch(), env={}, **fields)


def written(folder: Path) -> tuple[PathDesk, list[str]]:
    """Another host, which has written its file."""
    desk = PathDesk(str(folder))
    desk.steps["look"]()
    told = desk.steps["write"]()
    return desk, [told["name"], told["token"]]


def eventually(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not true() and time.monotonic() < until:
        time.sleep(0.01)
    return true()


def test_the_file_of_another_host_is_seen_and_both_are_removed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    other, file = written(tmp_path / "there")
    gone = [file[0].replace(file[0][-4:], "0000"), file[1]]
    board = Board({"0": file, "1": gone})
    places = [
        NeededPath(str(tmp_path / "there")),
        NeededPath(str(tmp_path)),
        NeededPath("/etc/hosts"),
    ]
    before = examining.SEEN_S
    examining.SEEN_S = 0.2
    try:
        found = examine(context(peers=board, group=(0, 7)), places, store="store")
    finally:
        examining.SEEN_S = before
    assert list(found[0]["sees"]) == ["7"]
    assert found[0]["sees"]["7"] is not None
    assert found[1]["sees"] == {"7": None}
    assert found[2]["form"] == "file"
    assert (found[0]["file"], found[0]["lock_error"]) == (None, "")
    assert found[0]["feels"] == {"7": False}  # nobody has locked that one
    assert board.posted["written"]["0"][0] != board.posted["written"]["1"][0]
    assert "token" not in found[0]
    other.put_away()
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_a_file_of_another_name_is_not_opened(tmp_path: Path) -> None:
    desk, _ = written(tmp_path)
    (tmp_path / "secret").write_text("token")
    files = {"1": ["secret", ""], "2": ["../x", ""]}
    assert desk.steps["find"](files=files, limit_s=0.0) == {"sees": {"1": None, "2": None}}
    desk.put_away()


def test_what_an_earlier_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left, (name, _) = written(tmp_path)
    fresh, (new, _) = written(tmp_path)
    old = time.time() - 7200
    foreign = tmp_path / ".nccl-doctor-0123456789abcdef"
    foreign.write_text("something else")
    for path in (tmp_path / name, foreign):
        os.utime(path, (old, old))
    desk, _ = written(tmp_path)
    desk.put_away()
    assert {path.name for path in tmp_path.iterdir()} == {new, foreign.name}
    fresh.put_away()
    left.put_away()


def test_who_is_killed_leaves_no_file(tmp_path: Path) -> None:
    """The process that asks is killed; the one that wrote sees its end."""
    heard, told = os.pipe()

    def body() -> int:
        worker = StorageWorker("storage", PathDesk(str(tmp_path)), 30)
        ask({0: worker}, "look", {0: {}}, 10)
        os.write(told, b"+" if "token" in ask({0: worker}, "write", {0: {}}, 10)[0] else b"-")
        time.sleep(60)
        return 0

    pid = forks.fork_child(body)
    assert os.read(heard, 1) == b"+"
    assert len(list(tmp_path.iterdir())) == 1
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert eventually(lambda: not list(tmp_path.iterdir()))
    os.close(heard)
    os.close(told)


def test_who_does_not_answer_is_not_waited_for_and_not_asked_again() -> None:
    workers = {number: StorageWorker("storage", Sleeper(), 30) for number in (0, 1)}
    with pytest.raises(RuntimeError, match=r"KeyError: 'dance'"):
        ask(workers, "dance", {0: {}}, 10)
    began = time.monotonic()
    made = ask(workers, "sleep", {0: {}}, 0.2) | ask(workers, "die", {0: {}, 1: {}}, 10)
    assert time.monotonic() - began < 10
    assert made[0]["hung"]["step"] == "sleep"
    assert made[0]["hung"]["state"] == "S"
    assert made[1]["error"]["text"] == "the process that accessed it was killed"
    assert ask(workers, "sleep", {0: {}, 1: {}}, 10) == {}
    for worker in workers.values():
        worker.close(kill=True)
    close_all(list(workers.values()))


def test_nobody_waits_for_a_file_server_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examining, "STEP_S", 0.3)
    (tmp_path / "well").mkdir()
    with disks.silent(tmp_path) as dead:
        found = examine(
            context(), [NeededPath(str(dead / "x")), NeededPath(str(tmp_path / "well"))]
        )
        with pytest.raises(Untested, match="give a longer --timeout"):
            examine(context(deadline=time.monotonic() + 1.1), [NeededPath(str(dead / "y"))])
    assert found[0]["hung"]["step"] == "look"
    assert found[0]["hung"]["after_s"] < 8
    assert "fuse" in found[0]["type"]
    assert "write_s" in found[1]


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own, which can be filled, or is read-only."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False, timeout=10).returncode:
        pytest.skip("this machine refuses to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True, timeout=10)


def test_disks_that_are_full_or_read_only(tmp_path: Path) -> None:
    def said(code: str, options: str, fill: int = 0) -> str:
        name = options.replace("=", "-")
        with tmpfs(tmp_path / name, options) as folder:
            if fill:
                (folder / "full").write_bytes(b"x" * fill)
            here = {"paths": examine(context(), [NeededPath(str(folder))])}
            assert not list(folder.glob(".nccl-doctor-*"))
        cluster = make_cluster(["nd0"], check="paths", by_host={"nd0": here}, round_name="hosts")
        return only(Paths(), cluster, code, hosts=["nd0"]).message

    assert said("path-full", "size=8k", 8192).endswith("No space left on device")
    assert said("path-full", "nr_inodes=2", 1).endswith("No space left on device")
    assert said("path-full", "size=1m").endswith("1 MiB free")
    assert said("path-read-only", "ro").endswith("Read-only file system")
