"""Limits of one host: memory, files, ports, CPUs, temporary files; and a clock that is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.broken import clock_ahead
from tests.lab.lab import HEALTHY_S, PATIENT, Lab
from tests.lab.reading import check_cause, check_clean, loud
from tests.lab.run import Run

needs_cores = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two CPUs")


def check_risk(
    run: Run, code: str, hosts: Sequence[str], ranks: Sequence[int] = ()
) -> dict[str, Any]:
    """The run may go on, with one warning, at exactly this place."""
    check_clean(run, HEALTHY_S)
    assert run.report is not None, str(run)
    assert [found["code"] for found in loud(run.report)] == [code], str(run)
    (found,) = loud(run.report)
    assert found["where"]["hosts"] == list(hosts), str(run)
    assert found["where"]["ranks"] == list(ranks), str(run)
    assert run.report["verdict"] == "warn", str(run)
    assert set(run.codes) == {0}, str(run)
    return dict(found)


@pytest.mark.wide
def test_a_small_shared_memory(lab: Lab) -> None:
    lab["nd1"].call("mount", "-o", "remount,size=1m", "/dev/shm")
    found = check_risk(lab.own_doctor(*PATIENT), "shm-too-small", ["nd1"])
    assert found["message"].startswith("1.0 MiB free of 1.0 MiB")


@pytest.mark.wide
def test_a_shared_memory_that_nobody_can_write_to(lab: Lab) -> None:
    lab["nd1"].call("mount", "-o", "remount,ro", "/dev/shm")
    found = check_risk(lab.own_doctor(*PATIENT), "shm-too-small", ["nd1"])
    assert "Read-only file system" in found["message"]


@pytest.mark.wide
def test_few_open_files(lab: Lab) -> None:
    run = lab.own_doctor(*PATIENT, wrap={"nd1": ["prlimit", "--nofile=128:128"]})
    found = check_risk(run, "open-files-limit-low", ["nd1"])
    assert "limit of open files 128 " in found["message"]
    assert "* - nofile 65536" in found["fix"]


@pytest.mark.wide
def test_a_read_only_temporary_folder(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    lab["nd1"].call("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder))
    run = lab.own_doctor(*PATIENT, per_host_env={"nd1": {"TMPDIR": str(folder)}})
    found = check_risk(run, "temp-dir-unwritable", ["nd1"])
    assert f"TMPDIR={folder}: Read-only file system" in found["message"]


@needs_cores
@pytest.mark.wide
def test_all_ranks_of_a_host_on_one_core(lab: Lab) -> None:
    core = str(min(os.sched_getaffinity(0)))
    run = lab.own_doctor(*PATIENT, wrap={"nd1": ["taskset", "--cpu-list", core]})
    found = check_risk(run, "cpu-limit-low", ["nd1"], [2, 3])
    assert found["message"].startswith(f"2 ranks on CPU {core} of ")


@pytest.mark.wide
def test_hardly_any_port(lab: Lab) -> None:
    lab["nd1"].call("sh", "-c", "echo 50000 50039 > /proc/sys/net/ipv4/ip_local_port_range")
    found = check_risk(lab.own_doctor(*PATIENT), "ports-exhausted", ["nd1"])
    assert "of 40 ports (50000–50039)" in found["message"]


def test_connections_that_find_no_port_on_their_own_host_are_not_blocked(lab: Lab) -> None:
    lab["nd0"].call("sh", "-c", "echo 50000 50011 > /proc/sys/net/ipv4/ip_local_port_range")
    few = ("--select", "firewall,kernel_limits,collectives")
    run = lab.own_doctor(*PATIENT, *few)
    root = check_cause(run, run.report, "ports-exhausted", hosts=["nd0"])
    assert "of 12 ports (50000–50011)" in root["message"], str(run)
    assert run.report is not None
    assert len(run.report["findings"]) == 1, str(run)


_NO_PORT = """
import socket, time
from nccl_doctor.gather.store import ControlStore, StoreLost
from nccl_doctor.toolkit.net.free_port import no_port_left

there = ("192.168.77.2", 29500)
assert not no_port_left(*there)
assert not no_port_left("nd1", 29500), "a name is looked up by nobody"
held = [socket.create_server(("", port)) for port in range(50000, 50004)]
assert no_port_left(*there)
began = time.monotonic()
try:
    ControlStore(*there, timeout_s=20.0, prefix="")
except StoreLost as error:
    print(error, time.monotonic() - began < 5)
"""


def test_a_call_without_a_port_to_call_from_ends_at_once(lab: Lab) -> None:
    lab["nd0"].call("sh", "-c", "echo 50000 50003 > /proc/sys/net/ipv4/ip_local_port_range")
    said = lab["nd0"].call(lab.python, "-c", _NO_PORT)
    words = "this host has no free port to call from (net.ipv4.ip_local_port_range) True"
    assert said.strip() == words


def test_a_short_queue_of_connections_counts_on_the_master_only(lab: Lab) -> None:
    for host in lab.hosts:
        host.call("sh", "-c", "echo 7 > /proc/sys/net/core/somaxconn")
    run = lab.own_doctor(*PATIENT, "--select", "kernel_limits,ranks,collectives", nproc=4)
    found = check_risk(run, "listen-backlog-low", ["nd0"])
    assert "net.core.somaxconn=7 for 8 ranks" in found["message"]


def test_one_wrong_clock_of_three(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    found = check_risk(
        lab.own_doctor(*PATIENT, nproc=1, per_host_env={"nd1": clock_ahead(42)}),
        "clock-skew",
        ["nd1"],
    )
    assert found["message"].startswith("42.")
    assert "s ahead of the others" in found["message"]
    assert found["confidence"] == "certain"


@pytest.mark.wide
def test_a_wrong_clock_of_the_master(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    run = lab.own_doctor(*PATIENT, nproc=1, per_host_env={"nd0": clock_ahead(-42)})
    found = check_risk(run, "clock-skew", ["nd0"])
    assert "s behind the others" in found["message"]


@pytest.mark.wide
def test_of_two_clocks_nobody_knows_the_right_one(lab: Lab) -> None:
    run = lab.own_doctor(*PATIENT, nproc=1, per_host_env={"nd1": clock_ahead(42)})
    found = check_risk(run, "clock-skew", ["nd0", "nd1"])
    assert found["confidence"] == "possible"


def test_a_wrong_clock_breaks_a_c10d_rendezvous(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    run = lab.own_doctor(
        *(*PATIENT, "--select", "clock,launch_record,ranks,rendezvous_endpoint,collectives"),
        nproc=1,
        per_host_env={"nd2": clock_ahead(42)},
        job=["/nonexistent.py"],
        rendezvous="c10d",
    )
    check_clean(run)
    check_cause(run, run.report, "clock-skew", hosts=["nd2"])
    assert run.codes == [1, 1, 1], str(run)
