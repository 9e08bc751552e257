"""Lines as people write them, and what their launchers make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.launch.command_line.job_line import JobLineError
from nccl_doctor.model.job import Rendezvous
from tests.support.command_lines import job, said, says
from tests.support.rows import each_row

HOSTS = "worker-0 slots=8\nworker-1 slots=8\n# spare\nworker-2 slots=4\n"


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text(HOSTS)
    (tmp_path / "one").write_text("gpu-box slots=4\n")
    return tmp_path


ALONE = {"nnodes": 1, "max_nnodes": 1, "node_rank": 0, "ranks_assigned": False}
C10D = {"nnodes": 2, "node_rank": None, "ranks_assigned": True, "master_addr": "head"}

TORCHRUN = [
    (
        "torchrun train.py",
        {**ALONE, "nproc_per_node": "1", "master_port": None, "max_restarts": 0},
    ),
    ("torchrun --nproc_per_node=4 train.py", {**ALONE, "nproc_per_node": "4"}),
    ("torchrun --nproc-per-node gpu --nnodes=1 train.py", {**ALONE, "nproc_per_node": "gpu"}),
    ("torchrun --nproc_per_node auto train.py", {"nproc_per_node": "auto"}),
    ("torchrun --nproc_per_node=cpu train.py", {"nproc_per_node": "cpu"}),
    ("torchrun --nproc_per_node 2 --master_port 29550 main.py", {**ALONE, "master_port": 29550}),
    ("torchrun --nproc_per_node=8 --master_port=0 src/train.py", {**ALONE, "master_port": None}),
    (
        "torchrun --standalone --nproc_per_node=gpu --nnodes=1 train.py",
        {**ALONE, "master_addr": "localhost", "master_port": None, "nproc_per_node": "gpu"},
    ),
    ("torchrun --standalone --nnodes=1:4 train.py", ALONE),
    (
        "torchrun --nnodes=2 --nproc_per_node=4 --master_addr net-g14 --master_port 6666 "
        "--node_rank=1 main.py",
        {"nnodes": 2, "node_rank": 1, "master_addr": "net-g14", "master_port": 6666},
    ),
    (
        "torchrun --nnodes 2 --node-rank 0 --master-addr head train.py",
        {"node_rank": 0, "master_addr": "head", "master_port": 29500, "ranks_assigned": False},
    ),
    (
        "torchrun --nnodes=2 --nproc_per_node=8 --rdzv_id=100 --rdzv_backend=c10d "
        "--rdzv_endpoint=head:29400 llfs_train.py",
        {**C10D, "master_port": 29400, "run_id": "100", "nproc_per_node": "8"},
    ),
    ("torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint head t.py", {"master_port": 29400}),
    (
        "torchrun --nnodes=1 --nproc_per_node=4 --rdzv_id=1 --rdzv_backend=c10d "
        "--rdzv_endpoint=localhost train.py",
        {**ALONE, "master_addr": "localhost", "master_port": 29400},
    ),
    (
        "torchrun --nnodes=1 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 train.py",
        {**ALONE, "master_addr": "localhost", "master_port": None},
    ),
    (
        "torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=[fd00::1]:29500 t.py",
        {"master_addr": "fd00::1", "master_port": 29500},
    ),
    (
        "torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=[fd00::1] t.py",
        {"master_addr": "fd00::1", "master_port": 29400},
    ),
    (
        "torchrun --nnodes=2 --node_rank=1 --master_addr=fd00::1 --master_port=29501 t.py",
        {"master_addr": "fd00::1", "master_port": 29501},
    ),
    (
        "torchrun --nnodes=2 --node_rank=1 --rdzv_endpoint=head:29501 t.py",
        {"master_addr": "head", "master_port": 29501, "ranks_assigned": False},
    ),
    (
        "torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=alias:29500 "
        "--rdzv-conf is_host=True,join_timeout=600,cas_backoff_max_seconds=0.5 t.py",
        {"is_host": True},
    ),
    (
        "torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=a:1 --rdzv_conf=is_host=0 t.py",
        {"is_host": False},
    ),
    ("torchrun --local-addr 10.0.0.2 --nnodes=1 t.py", {"local_addr": "10.0.0.2"}),
    # what follows the script is the script's
    ("torchrun --nproc_per_node 2 train.py --nnodes 7 --standalone", {**ALONE}),
    ("torchrun --nproc_per_node 2 -m pkg.train --node_rank 9", {**ALONE, "nproc_per_node": "2"}),
    ("torchrun -r 3 -t 3 --no-python ./bin/train --nnodes=3", ALONE),
    (
        "torchrun -r3 --max-restarts=3 --nproc_per_node 2 t.py",
        {"nproc_per_node": "2", "max_restarts": 3},
    ),
    ("torchrun --run-path /abs/train.py --nnodes=4", ALONE),
    # argparse takes a beginning that fits one flag, and the last of several
    ("torchrun --nnode=1 --node_r=0 --local_a=lo t.py", {**ALONE, "local_addr": "lo"}),
    ("torchrun --nproc_per_node 2 --nproc-per-node 8 t.py", {"nproc_per_node": "8"}),
    # a flag of another version, whose end is plain
    ("torchrun --new-thing=on --nproc_per_node 2 t.py", {"nproc_per_node": "2"}),
    ("torchrun --new-thing --nproc_per_node 2 t.py", {"nproc_per_node": "2"}),
    ("torchrun --nproc_per_node 2 --new-thing train.py", {"nproc_per_node": "2"}),
]


@each_row(("line", "expected"), TORCHRUN)
def test_torchrun(line: str, expected: dict[str, Any]):
    found = job(line)
    assert found.launcher == "torchrun"
    says(found, expected)
    assert not found.starts_remote


def test_each_value_says_what_told_it():
    found = job(
        "torchrun --nnodes 2 --node_rank=1 --rdzv-endpoint head:1 t.py", PET_NPROC_PER_NODE="8"
    )
    assert found.sources == {
        "nnodes": "--nnodes",
        "max_nnodes": "--nnodes",
        "node_rank": "--node_rank",
        "master_addr": "--rdzv-endpoint",
        "master_port": "--rdzv-endpoint",
        "nproc_per_node": "PET_NPROC_PER_NODE",
    }


def test_the_rendezvous_of_torchrun_is_kept_for_the_checks():
    line = "torchrun --nnodes 2 --rdzv-backend=c10d --rdzv-endpoint head:29400 "
    given = job(line + "--rdzv-conf join_timeout=900 --local-addr 10.0.0.2 t.py").rendezvous
    conf = "join_timeout=900"
    assert given == Rendezvous("c10d", "head:29400", conf, "--rdzv-conf", "10.0.0.2")
    assert job("torchrun --standalone t.py").rendezvous == Rendezvous("c10d", "localhost:0")
    assert job("torchrun t.py").rendezvous == Rendezvous("static")
    assert job("python t.py").rendezvous == Rendezvous()


def test_variables_stand_for_flags_that_are_not_given():
    environ = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "pod-0",
        "PET_MASTER_PORT": "23456",
        "PET_NPROC_PER_NODE": "auto",
        "PET_RDZV_ENDPOINT": "",
        "PET_STANDALONE": "0",
    }
    expected = {"nnodes": 2, "node_rank": 1, "nproc_per_node": "auto"}
    says(job("torchrun t.py", **environ), {**expected, "master_addr": "pod-0"})
    says(job("torchrun --nnodes 3 t.py", **environ), {"nnodes": 3, "master_port": 23456})
    says(job("env PET_NODE_RANK=0 torchrun t.py", **environ), {"node_rank": 0})
    says(job("env -u PET_NNODES -u PET_NODE_RANK torchrun t.py", **environ), ALONE)
    says(job("env -i PATH=/bin torchrun t.py", **environ), ALONE)
    says(job("torchrun t.py", PET_STANDALONE="1"), {"master_addr": "localhost", **ALONE})
    says(job("torchrun t.py", PET_MAX_RESTARTS="2"), {"max_restarts": 2})


def test_a_variable_that_is_set_to_nothing():
    """As torch 2.13.0 reads it: each was given to a torchrun."""
    for name in ("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_RDZV_ID", "PET_RDZV_CONF"):
        says(job("torchrun t.py", **{name: ""}), {**ALONE, "ranks_assigned": False})
    says(job("torchrun t.py", PET_LOCAL_ADDR=""), ALONE)
    with pytest.raises(JobLineError, match="PET_MASTER_ADDR '' has no host"):
        job("torchrun --nnodes 2 --node-rank 1 t.py", PET_MASTER_ADDR="")
    with pytest.raises(JobLineError, match="PET_MASTER_ADDR '' has no host"):
        job("torchrun --master-port 29501 t.py", PET_MASTER_ADDR="")
    with pytest.raises(JobLineError, match="PET_RDZV_BACKEND is empty, which torchrun refuses"):
        job("torchrun t.py", PET_RDZV_BACKEND="")
    says(job("torchrun --standalone t.py", PET_RDZV_BACKEND=""), ALONE)


def test_an_elastic_range_needs_its_fewest_hosts():
    line = "torchrun --nnodes=2:4 --rdzv_backend=c10d --rdzv_endpoint=head:29400 t.py"
    found = job(line)
    says(found, {**C10D, "nnodes": 2, "max_nnodes": 4})
    assert said(found, "2:4: waits for 4 hosts, and is content with 2")
    one = job(line.replace("2:4", "1:4"))
    says(one, {"nnodes": 1, "max_nnodes": 4, "ranks_assigned": True, "node_rank": None})
    static = job("torchrun --nnodes=2:4 --node_rank 3 --master_addr head t.py")
    says(static, {"nnodes": 4, "node_rank": 3})
    assert said(static, "static waits for 4 hosts")


@each_row(
    ("line", "words"),
    [
        ("torchrun --nnodes 2 --master_addr head t.py", "node rank 0 on every host"),
        (
            "torchrun --nnodes 2 --rdzv_backend c10d --master_addr head t.py",
            "needs --rdzv_endpoint",
        ),
        (
            "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint h:1 --node_rank 1 t.py",
            "--node_rank is not used",
        ),
        (
            "torchrun --nnodes 2 --node_rank 1 --rdzv_endpoint h:1 --master_addr g t.py",
            "--master_addr g is not used",
        ),
        ("torchrun --standalone --rdzv_endpoint h:1 t.py", "--rdzv_endpoint is not used"),
        ("torchrun --nproc_per_node xpu t.py", "xpu"),
        ("torchrun --new-thing=on t.py", "--new-thing is not known"),
        ("torchrun --new-thing prog --nnodes 2", "'prog' is taken for the script"),
        ("torchrun -n 4 t.py", "'4' is taken for its value; write -n=4 if it is the value"),
        ("torchrun --new-thing t.py -x 1", "--new-thing is not known here; it is ignored"),
        ("torchrun --no-python --new-thing prog --in a", "'prog' is taken for the script"),
        ("torchrun --new-thing 3", "'3' is taken for the script"),
        ("uv run torchrun t.py", "uv run nccl-doctor run -- torchrun"),
        ("torchrun --nnodes 2 --rdzv_backend etcd-v2 --rdzv_endpoint e:2379 t.py", "etcd-v2 at e"),
        (
            "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint /nfs/r "
            "--rdzv_conf store_type=file t.py",
            "the file /nfs/r",
        ),
    ],
)
def test_what_the_user_should_know(line: str, words: str):
    found = job(line)
    assert said(found, words)
    assert len(found.notes) == 1


@each_row(
    "line",
    [
        "torchrun --new-thing 3 --nnodes 2 --node-rank 1 --master-addr a t.py --lr 1",
        "torchrun --nnodes 2 --new-thing 3 --node-rank 1 --master-addr a t.py",
        "torchrun --nnodes 2 --node-rank 1 --master-addr a --new-thing 3 t.py",
        "torchrun --nnodes 2 --node-rank 1 --master-addr a --new-thing t.py",
        "torchrun --new-thing 3 --other-thing=x --third 4 --nnodes 2 --node-rank 1 "
        "--master-addr a -m pkg",
        "torchrun --nnodes 2 --tee 3 --log-line-prefix-template 'h${hostname}r${rank}: ' "
        "--print-completion --node-rank 1 --master-addr a t.py",
    ],
)
def test_a_flag_of_another_release_hides_nothing(line: str):
    found = job(line)
    assert (found.nnodes, found.node_rank, found.master_addr) == (2, 1, "a")


def test_the_programs_true_and_false():
    assert job("torchrun --nproc-per-node 2 --no-python true").notes == ()


def test_nothing_to_say_about_a_plain_line():
    for line, _ in TORCHRUN[:20]:
        assert job(line).notes == ()


REFUSED = [
    ("torchrun", "no training script"),
    ("torchrun --nnodes 2", "no training script"),
    ("torchrun --help", "--help prints the help"),
    ("torchrun --nnodes=x t.py", "--nnodes 'x' is not a whole number"),
    ("torchrun --nnodes= t.py", "--nnodes is empty; is its shell variable"),
    ("torchrun --nnodes=0 t.py", "--nnodes 0 is not at least 1"),
    ("torchrun --nnodes=1:2:3 t.py", "neither a number nor MIN:MAX"),
    ("torchrun --nnodes=4:2 t.py", "above the second"),
    ("torchrun --nnodes=:2 t.py", "--nnodes is empty"),
    ("torchrun --node_rank --nnodes 2 t.py", "--node_rank has no value"),
    ("torchrun --nnodes", "--nnodes has no value"),
    ("torchrun --node_rank=2 --nnodes 2 t.py", "--node_rank 2 is out of range"),
    ("torchrun --node_rank=1 t.py", "--node_rank 1 is out of range"),
    ("torchrun --node_rank=-1 --nnodes 2 t.py", "--node_rank -1 is not at least 0"),
    ("torchrun --nproc_per_node=0 t.py", "--nproc_per_node 0 is not at least 1"),
    ("torchrun --nproc_per_node=gpus t.py", "--nproc_per_node 'gpus' is not known; did you mean"),
    ("torchrun --rdzv_conf=timeout t.py", "'timeout' is not KEY=VALUE"),
    ("torchrun --nproc_per_node=8gpu t.py", "--nproc_per_node '8gpu' is not a whole number"),
    ("torchrun --master_port=70000 t.py", "--master_port 70000 is not 0 to 65535"),
    ("torchrun --nnodes 2 --master_port=0 t.py", "cannot find each other"),
    ("torchrun --nnodes 2 --master_addr= t.py", "has no host; is its shell variable"),
    ("torchrun --nnodes 2 --master_addr='a b' t.py", "does not begin with a host name"),
    ("torchrun --nnodes 2 --rdzv_endpoint=head t.py", "write head:29500"),
    ("torchrun --nnodes 2 --rdzv_endpoint=head:x t.py", "'x' is not a port"),
    ("torchrun --nnodes 2 --rdzv_endpoint=:29500 t.py", "has no host"),
    ("torchrun --rdzv_backend=c10d --rdzv_endpoint=h:99999 t.py", "'99999' is not a port"),
    (
        "torchrun --rdzv_backend=c10d --rdzv_endpoint=fd00::1:beef t.py",
        "write an IPv6 address as [fd00::1:beef]",
    ),
    ("torchrun --nnodes 2 --rdzv_backend=c10d --rdzv_endpoint=h:0 t.py", "port 0"),
    ("torchrun --rdzv_backend=c10d --rdzv_conf=is_host t.py", "'is_host' is not KEY=VALUE"),
    ("torchrun --rdzv_backend=c10d --rdzv_conf=is_host=maybe t.py", "neither true nor false"),
    ("torchrun --rdzv_backend=c10d --rdzv_conf=store_type=x t.py", "neither tcp nor file"),
    ("torchrun --standalone --nnodes 2 t.py", "--standalone is for one host"),
    ("torchrun --standalone=1 t.py", "--standalone"),
    ("torchrun --rdzv c10d t.py", "ambiguous option: --rdzv"),
    ("torchrun --nprocs_per_node=gpu t.py", 'did you mean "--nproc_per_node"?'),
    ("torchrun --nnodes=2 --rdzc_backend=c10d t.py", 'did you mean "--rdzv_backend"?'),
    ("torchrun --standalone true t.py", "--standalone takes no value"),
    ("env A=1", "no program after env"),
    ("env -S 'a \"b' torchrun", "No closing quotation"),
    ("nice -n 10", "no program after nice"),
    ("deepspeed --num_gpus=x t.py", "--num_gpus 'x' is not a whole number"),
    ("deepspeed --num_nodes=2 t.py", "--num_nodes 2 needs a --hostfile"),
    ("deepspeed --min_elastic_nodes t.py", "no training script"),
    ("deepspeed --min_elastic_nodes=x t.py", "--min_elastic_nodes 'x' is not a whole number"),
    ("deepspeed --hostfile=absent t.py", "absent: no such file"),
    ("deepspeed --include localhost:0 --exclude localhost:1 t.py", "exclude each other"),
    ("deepspeed --include localhost:0 --num_gpus 2 t.py", "--include and --num_gpus exclude"),
    ("deepspeed --include worker-1:0 t.py", "no such host; it has localhost"),
    ("deepspeed --include localhost:a t.py", "slot 'a' is not a whole number"),
    ("deepspeed --include localhost: t.py", "slot is empty"),
    ("deepspeed --launcher pdhs t.py", 'did you mean "pdsh"?'),
    ("deepspeed --no_ssh t.py", "--no_ssh needs --node_rank"),
    ("deepspeed --no_ssh --node_rank 1 t.py", ": no hostfile"),
    ("deepspeed --master_port 0 t.py", "--master_port 0 is not 1 to 65535"),
    ("deepspeed --num-gpus 2 t.py", 'did you mean "--num_gpus"?'),
    ("deepspeed --master 1.2.3.4 t.py", "ambiguous option: --master"),
    (
        "deepspeed --hostfile hosts --include worker-9 t.py",
        "no such host; it has worker-0, worker-1, worker-2",
    ),
    ("deepspeed --hostfile hosts --include worker-2:5 t.py", "worker-2 has no slot 5, only 4"),
    ("deepspeed --hostfile one --exclude gpu-box t.py", "no host is left"),
    ("deepspeed --hostfile hosts --no_ssh --node_rank 3 t.py", "the job has 3 hosts"),
    ("deepspeed --hostfile hosts --no_ssh t.py", "needs --node_rank, from 0 to 2"),
]


@each_row(("line", "words"), REFUSED)
def test_a_line_that_cannot_start_its_job(line: str, words: str, cwd: Path):
    with pytest.raises(JobLineError) as error:
        job(line, cwd)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("PET_NNODES", "two", "PET_NNODES 'two' is not"),
        ("PET_NODE_RANK", "", "PET_NODE_RANK is empty"),
        ("PET_STANDALONE", "yes", "PET_STANDALONE 'yes' is not"),
    ],
)
def test_a_variable_that_torchrun_would_refuse(name: str, text: str, words: str):
    with pytest.raises(JobLineError, match=words):
        job("torchrun t.py", **{name: text})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker-0\n", 'write "worker-0 slots=8"'),
        ("worker-0 max_slots=4 slots=2\n", 'write "worker-0 slots=2 max_slots=4"'),
        ("worker-0 slots=8\nworker-0 slots=8\n", "already"),
        ("worker-0 slots=0\nworker-1 slots=8\n", "line 1: worker-0 has slots=0"),
        ("", "names no host"),
    ],
)
def test_a_hostfile_that_deepspeed_would_refuse(text: str, words: str, tmp_path: Path):
    (tmp_path / "h").write_text(text)
    with pytest.raises(JobLineError) as error:
        job("deepspeed --hostfile h t.py", tmp_path)
    assert words in str(error.value)


HERE = {**ALONE, "master_addr": "127.0.0.1", "starts_remote": False, "hostfile": None}
DEEPSPEED = [
    ("deepspeed ds_train.py --epoch 1 --deepspeed", {**HERE, "nproc_per_node": "gpu"}),
    ("deepspeed --num_gpus=2 trainer.py --num_nodes 4", {**HERE, "nproc_per_node": "2"}),
    ("deepspeed --num_accelerators 2 trainer.py", {"nproc_per_node": "2"}),
    ("deepspeed --num_gpu 2 trainer.py", {"nproc_per_node": "2"}),
    (
        "deepspeed --include localhost:1,3 --master_port=28458 sft.py --master_port 1",
        {
            **HERE,
            "nproc_per_node": "2",
            "master_port": 28458,
            "environ": {"CUDA_VISIBLE_DEVICES": "1,3"},
        },
    ),
    ("deepspeed -i localhost t.py", {"nproc_per_node": "gpu", "environ": {}}),
    (
        "deepspeed --exclude=localhost:0 t.py",
        {"nproc_per_node": None, "environ": {"CUDA_VISIBLE_DEVICES": None}},
    ),
    ("deepspeed --no_ssh --node_rank 0 t.py", HERE),
    ("python -u -m deepspeed.launcher.runner --num_gpus 4 t.py", {**HERE, "nproc_per_node": "4"}),
    ("ds --num_gpus 4 --module pkg.train --num_gpus 1", {"nproc_per_node": "4"}),
    (
        "deepspeed --hostfile=hosts --master_addr 10.252.32.12 --ssh_port 2222 t.py",
        {
            "nnodes": 3,
            "node_rank": None,
            "nproc_per_node": None,
            "starts_remote": True,
            "hostfile": "hosts",
            "ssh_port": 2222,
            "master_addr": "10.252.32.12",
            "master_port": 29500,
        },
    ),
    ("deepspeed -H hosts --launcher OpenMPI t.py", {"starts_remote": True, "master_addr": None}),
    (
        "deepspeed --hostfile hosts --no_ssh --node_rank 2 --master_addr=a --master_port=2 t.py",
        {"nnodes": 3, "node_rank": 2, "nproc_per_node": "4", "starts_remote": False},
    ),
    (
        "deepspeed --hostfile one --include gpu-box:2,3 t.py",
        {**HERE, "hostfile": "one", "nproc_per_node": "2", "master_addr": None},
    ),
    ("deepspeed --hostfile one --force_multi t.py", {"nnodes": 1, "starts_remote": True}),
    ("deepspeed --elastic_training --min_elastic_nodes 1 --max_elastic_nodes 2 t.py", HERE),
    ("deepspeed --min_elastic_nodes 1 t.py --max_elastic_nodes x", HERE),
]


@each_row(("line", "expected"), DEEPSPEED)
def test_deepspeed(line: str, expected: dict[str, Any], cwd: Path):
    found = job(line, cwd)
    assert found.launcher == "deepspeed"
    says(found, expected)


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        ("", {"worker-0": 8, "worker-1": 8, "worker-2": 4}),
        ("--num_nodes 2", {"worker-0": 8, "worker-1": 8}),
        ("--num_nodes 2 --num_gpus 3", {"worker-0": 3, "worker-1": 3}),
        ("--include worker-2@worker-0:0,7", {"worker-0": 2, "worker-2": 4}),
        ("--exclude worker-0:0@worker-1", {"worker-0": 7, "worker-2": 4}),
    ],
)
def test_the_hosts_that_the_filters_leave(flags: str, hosts: dict[str, int], cwd: Path):
    found = job(f"deepspeed --hostfile hosts {flags} t.py", cwd)
    assert {entry.name: entry.slots for entry in found.hosts} == hosts
    assert found.nnodes == len(hosts)


@pytest.mark.parametrize(
    ("version", "good"),
    [("0.15.1", True), ("0.15.2", False), ("0.19.6", False), ("0.19.7", True)],
)
def test_a_host_that_older_deepspeed_leaves_out(
    version: str, good: bool, cwd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """0.15.2 to 0.19.6 take --include as it is: without slots, no rank of that host is started."""
    record = tmp_path / f"deepspeed-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Name: deepspeed\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = "deepspeed --hostfile hosts --include {} t.py"
    if good:
        found = job(line.format("worker-2@worker-0:0,7"), cwd)
        assert {each.name: each.slots for each in found.hosts} == {"worker-0": 2, "worker-2": 4}
        return
    with pytest.raises(JobLineError) as refused:
        job(line.format("worker-2@worker-0:0,7"), cwd)
    assert str(refused.value) == (
        f"deepspeed: --include: deepspeed {version} leaves out worker-2 without its slots; "
        'write "worker-2:0,1,2,3"'
    )
    found = job(line.format("worker-2:0,1,2,3@worker-0:0,9"), cwd)
    assert {each.name: each.slots for each in found.hosts} == {"worker-0": 2, "worker-2": 4}
    with pytest.raises(JobLineError, match=r'leaves out localhost without .* as in "localhost:0"'):
        job("deepspeed --include localhost t.py", cwd)


def test_the_ssh_that_deepspeed_needs_on_this_host(cwd: Path):
    """deepspeed 0.19.8 asks for a log-in though the hostfile names this host alone."""
    asked = {
        "": ("gpu-box",),
        "--ssh_port 2222": ("-p", "2222", "gpu-box"),
        "--no_ssh_check": ("gpu-box",),  # for the address that --master_addr would give
        "--master_addr 10.0.0.1": ("gpu-box",),
        "--no_ssh --node_rank 0": ("gpu-box",),
        "--no_ssh_check --master_addr 10.0.0.1": (),
        "--no_ssh --node_rank 0 --master_addr 10.0.0.1": (),
    }
    for flags, words in asked.items():
        assert job(f"deepspeed --hostfile one {flags} t.py", cwd).asks_ssh == words, flags
    assert job("deepspeed --num_gpus 2 t.py", cwd).asks_ssh == ()
    assert job("deepspeed --hostfile hosts t.py", cwd).asks_ssh == ()  # we ask all of them


def test_deepspeed_notes(cwd: Path):
    (cwd / "zero").write_text("a slots=2\nA slots=2\nb slots=0\n")
    zero = job("deepspeed --hostfile zero t.py", cwd)
    assert [(entry.name, entry.slots) for entry in zero.hosts] == [("a", 2), ("A", 2)]
    assert said(zero, "line 3: b has slots=0: no rank is started there")
    elastic = "deepspeed -H hosts --elastic_training --min_elastic_nodes 1 --master_addr a t.py"
    assert said(job(elastic, cwd), "all hosts are examined")
    assert said(job("deepspeed --master_addr 10.0.0.1 t.py", cwd), "not used without a hostfile")
    assert said(job("deepspeed --autotuning run t.py", cwd), "--autotuning")


def test_a_node_rank_that_is_the_number_of_a_task():
    line = "torchrun --nnodes 2 --node-rank 2 --master-addr a t.py"
    of_tasks = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
    with pytest.raises(JobLineError) as error:
        job(line, **of_tasks)
    assert "srun --ntasks-per-node=1), and give it --node-rank $SLURM_NODEID" in str(error.value)
    with pytest.raises(JobLineError) as error:
        job(line, **{**of_tasks, "SLURM_NTASKS": "2"})
    assert str(error.value).endswith("out of range: with 2 it is 0 to 1")
