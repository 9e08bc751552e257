"""Lines in which a launcher stands behind other programs, or none that can be read."""

from __future__ import annotations

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


def test_what_the_line_sets_is_kept():
    found = job("env -u A NCCL_DEBUG=INFO torchrun t.py")
    assert found.environ == {"A": None, "NCCL_DEBUG": "INFO"}
    assert job("env NCCL_DEBUG=INFO python train.py").environ == {"NCCL_DEBUG": "INFO"}
