"""Fixes name the options of the command behind `run --`, as its launcher spells them."""

from __future__ import annotations

import click

from nccl_doctor.cli.topology import topology_of
from nccl_doctor.launch.ranks import host_launch
from nccl_doctor.model.options import Flags
from nccl_doctor.toolkit.relaunch import start_with
from tests.support.clusters import change_rank, make_cluster
from tests.support.rows import each_row

ACCELERATE = "accelerate launch --multi_gpu --num_machines 2 --num_processes 2 --machine_rank 1"
TORCHRUN = "torchrun --nnodes 2 --node_rank 1 --nproc_per_node 1"


@each_row("line, field, lines", {
    "accelerate": (
        f"{ACCELERATE} --main_process_ip nd0 train.py", "master_addr",
        ("# --main_process_ip nd9", "# --main_process_ip nd0"),
    ),
    "its default": (
        f"{ACCELERATE} --main_process_ip nd0 train.py", "master_port",
        ("# --main_process_port nd9", "# --main_process_port 29500"),
    ),
    "torchrun": (
        f"{TORCHRUN} --master_addr nd0 train.py", "master_addr",
        ("# --master-addr nd9", "# --master-addr nd0"),
    ),
    "torchrun by c10d": (
        "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint nd0:29400 train.py", "master_addr",
        ("# --rdzv-endpoint nd9:29400", "# --rdzv-endpoint nd0:29400"),
    ),
    "vllm": (
        "vllm serve m --nnodes 2 --node-rank 1 --master-addr nd0", "master_addr",
        ("# --master-addr nd9", "# --master-addr nd0"),
    ),
    "sglang, which has address and port in one": (
        "sglang serve m --nnodes 2 --node-rank 1 --dist-init-addr nd0:5000", "master_addr",
        ("# --dist-init-addr nd9:5000", "# --dist-init-addr nd0:5000"),
    ),
    "fabric": (
        "fabric run --num-nodes 2 --node-rank 1 --main-address nd0 train.py", "master_addr",
        ("# --main-address nd9", "# --main-address nd0"),
    ),
    "another program": (
        "python train.py", "master_addr", ("# --master-addr nd9", "# --master-addr localhost"),
    ),
}.values())  # fmt: skip
def test_the_option_of_the_command(line, field, lines, monkeypatch, tmp_path):
    (tmp_path / "train.py").touch()
    for name in ("torchrun", "accelerate", "python", "vllm", "sglang", "fabric"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    given = dict.fromkeys((*Flags.__dataclass_fields__, "hostfile", "relay"))
    flags = topology_of(click.Context(click.Command("run")), given, line.split()).flags
    cluster = make_cluster(("nd0", "nd1"), 1)
    rank = change_rank(cluster, 1, launch=vars(host_launch(flags, 1))).ranks[1]
    (step,) = start_with([rank], field, "nd9")
    assert (step.command, step.undo) == lines
