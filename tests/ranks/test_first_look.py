"""What is certain at once: on stderr long before the join time-out is over, and in the report."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nccl_doctor.gather.examine import examine_alone
from nccl_doctor.gather.first_look import SO_FAR, look_first
from nccl_doctor.gather.run import prepare
from nccl_doctor.launch.detect import detect
from nccl_doctor.model.options import Options
from tests.ranks.ranks import free_port, rank_env
from tests.support.forkserver import quick_python_path

JOIN_S = 60
RUN = ["-m", "nccl_doctor", "run", f"--join-timeout={JOIN_S}", "--timeout=90", "--backend=gloo"]


@contextmanager
def held(port: int) -> Iterator[None]:
    """The port, while another program listens there."""
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        yield


def test_a_port_that_is_held_is_said_at_once_and_in_the_report_of_a_run_that_is_stopped(
    tmp_path: Path,
) -> None:
    port = free_port()
    said: list[str] = []
    with held(port):
        run = subprocess.Popen(
            [quick_python_path(), *RUN, "--select=port,ranks,interfaces"],
            env=rank_env(0, 2, port, GLOO_SOCKET_IFNAME="nosuch0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        assert run.stderr is not None
        began = time.monotonic()
        while len(said) < 2 and time.monotonic() - began < JOIN_S / 2:
            said += [line for line in [run.stderr.readline()] if SO_FAR in line]
        assert time.monotonic() - began < JOIN_S / 2, said
        run.send_signal(signal.SIGINT)
        report, _ = run.communicate(timeout=30)
    for code in ("port-in-use", "interface-missing"):
        (line,) = [line for line in said if code in line]
        assert line.startswith("nccl-doctor: so far: ")
        assert line.endswith(" (the report follows)\n")
        assert code in report
    assert f"MASTER_PORT={port} is held by process" in "".join(said)
    assert "SIGINT" in report


def test_a_host_of_the_own_launcher_says_that_the_name_does_not_resolve(tmp_path: Path) -> None:
    env = {
        name: value
        for name, value in rank_env(0, 2, free_port()).items()
        if not name.startswith(("RANK", "LOCAL_", "WORLD", "MASTER"))
    }
    run = subprocess.Popen(
        [quick_python_path(), *RUN, "--nnodes=2", "--node-rank=1", "--master-addr=nohost.invalid"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert run.stderr is not None
    began = time.monotonic()
    said = run.stderr.readline()
    assert time.monotonic() - began < JOIN_S / 2
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=30)
    assert said.startswith("nccl-doctor: so far: addr-unresolvable on ")
    assert "MASTER_ADDR=nohost.invalid does not resolve" in said


@pytest.mark.parametrize(("quiet", "nic"), [(False, "nosuch0"), (True, "nosuch0"), (False, "")])
def test_what_was_said_is_not_asked_again(quiet: bool, nic: str) -> None:
    """Nothing is said with --quiet, nor by a host that is healthy: then all is observed later."""
    env = dict.fromkeys(("RANK", "LOCAL_RANK", "NODE_RANK"), "0") | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **({"GLOO_SOCKET_IFNAME": nic} if nic else {}),
    }
    options = Options(backend="gloo", quiet=quiet, select=("interfaces", "master_addr"))
    run = prepare(options, detect(env), env, time.monotonic())
    lines = look_first(run)
    said = bool(nic) and not quiet
    assert [line.split()[2] for line in lines] == ["interface-missing"] * said
    assert list(run.first_facts) == ["interfaces"] * said
    first = dict(run.first_facts)
    facts = examine_alone(run)
    assert set(facts) == {"interfaces", "master_addr"}
    assert all(facts[name] is first[name] for name in first)
