"""Hosts that are odd: no /proc, system calls that are refused, hardly any memory. There is a report
in every case, and no cause that is not there.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import CLEAN
from tests.support.limited import HAS_NETLINK_FILTER, refused
from tests.support.reports import validate
from tests.support.rows import also

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
COMMANDS = {
    "run": "run --nproc-per-node 2 --timeout 40 --join-timeout 8 --collective-timeout 5",
    "env": "env",
}


ERRORS = (errno.EPERM, also(errno.ENOSYS))
needs_filter = pytest.mark.skipif(
    not HAS_NETLINK_FILTER, reason="the filter has not this machine's numbers"
)


def examined(folder: Path, command: str, before: list[str]) -> tuple[int, str, dict[str, Any]]:
    """Exit code, all that was printed, and the report of the program, started by other words."""
    words = [sys.executable, "-m", "nccl_doctor", *COMMANDS[command].split(), "--backend=gloo"]
    done = subprocess.run(
        [*before, *words, "--json", "report.json"],
        cwd=folder,
        env={**CLEAN, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    assert "itself failed" not in said, said
    assert "was not saved" not in said, said
    report = json.loads((folder / "report.json").read_text())
    validate(report)
    assert done.returncode == report["exit_code"]
    return done.returncode, said, report


def causes(report: dict[str, Any]) -> list[str]:
    return [found["code"] for found in report["root_causes"]]


def unknown(report: dict[str, Any]) -> set[str]:
    return {each["name"] for each in report["checks"] if each["status"] == "unknown"}


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", also("env")])
@pytest.mark.parametrize("limit", [66_000, 300_000, *map(also, (600_000, 900_000))])
def test_few_addresses(tmp_path: Path, command: str, limit: int) -> None:
    """From too few for most libraries, over one that ends its process, to too few for threads."""
    before = ["sh", "-c", f'ulimit -v {limit}; exec "$@"', "sh"]
    code, said, report = examined(tmp_path, command, before)
    assert (code, causes(report)) == (1, ["address-space-limit-low"]), said
    (found,) = report["root_causes"]
    assert found["message"].startswith(f"RLIMIT_AS is {limit * 1024 >> 20} MiB")
    assert found["fix"].startswith("ulimit -v unlimited")


def test_too_few_addresses_for_a_report(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "nccl_doctor", "run", "--backend=gloo", "--nproc-per-node=1"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -v 30000; exec "$@"', "sh", *words],
        cwd=tmp_path,
        env={**CLEAN, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 3
    assert "no memory is left" in done.stderr
    assert "ulimit -v" in done.stderr
    assert "Traceback" not in done.stderr


# /proc --------------------------------------------------------------------------------------------


def in_namespaces(flags: str, script: str) -> list[str]:
    before = ["unshare", *flags.split(), "sh", "-c", f'{script} exec "$@"', "sh"]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces of one's own are not allowed here")
    return before


@pytest.mark.parametrize("command", ["run", also("env")])
def test_no_proc(tmp_path: Path, command: str) -> None:
    """What is only there is unknown; the groups work all the same."""
    before = in_namespaces("-m", "mount -t tmpfs none /proc;")
    code, said, report = examined(tmp_path, command, before)
    assert (code, report["verdict"], causes(report)) == (3, "unknown", []), said
    assert "stuck_processes" in unknown(report)
    assert "collectives" not in unknown(report)


@pytest.mark.parametrize("command", ["run", also("env")])
def test_the_proc_of_another_pid_namespace(tmp_path: Path, command: str) -> None:
    code, said, report = examined(tmp_path, command, in_namespaces("-p -f", ""))
    assert (code, causes(report)) == (0, []), said


# Python ------------------------------------------------------------------------------------------


def test_warnings_that_are_errors(tmp_path: Path) -> None:
    """Torch warns of functions that are called here, and that the job may never call."""
    code, said, report = examined(tmp_path, "run", ["env", "PYTHONWARNINGS=error"])
    assert (code, causes(report)) == (0, []), said


# Calls --------------------------------------------------------------------------------------------


def without(call: str, error: int) -> list[str]:
    code = f"{refused(call, error)}; import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", code]


@needs_filter
@pytest.mark.parametrize("command", ["run", also("env")])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", ["memfd_create", also("getrusage")])
def test_a_call_that_can_be_done_without(
    tmp_path: Path, call: str, error: int, command: str
) -> None:
    code, said, report = examined(tmp_path, command, without(call, error))
    assert (code, causes(report)) == (0, []), said


@needs_filter
@pytest.mark.parametrize("command", ["run", also("env")])
@pytest.mark.parametrize("error", ERRORS)
def test_limits_that_cannot_be_read(tmp_path: Path, error: int, command: str) -> None:
    code, said, report = examined(tmp_path, command, without("prlimit64", error))
    assert (code, causes(report), unknown(report)) == (3, [], {"limits"}), said
    assert "a security rule refuses getrlimit(2) to this process" in said


@needs_filter
@pytest.mark.parametrize("error", ERRORS)
def test_no_socket_can_be_had(tmp_path: Path, error: int) -> None:
    """Neither gloo nor the store would start: each says what it was refused."""
    for command in COMMANDS:
        code, said, report = examined(tmp_path, command, without("socket", error))
        assert (code, causes(report)) == (1, ["netlink-refused"]), said


@needs_filter
@pytest.mark.parametrize("error", ERRORS)
def test_no_option_of_a_socket_can_be_set(tmp_path: Path, error: int) -> None:
    code, said, report = examined(tmp_path, "run", without("setsockopt", error))
    assert (code, causes(report)) == (1, ["port-privileged"]), said
    assert "setsockopt: " in report["root_causes"][0]["message"]
    code, said, report = examined(tmp_path, "env", without("setsockopt", error))
    assert causes(report) == [], said
