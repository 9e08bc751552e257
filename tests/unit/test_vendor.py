"""Tools of vendors, run together until one deadline, whatever they do."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nccl_doctor.report.vendor import COMMANDS, run_tools


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """A folder of tools, first in PATH: one that answers, fails, hangs, writes without end."""
    scripts = {
        "good": 'echo "$# $1 $LC_ALL"; echo warning >&2; cat',
        "bad": "echo half; exit 9",
        "stuck": "echo begun; trap '' TERM; sleep 60 & wait; sleep 60",
        "endless": "exec yes 0123456789abcdef",
        "no-tool": "",
    }
    for name, lines in scripts.items():
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{lines}\n")
        file.chmod(0o755 if name != "no-tool" else 0o644)
    (tmp_path / "broken").write_bytes(b"\0\1\2")
    (tmp_path / "broken").chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_all_at_once_and_none_is_waited_for(tools):
    names = ("good", "bad", "stuck", "endless", "no-tool", "absent", "broken")
    commands = {name: (name, "a; touch x") for name in names}
    started = time.monotonic()
    printed = run_tools(commands, deadline_s=0.7, environ=tools)
    assert time.monotonic() - started < 0.7 + 2.0
    assert list(printed) == list(names)
    assert printed["good"].text.splitlines() == ["1 a; touch x C", "warning"]
    assert printed["good"].problem == ""
    assert (printed["bad"].text, printed["bad"].problem) == ("half\n", "exit code 9")
    assert printed["stuck"].text == "begun\n"
    assert printed["stuck"].problem == "no answer within 0.7 s"
    assert printed["endless"].problem == "no answer within 0.7 s; cut after 4 MiB"
    assert len(printed["endless"].text) == 4 << 20
    for name in ("no-tool", "absent"):
        assert printed[name].problem == "not installed"
    assert printed["broken"].problem.startswith("not started: ")


def test_what_they_start_is_gone(tools, tmp_path):
    (tmp_path / "stuck").write_text("#!/bin/sh\nsleep 4711 & echo $!; wait\n")
    printed = run_tools({"stuck": ("stuck",)}, deadline_s=0.5, environ=tools)
    pid = int(printed["stuck"].text)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _lives(pid):
        time.sleep(0.02)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_they_only_read():
    changing = {"-r", "-pm", "-c", "-e", "set", "add", "del", "change", "replace", "flush", "reset"}
    for command in COMMANDS.values():
        assert not changing & set(command), command
