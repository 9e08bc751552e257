"""The variables that a DeepSpeed job would see on its other hosts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nccl_doctor.launch.ssh.program import ExportsError, apply, exported


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    home, cwd = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    cwd.mkdir()
    return home, cwd


def test_by_the_beginning_of_the_name(folders):
    home, cwd = folders
    environ = {
        "NCCL_DEBUG": "INFO",
        "UCX_TLS": "tcp",
        "MV2_X": "1",
        "MLFLOW_URI": "u",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "0",
        "LD_LIBRARY_PATH": "/x",
        "PATH": "/bin",
    }
    names = {"NCCL_DEBUG", "UCX_TLS", "MV2_X", "MLFLOW_URI", "PYTHONPATH"}
    assert set(exported(environ, home, cwd, [])) == names


def test_the_working_directory_comes_first_in_the_path(folders):
    home, cwd = folders
    assert exported({}, home, cwd, [])["PYTHONPATH"] == str(cwd)
    assert exported({"PYTHONPATH": "/a:/b"}, home, cwd, [])["PYTHONPATH"] == f"{cwd}:/a:/b"


def test_the_files_of_home_and_working_directory(folders):
    home, cwd = folders
    (home / ".deepspeed_env").write_text("NCCL_DEBUG=WARN\nGLOO_SOCKET_IFNAME = eth1 \nA=b=c\n")
    (cwd / ".deepspeed_env").write_text("NCCL_DEBUG=TRACE\nEMPTY=")
    found = exported({"NCCL_DEBUG": "INFO"}, home, cwd, [])
    assert found["NCCL_DEBUG"] == "TRACE"
    assert found["GLOO_SOCKET_IFNAME"] == "eth1"
    assert found["A"] == "b=c"
    assert found["EMPTY"] == ""
    other = home / "other"
    other.write_text("NCCL_DEBUG=VERSION")
    assert exported({"DS_ENV_FILE": str(other)}, home, cwd, [])["NCCL_DEBUG"] == "VERSION"


@pytest.mark.parametrize(
    "line", ["", "# a comment", "#A=b", "export A=b", "A b", "=x", "A=\0", "MIIEa"]
)
def test_a_line_at_which_the_launcher_would_stop(folders, line):
    home, cwd = folders
    (cwd / ".deepspeed_env").write_text(f"NCCL_DEBUG=INFO\n{line}\nA=b\n")
    with pytest.raises(
        ExportsError, match=r"\.deepspeed_env, line 2: .* is not NAME=value"
    ) as wrong:
        exported({}, home, cwd, [])
    assert "MIIEa" not in str(wrong.value), "it may be a line of a key"


def test_a_file_that_is_no_text(folders):
    home, cwd = folders
    (home / ".deepspeed_env").write_bytes(b"A=\xff\n")
    with pytest.raises(ExportsError, match="cannot be read"):
        exported({}, home, cwd, [])


def test_references_are_the_other_hosts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/there")
    monkeypatch.setenv("NCCL_X", "before")
    apply({"NCCL_X": "/cuda:$LD_LIBRARY_PATH:${LD_LIBRARY_PATH}:$(id)`id`"})
    assert os.environ["NCCL_X"] == "/cuda:/there:/there:$(id)`id`"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_of_another_user_is_left_out_and_said(folders):
    """What it says is set on every host before anything is imported there: PYTHONPATH, too."""
    home, cwd = folders
    (home / ".deepspeed_env").write_text("NCCL_DEBUG=WARN")
    theirs = cwd / ".deepspeed_env"
    theirs.write_text("PYTHONPATH=/theirs\nnonsense")
    os.chown(theirs, 65533, 65533)
    left_out: list[str] = []
    found = exported({}, home, cwd, left_out)
    assert found == {"NCCL_DEBUG": "WARN", "PYTHONPATH": str(cwd)}
    assert left_out == [
        f"{theirs} is left out: .deepspeed_env belongs to another user (uid 65533); the deepspeed "
        "launcher would read it"
    ]
