"""A real slurmd calls the Prolog and the HealthCheckProgram of docs/slurm.md.

The doctor is the real one, under the path of the page; a stand-in for NVIDIA's library tells it of
the GPUs. What is broken about it is broken as on a node: no program, no Python, a signal.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import slurm
from tests.lab.lab import Lab
from tests.lab.slurm import Slurm
from tests.nvml.stand_in import build, h100s, uuid, write
from tests.support.forkserver import quick_python_path
from tests.support.waiting import until

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "slurm.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
INTERVAL_S = 3
"""Between two health checks, in place of the minutes of the page."""
PATIENCE_S = 60.0
"""For slurmctld to ask for a health check, and for the doctor, which imports torch, to make it."""
LOST = f"nccl-doctor: gpu-lost: {uuid(6)}: the driver reports"
AT_ITS_PATH = """
for each in /opt/*/; do
    [ -d "$each" ] || continue
    mkdir -p "/run$each"
    mount --rbind "$each" "/run$each"
done
mkdir -p /run/opt/nccl-doctor
mount --bind "$1" /run/opt/nccl-doctor
mount --rbind /run/opt /opt
"""
"""Add a folder to /opt as this host sees it, where the scripts look for the doctor."""

BROKEN = {
    "no program": "exit 127",
    "no Python": "exec /opt/nccl-doctor/bin/no-such-python -m nccl_doctor",
    "a traceback": f"exec {sys.executable} -c 'raise SystemError'",
    "words and 1": "echo oops; exit 1",
    "a Reason, and no verdict": f'echo "{LOST}"; exit 3',
    "killed": "kill -9 $$",
    "no such option": f'exec {sys.executable} -m nccl_doctor "$@" --frobnicate',
    "no such check": f'exec {sys.executable} -m nccl_doctor "$@" --select no_such_check',
}


@pytest.fixture(autouse=True)
def _can_run() -> None:
    if reason := slurm.impossible():
        pytest.skip(reason)
    if reason := slurm.missing():
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(f"CI=true, so Slurm must run: {reason}", pytrace=False)
        pytest.skip(reason)


class Nodes:
    """Slurm with the scripts of the page, and the doctor of every node."""

    def __init__(self, cluster: Slurm, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.made: dict[str, int] = {}
        self.wanted: dict[str, int] = {}
        self.library = build(folder).parent
        for name in ("nccl-doctor-health.sh", "nccl-doctor-prolog.sh"):
            (text,) = [text for text in SCRIPTS if f"# /etc/slurm/{name}" in text]
            assert "PATH=/opt/nccl-doctor/bin:" in text
            file = cluster.etc / name
            file.write_text(text)
            file.chmod(0o755)
        for host in cluster.lab.hosts:
            (folder / host.name / "bin").mkdir(parents=True)
            host.call("sh", "-euc", AT_ITS_PATH, "sh", str(folder / host.name))
            # There is no syslog on a host of the lab.
            self._program(host.name, "logger", 'printf "%s\\n" "$*" >> /opt/nccl-doctor/syslog')
            self.is_well(host.name)

    def _program(self, node: str, name: str, body: str) -> None:
        file = self.folder / node / "bin" / f".{name}"
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
        file.replace(file.with_name(name))

    def _doctor(self, node: str, body: str) -> None:
        """Another doctor, that notes how it ended. It works once, and once more for each time that
        a test waits for more, and one at a time: slurmd starts the next check whether or not the
        last one has ended, and here they are asked for faster than torch is imported.
        """
        self.made[node] = self.made.get(node, 0) + 1
        self._wants(node, 1)
        self._program(node, "body", body)
        self._program(
            node,
            "nccl-doctor",
            f"""
            exec 9> /opt/nccl-doctor/lock
            flock -n 9 || exit 0
            calls=/opt/nccl-doctor/calls.{self.made[node]}
            [ "$(cat "$calls" 2>&- | wc -l)" -lt "$(cat /opt/nccl-doctor/wanted)" ] || exit 0
            "${{0%/*}}/body" "$@" 9>&-
            code=$?
            echo "$code" >> "$calls"
            exit "$code"
            """,
        )

    def _wants(self, node: str, calls: int) -> None:
        self.wanted[node] = calls
        file = self.folder / node / "wanted"
        file.with_suffix(".new").write_text(str(calls))
        file.with_suffix(".new").replace(file)

    def _finds(self, node: str, machine: dict[str, dict[str, object]]) -> None:
        file = write(machine, self.folder / node / "gpus")
        variables = {
            **self.cluster.lab.env,
            "LD_LIBRARY_PATH": str(self.library),
            "NVML_STAND_IN": str(file),
        }
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        python = quick_python_path()
        self._doctor(node, f'exec env -i {given} {python} -m nccl_doctor "$@"')

    def is_well(self, node: str) -> None:
        self._finds(node, h100s())

    def has_lost_a_gpu(self, node: str) -> None:
        machine = h100s()
        machine["6"]["nvmlDeviceGetTemperature.0"] = "!15"
        self._finds(node, machine)

    def has_no_room(self, node: str) -> None:
        """A failure of the same check, of a kind that does not drain: `gpu-busy`."""
        machine = h100s()
        machine["0"]["nvmlDeviceGetMemoryInfo"] = f"{80 << 30} {2 << 30} {78 << 30}"
        self._finds(node, machine)

    def is_broken(self, node: str, how: str) -> None:
        self._doctor(node, BROKEN[how])

    def calls(self, node: str) -> list[str]:
        """Exit codes so far of the doctor that this node has now."""
        file = self.folder / node / f"calls.{self.made[node]}"
        return file.read_text().split() if file.exists() else []

    def syslog(self, node: str) -> str:
        file = self.folder / node / "syslog"
        return file.read_text() if file.exists() else ""

    def once_called(self, *nodes: str) -> dict[str, str]:
        """Wait until the doctor that each of these nodes has now was called; how it ended."""
        self.until(lambda: all(map(self.calls, nodes)))
        return {node: self.calls(node)[0] for node in nodes}

    def once_more(self, node: str) -> None:
        """Wait for another call, so that what followed the last one is done."""
        self._wants(node, self.wanted[node] + 1)
        self.until(lambda: len(self.calls(node)) == self.wanted[node])

    def until(self, true: Callable[[], bool]) -> None:
        until(true, every_s=0.3, said=self.cluster.logs)  # some ask slurmctld, by a program

    def is_up(self, node: str) -> bool:
        state = self.cluster.state_of(node)
        return "DRAIN" not in state and "DOWN" not in state and "Reason=" not in state

    def reason(self, node: str) -> str:
        found = re.search(r"Reason=(.*)", self.cluster.state_of(node))
        return found[1] if found else ""


@pytest.fixture
def nodes(make_lab: Callable[..., Lab], tmp_path: Path) -> Nodes:
    folder = tmp_path / "nodes"
    folder.mkdir()
    return Nodes(Slurm(make_lab("nd0", "nd1")), folder)


def test_the_health_check_that_slurmd_calls(nodes: Nodes) -> None:
    (lines,) = re.findall(r"^```\n# slurm\.conf\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert "HealthCheckProgram=/etc/slurm/nccl-doctor-health.sh\n" in lines
    nodes.has_no_room("nd1")
    nodes.cluster.reconfigure(re.sub(r"Interval=\d+", f"Interval={INTERVAL_S}", lines))
    # Healthy nodes, and one with a failure of a kind that does not drain.
    assert nodes.once_called("nd0", "nd1") == {"nd0": "0", "nd1": "0"}
    assert nodes.is_up("nd0")
    assert nodes.is_up("nd1")
    # Doctors that are broken, two kinds at a time.
    kinds = list(BROKEN)
    for first, second in zip(kinds[::2], kinds[1::2], strict=True):
        nodes.is_broken("nd0", first)
        nodes.is_broken("nd1", second)
        nodes.once_called("nd0", "nd1")
    # A GPU is lost on one of them; until here none was drained, and the other one still is not.
    assert nodes.is_up("nd0")
    assert nodes.is_up("nd1")
    nodes.is_well("nd0")
    nodes.has_lost_a_gpu("nd1")
    nodes.until(lambda: not nodes.is_up("nd1"))
    assert "State=IDLE+DRAIN" in nodes.cluster.state_of("nd1")
    assert nodes.reason("nd1").startswith(LOST)
    listed = nodes.cluster.client("sinfo", "-R", "--noheader", "--format", "%200E|%N").stdout
    assert len(listed.splitlines()) == 1, "one node, and its Reason is one line"
    assert listed.strip().endswith("|nd1")
    nodes.once_called("nd0")
    assert nodes.is_up("nd0")
    # Who was mended is not drained again; whom somebody else drained keeps that reason.
    nodes.is_well("nd1")
    nodes.once_called("nd1")
    update = ("scontrol", "update", "NodeName=nd1")
    nodes.cluster.client(*update, "State=RESUME")
    nodes.once_more("nd1")
    assert nodes.is_up("nd1")
    nodes.cluster.client(*update, "State=DRAIN", "Reason=new memory")
    nodes.has_lost_a_gpu("nd1")
    assert nodes.once_called("nd1") == {"nd1": "1"}
    nodes.once_more("nd1")
    assert nodes.reason("nd1").startswith("new memory")


def test_the_prolog_that_slurmd_calls(nodes: Nodes) -> None:
    cluster = nodes.cluster
    cluster.reconfigure("Prolog=/etc/slurm/nccl-doctor-prolog.sh\n")

    def job(node: str) -> str:
        done = cluster.client("srun", "-w", node, "-n1", "hostname", timeout_s=PATIENCE_S)
        assert done.poll() == 0, f"{done.stderr}\n{cluster.logs()}"
        return done.stdout.strip()

    assert (job("nd0"), job("nd1")) == ("nd0", "nd1")
    assert (nodes.calls("nd0"), nodes.calls("nd1")) == (["0"], ["0"])
    nodes.has_no_room("nd0")
    assert job("nd0") == "nd0"
    for how in BROKEN:
        nodes.is_broken("nd0", how)
        assert job("nd0") == "nd0", how
        assert nodes.is_up("nd0"), how
    assert nodes.syslog("nd0") == ""
    nodes.has_lost_a_gpu("nd1")
    cluster.client("sbatch", "-w", "nd1", "-o", "/dev/null", "--wrap", "hostname")
    nodes.until(lambda: not nodes.is_up("nd1"))
    assert "State=IDLE+DRAIN" in cluster.state_of("nd1")
    assert nodes.reason("nd1").startswith("Prolog error")
    (line,) = nodes.syslog("nd1").splitlines()
    assert line.startswith(f"-t nccl-doctor {LOST}")
    nodes.until(lambda: "launch failed requeued held" in cluster.client("squeue").stdout)
    assert nodes.is_up("nd0")
