"""`accelerate launch`: flags, configuration files, and the launchers that it hands over to."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.launch.command_line import accelerate
from nccl_doctor.launch.command_line.job_line import JobLine, JobLineError
from nccl_doctor.launch.command_line.reader import read
from tests.support.rows import each_row
from tests.support.unsent import unsent

FILE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 1
main_process_ip: 192.168.20.1   # the first machine
main_process_port: 8080
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
use_cpu: false
"""
DEEPSPEED = """\
---
# written by hand
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_hostfile: hosts
  deepspeed_multinode_launcher: "pdsh"
  deepspeed_inclusion_filter: null
  zero_stage: 2
fsdp_config: {}
commands:
- echo
machine_rank: 0
main_process_ip: 10.0.0.1
num_machines: 2
num_processes: 8
"""


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "two.yaml").write_text(FILE)
    (tmp_path / "ds.yaml").write_text(DEEPSPEED)
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    return unsent(tmp_path)


def job(flags: str, cwd: Path, **environ: str) -> JobLine:
    line = ["accelerate", "launch", *shlex.split(flags)]
    here = {"HOME": str(cwd / "home"), "CUDA_VISIBLE_DEVICES": ""}
    return read(line, {**here, **environ}, cwd)


def says(found: JobLine, expected: dict[str, Any]) -> None:
    assert {name: getattr(found, name) for name in expected} == expected


def said(found: JobLine, words: str) -> bool:
    return any(words in note for note in found.notes)


MANY = "--multi_gpu --num_machines 2 --num_processes 16 --machine_rank 1 --main_process_ip 10.0.0.1"
TWO = {"nnodes": 2, "node_rank": 1, "nproc_per_node": "8", "master_addr": "10.0.0.1"}
TWO_OF_2 = {"nnodes": 2, "nproc_per_node": "2"}
ONE = {"nnodes": 1, "node_rank": 0, "ranks_assigned": False}

LINES = [
    ("train.py", {**ONE, "nproc_per_node": "1", "master_port": None}),
    ("--multi_gpu --num_processes=4 train.py", {**ONE, "nproc_per_node": "4"}),
    ("--use_fsdp --num-processes 4 --main-process-port 29501 t.py", {"master_port": 29501}),
    (
        "--main_process_port=0 --mixed_precision=bf16 --dynamo_backend=no --num_machines=1 "
        "--num_processes=2 --use_deepspeed finetune_distributed.py",
        {**ONE, "nproc_per_node": "2", "master_port": None},
    ),
    (
        "-m --config_file two.yaml --machine_rank 0 --main_process_ip 0.0.0.0 "
        "--main_process_port 20055 --num_machines 1 --num_processes 1 scripts.train --config x",
        {**ONE, "nproc_per_node": "1", "master_port": 20055},
    ),
    (
        "--main_process_port=29803 --num_processes=1 --gpu_ids='1' --num_machines=1 t.py",
        {"environ": {"CUDA_VISIBLE_DEVICES": "1"}, "nproc_per_node": "1"},
    ),
    (f"{MANY} t.py --num_machines 9", {**TWO, "master_port": 29500, "ranks_assigned": False}),
    (f"{MANY} --main_process_port 9999 --same_network t.py", {**TWO, "master_port": 9999}),
    (f"{MANY} --max_restarts 2 t.py", {**TWO, "max_restarts": 2}),
    (
        f"{MANY} --rdzv_backend c10d --rdzv_conf is_host=1 t.py",
        {**TWO, "node_rank": None, "ranks_assigned": True, "master_port": 29500, "is_host": True},
    ),
    # handed over without an endpoint: c10d then meets on each host itself
    (
        f"{MANY} --rdzv_backend c10d --same_network t.py",
        {"master_addr": "localhost", "master_port": 29400, "ranks_assigned": True},
    ),
    (f"{MANY.replace('--multi_gpu', '--use_fsdp')} --fsdp_version 2 --fsdp-new-thing 3 t.py", TWO),
    (f"{MANY.replace('--multi_gpu', '--use_megatron_lm')} --megatron_lm_tp_degree=2 t.py", TWO),
    (
        f"{MANY.replace('--multi_gpu', '--use_deepspeed')} --zero_stage 3 "
        "--deepspeed_multinode_launcher standard t.py",
        {**TWO, "starts_remote": False, "hosts": ()},
    ),
    ("--config_file two.yaml t.py", {**TWO, "master_addr": "192.168.20.1", "master_port": 8080}),
    ("--config_file two.yaml --machine_rank 0 --num_processes 4 t.py", {"node_rank": 0}),
    (
        "--config_file ds.yaml t.py",
        {
            "nnodes": 2,
            "starts_remote": True,
            "hostfile": "hosts",
            "master_addr": "10.0.0.1",
            "master_port": 29500,
        },
    ),
    ("--config_file ds.yaml --deepspeed_hostfile hosts --num_machines 1 t.py", ONE),
    (
        "--config_file ds.yaml --deepspeed-multinode-launcher nossh --machine_rank 1 t.py",
        {"node_rank": 1, "nproc_per_node": "4", "starts_remote": False},
    ),
    (
        "--config_file ds.yaml --deepspeed_exclusion_filter b t.py",
        {"nnodes": 1, "nproc_per_node": "8", "starts_remote": False},
    ),
    ("--cpu --num_processes 4 t.py", {**ONE, "nproc_per_node": "1"}),
    (
        "--cpu --mpirun_hostfile hosts --num_processes 8 --num_machines 2 --main_process_ip a "
        "--main_process_port 29500 t.py",
        {"hostfile": "hosts", "starts_remote": True, "nnodes": 2, "nproc_per_node": "4"},
    ),
]


@each_row(("flags", "expected"), LINES)
def test_accelerate(flags: str, expected: dict[str, Any], cwd: Path):
    found = job(flags, cwd)
    assert found.launcher == "accelerate"
    says(found, expected)


@pytest.mark.parametrize(
    "front",
    [
        "accelerate-launch",
        "python -m accelerate.commands.launch",
        "python -m accelerate.commands.accelerate_cli launch",
        "python /opt/venv/bin/accelerate launch",
        "nohup python3 -u /x/accelerate/commands/launch.py",
    ],
)
def test_other_ways_to_start_it(front: str, cwd: Path):
    found = read(shlex.split(f"{front} {MANY} t.py"), {"HOME": "/"}, cwd)
    assert found.launcher == "accelerate"
    says(found, TWO)


def test_each_value_says_what_told_it(cwd: Path):
    found = job("--config_file two.yaml --machine-rank 0 --num_processes 8 t.py", cwd)
    file = cwd / "two.yaml"
    assert found.sources == {
        "nnodes": f"num_machines in {file}",
        "max_nnodes": f"num_machines in {file}",
        "node_rank": "--machine-rank",
        "nproc_per_node": "--num_processes",
        "master_addr": f"main_process_ip in {file}",
        "master_port": f"main_process_port in {file}",
    }


@pytest.mark.parametrize(
    ("folder", "environ"),
    [
        ("home/.cache/huggingface", {}),
        ("cache/huggingface", {"XDG_CACHE_HOME": "{cwd}/cache"}),
        ("hf", {"HF_HOME": "{cwd}/hf", "XDG_CACHE_HOME": "/elsewhere"}),
        ("home/hf", {"HF_HOME": "~/hf"}),
    ],
)
def test_the_file_that_is_read_where_none_is_named(folder: str, environ: dict[str, str], cwd: Path):
    environ = {name: text.format(cwd=cwd) for name, text in environ.items()}
    file = cwd / folder / "accelerate" / "default_config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(FILE)
    says(job("t.py", cwd, **environ), {"nnodes": 2, "node_rank": 1, "nproc_per_node": "8"})
    says(job("--cpu t.py", cwd, **environ), ONE)
    says(job("--config_file ds.yaml t.py", cwd, **environ), {"starts_remote": True})


def test_without_multi_gpu_the_gpus_decide(cwd: Path):
    """A host with one GPU or none starts one process without RANK, whatever --num_processes is."""
    two, home = ["--num_processes", "2", "t.py"], {"HOME": str(cwd)}
    for gpus, ranks, words in ((0, "1", "sees no GPUs here"), (1, "1", "sees 1 GPU here")):
        found = accelerate.read(two, home, cwd, gpus=gpus)
        says(found, {**ONE, "nproc_per_node": ranks})
        assert said(found, f"--num_processes 2: accelerate {words} and starts one process")
        assert accelerate.read(["t.py"], home, cwd, gpus=gpus).notes == ()
    many = accelerate.read(two, home, cwd, gpus=8)
    says(many, {**ONE, "nproc_per_node": "2", "notes": ()})
    says(accelerate.read(["t.py"], home, cwd, gpus=8), {"nproc_per_node": "gpu"})
    says(accelerate.read(["--num_processes=1", "t.py"], home, cwd, gpus=8), {"nproc_per_node": "1"})


def test_a_file_in_json(cwd: Path):
    table = {"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 4, "debug": False}
    more = {"main_process_ip": "h", "machine_rank": 1, "gpu_ids": None, "fsdp_config": {"a": 1}}
    (cwd / "c.json").write_text(json.dumps({**table, **more}))
    says(job("--config_file c.json t.py", cwd), {"nproc_per_node": "2", "master_addr": "h"})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--cpu --num_processes 4 t.py", "starts one process here"),
        (f"{MANY} --num_processes 17 t.py", "starts 8 on each machine"),
        (MANY.replace("--multi_gpu", "--main_process_port 1") + " t.py", "trains alone: add"),
        ("--num_processes 2 t.py", "sees no GPUs here and starts one process, without RANK"),
        (f"{MANY} --rdzv_backend c10d --same_network t.py", "--main_process_ip is not used"),
        (f"{MANY.replace('--num_processes 16', '')} t.py", "--num_processes is not given"),
        ("--tpu t.py", "TPUs"),
        (f"{MANY} --fancy=1 t.py", "--fancy is not known"),
    ],
)
def test_what_the_user_should_know(flags: str, words: str, cwd: Path):
    assert said(job(flags, cwd), words)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rdzv_backend: static", "rdzv_backend: c10d", "is not read by accelerate"),
        ("LOCAL_MACHINE", "AMAZON_SAGEMAKER", "AMAZON_SAGEMAKER, not here"),
    ],
)
def test_what_the_user_should_know_of_the_file(old: str, new: str, words: str, cwd: Path):
    (cwd / "two.yaml").write_text(FILE.replace(old, new))
    assert said(job("--config_file two.yaml t.py", cwd), words)


def test_nothing_to_say_about_a_plain_line(cwd: Path):
    for flags in (
        f"{MANY} t.py",
        "t.py",
        "--config_file two.yaml t.py",
        "--config_file ds.yaml t.py",
    ):
        assert job(flags, cwd).notes == ()


REFUSED = [
    ("", "no training script"),
    ("--config_file absent.yaml t.py", "absent.yaml: no such file"),
    ("--config_file . t.py", "no such file"),
    ("--multi_gpu --cpu t.py", "--multi_gpu and --cpu exclude each other"),
    ("--use_fsdp --use_deepspeed t.py", "exclude each other"),
    ("--multi_gpu --num_processes 1 t.py", "needs --num_processes of 2 or more, not 1"),
    ("--num_processes four t.py", "--num_processes 'four' is not a whole number"),
    ("--num_machines 0 t.py", "--num_machines 0 is not at least 1"),
    (f"{MANY.replace('--multi_gpu', '--cpu')} t.py", "needs --main_process_port"),
    ("--num_machines= t.py", "--num_machines is empty"),
    (
        "--multi_gpu --num_machines 4 --num_processes 2 --machine_rank 0 --main_process_ip a t.py",
        "less",
    ),
    ("--multi_gpu --num_machines 2 --num_processes 4 --machine_rank 0 t.py", "--main_process_ip"),
    ("--multi_gpu --num_machines 2 --num_processes 4 --main_process_ip a t.py", "--machine_rank"),
    (f"{MANY} --machine_rank 2 t.py", "--machine_rank 2 is out of range"),
    (f"{MANY} --main_process_port 99999 t.py", "--main_process_port 99999 is not 0 to 65535"),
    (f"{MANY} --main_process_port 0 t.py", "cannot find each other"),
    (f"{MANY} --same_network false t.py", "--same_network takes no value"),
    ("--num_process 4 t.py", 'did you mean "--num_processes"?'),
    (
        f"{MANY.replace('--multi_gpu', '--use_deepspeed')} t.py",
        "every machine trains alone",
    ),
    (
        f"{MANY.replace('--multi_gpu', '--use_deepspeed')} --deepspeed_hostfile none t.py",
        "none: no such file",
    ),
    (
        f"{MANY.replace('--multi_gpu', '--use_deepspeed')} "
        "--deepspeed_multinode_launcher standart t.py",
        'did you mean "standard"?',
    ),
]


@each_row(("flags", "words"), REFUSED)
def test_a_line_that_cannot_start_its_job(flags: str, words: str, cwd: Path):
    with pytest.raises(JobLineError) as error:
        job(flags, cwd)
    assert words in str(error.value)
    assert str(error.value).startswith("accelerate: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("c.json", b"{", "not JSON"),
        ("c.json", b"[1]", "not a table"),
        ("c.json", b"[" * 60_000, "not JSON"),
        ("c.json", b'\xef\xbb\xbf{"distributed_type": "NO"}', "Unexpected UTF-8 BOM"),
        ("c.yaml", b"\xff\xfe", "not text"),
        ("c.yaml", b"a: 1\n" * 300_000, "longer than 65536 bytes"),
        ("c.yaml", b"distributed_type: MULTI_GPU\n", "the number of processes is missing"),
        ("c.yaml", b"distributed_type: MULTI_GPU\nnum_processes: -1\n", "is missing"),
        ("c.yaml", b"num_machines: two\n", "c.yaml: distributed_type is missing"),
        ("c.yaml", b"", "c.yaml: is empty; `accelerate config` writes one"),
        ("c.yaml", b"debug false\n", "c.yaml: not a table"),
        ("c.yaml", b"debug: no\n- x\n", "c.yaml, line 2: not YAML"),
        ("c.yaml", b"a: 2026-13-45\n", "c.yaml: not YAML: month must be in 1..12"),
    ],
)
def test_a_file_that_is_none(name: str, content: bytes, words: str, cwd: Path):
    (cwd / name).write_bytes(content)
    with pytest.raises(JobLineError) as error:
        job(f"--config_file {name} t.py", cwd)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


OF_A_KEY = [
    ("LOCAL_MACHINE", "MULTI_MACHINE", "compute_environment", 'did you mean "LOCAL_MACHINE"?'),
    ("MULTI_GPU", "multi_gpu", "distributed_type in", "write MULTI_GPU"),
    ("gpu_ids: all", "gpu_ids: 0", "write gpu_ids: '0'"),
    ("gpu_ids: all", "gpu_ids: [0, 1]", "a list or table is not text", "write gpu_ids: '0,1'"),
    ("num_machines: 2", "gpu_ids: '1'", "'1' is one GPU, and distributed_type asks for several"),
    ("bf16\n", "no\n", "mixed_precision in", "write mixed_precision: 'no'"),
    ("bf16\n", "fp32\n", "'fp32' is not known to accelerate; it is one of no, fp8, fp16, bf16"),
    ("num_machines: 2", "num_machines: '2'", "write num_machines: 2"),
    ("num_machines: 2", "num_machines:", "num_machines in", "nothing is not a number"),
    ("num_processes: 16", "num_processes: '16'", "write num_processes: 16"),
    ("8080", "'8080'", "write main_process_port: 8080"),
    ("debug: false", "num_process: 3", "accelerate knows no key num_process", "num_processes"),
    ("debug: false", "strange: 3", "accelerate knows no key strange; take it out"),
    ("debug: false", "dynamo_backend: x", "'x' is not known"),
    (
        "distributed_type: MULTI_GPU",
        "distributed_type: FSDP\nfsdp_config: {sync_module_states: false}",
        "fsdp_sync_module_states in",
    ),
    ("machine_rank: 1", "machine_rank:", "needs --machine_rank"),
]


@each_row("row", OF_A_KEY)
def test_a_value_of_the_file_that_ends_accelerate(row: tuple[str, ...], cwd: Path):
    """As accelerate 1.15 does; test_command_line_truth.py asks an installed one."""
    old, new, *words = row
    (cwd / "c.yaml").write_text(FILE.replace(old, new))
    with pytest.raises(JobLineError) as error:
        job("--config_file c.yaml t.py", cwd)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_the_numbers_of_yaml_are_those_of_its_old_version(cwd: Path):
    for text, ranks in {"010": "4", "0x10": "8", "8:20": "250", "1_6": "8"}.items():
        (cwd / "c.yaml").write_text(FILE.replace("num_processes: 16", f"num_processes: {text}"))
        says(job("--config_file c.yaml t.py", cwd), {"nproc_per_node": ranks})


def test_a_flag_takes_the_place_of_a_bad_value(cwd: Path):
    (cwd / "c.yaml").write_text(FILE.replace(": 16", ": '16'").replace(": bf16", ": no"))
    says(job("--config_file c.yaml --mixed_precision bf16 --num_processes 4 t.py", cwd), TWO_OF_2)


def test_a_file_that_may_not_be_read(cwd: Path):
    (cwd / "c.yaml").symlink_to("/proc/self/mem")  # its first page cannot be read by anybody
    with pytest.raises(JobLineError, match="cannot be read"):
        job("--config_file c.yaml t.py", cwd)
