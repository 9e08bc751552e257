"""Writing a file whole, and what cannot be replaced where it stands."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nccl_doctor.system.files import write_whole

LONG = "x" * 300_000 + "é\n"


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "report.txt"
    target.write_text("old " * 100)
    before = target.stat().st_ino
    write_whole(target, LONG)
    assert target.read_text(encoding="utf-8") == LONG
    assert target.stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir()] == ["report.txt"]


def test_a_link_to_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("kept")
    target = tmp_path / "report.txt"
    target.symlink_to("kept.txt")
    write_whole(target, "new")
    assert target.read_text() == "new"
    assert (tmp_path / "kept.txt").read_text() == "kept"


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    target = tmp_path / "pipe"
    os.mkfifo(target)
    with subprocess.Popen(["cat", str(target)], stdout=subprocess.PIPE, text=True) as reader:
        keeper = os.open(target, os.O_WRONLY)  # returns when the reader is there
        write_whole(target, "hello\n")
        os.close(keeper)
        assert reader.communicate(timeout=10)[0] == "hello\n"
    assert stat.S_ISFIFO(target.stat().st_mode)


def test_a_pipe_that_nobody_reads_is_an_error_and_no_wait(tmp_path: Path) -> None:
    target = tmp_path / "pipe"
    os.mkfifo(target)
    with pytest.raises(OSError, match="No such device or address"):
        write_whole(target, "lost")


def test_a_device_stays_a_device() -> None:
    write_whole("/dev/null", LONG)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("to_file", [False, True], ids=["pipe", "file"])
def test_the_stream_of_a_process_stays_a_link(tmp_path: Path, to_file: bool) -> None:
    code = (
        "from nccl_doctor.system.files import write_whole\n"
        "print('before', flush=True)\n"
        "write_whole('/dev/stdout', 'hello\\n')\n"
        "print('after')\n"
    )
    with (tmp_path / "out").open("w") as file:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=file if to_file else subprocess.PIPE,
            text=True,
            timeout=30,
            check=True,
        )
    assert ((tmp_path / "out").read_text() if to_file else done.stdout) == (
        "before\nhello\nafter\n"
    )
    assert os.path.islink("/dev/stdout")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_file_in_a_folder_where_none_can_be_made() -> None:
    """As for a user who is not root, whose termination message stands in root's /dev."""
    with tempfile.TemporaryDirectory() as made:  # pytest's own folders are closed to others
        folder = Path(made)
        folder.chmod(0o755)
        target = folder / "termination-log"
        target.write_text("something longer than the message")
        target.chmod(0o666)
        code = (
            "import os, sys; from nccl_doctor.system.files import write_whole\n"
            "os.setuid(65534)\n"
            "write_whole(sys.argv[1], 'message')\n"
            "write_whole(sys.argv[1] + '.no', 'message')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(target)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert target.read_text() == "message"
        assert "Permission denied" in done.stderr
        assert [path.name for path in folder.iterdir()] == ["termination-log"]


def test_a_file_that_is_a_mount(tmp_path: Path) -> None:
    """As /dev/termination-log is in a container: it cannot be renamed over."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace of one's own is not allowed here")
    outside, target = tmp_path / "outside", tmp_path / "termination-log"
    outside.write_text("something longer than the message")
    target.touch()
    code = (
        "import sys; from nccl_doctor.system.files import write_whole as w; w(sys.argv[1], 'new')"
    )
    script = 'mount --bind "$1" "$2" && exec "$3" -c "$4" "$2"'
    done = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            script,
            "sh",
            str(outside),
            str(target),
            sys.executable,
            code,
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert outside.read_text() == "new"
    assert target.read_text() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "termination-log"]
