"""The process that the user started, and programs below it that end in every possible way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

START_S = 15.0  # of an interpreter, on a busy machine

PROGRAM = """
import os, signal, sys, threading, time
from nccl_doctor.system import supervisor

def program():
    {body}

supervisor.GRACE_S = 0.2
sys.exit(supervisor.watch(program, supervisor.Terms(
    limit_s={limit},
    keeps={keeps},
    hands_over={hands_over},
    unable=lambda message, code: (code, "unable: " + message),
    tell_death=lambda about, name: print("told", about["name"], name, flush=True),
)))
"""


def started(
    body: str, *, limit: float = 60.0, keeps: bool = True, hands_over: bool = False
) -> subprocess.Popen[str]:
    text = PROGRAM.format(body=body, limit=limit, keeps=keeps, hands_over=hands_over)
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


def watched(body: str, **more: float | bool) -> tuple[int, str, str]:
    return ended(started(body, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_exit_code_of_a_report_that_is_written(code: int) -> None:
    assert watched(f"supervisor.written({code}); return {code}") == (code, "", "")


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("os._exit(0)", "ended with 0 before its answer"),
        ("return 0", "ended with 0 before its report"),
        ("os._exit(7)", "ended with 7 before its answer"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL before its answer"),
    ],
)
def test_there_is_no_success_without_a_report(body: str, how: str) -> None:
    code, stdout, stderr = watched(body)
    assert code == 3
    assert stdout.startswith("unable: ")
    assert how in stderr


def test_a_command_that_examines_nothing_needs_no_report() -> None:
    assert watched("return 0", keeps=False) == (0, "", "")
    assert watched("os._exit(0)", keeps=False)[0] == 3


def test_a_process_that_dies_after_its_report_changes_nothing() -> None:
    assert watched("supervisor.written(0); os.kill(os.getpid(), 9)") == (0, "", "")
    assert watched("supervisor.written(1); os._exit(0)") == (1, "", "")
    # but a command that was to follow has not been started
    assert watched("supervisor.written(0); os._exit(0)", hands_over=True)[0] == 3


def test_the_others_are_told_of_who_was_killed() -> None:
    body = "supervisor.signed_in(name='one'); os.kill(os.getpid(), 9)"
    assert watched(body)[1].startswith("told one SIGKILL\n")


LATE = {
    "sleeps": ("time.sleep(600)", "did not end"),
    "deaf": (
        "supervisor.take_signals(); [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; "
        "time.sleep(600)",
        "did not end",
    ),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)", "is stopped (state T)"),
}


@pytest.mark.parametrize("how", LATE)
def test_the_deadline_ends_whatever_is_stuck(how: str) -> None:
    body, words = LATE[how]
    began = time.monotonic()
    code, _, stderr = watched(body, limit=0.5)
    assert time.monotonic() - began < 0.5 + START_S
    assert code == 3
    (line,) = stderr.splitlines()
    assert line.startswith("nccl-doctor: the deadline has passed (0.5 s); process ")
    assert words in line


def test_a_late_process_whose_report_is_written_keeps_its_code() -> None:
    assert watched("supervisor.written(1); time.sleep(600)", limit=0.5) == (1, "", "")


def test_the_program_sets_its_own_deadline() -> None:
    body = "supervisor.set_deadline(supervisor.began() + 0.3); time.sleep(600)"
    code, _, stderr = watched(body, limit=600)
    assert (code, "(0.3 s)" in stderr) == (3, True)


def test_a_reader_of_stderr_that_stopped_keeps_nobody() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    text = PROGRAM.format(body="time.sleep(600)", limit=0.3, keeps=True, hands_over=False)
    process = subprocess.Popen([sys.executable, "-c", text], stdout=write, stderr=write)
    assert process.wait(0.3 + START_S) == 3
    os.close(read)
    os.close(write)


def test_a_signal_before_the_program_takes_it_ends_everything() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process = started("print('here', flush=True); time.sleep(600)", hands_over=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        code, _, stderr = ended(process)
        assert code == 3
        assert f"received {number.name} before the examination" in stderr


def test_a_command_that_examines_nothing_dies_of_the_signal() -> None:
    for number, code in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)):
        process = started("print('here', flush=True); time.sleep(600)", keeps=False)
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        assert ended(process)[0] == code


TAKES = """
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    supervisor.take_signals()
    print("here", flush=True)
    while not came:
        time.sleep(0.01)
    supervisor.written(0)
    supervisor.done(0, ["echo", "follows"])
    os._exit(0)
"""


def test_a_signal_that_the_program_takes_stops_the_command() -> None:
    process = started(TAKES.strip(), hands_over=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    code, stdout, stderr = ended(process)
    assert code == 3
    assert "follows" not in stdout
    assert "received SIGTERM: the command is not started" in stderr


SIGNALS = "grep -E 'SigBlk|SigIgn' /proc/self/status"


def test_the_command_gets_the_signals_as_they_were() -> None:
    body = f"supervisor.written(0); supervisor.done(0, ['sh', '-c', {SIGNALS!r}]); os._exit(0)"
    code, stdout, _ = watched(body, hands_over=True)
    assert code == 0
    # Whoever runs the tests may ignore some.
    bare = subprocess.run(["sh", "-c", SIGNALS], capture_output=True, text=True, check=True)
    assert stdout == bare.stdout


def test_the_command_ignores_what_was_ignored() -> None:
    body = f"supervisor.written(0); supervisor.done(0, ['sh', '-c', {SIGNALS!r}]); os._exit(0)"
    text = PROGRAM.format(body=body, limit=60, keeps=True, hands_over=True)
    script = f'trap \'\' INT; {SIGNALS}; exec "$0" -c "$1"'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable, text], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == lines[2:]


def test_under_nohup_a_hang_up_is_nothing() -> None:
    text = PROGRAM.format(
        body="os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.3); supervisor.written(0); "
        "supervisor.done(0, ['grep', 'SigIgn', '/proc/self/status']); os._exit(0)",
        limit=60, keeps=True, hands_over=True,
    )  # fmt: skip
    done = subprocess.run(
        ["nohup", sys.executable, "-c", text], capture_output=True, text=True, timeout=60,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert int(done.stdout.split()[1], 16) & 1 << signal.SIGHUP - 1


def test_it_is_light(tmp_path: Path) -> None:
    """What is imported before it stands is a time in which a signal meets a bare interpreter."""
    code = "import sys, nccl_doctor.__main__, nccl_doctor.system.supervisor; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    ours = {name for name in done.stdout.split() if name.startswith("nccl_doctor.")}
    assert ours == {f"nccl_doctor.{name}" for name in (
        "__main__", "system", "system.forks", "system.helpers", "system.leaving",
        "system.shortage", "system.supervisor", "system.tick",
    )}  # fmt: skip
    assert "click" not in done.stdout.split()
