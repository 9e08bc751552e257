"""Commands on other hosts: started, told one word, heard to the end, and none left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from nccl_doctor.launch.ssh.connection import (
    AT_ONCE,
    STDERR_MAX,
    Heard,
    converse,
    ssh_command,
)
from nccl_doctor.system.deadline import MoreTime

# It is not our code that this stands in for: an ssh that always gets in, to this very host.
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift 2
exec sh -c "$*"
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bin" / "ssh"
    file.parent.mkdir()
    file.write_text(SSH)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")


@pytest.fixture(autouse=True)
def nothing_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    gone = time.monotonic() + 3
    while (left := set(psutil.Process().children(recursive=True)) - before) and (
        time.monotonic() < gone
    ):
        time.sleep(0.02)
    assert not left


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def talk(
    *commands: Sequence[str],
    word: Callable[[frozenset[int]], str] = lambda lost: f"go {sorted(lost)}\n",
    ready_s: float = 5.0,
    within_s: float = 10.0,
) -> Heard:
    now = time.monotonic()
    return converse(
        commands, marker="ready", word=word, ready_by=now + ready_s, deadline=now + within_s
    )


# --- the words of the command ---


def test_words_arrive_as_they_were_given(ssh):
    words = ["a b", "it's", '"$HOME"', "`id`", "*", "\\", "", "-x", "é", "a\nb", ";", "~"]
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    heard = talk(ssh_command("nd0", [sys.executable, "-c", code, *words], connect_s=1))
    assert json.loads(heard.ended[0].stdout) == words
    assert heard.ended[0].code == 0


def test_variables(ssh):
    code = "import os; print(os.environ['NCCL_X']); print(os.getcwd())"
    variables = {"NCCL_X": "a 'b' $HOME"}
    command = ssh_command("nd0", [sys.executable, "-c", code], connect_s=1, variables=variables)
    (ended,) = talk(command).ended
    assert ended.stdout.splitlines() == ["a 'b' $HOME", os.getcwd()]


def test_the_destination_cannot_be_taken_for_an_option():
    words = ssh_command("-oProxyCommand=x", ["true"], connect_s=0.2)
    assert words[words.index("--") + 1] == "-oProxyCommand=x"
    assert "BatchMode=yes" in words
    assert "ConnectTimeout=1" in words
    assert not [word for word in words if "StrictHostKeyChecking" in word]


def test_the_port_of_a_command_goes_before_the_destination():
    words = ssh_command("nd0", ["true"], connect_s=1, port=2222)
    assert words[words.index("-p") + 1] == "2222"
    assert words.index("-p") < words.index("--")
    assert "-p" not in ssh_command("nd0", ["true"], connect_s=1)


# --- the conversation ---

READY = "echo noise >&2; echo ready >&2; read word; echo told $word"


def test_all_are_told_together_once_the_last_is_ready():
    heard = talk(
        shell(f"{READY}; date +%s.%N"),
        shell(f"sleep 1.5; {READY}; date +%s.%N"),
        shell("echo no way in >&2; exit 255"),
    )
    assert [ended.code for ended in heard.ended] == [0, 0, 255]
    assert [ended.ready for ended in heard.ended] == [True, True, False]
    (first, first_s), (second, second_s) = (e.stdout.splitlines() for e in heard.ended[:2])
    assert first == second == "told go [2]"
    assert abs(float(first_s) - float(second_s)) < 1.2
    assert heard.ended[2].stderr == "no way in\n"
    assert heard.interrupted is None


def test_one_that_is_slow_to_get_ready_does_not_hold_the_others():
    tell = f"{READY}; date +%s.%N"
    heard = talk(shell(f"{tell}; sleep 2.5"), shell(f"sleep 1.5; {tell}"), ready_s=0.3)
    (first, first_s), (second, second_s) = (e.stdout.splitlines() for e in heard.ended)
    assert first == second == "told go []"
    assert float(second_s) - float(first_s) > 0.7


def test_one_that_never_gets_ready_is_not_awaited_once_the_others_are_through():
    started = time.monotonic()
    heard = talk(shell(READY), shell("sleep 60"), ready_s=0.3, within_s=30)
    assert time.monotonic() - started < 5
    assert [ended.code for ended in heard.ended] == [0, None]


def test_whoever_still_runs_at_the_deadline_is_killed():
    started = time.monotonic()
    heard = talk(
        shell("trap '' TERM INT HUP; sleep 60"), shell("echo done"), ready_s=0.2, within_s=0.7
    )
    assert time.monotonic() - started < 3
    assert [ended.code for ended in heard.ended] == [None, 0]
    assert heard.ended[1].stdout == "done\n"


def test_long_answers_are_whole_and_long_complaints_are_not():
    size = 3_000_000
    script = f"echo ready >&2; head -c {size} /dev/zero | tr '\\0' x; head -c {size} /dev/zero >&2"
    (ended,) = talk(shell(f"{script}; echo the end >&2")).ended
    assert ended.stdout == "x" * size
    assert ended.ready
    assert len(ended.stderr) <= STDERR_MAX
    assert ended.stderr.endswith("the end\n")


def test_what_it_left_behind_does_not_keep_us():
    started = time.monotonic()
    (ended,) = talk(shell("echo answer; sleep 6 & exit 3")).ended
    assert time.monotonic() - started < 4
    assert (ended.code, ended.stdout) == (3, "answer\n")


def test_bytes_that_are_no_text():
    (ended,) = talk(shell("printf '\\377ok'; printf '\\377' >&2")).ended
    assert ended.stdout == "\ufffdok"


def test_a_command_that_does_not_exist_leaves_none_running():
    with pytest.raises(FileNotFoundError):
        talk(shell("sleep 60"), ["/no/such/ssh"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_them_for_their_last_words(number):
    before = signal.getsignal(number)
    threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
    started = time.monotonic()
    heard = talk(
        shell("echo ready >&2; read word; read eof || echo last words"), shell(READY), within_s=30
    )
    assert heard.interrupted == number.name
    assert heard.ended[0].stdout == "last words\n"
    assert heard.ended[1].stdout == "told go []\n"
    assert time.monotonic() - started < 5
    assert signal.getsignal(number) is before


def test_who_gets_ready_after_a_signal_is_told_nothing():
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    late = shell("sleep 1; echo ready >&2; read word || echo hung up; sleep 0.5")
    heard = talk(late, shell("exit 3"), within_s=30)
    assert heard.interrupted == "SIGINT"
    assert [(ended.code, ended.stdout) for ended in heard.ended] == [(0, "hung up\n"), (3, "")]


def test_they_notice_when_this_process_is_killed(tmp_path):
    code = (
        "import sys, time\n"
        "from nccl_doctor.launch.ssh.connection import converse\n"
        "now = time.monotonic()\n"
        "converse([['sh', '-c', sys.argv[1]]], marker='ready', word=lambda lost: 'go\\n',\n"
        "         ready_by=now + 5, deadline=now + 60)\n"
    )
    word = tmp_path / "word"
    script = f"echo ready >&2; read go; echo $$ > {word}.new; mv {word}.new {word}; read eof"
    caller = subprocess.Popen([sys.executable, "-c", code, f"{script}; rm {word}"])
    try:
        _until(word.exists)
        caller.kill()
        _until(lambda: not word.exists())
    finally:
        caller.kill()
        caller.wait()


def _until(true: Callable[[], bool], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_that_needs_more_time_is_heard_and_waited_for() -> None:
    more = MoreTime()

    def hear(stderr: bytes) -> None:
        if b"more\n" in stderr:
            more.give(2)

    now = time.monotonic()
    heard = converse(
        [shell("echo ready >&2; read word; echo more >&2; sleep 1.5; echo done")],
        marker="ready",
        word=lambda lost: "go\n",
        ready_by=now + 5,
        deadline=now + 1.0,
        hear=hear,
        more=more,
    )
    (ended,) = heard.ended
    assert (ended.code, ended.stdout) == (0, "done\n")


def test_a_time_that_was_put_off_ends_too() -> None:
    more = MoreTime()
    more.give(1)
    now = time.monotonic()
    heard = converse(
        [shell("echo ready >&2; read word; sleep 60")],
        marker="ready",
        word=lambda lost: "go\n",
        ready_by=now + 5,
        deadline=now + 0.5,
        more=more,
    )
    assert heard.ended[0].code is None
    assert 1.4 < time.monotonic() - now < 6


# --- many of them ---


def test_many_come_in_some_at_a_time_and_are_told_together() -> None:
    """Those that get nowhere hold the others back for a while, and no longer."""
    stuck = shell("date +%s%N; exec sleep 30")
    first = shell("date +%s%N; echo ready >&2; read word; echo $word")
    said: list[str] = []
    now = time.monotonic()
    heard = converse(
        [first] * 4 + [stuck] * (AT_ONCE + 2) + [first] * 2,
        marker="ready",
        word=lambda lost: f"go {len(lost)}\n",
        ready_by=now + 1.0,
        deadline=now + 20.0,
        spread_s=0.6,
        tick=said.append,
    )
    assert time.monotonic() - now < 15  # nobody is waited for who was never told
    answers = [ended.stdout.split() for ended in heard.ended]
    assert [answer[1:] for answer in (*answers[:4], *answers[-2:])] == [["go", "0"]] * 6
    began = [int(answer[0]) for answer in answers]
    held_back = (began[-1] - began[0]) / 1e9
    assert held_back > 0.4
    assert said[-1].startswith(f"6 of {len(began)} hosts reached by ssh, waiting for ")


def test_an_interrupt_starts_nobody_else() -> None:
    """And those that were never started are among the answers, without one."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    heard = talk(*[shell("echo started; read word")] * (AT_ONCE + 3), ready_s=60, within_s=60)
    assert heard.interrupted == "SIGINT"
    assert [one.stdout for one in heard.ended] == ["started\n"] * AT_ONCE + [""] * 3
    assert [one.code for one in heard.ended[AT_ONCE:]] == [None] * 3
