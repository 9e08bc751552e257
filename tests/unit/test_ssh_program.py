"""The words that start the program on another host: what it imports there, and from where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import nccl_doctor
from nccl_doctor.launch.ssh.connection import ssh_command
from nccl_doctor.launch.ssh.program import start_words

SOURCE = Path(nccl_doctor.__file__).parent.parent
STAND_IN = """\
import json, os, sys
import torch
said = {"args": sys.argv[1:], "path": sys.path, "cwd": os.getcwd(), "torch": torch.__file__}
print(json.dumps({**said, "json": json.__file__}))
"""


@pytest.fixture
def started(tmp_path: Path):
    """Starts what lies there in the place of the program; returns what it says of itself."""
    write(tmp_path / "own/nccl_doctor", __init__="", __main__=STAND_IN)
    write(tmp_path / "libraries", torch="", json="1/0", os="1/0")
    (tmp_path / "home").mkdir()

    def start(folder: Path, **variables: str) -> dict:
        python, *words, source = start_words(folder, variables)
        assert source == str(SOURCE)
        done = subprocess.run(
            [python, "-S", *words, str(tmp_path / "own"), "run", "a b", ""],
            cwd=tmp_path / "home",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return start


def write(folder: Path, **modules: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)
    return folder


def test_modules_of_a_folder_of_all_users_are_not_imported(started, tmp_path: Path) -> None:
    folder = write(tmp_path / "open", json="1/0", torch="1/0", nccl_doctor="1/0", runpy="1/0")
    for mode in (0o1777, 0o777, 0o757):
        folder.chmod(mode)
        said = started(folder, PYTHONPATH=f"{folder}:{tmp_path / 'libraries'}:")
        assert said["torch"] == str(tmp_path / "libraries/torch.py")
        assert said["cwd"] == str(folder)
        assert str(folder) not in said["path"]
        assert "" not in said["path"]
        assert said["args"] == ["run", "a b", ""]


def test_a_folder_of_ones_own_adds_modules_and_replaces_none(started, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", json="1/0", torch="here = 1", nccl_doctor="1/0")
    said = started(folder, PYTHONPATH=str(folder))
    assert said["torch"] == str(folder / "torch.py")
    assert said["path"].index(str(folder)) > said["path"].index(os.path.dirname(os.__file__))
    said = started(folder, PYTHONPATH="../libraries")
    assert said["torch"] == str(tmp_path / "libraries/torch.py"), "PYTHONPATH before the folder"


def test_a_folder_that_is_not_there(started, tmp_path: Path) -> None:
    said = started(tmp_path / "gone", PYTHONPATH=str(tmp_path / "libraries"))
    assert said["cwd"] == str(tmp_path / "home")


def failed(words: Sequence[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [words[0], "-S", *words[1:]],
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("folder", ["no", "empty"])
def test_where_the_program_is_not(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty" / "nccl_doctor").mkdir(parents=True)
    words = [*start_words(tmp_path, {})[:-1], str(tmp_path / folder)]
    assert failed(words, tmp_path) == (1, f"{sys.executable}: No module named nccl_doctor\n")


def test_where_the_one_file_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "doctor"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("__main__.py", "raise SystemExit(7)")
    monkeypatch.setattr(sys, "argv", [str(file)])
    words = start_words(tmp_path, {})
    assert failed(words, tmp_path) == (7, "")
    file.unlink()
    code, err = failed(words, tmp_path)
    assert code == 2
    assert f"can't open file '{file}'" in err


def test_every_shell_takes_the_words(tmp_path: Path) -> None:
    """In that of csh, a quoted word ends at the end of a line, and ! is a command of history."""
    words = ssh_command("nd0", start_words(tmp_path, {"PYTHONPATH": "/x"}), connect_s=1)
    assert "\n" not in words[-1]
    assert "!" not in words[-1]
    assert str(SOURCE) in words[-1]
