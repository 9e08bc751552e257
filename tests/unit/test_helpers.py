"""Work on files in children: what comes back, and what is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nccl_doctor.system import files, forks, helpers
from tests.support import disks

PATIENCE_S = 2.0
SLACK_S = 3.0  # of a busy machine


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(helpers, "_memory", helpers._Memory())
    monkeypatch.setattr(helpers, "PATIENCE_S", PATIENCE_S)
    yield
    assert not forks.living


def test_what_it_returns_comes_back_whole(tmp_path: Path) -> None:
    text = os.urandom(3 << 20)
    assert helpers.send(tmp_path, lambda: text) == text
    assert helpers.send(tmp_path, lambda: b"") == b""


def test_an_error_comes_back_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        helpers.send(tmp_path, (tmp_path / "no").read_bytes)
    assert caught.value.strerror == "No such file or directory"


def test_a_mistake_comes_back_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"test_helpers\.py"):
        helpers.send(tmp_path, lambda: 1 / 0)  # type: ignore[arg-type,return-value]


def test_a_child_that_dies_is_an_error(tmp_path: Path) -> None:
    for die in (lambda: os._exit(0), lambda: os.kill(os.getpid(), signal.SIGINT)):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - as every caller expects of a disk
            helpers.send(tmp_path, die)  # type: ignore[arg-type]
        assert caught.value.strerror == "the process that accessed the disk has died"


def test_the_child_has_nothing_of_ours_open(tmp_path: Path) -> None:
    kept = os.open(tmp_path, os.O_RDONLY)
    try:
        listing = helpers.send(
            tmp_path, lambda: "\n".join(map(_opened, os.listdir("/proc/self/fd"))).encode()
        )
    finally:
        os.close(kept)
    opened = [line for line in listing.decode().splitlines() if not line.startswith("/proc")]
    assert sorted(set(opened))[0] == "/dev/null"
    assert len([line for line in opened if line != "/dev/null"]) == 1  # its pipe to us


def _opened(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:  # that of the listing itself
        return "/proc"


def test_a_silent_folder_costs_one_wait_and_others_none(tmp_path: Path) -> None:
    silent, other = tmp_path / "a", tmp_path / "ab"
    started = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        helpers.send(silent, lambda: time.sleep(100) or b"")
    assert caught.value.strerror == "no answer within 2.0 s"
    for folder in (silent, silent / "below"):
        with pytest.raises(TimeoutError, match="not tried again"):
            helpers.send(folder, lambda: b"never run")
    assert helpers.send(other, lambda: b"fine") == b"fine"
    assert time.monotonic() - started < PATIENCE_S + SLACK_S


def test_slow_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(times: int) -> bytes:
        for _ in range(times):
            time.sleep(0.25)
            helpers.alive()
        return b".done"

    monkeypatch.setattr(helpers, "PATIENCE_S", 1.0)
    assert helpers.send(tmp_path, lambda: slow(6)) == b".done"
    helpers.leave_by(time.monotonic() + 3.0)
    with pytest.raises(TimeoutError, match=r"not finished within 1\.\d s"):
        helpers.send(tmp_path, lambda: slow(100))


def test_large_files_come_back_whole(tmp_path: Path) -> None:
    data = os.urandom((1 << 20) + 1) * 3
    (tmp_path / "large").write_bytes(data)
    assert files.read(tmp_path / "large", len(data)) == data
    with pytest.raises(OSError, match="longer than 2 MiB"):
        files.read(tmp_path / "large", 2 << 20)
    text = data.hex()
    files.write_whole(tmp_path / "text", text)
    assert (tmp_path / "text").read_text() == text


def test_one_who_leaves_soon_has_less_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "PATIENCE_S", 60.0)
    helpers.leave_by(time.monotonic() + 0.3)
    started = time.monotonic()
    for name in "abc":
        with pytest.raises(TimeoutError):
            helpers.send(tmp_path / name, lambda: time.sleep(100) or b"")
    assert time.monotonic() - started < 0.3 + SLACK_S


def test_a_disk_that_lets_nobody_be_killed(tmp_path: Path) -> None:
    with disks.frozen(tmp_path) as disk:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            files.write_whole(disk / "report.json", "{}")
        with pytest.raises(TimeoutError):
            files.write_private(disk / "map", "{}")
        assert time.monotonic() - started < PATIENCE_S + SLACK_S
    assert not (tmp_path / "disk" / "report.json").exists()


def test_a_pipe_that_nobody_writes(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(TimeoutError):
        files.read(pipe, 9)


def test_a_descriptor_is_read_by_ourselves() -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"a configuration")
    os.close(theirs)
    assert files.read(f"/dev/fd/{ours}", 99) == b"a configuration"
    os.close(ours)
