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

from nccl_doctor.kinds import CONFIG_BAD_VALUE, REMOTE_COMMAND_FAILED, RUN_INTERRUPTED, SSH_FAILED
from nccl_doctor.relay import MARKER
from nccl_doctor.remote import STDERR_MAX, Ended, Heard, converse, ssh_command
from nccl_doctor.remote_faults import Failed, findings

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


def test_variables_and_the_folder_that_may_not_be_there(ssh, tmp_path):
    def run(folder: Path) -> list[str]:
        code = "import os; print(os.environ['NCCL_X']); print(os.getcwd())"
        command = [sys.executable, "-c", code]
        variables = {"NCCL_X": "a 'b' $HOME"}
        (ended,) = talk(
            ssh_command("nd0", command, connect_s=1, folder=folder, variables=variables)
        ).ended
        return ended.stdout.splitlines()

    there = tmp_path / "it's here"
    there.mkdir()
    assert run(there) == ["a 'b' $HOME", str(there)]
    assert run(tmp_path / "not here") == ["a 'b' $HOME", os.getcwd()]


def test_the_destination_cannot_be_taken_for_an_option():
    words = ssh_command("-oProxyCommand=x", ["true"], connect_s=0.2)
    assert words[words.index("--") + 1] == "-oProxyCommand=x"
    assert "BatchMode=yes" in words
    assert "ConnectTimeout=1" in words
    assert not [word for word in words if "StrictHostKeyChecking" in word]


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


def test_they_notice_when_this_process_is_killed(tmp_path):
    code = (
        "import sys, time\n"
        "from nccl_doctor.remote import converse\n"
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


# --- what a failure says: texts of OpenSSH 8 and 9 ---

SSH_SAYS = {
    "ssh: Could not resolve hostname nd1: Name or service not known\r\n": (
        "Could not resolve hostname: Name or service not known",
        "correct the name in the hostfile",
    ),
    "ssh: connect to host nd1 port 22: Connection refused\r\n": (
        "port 22: Connection refused",
        "start the ssh server there",
    ),
    "ssh: connect to host nd1 port 2222: Connection timed out": (
        "port 2222: Connection timed out",
        "`ping nd1`",
    ),
    "ssh: connect to host nd1 port 22: No route to host": (
        "port 22: No route to host",
        "`ip route get nd1`",
    ),
    "bob@nd1: Permission denied (publickey,password).": (
        "Permission denied (publickey,password)",
        "`ssh-copy-id bob@nd1`",
    ),
    "Received disconnect from 1.2.3.4 port 22:2: Too many authentication failures\n"
    "Disconnected from 1.2.3.4 port 22": (
        "Too many authentication failures",
        "`ssh-copy-id bob@nd1`",
    ),
    "No ED25519 host key is known for nd1 and you have requested strict checking.\n"
    "Host key verification failed.": ("Host key verification failed", "`ssh bob@nd1 true` once"),
    "@@@@@@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@@@\n"
    "IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!\nHost key verification failed.": (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "`ssh-keygen -R nd1`",
    ),
    "kex_exchange_identification: Connection closed by remote host\n"
    "Connection closed by 1.2.3.4 port 22": (
        "kex_exchange_identification: Connection closed by remote host",
        "MaxStartups",
    ),
    "Connection timed out during banner exchange\nConnection to 1.2.3.4 port 22 timed out": (
        "Connection timed out during banner exchange",
        "not an ssh server",
    ),
    "/root/.ssh/config: line 3: Bad configuration option: hots\n"
    "/root/.ssh/config: terminating, 1 bad configuration options": (
        "Bad configuration option: hots",
        "correct the ssh configuration",
    ),
    "nd1: something new": ("the host: something new", "`ssh -v bob@nd1 true`"),
    "": ("ssh ended with 255 and said nothing", "`ssh -v bob@nd1 true`"),
}


def failed(host: str = "nd1", **ended) -> Failed:
    end = {"code": 255, "ready": False, "stdout": "", "stderr": "", "seconds": 0.1, **ended}
    return Failed(host, host, f"bob@{host}", Ended(**end))


@pytest.mark.parametrize("stderr", SSH_SAYS)
def test_ssh_in_its_own_words_with_the_fix(stderr):
    (found,) = findings([failed(stderr=stderr)], "/opt/python")
    message, fix = SSH_SAYS[stderr]
    assert found.kind is SSH_FAILED
    assert found.message == message
    assert fix in found.fix
    assert found.where.hosts == ("nd1",)
    assert found.explained_by is None


BECAME = {
    "no interpreter": (
        {"code": 127, "stderr": "env: '/opt/python': No such file or directory\n"},
        REMOTE_COMMAND_FAILED,
        "exit 127: env: '/opt/python': No such file or directory",
        "so that /opt/python exists",
    ),
    "no doctor": (
        {"code": 1, "stderr": "bash: line 1: cd: /x: No such file\n/opt/python: No module named "
                              "nccl_doctor\n"},
        REMOTE_COMMAND_FAILED,
        "exit 1: /opt/python: No module named nccl_doctor",
        "`/opt/python -m pip install nccl-doctor`",
    ),
    "no shell": (
        {"code": 1, "stderr": "This account is currently not available.\n"},
        REMOTE_COMMAND_FAILED,
        "exit 1: This account is currently not available.",
        "`ssh bob@nd1 /opt/python -m nccl_doctor env`",
    ),
    "a crash": (
        {"code": 1, "ready": True, "stderr": f"{MARKER}1\nTraceback (most recent call last):\n"
                                             "  File ...\nMemoryError\n"},
        REMOTE_COMMAND_FAILED,
        "exit 1: MemoryError",
        "",
    ),
    "nothing to say": ({"code": 0, "ready": True}, REMOTE_COMMAND_FAILED, "exit 0", ""),
    "its configuration": (
        {"code": 2, "stderr": "motd\nnccl-doctor: error: nccl-doctor.toml is not TOML: x\n"},
        CONFIG_BAD_VALUE,
        "nccl-doctor.toml is not TOML: x",
        "correct there",
    ),
    "exit 2 of something else": (
        {"code": 2, "stderr": "sh: syntax error\n"},
        REMOTE_COMMAND_FAILED,
        "exit 2: sh: syntax error",
        "",
    ),
    "a log-in that hangs": (
        {"code": None, "stderr": "Welcome\n"},
        REMOTE_COMMAND_FAILED,
        "the log-in had not come to an end after 0 s",
        "a home folder on a file server",
    ),
    "too late": (
        {"code": None, "ready": True, "stderr": f"{MARKER}1\n"},
        RUN_INTERRUPTED,
        "no report in time",
        "",
    ),
    "connection lost": (
        {"ready": True, "stderr": f"{MARKER}1\nTimeout, server nd1 not responding.\n"},
        RUN_INTERRUPTED,
        "the ssh connection was lost: Timeout, server the host not responding.",
        "",
    ),
    "killed": (
        {"ready": True, "stderr": f"{MARKER}1\n"},
        RUN_INTERRUPTED,
        "killed there, or the ssh connection was cut",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BECAME)
def test_what_became_of_the_command(name):
    ended, kind, message, fix = BECAME[name]
    (found,) = findings([failed(**ended)], "/opt/python")
    assert (found.kind, found.message) == (kind, message)
    assert fix in (found.fix or found.kind.fix)
    assert found.where.hosts == ("nd1",)


def test_one_finding_for_the_same_fault_of_many_hosts():
    says = "ssh: connect to host {} port 22: Connection refused"
    hosts = ("nd2", "nd1", "nd10")
    others = failed("nd3", stderr="bob@nd3: Permission denied (publickey).")
    found = findings([*(failed(host, stderr=says.format(host)) for host in hosts), others], "py")
    assert [(f.message, f.where.hosts) for f in found] == [
        ("port 22: Connection refused", ("nd1", "nd10", "nd2")),
        ("Permission denied (publickey)", ("nd3",)),
    ]
    assert [each["ssh"] for each in found[0].evidence["each"]] == ["bob@nd2", "bob@nd1", "bob@nd10"]
    # The names of a host are taken out of words only as whole names.
    (lost,) = findings([failed(ready=True, stderr="nd10 lost nd1.\nnd10 lost nd1-x, nd1.")], "py")
    assert lost.message.endswith(": nd10 lost nd1-x, the host.")


def test_words_of_another_host_cannot_write_to_the_terminal():
    (found,) = findings([failed(code=1, stderr="\x1b[2Jbad\x07\n")], "py")
    assert found.message == "exit 1: [2Jbad"
