"""Options as one record, and flags against the launcher."""

from __future__ import annotations

import json

import pytest

from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.model.findings import Level
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.options import Flags, Options, contradictions

TORCHRUN = Launch(
    launcher="torchrun",
    rank=2,
    world_size=4,
    local_rank=0,
    local_world_size=2,
    node_rank=1,
    nnodes=2,
    master_addr="nd0",
    master_port=29500,
    sources={"nnodes": "GROUP_WORLD_SIZE", "master_port": "MASTER_PORT"},
)


def test_options_through_json():
    options = Options(level=Level.FULL, select=("a",), ignore=("b", "c"), expected={"x": 1})
    data = json.loads(json.dumps(encode(options)))
    assert decode(Options, Node("options", data)) == options
    assert decode(Options, Node("options", {**data, "newer": 1})) == options


def test_flags_that_agree():
    flags = Flags(nnodes=2, node_rank=1, nproc_per_node="2", master_addr="nd0", master_port=29500)
    assert contradictions(flags, TORCHRUN) == []
    assert contradictions(Flags(), TORCHRUN) == []
    for word in ("auto", "gpu", "cpu"):
        assert contradictions(Flags(nproc_per_node=word), TORCHRUN) == []


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (Flags(nnodes=3), "--nnodes 3: torchrun has 2 (GROUP_WORLD_SIZE); leave the option out"),
        (Flags(node_rank=0), "--node-rank 0: torchrun has 1; leave the option out"),
        (Flags(nproc_per_node="8"), "--nproc-per-node 8: torchrun has 2; leave the option out"),
        (Flags(master_addr="nd1"), "--master-addr nd1: torchrun has nd0; leave the option out"),
        (
            Flags(master_port=1234),
            "--master-port 1234: torchrun has 29500 (MASTER_PORT); leave the option out",
        ),
    ],
)
def test_flags_that_disagree_are_named(flags, line):
    assert contradictions(flags, TORCHRUN) == [line]


def test_every_disagreement_is_named():
    assert len(contradictions(Flags(nnodes=3, master_port=1), TORCHRUN)) == 2


def test_a_flag_that_would_be_ignored_in_silence():
    launch = Launch(launcher="srun", rank=0, world_size=2)
    (line,) = contradictions(Flags(master_addr="nd0"), launch)
    assert line.startswith("--master-addr nd0: under srun this value comes from the environment")
    assert line.endswith("export MASTER_ADDR=nd0 instead")


def test_a_meeting_point_that_only_a_rule_gave_is_no_contradiction():
    launch = Launch(
        launcher="srun",
        master_addr="nd0",
        master_port=19711,
        sources={
            "master_addr": "derived from SLURM_JOB_NODELIST",
            "master_port": "derived from SLURM_JOB_ID",
        },
    )
    assert contradictions(Flags(master_addr="nd0", master_port=19711), launch) == []
    (line,) = contradictions(Flags(master_port=29500), launch)
    assert line.endswith("export MASTER_PORT=29500 instead")
