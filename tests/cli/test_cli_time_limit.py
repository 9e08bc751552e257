"""The time limit of real runs: 120 s where nobody gives one, put off for slow starts, never else.

A plug-in stands for a round in which GPUs and communicators take long to start. The limit itself is
made short through the line that `--hostfile` sends to a host.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.launch.ssh.connection import MARKER, MORE, instructions
from nccl_doctor.model.codec import encode
from nccl_doctor.model.options import Options
from tests.cli.program import CLEAN, program
from tests.ranks.ranks import free_port
from tests.support.forkserver import quick_python_path
from tests.support.reports import validate

HERE = ("--select", "ranks", "--backend", "gloo", "--nproc-per-node", "2", "--json", "-")
LIMIT_S = 10.0
PAGE = '''
"""Do the groups of slow GPUs form?"""
import time
from nccl_doctor.api import *

KIND = Kind("slow-groups", Layer.COLLECTIVE, "title", "why", "fix")

class SlowGroups(Check):
    name = "slow_groups"
    layer = Layer.COLLECTIVE
    scope = Scope.RANK
    kinds = (KIND,)
    together = True
    forms_groups = True
    def plan(self, cluster):
        return [Round("start", ((0, 1),), 40.0)]
    def observe(self, ctx):
        time.sleep(float(ctx.env.get("SLOW_S", 10)))
        return {}
    def judge(self, cluster):
        return ()
'''


def installed(folder: Path) -> dict[str, str]:
    """Environment in which the plug-in is installed."""
    info = folder / "slow_groups-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-groups\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nccl_doctor.checks]\nslow_groups = bad_slow_groups\n")
    (folder / "bad_slow_groups.py").write_text(PAGE)
    here = os.environ.get("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    return {**CLEAN, "PYTHONPATH": f"{folder}{os.pathsep}{here}"}


def options_of(**changes: Any) -> Options:
    return Options(select=("slow_groups",), timeout_s=LIMIT_S, collective_timeout_s=2.0, **changes)


def relay(tmp_path: Path, options: Options, *flags: str) -> subprocess.Popen[str]:
    """A host that was started over ssh, with the plug-in alone."""
    process = subprocess.Popen(
        [quick_python_path(), "-m", "nccl_doctor", "run", "--relay", *flags],
        cwd=tmp_path,
        env=installed(tmp_path / "plugins"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(instructions(options, {}))
    process.stdin.flush()  # it stays open: who closes it wants the run to end
    return process


def answer_of(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """Report and stderr of a relay."""
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        report, err = json.loads(process.stdout.read()), process.stderr.read()
    validate(report)
    return report, err


def test_a_slow_start_puts_the_end_of_every_process_off(tmp_path: Path) -> None:
    began = time.monotonic()
    options = options_of(backend="nccl", timeout_grows=True)
    report, err = answer_of(relay(tmp_path, options, "--nproc-per-node", "2"))
    took_s = time.monotonic() - began
    assert (report["verdict"], report["run"]["complete"]) == ("pass", True), report["findings"]
    assert [(check["name"], check["status"]) for check in report["checks"]] == [
        ("slow_groups", "pass")
    ]
    limit = report["run"]["time_limit"]
    more_s = limit["seconds"] - LIMIT_S
    assert limit["default_s"] == LIMIT_S < took_s < limit["seconds"]
    assert 0 < more_s <= 38
    assert limit["why"] == "the start of GPUs and communicators"
    said = [line for line in err.splitlines() if not line.startswith(MARKER)]
    assert said == [
        f"{MORE}{more_s:.0f}",
        f"nccl-doctor: time limit of the run: {limit['seconds']:.0f} s, {more_s:.0f} s more than "
        "the default, for the start of GPUs and communicators (--timeout sets another one)",
    ]


def test_a_limit_that_was_given_ends_a_slow_start(tmp_path: Path) -> None:
    options = options_of(backend="nccl")
    report, err = answer_of(relay(tmp_path, options, "--nproc-per-node", "2"))
    assert report["verdict"] == "unknown"
    assert not [found for found in report["findings"] if found["severity"] == "fail"]
    assert "--timeout" in report["checks"][0]["reason"]
    assert report["run"]["duration_s"] < LIMIT_S
    assert "time_limit" not in report["run"]
    assert "time limit" not in err


def test_a_host_that_loses_rank_0_afterwards_ends_in_time(tmp_path: Path) -> None:
    options = options_of(backend="nccl", timeout_grows=True)
    port = str(free_port())
    flags = ("--nnodes=2", "--master-addr=127.0.0.1", "--nproc-per-node=1", "--master-port", port)
    began = time.monotonic()
    first = relay(tmp_path, options, *flags, "--node-rank=0")
    other = relay(tmp_path, options, *flags, "--node-rank=1")
    assert first.stderr is not None
    with first:
        while MORE not in (line := first.stderr.readline()):
            assert line, "it ended"
        first.kill()
    report, err = answer_of(other)
    assert time.monotonic() - began < LIMIT_S + int(line.removeprefix(MORE))
    assert report["run"]["complete"] is False
    assert other.returncode == report["exit_code"] != 0
    assert {found["code"] for found in report["findings"]} <= {"store-lost", "coordinator-lost"}
    assert "Traceback" not in err


HOSTS = """
import json, os, sys, time
from nccl_doctor.gather.fleet import Fleet, run_on_hosts
from nccl_doctor.launch.ssh.hostfile import Entry
from nccl_doctor.model.codec import Node, decode
from nccl_doctor.model.options import Flags, Options

options = decode(Options, Node("options", json.loads(sys.argv[1])))
flags = Flags(master_addr="127.0.0.1", master_port=int(sys.argv[2]))
fleet = Fleet.of("hosts", (Entry("nd0", 2, 1),), ("2",), flags, dict(os.environ))
began = time.monotonic()
report = run_on_hosts(fleet, options)
print(json.dumps([report.to_json(), time.monotonic() - began]))
"""
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift 2
exec sh -c "$*"
"""


@pytest.mark.wide
def test_over_ssh_the_hosts_are_waited_for_as_long(tmp_path: Path) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    env = installed(tmp_path / "plugins")
    env |= {"PATH": f"{ssh.parent}{os.pathsep}{os.environ['PATH']}", "SLOW_S": "20"}
    options = replace(options_of(backend="nccl", timeout_grows=True), timeout_s=20.0)
    done = subprocess.run(
        [quick_python_path(), "-c", HOSTS, json.dumps(encode(options)), str(free_port())],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    report, took_s = json.loads(done.stdout)
    validate(report)
    assert (report["verdict"], report["run"]["complete"]) == ("pass", True), report["findings"]
    limit = report["run"]["time_limit"]
    assert limit["default_s"] == 20 < took_s < limit["seconds"]
    assert done.stderr.startswith(f"nccl-doctor: time limit of the run: {limit['seconds']:.0f} s")
    assert len(done.stderr.splitlines()) == 1


def test_without_timeout_a_run_takes_no_longer(tmp_path: Path) -> None:
    done = program("run", *HERE, cwd=tmp_path)
    run = json.loads(done.stdout)["run"]
    assert done.returncode == 0, done
    assert (run["options"]["timeout_s"], run["options"]["timeout_grows"]) == (120.0, True)
    assert "time_limit" not in run
    assert run["duration_s"] < 60
    assert "time limit" not in done.stderr


def test_who_gives_a_limit_keeps_it(tmp_path: Path) -> None:
    for how in (("--timeout", "120"), ("--config", "limits.toml")):
        (tmp_path / "limits.toml").write_text("timeout = 90\n")
        done = program("run", *HERE, *how, cwd=tmp_path)
        options = json.loads(done.stdout)["run"]["options"]
        assert options["timeout_s"] == (120.0 if "--timeout" in how else 90.0)
        assert options["timeout_grows"] is False


def test_the_facts_of_this_host_keep_their_limit(tmp_path: Path) -> None:
    options = ("--select", "ranks,torch_import", "--backend", "gloo", "--json", "-")
    done = program("env", *options, cwd=tmp_path)
    assert json.loads(done.stdout)["run"]["options"]["timeout_grows"] is False
