"""Lines of vLLM, SGLang, Fabric, horovodrun, colossalai, LLaMA-Factory and ms-swift, and what these
make of them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.gather.fleet import Fleet
from nccl_doctor.launch.command_line.job_line import JobLineError
from nccl_doctor.model.job import UnreadHosts
from tests.support.command_lines import job, said, says
from tests.support.rows import each_row

ON_TWO = {"nnodes": 2, "max_nnodes": 2, "node_rank": 1, "nproc_per_node": "8"}


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "slots").write_text("a slots=8\nb slots=8\n")
    (tmp_path / "bare").write_text("a\nb\nc\n")
    return tmp_path


@each_row(
    ("line", "expected"),
    [
        (
            "vllm serve m --nnodes 2 --node-rank 1 --master-addr 10.0.0.5 -tp 8 -pp 2 --headless",
            {"launcher": "vllm", **ON_TWO, "master_addr": "10.0.0.5", "master_port": 29501},
        ),
        (
            "python -m vllm.entrypoints.openai.api_server --model m --tensor_parallel_size=16 "
            "-n 2 -r 1 --master_addr a --master_port=2222",
            {"launcher": "vllm", **ON_TWO, "master_addr": "a", "master_port": 2222},
        ),
        (
            "vllm serve m --nnodes 2 -tp 4 -dp 2 --node-rank 0",
            {"nproc_per_node": "4", "node_rank": 0, "master_addr": "127.0.0.1"},
        ),
        (
            "python -m sglang.launch_server --model-path m --tp 16 --nnodes 2 --node-rank 1 "
            "--dist-init-addr 10.0.0.5:25000",
            {"launcher": "sglang", **ON_TWO, "master_addr": "10.0.0.5", "master_port": 25000},
        ),
        (
            "sglang serve m --tp-size=8 --pp-size 2 --nnodes=2 --node-rank=1 "
            "--nccl-init-addr=[fd00::5]:25000",
            {**ON_TWO, "master_addr": "fd00::5", "master_port": 25000},
        ),
        (
            "fabric run --devices 8 --num-nodes=2 --node_rank 1 --main-address a t.py --x",
            {"launcher": "fabric", **ON_TWO, "master_addr": "a", "master_port": 29400},
        ),
        ("fabric run --devices=0,1 t.py", {"nnodes": 1, "nproc_per_node": "2"}),
        ("fabric run t.py", {"nnodes": 1, "nproc_per_node": "1", "node_rank": 0}),
        (
            "horovodrun -np 12 -H a:8,b:8 python t.py",
            {"launcher": "horovodrun", "nnodes": 2, "starts_remote": True, "shell_here": True},
        ),
        ("horovodrun -np 4 python t.py", {"nnodes": 1, "nproc_per_node": "4", "hosts": ()}),
        ("colossalai run --nproc_per_node 4 t.py", {"nnodes": 1, "nproc_per_node": "4"}),
    ],
)
def test_what_a_line_says(line: str, expected: dict[str, Any]):
    found = job(line)
    says(found, expected)
    assert found.unread == UnreadHosts()


@each_row(
    ("line", "hosts"),
    [
        ("horovodrun -np 12 -H a:8,b:8,c:8 python t.py", [("a", 8), ("b", 4)]),
        ("horovodrun -np 16 -hostfile slots python t.py", [("a", 8), ("b", 8)]),
        ("colossalai run --host a,b --master_addr a --nproc_per_node 4 t.py", [("a", 4), ("b", 4)]),
        (
            "colossalai run --hostfile bare --exclude b --nproc_per_node 4 --master_addr a t.py",
            [("a", 4), ("c", 4)],
        ),
        (
            "colossalai run --hostfile bare --num_nodes 2 --nproc_per_node 4 --master_addr a t.py",
            [("a", 4), ("b", 4)],
        ),
    ],
)
def test_hosts_that_a_line_starts_on(line: str, hosts: list[tuple[str, int]], cwd: Path):
    found = job(line, cwd)
    assert [(entry.name, entry.slots) for entry in found.hosts] == hosts
    assert found.starts_remote
    assert found.nnodes == len(hosts)


@each_row(
    ("line", "words"),
    [
        ("vllm serve m --nnodes 2 --node-rank 2", "--node-rank 2 is not 0 to 1"),
        ("vllm serve m --nnodes two", "--nnodes 'two' is not a whole number"),
        ("vllm serve m --nnodes", "--nnodes is empty"),
        ("sglang serve m --nnodes 2 --dist-init-addr a", "a has no port: write a:PORT"),
        ("horovodrun -H a:8 python t.py", "-np is missing"),
        ("horovodrun -np 9 -H a:8 python t.py", "-np 9: -H has 8 slots"),
        ("horovodrun -np 9 -H a,b python t.py", "-H 'a' is not HOST:SLOTS"),
        ("horovodrun -np 2 -hostfile bare python t.py", 'line 1: write "a slots=N"'),
        ("colossalai run --hostfile slots --nproc_per_node 2 t.py", 'line 1: write "a"'),
        ("colossalai run --hostfile bare t.py", "--nproc_per_node is missing"),
        ("colossalai run --hostfile bare --include x --nproc_per_node 2 t.py", "'x': the hostfile"),
        ("colossalai run --hostfile none --nproc_per_node 2 t.py", "none: cannot be read"),
    ],
)
def test_a_line_that_its_launcher_refuses(line: str, words: str, cwd: Path):
    with pytest.raises(JobLineError) as error:
        job(line, cwd)
    assert words in str(error.value)


def test_servers_of_one_host_are_no_launcher_and_other_hosts_of_ray_are_not_known():
    assert job("vllm serve m -tp 8").launcher == "none"
    assert job("vllm serve m --nnodes 1 --master-addr a").unread == UnreadHosts()
    assert job("horovodrun -np 2 --host-discovery-script s t").unread.said.endswith("script")
    assert "one by no name" in job("horovodrun -np 2 -H localhost:1,b:1 t").unread.said


def test_a_server_without_a_node_rank_is_node_0_everywhere():
    assert said(job("vllm serve m --nnodes 2 --master-addr a"), "uses node rank 0 on every host")


def test_what_is_on_this_host_is_started_without_ssh(cwd: Path):
    entries = job("colossalai run --host 127.0.0.1,b --nproc_per_node 2 t.py").hosts
    fleet = Fleet("the command", entries, ("2", "2"), "10.0.0.5", 29500, {}, shell_here=True)
    here, there = fleet.command(0, 1.0), fleet.command(1, 1.0)
    assert here[:2] == ["sh", "-c"]
    assert there[0] == "ssh"
    assert "--node-rank 0" in here[2]


OF_HOST_1 = {
    "NNODES": "2",
    "NODE_RANK": "1",
    "NPROC_PER_NODE": "4",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "29500",
}
TORCHRUN_1 = {
    **{"launcher": "torchrun", "nnodes": 2, "max_nnodes": 2, "node_rank": 1, "nproc_per_node": "4"},
    **{"master_addr": "10.0.0.5", "master_port": 29500},
}


@each_row(
    ("line", "environ", "expected"),
    [
        ("llamafactory-cli train x.yaml", {**OF_HOST_1, "FORCE_TORCHRUN": "1"}, TORCHRUN_1),
        ("lmf train x.yaml", {**OF_HOST_1, "FORCE_TORCHRUN": "True"}, TORCHRUN_1),
        ("swift sft --model m", OF_HOST_1, TORCHRUN_1),
        ("megatron pt --x y", OF_HOST_1, TORCHRUN_1),
        ("swift rlhf", {"NPROC_PER_NODE": "2"}, {"nnodes": 1, "nproc_per_node": "2"}),
        (
            "llamafactory-cli train x.yaml",
            {
                **{**OF_HOST_1, "FORCE_TORCHRUN": "1", "RDZV_ID": "job7", "MAX_RESTARTS": "3"},
                **{"MIN_NNODES": "1", "MAX_NNODES": "3"},
            },
            {
                **{"nnodes": 1, "max_nnodes": 3, "ranks_assigned": True, "run_id": "job7"},
                **{"master_addr": "10.0.0.5", "master_port": 29500, "max_restarts": 3},
            },
        ),
    ],
)
def test_programs_that_start_torchrun_by_variables(
    line: str, environ: dict[str, str], expected: dict[str, Any]
):
    found = job(line, **environ)
    says(found, expected)
    assert found.unread == UnreadHosts()
    told = {name: each for name, each in found.sources.items() if name in TORCHRUN_1}
    assert all(each.isupper() or each == "default" for each in told.values())


def test_a_rank_that_llamafactory_does_not_read():
    """One that was set by hand on each host: all of them are node 0."""
    environ = {**OF_HOST_1, "FORCE_TORCHRUN": "1", "RANK": "0"}
    del environ["NODE_RANK"]
    found = job("llamafactory-cli train x.yaml", **environ)
    assert (found.node_rank, found.sources["node_rank"]) == (0, "NODE_RANK")
    assert said(found, "NODE_RANK is not set: every host then has node rank 0")
    with pytest.raises(JobLineError, match="RANK=1 is not read, and NODE_RANK is not set: this"):
        job("llamafactory-cli train x.yaml", **{**environ, "RANK": "1"})


@each_row(
    ("line", "environ"),
    [
        ("llamafactory-cli train x.yaml", {"NPROC_PER_NODE": "4", "USE_RAY": "1"}),
        ("llamafactory-cli chat x.yaml", {"FORCE_TORCHRUN": "1"}),
        ("swift export --x", {"NPROC_PER_NODE": "4"}),
        ("swift sft --x", {}),
    ],
)
def test_what_they_start_without_torchrun(line: str, environ: dict[str, str]):
    found = job(line, **environ)
    assert (found.launcher, found.unread) == ("none", UnreadHosts())


@each_row(
    ("environ", "words"),
    [
        ({"NNODES": "2", "NPROC_PER_NODE": "1"}, "MASTER_PORT is not set: each host takes a free"),
        ({"NODE_RANK": "1", "NPROC_PER_NODE": "1"}, "NODE_RANK 1 is out of range: with 1 it is 0"),
        ({"NNODES": "", "NPROC_PER_NODE": "1"}, "NNODES is empty; is its shell variable set?"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE 0 is not at least 1"),
    ],
)
def test_variables_with_which_they_cannot_start(environ: dict[str, str], words: str):
    with pytest.raises(JobLineError, match=re.escape(f"llamafactory: {words}")):
        job("llamafactory-cli train x.yaml", FORCE_TORCHRUN="1", **environ)
