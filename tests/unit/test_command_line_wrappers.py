"""Lines in which a launcher stands behind other programs, or none that can be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nccl_doctor.launch.command_line import binding
from nccl_doctor.launch.command_line.job_line import JobLineError
from tests.support.command_lines import job, said, says
from tests.support.rows import each_row

LAUNCHED = "--nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port=2222 --nproc_per_node=4"
SPELLINGS = [
    "torchrun {} t.py",
    "/opt/conda/bin/torchrun {} t.py",
    "python /opt/conda/bin/torchrun {} t.py",
    "python -m torch.distributed.run {} t.py",
    "python3.11 -u -m torch.distributed.run {} t.py",
    "python3.13t -mtorch.distributed.run {} t.py",
    "python -W ignore -X dev -um torch.distributed.run {} t.py",
    "python -Wignore --check-hash-based-pycs always -m torch.distributed.run {} t.py",
    "/usr/bin/python -m torch.distributed.launch --use_env {} t.py",
    "python -m torch.distributed.launch {} t.py --local_rank=0",
    "python /site-packages/torch/distributed/launch.py {} main.py --local_world_size=2",
    "env OMP_NUM_THREADS=1 torchrun {} t.py",
    "env -u A --chdir=/tmp -S 'B=1 torchrun' {} t.py",
    "exec torchrun {} t.py",
    "exec -a job torchrun {} t.py",
    "nohup torchrun {} t.py",
    "time -p torchrun {} t.py",
    "nice -n 10 ionice -c2 -n 7 torchrun {} t.py",
    "nice -10 torchrun {} t.py",
    "stdbuf -oL -e L torchrun {} t.py",
    "numactl --cpunodebind=0 --membind 0 torchrun {} t.py",
    "numactl -N 0 -l python -m torch.distributed.run {} t.py",
    "taskset -c 0-7 torchrun {} t.py",
    "chrt -f 10 torchrun {} t.py",
    "timeout -k 5 --signal=INT 2h torchrun {} t.py",
    "setsid -w torchrun {} t.py",
    "uv run torchrun {} t.py",
    "uv --project x run --with numpy --isolated torchrun {} t.py",
    "poetry run python -m torch.distributed.run {} t.py",
    "conda run -n train --no-capture-output torchrun {} t.py",
]


@each_row("spelling", SPELLINGS)
def test_a_launcher_behind_other_programs(spelling: str):
    found = job(spelling.format(LAUNCHED))
    expected = {"nnodes": 2, "node_rank": 1, "nproc_per_node": "4", "launcher": "torchrun"}
    says(found, {**expected, "master_addr": "10.0.0.1", "master_port": 2222})


@each_row(
    ("line", "words"),
    [
        ("python train.py", None),
        ("python train.py deepspeed torchrun", None),
        ("python -c 'import torch' -m torch.distributed.run", None),
        ("python -m pkg.train torchrun", None),
        ("python", None),
        ("./train", None),
        ("accelerate config", None),
        ("hatch test torchrun", "hatch is not known here"),
        ("srun -N 2 train", "srun nccl-doctor run -- COMMAND"),
        (
            "srun -N 2 --export=ALL torchrun --nnodes 2 t.py",
            "srun -N 2 --export=ALL nccl-doctor run -- torchrun …",
        ),
        ("srun -n 8 python train.py --x torchrun", "srun -n 8 nccl-doctor run -- python …"),
        ("mpirun -np 8 env A=1 python t.py", "mpirun -np 8 env A=1 nccl-doctor run -- python …"),
        ("docker run --gpus all img torchrun t.py", "img nccl-doctor run -- torchrun …"),
        ("nsys profile -o x torchrun t.py", "nsys is not known here"),
        ("bash train.sh --nnodes 2", "the command that bash starts is not read"),
        ("bash -c 'torchrun --nnodes 2 t.py'", "the command that bash starts is not read"),
        ("./scripts/train.sh", "the command that train.sh starts is not read"),
    ],
)
def test_a_line_that_is_not_read(line: str, words: str | None):
    found = job(line)
    says(found, {"launcher": "none", "nnodes": None, "nproc_per_node": None})
    assert said(found, words) if words else found.notes == ()


def cpus_of_node_0() -> str:
    try:
        listed = Path("/sys/devices/system/node/node0/cpulist").read_text().strip()
    except OSError:
        pytest.skip("no NUMA node is listed here")
    words = f"import os; os.sched_setaffinity(0, {[*binding._listed(listed)]}); "
    words += "print(len(os.sched_getaffinity(0)))"
    done = subprocess.run([sys.executable, "-c", words], check=True, capture_output=True, text=True)
    return done.stdout


def test_the_cpus_to_which_the_line_binds():
    """torchrun counts what it may use: affinity, in which the kernel leaves what a cpuset allows.

    Seen with torchrun of torch 2.13.0 and taskset of util-linux 2.38: one worker.
    """
    first = min(os.sched_getaffinity(0))
    for front in (
        f"taskset -c {first}",
        f"taskset --cpu-list {first}",
        f"taskset -ac {first}",
        f"taskset {1 << first:x}",
        f"taskset 0x{1 << first:x}",
        f"numactl -C {first} -l",
        f"numactl --physcpubind={first}",
        f"numactl -C{first}",
        f"nice taskset -c {first}-{first}:2 env A=1",
    ):
        for word in ("auto", "cpu"):
            line = f"{front} torchrun --nproc-per-node {word} t.py"
            assert job(line, CUDA_VISIBLE_DEVICES="").nproc_per_node == "1", front
        assert job(f"{front} torchrun --nproc-per-node 3 t.py").nproc_per_node == "3"
        assert job(f"{front} torchrun --nproc-per-node gpu t.py").nproc_per_node == "gpu"


def test_the_cpus_of_a_numa_node():
    here = cpus_of_node_0().strip()
    for front in ("numactl -N 0 -l", "numactl --cpunodebind=0 --membind 0"):
        assert job(f"{front} torchrun --nproc-per-node cpu t.py").nproc_per_node == here
    with pytest.raises(JobLineError, match="has no NUMA node 4095"):
        job("numactl -N 4095 torchrun --nproc-per-node cpu t.py")


def test_a_binding_that_is_not_read_or_not_possible():
    plain = job("numactl --interleave all torchrun --nproc-per-node cpu t.py")
    says(plain, {"nproc_per_node": "cpu", "notes": ()})
    relative = job("numactl -C +0-1 torchrun --nproc-per-node cpu t.py")
    assert said(relative, "to which CPUs numactl -C +0-1 binds is not read")
    with pytest.raises(JobLineError, match=r"taskset -c 99999: this host has no such CPU"):
        job("taskset -c 99999 torchrun --nproc-per-node cpu t.py")


def test_what_the_line_sets_is_kept():
    found = job("env -u A NCCL_DEBUG=INFO torchrun t.py")
    assert found.environ == {"A": None, "NCCL_DEBUG": "INFO"}
    assert job("env NCCL_DEBUG=INFO python train.py").environ == {"NCCL_DEBUG": "INFO"}
