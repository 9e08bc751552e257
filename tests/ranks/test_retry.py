"""--retry with real ranks: examined again until all is good, and not a moment longer."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.cli.program import CLEAN

FEW = ("--nproc-per-node", "1", "--backend", "gloo", "--select", "port,ranks", "--nnodes", "1")


def started(held: socket.socket, *words: str) -> subprocess.Popen[str]:
    """A run on a MASTER_PORT that somebody holds."""
    place = ("--master-addr", "127.0.0.1", "--master-port", str(held.getsockname()[1]))
    return subprocess.Popen(
        [sys.executable, "-m", "nccl_doctor", "run", *FEW, *place, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=CLEAN,
    )


def held_port() -> socket.socket:
    held = socket.create_server(("127.0.0.1", 0))
    held.listen()
    return held


def said_again(process: subprocess.Popen[str]) -> Sequence[str]:
    """What stderr says up to the line that another attempt follows."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "examined again in 5 s (--retry: " in line:
            return lines
    raise AssertionError(lines)


def test_the_job_starts_as_soon_as_the_port_is_free() -> None:
    held = held_port()
    process = started(held, "--retry", "90", "--", "echo", "the job")
    assert "FAIL: port-in-use; " in said_again(process)[-1]
    held.close()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.startswith(("nccl-doctor: PASS: ", "nccl-doctor: WARN: "))
    assert "port-in-use" not in out, "the report of a failed attempt is not printed"
    assert out.endswith("\nthe job\n")
    assert "examined again" not in err


def test_when_its_time_is_over_the_last_report_counts() -> None:
    with held_port() as held:
        began = time.monotonic()
        process = started(held, "--retry", "12")
        out, _ = process.communicate(timeout=60)
        assert time.monotonic() - began < 45
    assert process.returncode == 1
    assert out.count("[port-in-use]") == 1


def test_a_signal_between_two_attempts_ends_it() -> None:
    with held_port() as held:
        process = started(held, "--retry", "90")
        said_again(process)
        time.sleep(1.0)  # it comes in the pause between two attempts
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    assert process.returncode in (3, -signal.SIGTERM)
    assert "PASS" not in out
