"""A command whose output is kept: it cannot tell, and neither can who started it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nccl_doctor.cli.keep import Plan, folder_of

PROGRAM = """
import sys
from pathlib import Path
from nccl_doctor.system import kept
kept._LARGEST, kept._FLUSH_S = 1 << 16, 0.5
end = kept.run_kept(sys.argv[2:], Path(sys.argv[1]))
Path(sys.argv[1], "asked").write_text(str(end.was_asked))
kept.leave_as(end.code)
"""
LIMIT_S = 30.0


def words(folder: Path, *command: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(folder), *command]


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(folder, "sh", "-c", script),
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def kept(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*.log"))}


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 3", 3),
        ("exit 255", 255),
        ("kill -KILL $$", -signal.SIGKILL),
        ("kill -SEGV $$", -signal.SIGSEGV),
        ("kill -TERM $$", -signal.SIGTERM),
    ],
)
def test_it_ends_as_the_command_ends(script: str, code: int, tmp_path: Path) -> None:
    assert run(tmp_path, script).returncode == code


def test_a_command_that_cannot_be_run(tmp_path: Path) -> None:
    done = subprocess.run(
        words(tmp_path, "./nosuch"), check=False, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 2
    assert "cannot run ./nosuch: No such file or directory" in done.stderr


def test_both_streams_pass_and_are_kept(tmp_path: Path) -> None:
    done = run(tmp_path, "echo out; echo err >&2; printf end")
    assert (done.stdout, done.stderr) == ("out\nend", "err\n")
    assert kept(tmp_path) == {"stdout.log": "out\nend", "stderr.log": "err\n"}


def test_two_streams_that_are_one_stay_in_order(tmp_path: Path) -> None:
    script = "for i in 1 2 3; do echo out$i; echo err$i >&2; done"
    done = subprocess.run(
        words(tmp_path, "sh", "-c", script),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout == "out1\nerr1\nout2\nerr2\nout3\nerr3\n"
    assert kept(tmp_path) == {"console.log": done.stdout}


def test_the_last_part_of_much_output_is_kept(tmp_path: Path) -> None:
    done = run(tmp_path, "seq 100000")
    lines = done.stdout.splitlines()
    assert lines == [str(number) for number in range(1, 100001)]
    older, newer = kept(tmp_path).get("stdout.0.log", ""), kept(tmp_path)["stdout.log"]
    assert done.stdout.endswith(older + newer)
    assert len(newer) <= (1 << 16) + (1 << 24)
    assert older


def test_a_reader_that_leaves_ends_the_command(tmp_path: Path) -> None:
    with subprocess.Popen(words(tmp_path, "yes"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(2)
        process.stdout.close()
        assert process.wait(LIMIT_S) == -signal.SIGPIPE


def test_a_disk_that_does_not_answer_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stdout.log")  # opening it waits for a reader
    done = run(tmp_path, "seq 100000; exit 4")
    assert done.returncode == 4
    assert done.stdout.endswith("\n100000\n")


def test_a_child_that_holds_the_streams_open_is_not_waited_for(tmp_path: Path) -> None:
    started = time.monotonic()
    # Its life is what the time is compared with.
    assert run(tmp_path, f"sleep {LIMIT_S:g} & exit 5").returncode == 5
    assert time.monotonic() - started < LIMIT_S


def test_a_signal_is_sent_on_once(tmp_path: Path) -> None:
    script = "trap 'echo got' TERM; trap 'echo usr' USR1; echo ready; while read x; do :; done"
    with subprocess.Popen(
        words(tmp_path, "bash", "-c", script),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number, line in ((signal.SIGTERM, "got\n"), (signal.SIGUSR1, "usr\n")):
            process.send_signal(number)
            assert process.stdout.readline() == line
        process.kill()
        assert process.stdout.read() == ""  # and the command dies with it


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    script = "trap '' HUP; exec \"$@\""
    line = ["sh", "-c", script, "sh", *words(tmp_path, "sh", "-c", "kill -HUP $$; echo alive")]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (0, "alive\n")


@contextlib.contextmanager
def in_terminal(line: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Process that leads a terminal of 50 × 30, and the other end of that."""
    pid, master = pty.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 30, 0, 0))
            os.execv(line[0], list(line))
        os._exit(127)
    try:
        yield pid, master
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)  # and the command dies with it
            os.waitpid(pid, 0)
        os.close(master)


def read_until(master: int, word: bytes) -> bytes:
    data, ends = b"", time.monotonic() + LIMIT_S
    while word not in data:
        assert time.monotonic() < ends, data
        if select.select([master], [], [], 0.1)[0]:
            try:
                data += os.read(master, 4096)
            except OSError:
                break
    return data


def test_a_terminal_is_one_for_the_command(tmp_path: Path) -> None:
    script = "test -t 1 && test -t 2 && stty size; echo end; cat"
    with in_terminal(words(tmp_path, "sh", "-c", script)) as (pid, master):
        assert read_until(master, b"end\r\n") == b"50 30\r\nend\r\n"
        os.write(master, b"\x04")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert kept(tmp_path) == {"console.log": "50 30\nend\n"}


SAYS_ITS_SIZE = """
import os, signal
signal.signal(signal.SIGWINCH, lambda *_: print(*os.get_terminal_size(1), flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_the_size_of_the_terminal_follows(tmp_path: Path) -> None:
    with in_terminal(words(tmp_path, sys.executable, "-c", SAYS_ITS_SIZE)) as (_, master):
        read_until(master, b"ready")
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 90, 0, 0))
        assert b"90 20" in read_until(master, b"90 20")


def test_ctrl_c_reaches_the_command_once(tmp_path: Path) -> None:
    script = "trap 'echo int; n=x$n' INT; echo ready; read x; echo $n; kill -INT $$; exit 7"
    with in_terminal(words(tmp_path, "bash", "-c", script)) as (pid, master):
        read_until(master, b"ready")
        os.write(master, b"\x03")
        read_until(master, b"int")
        os.write(master, b"\n")
        assert b"xx" not in read_until(master, b"int")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert (tmp_path / "asked").read_text() == "True"


HANGS = """
RANK=1 sh -c 'kill -STOP $$' &
RANK=2 sleep 60 &
echo started
trap 'kill -KILL 0' TERM
wait
"""


@pytest.mark.parametrize("own", ["", "0"], ids=["a launcher", "a rank"])
def test_a_job_that_prints_nothing_is_looked_at_and_goes_on(own: str, tmp_path: Path) -> None:
    folder = folder_of(str(tmp_path), "node0-nd0")
    program = (sys.executable, "-m", "nccl_doctor")
    plan = Plan(str(folder), "", (), program, 1, first=True, hang_after_s=0.5)
    with subprocess.Popen(
        plan.words(["bash", "-c", HANGS]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "RANK": own},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "started\n"
        assert process.stderr.readline() == "nccl-doctor: the job has printed nothing for 0.5 s\n"
        said = next(line for line in process.stderr if "[rank-" in line)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
    report = json.loads((folder / "hang.json").read_text())
    (cause,) = report["root_causes"]
    assert (cause["code"], cause["where"]["ranks"]) == ("rank-frozen", [1])
    assert "[rank-frozen]" in said
    looked = {path.name for path in folder.glob("status.*")}
    assert looked == {f"status.rank{rank}.txt" for rank in (1, 2, *map(int, own))}
