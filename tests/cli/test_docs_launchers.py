"""docs/deepspeed.md and docs/accelerate.md: their lines are run, and print what the pages show."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.cli import cli
from nccl_doctor.cli.line import COMMAND
from nccl_doctor.launch.command_line.job_line import JobLine
from nccl_doctor.launch.command_line.reader import read
from tests.cli.program import CLEAN, program
from tests.ranks.ranks import free_port
from tests.support.forkserver import quick_python_path
from tests.support.quick_python import LAUNCHERS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("deepspeed", "accelerate")
}
PATH = f"{Path(sys.executable).parent}:{CLEAN['PATH']}"
QUICK = ("--select", "ranks,torch_import,interfaces")
PRINTS = """
import os

os.write(1, "job {RANK} of {WORLD_SIZE}\\n".format(**os.environ).encode())
"""
TWO_MACHINES = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
machine_rank: 0
main_process_ip: head
main_process_port: 29501
num_machines: 2
num_processes: 16
"""

Done = subprocess.CompletedProcess[str]


def lines_of(page: str) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def line_of(page: str, *words: str) -> str:
    """The one line of a page that begins with `nccl-doctor` and holds these words."""
    (line,) = (
        line
        for line in lines_of(page)
        if line.startswith("nccl-doctor ") and all(word in line for word in words)
    )
    return line


def sample_of(page: str) -> tuple[str, str]:
    """What is typed, and what is printed."""
    (block,) = re.findall(r"^```\n\$ (.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)
    line, _, printed = block.partition("\n")
    return line, printed


def type_in(line: str, folder: Path, *options: str, **env: str) -> Done:
    """Run a line of a page in this folder, with more options of the doctor."""
    words = shlex.split(line)
    assert words[:2] == ["nccl-doctor", "run"]
    variables = {"PATH": PATH, "CUDA_VISIBLE_DEVICES": "", "HOME": str(folder), **env}
    return program("run", *options, *words[2:], cwd=folder, env=variables, timeout_s=100.0)


def even(text: str) -> str:
    """Without what differs from run to run: times."""
    return re.sub(r"\b\d+\.\d s\b", "0.0 s", text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PRINTS)
    (tmp_path / "hosts").write_text("gpu-a slots=8\ngpu-b slots=8\ngpu-c slots=8\n")
    (tmp_path / "two.yaml").write_text(TWO_MACHINES)
    return tmp_path


@pytest.fixture
def path(tmp_path: Path) -> str:
    """PATH with the launchers' scripts, in a Python that has torch imported as it starts."""
    for name, module in LAUNCHERS.items():
        file = tmp_path / "scripts" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f'#!/bin/sh\nexec {quick_python_path()} -m {module} "$@"\n')
        file.chmod(0o755)
    return f"{tmp_path / 'scripts'}:{PATH}"


# --- what is read from the lines ---


def command_of(line: str) -> list[str]:
    """The command behind `--`; asserts that the doctor has the options in front of it."""
    words = shlex.split(line)
    with cli.commands["run"].make_context("run", words[2:], resilient_parsing=True) as ctx:
        command: list[str] = ctx.meta[COMMAND]
    return command


EXPECTED: dict[tuple[str, ...], dict[str, Any]] = {
    ("deepspeed", "--num_gpus 2 train.py"): {"nnodes": 1, "nproc_per_node": "2"},
    ("deepspeed", "--hostfile hosts train.py"): {"nnodes": 3, "starts_remote": True},
    ("deepspeed", "--include"): {"nnodes": 2, "starts_remote": True},
    ("accelerate", "launch train.py"): {"nnodes": 1, "nproc_per_node": "1"},
    ("accelerate", "--num_processes 8"): {"nnodes": 1, "nproc_per_node": "8"},
    ("accelerate", "--main_process_ip"): {"node_rank": 1, "master_addr": "head"},
    ("accelerate", "--config_file"): {"node_rank": 1, "master_port": 29501, "nproc_per_node": "8"},
}


@pytest.mark.parametrize("words", EXPECTED, ids=" ".join)
def test_the_topology_of_a_line(words: tuple[str, ...], folder: Path) -> None:
    page, *parts = words
    environ = {"HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    line: JobLine = read(command_of(line_of(page, *parts)), environ, folder)
    assert line.launcher == page
    assert {name: getattr(line, name) for name in EXPECTED[words]} == EXPECTED[words]
    assert line.notes == ()


@pytest.mark.parametrize("page", PAGES)
def test_every_line_is_one_of_these(page: str) -> None:
    told = [line for line in lines_of(page) if line.startswith("nccl-doctor ")]
    assert len(told) == sum(words[0] == page for words in EXPECTED)


# --- for real ---


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_the_line_of_deepspeed_runs(folder: Path, path: str) -> None:
    line = line_of("deepspeed", "--num_gpus 2 train.py")
    port = f"--master_port {free_port()} train.py"  # several tests at once
    line = line.replace("train.py", port)
    done = type_in(line, folder, "--quiet", *QUICK, DS_ACCELERATOR="cpu", PATH=path)
    assert done.returncode == 0, done
    assert done.stdout.startswith("nccl-doctor: PASS: ")
    said = sorted(word for word in done.stdout.splitlines() if word.startswith("job "))
    assert said == ["job 0 of 2", "job 1 of 2"]


needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate is not installed"
)


@needs_accelerate
def test_the_line_of_accelerate_runs(folder: Path, path: str) -> None:
    """With --cpu: without a GPU and without it, accelerate starts one process on its own terms."""
    line = line_of("accelerate", "launch train.py").replace("train.py", "--cpu train.py")
    (folder / "train.py").write_text("print('job')\n")
    done = type_in(line, folder, "--quiet", *QUICK, "--master-port", str(free_port()), PATH=path)
    assert done.returncode == 0, done
    assert done.stdout.startswith("nccl-doctor: PASS: ")
    assert done.stdout.splitlines()[-1] == "job"


@pytest.mark.wide
@needs_accelerate
def test_the_line_of_accelerate_with_several_ranks_runs(folder: Path) -> None:
    line = line_of("accelerate", "--num_processes 8")
    two = f"--num_processes 2 --main_process_port {free_port()}"  # several tests at once
    line = line.replace("--num_processes 8", two)
    done = type_in(line, folder, "--backend", "gloo", *QUICK)
    assert done.returncode == 0, done
    assert done.stdout.startswith("nccl-doctor: PASS: ")
    assert "1 host · 2 ranks" in done.stdout
    said = sorted(word for word in done.stdout.splitlines() if word.startswith("job "))
    assert said == ["job 0 of 2", "job 1 of 2"]


UNDER = {
    "deepspeed": ("--hostfile hosts", "--no_ssh_check --master_addr 127.0.0.1 --master_port"),
    "accelerate": ("launch", "--multi_gpu --num_processes 2 --main_process_port"),
}
"""Page: the words of its line behind which two ranks and a free port are asked for."""


@pytest.mark.parametrize("page", PAGES)
def test_the_line_under_the_launcher_runs(page: str, folder: Path, path: str) -> None:
    if find_spec(page) is None:  # importing it would import torch too, in this process
        pytest.skip(f"{page} is not installed")
    (line,) = (line for line in lines_of(page) if line.startswith(f"{page} "))
    words, more = UNDER[page]
    (folder / "hosts").write_text("localhost slots=2\n")
    line = line.replace(words, f"{words} {more} {free_port()}")
    done = subprocess.run(
        [*shlex.split(line), "--json", "report.json", "--backend", "gloo", *QUICK],
        cwd=folder,
        env={
            **CLEAN,
            "PATH": path,
            "HOME": str(folder),
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(DOCS.parent),
        },
        timeout=100.0,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    assert "PASS: " in done.stdout
    report = json.loads((folder / "report.json").read_text())
    assert [rank["rank"] for rank in report["ranks"] if rank["reported"]] == [0, 1]


def test_the_failure_that_the_page_of_deepspeed_shows(folder: Path) -> None:
    (made,) = (line for line in lines_of("deepspeed") if line.startswith("echo "))
    text = re.fullmatch(r"echo '(.*)' > ds\.json", made)
    assert text is not None
    (folder / "ds.json").write_text(text[1])
    line, printed = sample_of("deepspeed")
    port = f"--num_gpus 2 --master_port {free_port()} train.py"
    line = line.replace("--num_gpus 2 train.py", port)
    done = type_in(line, folder, PATH=with_stub(folder, "deepspeed"))
    assert done.returncode == 1, done
    assert even(done.stdout) == even(printed)


def test_the_line_that_the_page_of_accelerate_refuses(folder: Path) -> None:
    line, printed = sample_of("accelerate")
    done = type_in(line, folder, PATH=with_stub(folder, "accelerate"))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", printed)


def with_stub(folder: Path, name: str) -> str:
    """PATH with a program that is looked for, installed or not, and must not be started."""
    file = folder / "bin" / name
    file.parent.mkdir()
    file.write_text("#!/bin/sh\necho started\n")
    file.chmod(0o755)
    return f"{file.parent}:{PATH}"
