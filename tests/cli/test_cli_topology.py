"""`--topology`: a file that cannot be used, one that lacks hosts, and where it is read."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.cli.program import error_of, program

RUN = ("run", "--nproc-per-node", "1", "--backend", "gloo", "--select", "ranks")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read net.conf: No such file or directory"),
        (b"\xff", "net.conf is not UTF-8 text (byte 0)"),
        (b"nd1 nd2\n", "net.conf: line 1 is neither SwitchName=NAME Nodes=LIST nor"),
        (b"SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n", "line 2: n1 is below a and below b"),
    ],
)
@pytest.mark.parametrize("by_config", [False, True])
def test_a_file_that_cannot_be_used_is_one_line(
    tmp_path: Path, content: bytes | None, words: str, by_config: bool
) -> None:
    if content is not None:
        (tmp_path / "net.conf").write_bytes(content)
    option = ["--topology", "net.conf"]
    if by_config:
        (tmp_path / "nccl-doctor.toml").write_text('topology = "net.conf"\n')
        option = []
    line = error_of(program(*RUN, *option, cwd=tmp_path))
    assert line.startswith("--topology: ")
    assert words in line


def test_the_report_keeps_the_switches_and_a_redacted_one_no_name(tmp_path: Path) -> None:
    name = socket.gethostname()
    (tmp_path / "net.conf").write_text(
        f"SwitchName=leaf-of-acme Nodes={name},gpu-acme[01-16]\nSwitchName=s Switches=leaf-of-acme"
    )
    option = ("--topology", "net.conf")
    done = program(*RUN, *option, "--json", "clear.json", cwd=tmp_path)
    assert done.returncode == 0
    told = json.loads((tmp_path / "clear.json").read_text())["run"]["job"]["leaves"]
    assert told == [{"leaf_switch": "leaf-of-acme", "hostlist": f"{name},gpu-acme[01-16]"}]
    done = program("report", "show", "clear.json", "--redact", "--json", "-", cwd=tmp_path)
    assert done.returncode == 0
    assert "acme" not in done.stdout
    assert name not in done.stdout


def test_a_host_that_is_not_that_of_rank_0_does_not_read_it(tmp_path: Path) -> None:
    """It may have no such file; it ends as rank 0 never comes."""
    place = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1")
    limits = ("--master-port", "9", "--join-timeout", "2", "--timeout", "20")
    done = program(*RUN, *place, *limits, "--topology", "net.conf", cwd=tmp_path)
    assert done.returncode == 3
    assert "coordinator-lost" in done.stdout + done.stderr
