"""`--hostfile` over real ssh: who cannot be started on is named, and why, in ssh's own words."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import nccl_doctor
from nccl_doctor.system.supervisor import INTERRUPT_S
from tests.lab import sshd
from tests.lab.lab import MASTER_PORT, MEET, Lab
from tests.lab.reading import check_cause, check_clean, check_healthy, loud
from tests.lab.run import Run
from tests.lab.sshd import Ssh
from tests.support.waiting import until

ALONE_S = 15.0
"""A run whose roll call need not wait: nobody is awaited who is known not to come."""


@pytest.fixture(autouse=True)
def _can_serve() -> None:
    if reason := sshd.impossible():
        pytest.skip(reason)
    if reason := sshd.missing():
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(f"CI=true, so ssh must run: {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.fixture
def ssh(lab: Lab) -> Ssh:
    return Ssh(lab)


def check_refused(run: Run, words: str, host: str = "nd1", code: str = "ssh-failed") -> str:
    """One cause, this host, these words, and the absence of the host explained by it."""
    check_clean(run, ALONE_S)
    root = check_cause(run, run.report, code, hosts=[host])
    assert words in root["message"], str(run)
    assert run.report is not None
    absent = [found for found in run.report["findings"] if found["code"] == "host-absent"]
    assert [found["explained_by"] for found in absent] == [code], str(run)
    assert absent[0]["where"]["hosts"] == [host], "known by name from the hostfile"
    return str(root["fix"])


def test_two_healthy_hosts(ssh: Ssh) -> None:
    ssh.serve("nd0", "nd1")
    run = ssh.run(*MEET, lines=["nd0 slots=1", "nd1 slots=2"], join_s=30)
    check_healthy(run, ranks=3)
    assert run.report is not None
    assert [host["host"] for host in run.report["hosts"]] == ["nd0", "nd1"]
    assert run.report["run"]["launcher"] == "nccl-doctor"
    assert "PASS: 5 checks passed for 3 ranks on 2 hosts" in run.done[0].stdout


@pytest.mark.wide
def test_the_launching_host_need_not_be_one_of_them(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "login")
    ssh = Ssh(lab)
    ssh.serve("nd0", "nd1")
    run = ssh.run(*MEET, lines=["nd0 slots=1", "root@nd1 slots=1"], at=lab["login"], join_s=30)
    check_healthy(run, ranks=2)


@pytest.mark.wide
def test_no_server_there(ssh: Ssh) -> None:
    ssh.serve("nd0")
    fix = check_refused(ssh.run(join_s=30), "port 22: Connection refused")
    assert "systemctl start ssh" in fix


@pytest.mark.wide
def test_a_name_that_does_not_exist(ssh: Ssh) -> None:
    ssh.serve("nd0", "nd1")
    lines = ["nd0 slots=1", "nd1 slots=1", "nd9 slots=1"]
    fix = check_refused(ssh.run(lines=lines, join_s=30), "Could not resolve", host="nd9")
    assert "correct the name in the hostfile" in fix


def test_a_key_that_is_not_let_in(ssh: Ssh) -> None:
    ssh.serve("nd0")
    ssh.serve("nd1", keys="/dev/null")
    fix = check_refused(ssh.run(), "Permission denied (publickey)")
    assert "ssh-copy-id nd1 (" in fix


@pytest.mark.wide
def test_a_host_key_that_is_not_known(ssh: Ssh) -> None:
    ssh.serve("nd0", "nd1")
    known = ssh.home / ".ssh" / "known_hosts"
    lines = known.read_text().splitlines(keepends=True)
    known.write_text("".join(line for line in lines if not line.startswith("nd1")))
    fix = check_refused(ssh.run(), "Host key verification failed")
    assert "ssh nd1 true (once by hand" in fix


def test_a_host_whose_key_has_changed(ssh: Ssh) -> None:
    ssh.serve("nd0", "nd1")
    known = ssh.home / ".ssh" / "known_hosts"
    other = (ssh.home / ".ssh" / "id_ed25519.pub").read_text()
    lines = known.read_text().splitlines(keepends=True)
    lines = [f"nd1 {other}" if line.startswith("nd1") else line for line in lines]
    known.write_text("".join(lines))
    check_refused(ssh.run(), "REMOTE HOST IDENTIFICATION HAS CHANGED")


def test_a_firewall_before_the_server(ssh: Ssh) -> None:
    ssh.serve("nd0", "nd1")
    _drop(ssh.lab, "nd1", 22)
    run = ssh.run()
    root = check_cause(run, run.report, "ssh-failed", hosts=["nd1"])
    assert "timed out" in root["message"]
    assert "firewall" in root["fix"]


def test_no_python_there(ssh: Ssh) -> None:
    ssh.serve("nd0", "nd1")
    _hide(ssh, "nd1", Path(ssh.lab.python).parent)
    fix = check_refused(ssh.run(), "exit 127: ", code="remote-command-failed")
    assert ssh.lab.python in fix


def test_no_doctor_there(ssh: Ssh) -> None:
    ssh.serve("nd0")
    ssh.serve("nd1", env={"PYTHONNOUSERSITE": "1"})  # so that it is read from files, not forked
    _hide(ssh, "nd1", Path(nccl_doctor.__file__).parent)
    fix = check_refused(ssh.run(), "No module named nccl_doctor", code="remote-command-failed")
    assert "-m pip install nccl-doctor" in fix


def test_two_hosts_with_two_faults(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    ssh = Ssh(lab)
    ssh.serve("nd0")
    ssh.serve("nd2", keys="/dev/null")
    run = ssh.run(join_s=30)
    check_clean(run, ALONE_S)
    assert run.report is not None
    roots = {(found["message"], *found["where"]["hosts"]) for found in run.report["root_causes"]}
    assert ("port 22: Connection refused", "nd1") in roots, str(run)
    assert ("Permission denied (publickey)", "nd2") in roots, str(run)


def test_the_first_host_is_the_one(ssh: Ssh) -> None:
    ssh.serve("nd1")
    run = ssh.run(join_s=30)
    check_clean(run, ALONE_S)
    assert run.report is not None
    (root,) = run.report["root_causes"]
    assert (root["code"], root["where"]["hosts"]) == ("ssh-failed", ["nd0"]), str(run)
    explained = {f["code"]: f["explained_by"] for f in loud(run.report) if f != root}
    assert explained == {"port-refused": "ssh-failed", "coordinator-lost": "port-refused"}, str(run)
    reported = {host["host"]: host["reported"] for host in run.report["hosts"]}
    assert reported == {"nd0": False, "nd1": True}, "nd1 has said what it sees"


def test_ssh_is_well_but_the_road_is_not(ssh: Ssh) -> None:
    ssh.serve("nd0", "nd1")
    _drop(ssh.lab, "nd0", MASTER_PORT)
    run = ssh.run()
    check_clean(run)
    assert run.report is not None
    assert run.report["verdict"] == "fail", str(run)
    assert "port-blocked" in {found["code"] for found in run.report["root_causes"]}, str(run)
    assert all(host["reported"] for host in run.report["hosts"]), "nd1 sent its own view"


def test_ctrl_c_ends_it_everywhere(ssh: Ssh) -> None:
    run, took_s = _struck(ssh, signal.SIGINT)
    assert took_s < INTERRUPT_S
    check_clean(run)
    assert run.report is not None
    said = " ".join(found["message"] for found in run.report["findings"])
    assert re.search(r"stopped after \d+\.\d s by SIGINT", said), said
    assert run.codes == [3], str(run)


def test_nothing_stays_behind_when_it_is_killed(ssh: Ssh) -> None:
    run, _ = _struck(ssh, signal.SIGKILL)
    assert run.report is None
    assert run.leftovers == [], str(run)


def _struck(ssh: Ssh, number: int) -> tuple[Run, float]:
    """A run that gets a signal in a round that never ends, and the seconds until it had left."""
    waiting = ssh.folder / "waiting"
    waiting.mkdir()
    fault = {"TEST_BREAK": "waits_in_all_reduce", "TEST_WAITS": str(waiting)}
    ssh.serve("nd0", "nd1", env=fault)
    struck = []

    def strike() -> None:
        until(lambda: {path.name for path in waiting.iterdir()} == {"0", "1"})
        ssh.lab.processes[-1].signal(number)
        struck.append(time.monotonic())

    run = ssh.run(*MEET, "--collective-timeout", "30", during=strike, grace_s=10, join_s=30)
    return run, time.monotonic() - struck[0]


def _drop(lab: Lab, name: str, port: int) -> None:
    lab[name].nft(
        "table inet firewall {\n chain input {\n type filter hook input priority 0;\n"
        f" iifname eth0 tcp dport {port} drop\n }}\n}}\n"
    )


def _hide(ssh: Ssh, name: str, folder: Path) -> None:
    empty = ssh.folder / "empty"
    empty.mkdir()
    ssh.lab[name].call("mount", "--bind", str(empty), str(folder))
