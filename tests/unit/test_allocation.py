"""One host of an allocation: which variables say that there are others, and what is to be typed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from nccl_doctor.judge.unread_hosts import unread_hosts
from nccl_doctor.launch.allocation import ignored_hostfile, other_hosts
from nccl_doctor.model.job import UnreadHosts
from tests.support.command_lines import job
from tests.support.launches import MASTER
from tests.support.rows import each_row

FILES = {
    "pbs": "a1\na1\na2\na2\n",
    "alone": "a1\na1\n",
    "pe": "a1 8 all.q@a1 UNDEFINED\na2 8 all.q@a2 UNDEFINED\n",
}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def in_folder(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    return {name: text.replace("FOLDER", str(folder)) for name, text in environ.items()}


@each_row(
    ("environ", "said"),
    [
        (SKYPILOT, "SKYPILOT_NUM_NODES has 2 hosts"),
        ({"DSTACK_NODES_NUM": "4"}, "DSTACK_NODES_NUM has 4 hosts"),
        ({"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0"}, "LWS_GROUP_SIZE has 2 hosts"),
        ({"AWS_BATCH_JOB_NUM_NODES": "2"}, "AWS_BATCH_JOB_NUM_NODES has 2 hosts"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "SM_HOSTS has 2 hosts"),
        ({"_CONDOR_NPROCS": "3", "_CONDOR_PROCNO": "0"}, "_CONDOR_NPROCS has 3 hosts"),
        ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1"),
        ({"PBS_NODEFILE": "FOLDER/pbs"}, "PBS_NODEFILE has 2 hosts"),
        ({"OAR_NODEFILE": "FOLDER/pbs"}, "OAR_NODEFILE has 2 hosts"),
        ({"PE_HOSTFILE": "FOLDER/pe"}, "PE_HOSTFILE has 2 hosts"),
        ({"LSB_MCPU_HOSTS": "a1 8 a2 8"}, "LSB_MCPU_HOSTS has 2 hosts"),
        ({"LSB_MCPU_HOSTS": "a1 1 a2 1"}, "LSB_MCPU_HOSTS has 2 hosts"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_NUM_NODES has 2 hosts"),
        ({"NODE_RANK": "0", "WORLD_SIZE": "4", **MASTER}, "NODE_RANK=0 and WORLD_SIZE=4"),
        ({"NODE_RANK": "1", **MASTER}, "NODE_RANK=1"),
        ({"NODE_RANK": "0", "NUM_NODES": "2"}, "NODE_RANK=0 and NUM_NODES=2"),
        ({"NNODES": "2"}, "NNODES has 2 hosts"),
        # one host, or nobody knows
        ({"NODE_RANK": "0", "WORLD_SIZE": "4"}, ""),
        ({"NODE_RANK": "0", "WORLD_SIZE": "4", "NNODES": "1", **MASTER}, ""),
        ({"NODE_RANK": "zero"}, ""),
        ({}, ""),
        ({"SKYPILOT_NUM_NODES": "1"}, ""),
        ({"SKYPILOT_NUM_NODES": "two"}, ""),
        ({"SM_HOSTS": '["algo-1"]'}, ""),
        ({"SM_HOSTS": "algo-1,algo-2"}, ""),
        ({"_CONDOR_NPROCS": "16"}, ""),  # a site's own: the CPUs of the slot
        ({"JOB_COMPLETION_INDEX": "0"}, ""),
        ({"PBS_NODEFILE": "FOLDER/alone"}, ""),
        ({"PBS_NODEFILE": "FOLDER/absent"}, ""),
        ({"PBS_NODEFILE": ""}, ""),
        ({"LSB_MCPU_HOSTS": "a1 1 a1 8"}, ""),
        ({"LSB_MCPU_HOSTS": "batch2 1 a1 42"}, ""),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_ID": "0"}, ""),
    ],
)
def test_what_a_scheduler_says_of_other_hosts(
    environ: Mapping[str, str], said: str, folder: Path
) -> None:
    assert other_hosts(in_folder(environ, folder), command=False).said == said


def test_a_command_stays_on_its_host_where_a_scheduler_starts_it_on_the_first() -> None:
    assert job("python t.py", LSB_MCPU_HOSTS="a1 8 a2 8").unread == UnreadHosts()
    assert job("python t.py", SLURM_JOB_NUM_NODES="2").unread == UnreadHosts()
    found = job("python t.py", **SKYPILOT).unread
    assert found == UnreadHosts(
        "SKYPILOT_NUM_NODES has 2 hosts", nnodes="2", variable="SKYPILOT_NUM_NODES"
    )
    assert job("python t.py --nnodes 1", **SKYPILOT).unread == UnreadHosts()
    of_line = job("torchrun --nproc-per-node 2 t.py", **SKYPILOT)
    assert of_line.unread == UnreadHosts(), "the line says that it is for one host"


def fix_of(environ: Mapping[str, str]) -> list[str]:
    (found,) = unread_hosts(other_hosts(environ, command=False))
    return [step.command for step in found.fix.steps]


def typed(line: str, environ: Mapping[str, str], folder: Path) -> list[str]:
    """The words of a line that a shell runs, as a program gets them."""
    run = ["bash", "-c", line.replace("# ", "printf '%s\\n' ")]
    done = subprocess.run(
        run, env=dict(environ), cwd=folder, check=True, capture_output=True, text=True, timeout=10
    )
    return done.stdout.splitlines()


@each_row(
    ("environ", "words"),
    [
        (SKYPILOT, "--nnodes 2 --node-rank 1 --master-addr 10.0.0.5"),
        (
            {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "10.0.0.5"},
            "--nnodes 2 --node-rank 1 --master-addr 10.0.0.5",
        ),
        (
            {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "l-0.l.ns"},
            "--nnodes 2 --node-rank 1 --master-addr l-0.l.ns",
        ),
        (
            {
                "AWS_BATCH_JOB_NUM_NODES": "2",
                "AWS_BATCH_JOB_NODE_INDEX": "1",
                "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.5",
            },
            "--nnodes 2 --node-rank 1 --master-addr 10.0.0.5",
        ),
        (
            {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
            "--nnodes 2 --node-rank 1 --master-addr algo-1",
        ),
        (
            {"_CONDOR_NPROCS": "3", "_CONDOR_PROCNO": "2"},
            "--nnodes 3 --node-rank 2 --master-addr ADDRESS",
        ),
        ({"JOB_COMPLETION_INDEX": "1"}, "--nnodes NUMBER --node-rank 1 --master-addr ADDRESS"),
        (
            {"NODE_RANK": "1", "NNODES": "2", **MASTER},
            "--nnodes 2 --node-rank 1 --master-addr nd0",
        ),
    ],
)
def test_the_line_for_a_host_has_its_numbers(
    environ: Mapping[str, str], words: str, folder: Path
) -> None:
    (line,) = fix_of(environ)
    assert typed(line, {"PATH": "/usr/bin:/bin", **environ}, folder) == words.split()


@each_row(("variable", "name"), [("PBS_NODEFILE", "pbs"), ("PE_HOSTFILE", "pe")])
def test_the_file_of_hosts_has_one_line_for_each(variable: str, name: str, folder: Path) -> None:
    environ = {variable: f"{folder}/{name}", "PATH": "/usr/bin:/bin"}
    make, use = fix_of(environ)
    typed(make, environ, folder)
    assert (folder / "hosts").read_text() == "a1\na2\n"
    assert use == "# nccl-doctor run --hostfile hosts --nproc-per-node NUMBER"


OF_PRRTE = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-nd0-77@1",
    "OMPI_MCA_orte_default_hostfile": "FOLDER/pbs",
}


@each_row(
    ("change", "count"),
    [
        ({}, 2),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 0),  # ranks are on other hosts too
        ({"PMIX_NAMESPACE": "4171"}, 0),  # Open MPI 4 reads it
        ({"PRTE_MCA_prte_default_hostfile": "FOLDER/alone"}, 0),
        ({"OMPI_MCA_orte_default_hostfile": "FOLDER/alone"}, 0),
        ({"OMPI_MCA_orte_default_hostfile": "FOLDER/absent"}, 0),
    ],
)
def test_a_hostfile_that_open_mpi_5_does_not_read(
    change: Mapping[str, str], count: int, folder: Path
) -> None:
    found = ignored_hostfile(in_folder({**OF_PRRTE, **change}, folder))
    assert found.nnodes == (str(count) if count else "")
    if count:
        (finding,) = unread_hosts(found)
        assert "and Open MPI 5 does not read that variable" in finding.message
        assert [step.command for step in finding.fix.steps] == [
            'export PRTE_MCA_prte_default_hostfile="$OMPI_MCA_orte_default_hostfile"'
        ]


def test_what_nobody_knows_stays_open() -> None:
    assert fix_of({"NNODES": "2"}) == ["# --nnodes 2 --node-rank NUMBER --master-addr ADDRESS"]
    assert fix_of({"SLURM_JOB_NUM_NODES": "2"}) == ["# srun nccl-doctor run"]
    (make, _) = fix_of({"LSB_MCPU_HOSTS": "a1 8 a2 8"})
    assert '"$LSB_DJOB_HOSTFILE"' in make
