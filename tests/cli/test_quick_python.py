"""The `python` that tests give to launchers behaves as the one that it stands for."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.program import CLEAN
from tests.ranks.ranks import free_port, is_served
from tests.support import forkserver
from tests.support.forkserver import Forked, quick_python_path, read_early
from tests.support.quick_python import make
from tests.support.waiting import until

WAITS = ("run", "--nnodes", "2", "--node-rank", "0", "--master-addr", "localhost")
OPTIONS = ("--backend", "gloo", "--nproc-per-node", "1", "--select", "ranks", "--timeout", "60")


def ran(*command: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False, env=CLEAN, **more
    )


def seconds(*command: str) -> float:
    started = time.monotonic()
    assert ran(*command).returncode == 0
    return time.monotonic() - started


def test_the_same_words_and_codes():
    quick = quick_python_path()
    for words in (("--version",), ("frobnicate",), ("schema",)):
        one, other = (
            ran(python, "-m", "nccl_doctor", *words) for python in (quick, sys.executable)
        )
        assert (one.returncode, one.stdout, one.stderr) == (
            other.returncode,
            other.stdout,
            other.stderr,
        )


def test_what_is_no_module_runs_in_python_itself():
    done = ran(quick_python_path(), "-c", "import sys; print(sys.executable); sys.exit(7)")
    assert (done.returncode, done.stdout) == (7, f"{sys.executable}\n")


def test_limits_and_folder_are_the_caller_s(tmp_path: Path):
    command = ("run", *OPTIONS, "--select", "limits", "--json", "here.json")
    ran(
        "prlimit",
        "--nofile=201:202",
        quick_python_path(),
        "-m",
        "nccl_doctor",
        *command,
        cwd=tmp_path,
    )
    report = json.loads((tmp_path / "here.json").read_text())
    (host,) = report["hosts"]
    print(host)
    assert "201" in json.dumps(report)


def working_in(folder: Path) -> list[int]:
    """Process ids of all that have this working directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd() == str(folder):
                found.append(process.pid)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_all_that_it_started(tmp_path: Path, number: int):
    said = tmp_path / "said"
    with said.open("w") as file:
        port = free_port()
        where = ("--master-port", str(port))
        process = subprocess.Popen(
            [quick_python_path(), "-m", "nccl_doctor", *WAITS, *where, *OPTIONS],
            stdout=file,
            stderr=file,
            cwd=tmp_path,
            env={**CLEAN, "TMPDIR": str(tmp_path)},
        )
        until(lambda: is_served(port), said=said.read_text)  # it waits for another host
        assert working_in(tmp_path)
        process.send_signal(number)
        code = process.wait(20)
    assert code == -signal.SIGKILL if number == signal.SIGKILL else code in (1, 3), said.read_text()
    until(lambda: not working_in(tmp_path), 5)


@pytest.mark.parametrize("trap", ["trap '' HUP INT; ", ""])
def test_what_the_caller_ignores_and_nothing_else(tmp_path: Path, trap: str):
    """The fork server itself was started in the background of a shell, which ignores SIGINT."""
    shows = ("grep", "SigIgn", "/proc/self/status")
    quick = (quick_python_path(), "-m", "nccl_doctor", "run", *OPTIONS, "--", *shows)
    ignored = [
        ran("sh", "-c", f'{trap}exec "$@"', "sh", *command, cwd=tmp_path).stdout.splitlines()[-1]
        for command in (quick, shows)
    ]
    assert ignored[0] == ignored[1]


def test_a_module_in_the_way_gets_a_fresh_python(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise SystemExit(9)\n")
    done = ran(quick_python_path(), "-m", "nccl_doctor", "run", *OPTIONS, cwd=tmp_path)
    assert done.returncode == 1, done
    assert "torch-missing" in done.stdout
    assert "SystemExit: 9" in done.stdout


def test_a_forked_one_has_the_modules_of_its_path_and_ends_as_python_does(tmp_path: Path):
    (tmp_path / "of_this_test.py").write_text("print('imported', end='')")
    assert not read_early({"PYTHONPATH": str(tmp_path)})
    for out, code in ((tmp_path / "out", 0), (Path("/dev/full"), 120)):
        forked = Forked(
            (),
            {**CLEAN, "PYTHONPATH": str(tmp_path)},
            folder=tmp_path,
            out=out,
            err=tmp_path / "err",
            code="import of_this_test",
        )
        assert forked.wait(30) == code, (tmp_path / "err").read_text()
    (tmp_path / "json.py").touch()
    assert read_early({"PYTHONPATH": str(tmp_path)})


ASKS = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
socket.send_fds(sock, [b"1\\0nccl_doctor"], [0, 1, 2, os.open(".", os.O_PATH)])
"""


def test_the_server_survives_a_caller_that_is_gone(tmp_path: Path):
    python, door = make(tmp_path)
    subprocess.run([sys.executable, "-c", ASKS, str(tmp_path / "door")], check=True)
    caller, _ = door.accept()
    with door, caller:
        assert forkserver._receive(caller, [], str(python)) is None
