"""Why a host could not be started on, in the texts of OpenSSH 8 and 9."""

from __future__ import annotations

from nccl_doctor.launch.ssh.connection import MARKER, CommandEnd
from nccl_doctor.launch.ssh.faults import SilentHost, findings
from nccl_doctor.model.kinds import (
    CONFIG_BAD_VALUE,
    REMOTE_COMMAND_FAILED,
    RUN_INTERRUPTED,
    SSH_FAILED,
)
from tests.support.rows import each_row

OWN = ("/opt/python", "-m", "nccl_doctor")
SSH_SAYS = {
    "ssh: Could not resolve hostname nd1: Name or service not known\r\n": (
        "Could not resolve hostname: Name or service not known",
        "correct the name in the hostfile",
    ),
    "ssh: connect to host nd1 port 22: Connection refused\r\n": (
        "port 22: Connection refused",
        "systemctl start ssh",
    ),
    "ssh: connect to host nd1 port 2222: Connection timed out": (
        "port 2222: Connection timed out",
        "ping -c 3 nd1",
    ),
    "ssh: connect to host nd1 port 22: No route to host": (
        "port 22: No route to host",
        "ip route get nd1",
    ),
    "bob@nd1: Permission denied (publickey,password).": (
        "Permission denied (publickey,password)",
        "ssh-copy-id bob@nd1",
    ),
    "Received disconnect from 1.2.3.4 port 22:2: Too many authentication failures\n"
    "Disconnected from 1.2.3.4 port 22": (
        "Too many authentication failures",
        "ssh-copy-id bob@nd1",
    ),
    "No ED25519 host key is known for nd1 and you have requested strict checking.\n"
    "Host key verification failed.": ("Host key verification failed", "ssh bob@nd1 true (once"),
    "@@@@@@@@@@@\n@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n@@@@@\n"
    "IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!\nHost key verification failed.": (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "ssh-keygen -R nd1",
    ),
    "kex_exchange_identification: Connection closed by remote host\n"
    "Connection closed by 1.2.3.4 port 22": (
        "kex_exchange_identification: Connection closed by remote host",
        "MaxStartups",
    ),
    "Connection timed out during banner exchange\nConnection to 1.2.3.4 port 22 timed out": (
        "Connection timed out during banner exchange",
        "another service on this port",
    ),
    "/root/.ssh/config: line 3: Bad configuration option: hots\n"
    "/root/.ssh/config: terminating, 1 bad configuration options": (
        "Bad configuration option: hots",
        "correct the ssh configuration",
    ),
    "nd1: something new": ("the host: something new", "ssh -v bob@nd1 true"),
    "": ("ssh ended with exit code 255 and printed nothing", "ssh -v bob@nd1 true"),
}


def failed(host: str = "nd1", **ended) -> SilentHost:
    end = {"code": 255, "ready": False, "stdout": "", "stderr": "", "seconds": 0.1, **ended}
    return SilentHost(host, host, f"bob@{host}", CommandEnd(**end))


@each_row("stderr", SSH_SAYS)
def test_ssh_in_its_own_words_with_the_fix(stderr):
    (found,) = findings([failed(stderr=stderr)], OWN)
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
        "/opt/python -m pip install nccl-doctor",
    ),
    "no shell": (
        {"code": 1, "stderr": "This account is currently not available.\n"},
        REMOTE_COMMAND_FAILED,
        "exit 1: This account is currently not available.",
        "ssh bob@nd1 /opt/python -m nccl_doctor env",
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
        "correct on this host",
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
        "the log-in was not complete after 0 s",
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
        "killed on the host, or the ssh connection was cut",
        "",
    ),
}  # fmt: skip


@each_row("name", BECAME)
def test_what_became_of_the_command(name):
    ended, kind, message, fix = BECAME[name]
    (found,) = findings([failed(**ended)], OWN)
    assert (found.kind, found.message) == (kind, message)
    assert fix in (found.fix or found.kind.fix)
    assert found.where.hosts == ("nd1",)


def test_the_one_file_that_is_not_there_is_asked_for():
    says = "/opt/python: can't open file '/x/d.pyz': [Errno 2] No such file or directory"
    (found,) = findings([failed(code=2, stderr=says)], ("/opt/python", "/x/d.pyz"))
    assert (found.kind, found.message) == (REMOTE_COMMAND_FAILED, f"exit 2: {says}")
    assert found.fix == "put /x/d.pyz at the same path on the host"


def test_one_finding_for_the_same_fault_of_many_hosts():
    says = "ssh: connect to host {} port 22: Connection refused"
    hosts = ("nd2", "nd1", "nd10")
    others = failed("nd3", stderr="bob@nd3: Permission denied (publickey).")
    found = findings([*(failed(host, stderr=says.format(host)) for host in hosts), others], OWN)
    assert [(f.message, f.where.hosts) for f in found] == [
        ("port 22: Connection refused", ("nd1", "nd10", "nd2")),
        ("Permission denied (publickey)", ("nd3",)),
    ]
    assert [each["ssh"] for each in found[0].evidence["each"]] == ["bob@nd2", "bob@nd1", "bob@nd10"]
    # The names of a host are taken out of words only as whole names.
    (lost,) = findings([failed(ready=True, stderr="nd10 lost nd1.\nnd10 lost nd1-x, nd1.")], OWN)
    assert lost.message.endswith(": nd10 lost nd1-x, the host.")


def test_words_of_another_host_cannot_write_to_the_terminal():
    (found,) = findings([failed(code=1, stderr="\x1b[2Jbad\x07\n")], OWN)
    assert found.message == r"exit 1: \x1b[2Jbad\x07"
