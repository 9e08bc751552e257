"""Check `network_speed` in real processes, where gloo stands in for NCCL."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import fabrics
from tests.support.forkserver import Forked

WORLD = 2
LIMIT_S = 60
RANK = """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist
from nccl_doctor.api import Context, Launch
from nccl_doctor.checks.network_speed import NetworkSpeed

seat, world, folder, params = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
real, at_init = dist.init_process_group, {}

def init_process_group(*args, **kwargs):
    at_init.update({name: value for name, value in os.environ.items() if "NCCL" in name})
    return real(*args, **kwargs)

dist.init_process_group = init_process_group

class OnFile:
    def store(self):
        return dist.FileStore(str(folder / "store"), world)

facts = NetworkSpeed().observe(Context(
    launch=Launch(local_rank=1), env={"NCCL_CONF_FILE": "/nonexistent", "NCCL_ALGO": "Ring"},
    deadline=time.monotonic() + 6, round="network-0", seat=seat, group=tuple(range(world)),
    params=json.loads(params), root=folder, peers=OnFile(),
))
print(json.dumps({**facts, "at_init": at_init}), flush=True)
os._exit(0)  # as probe children leave: gloo's threads may want the GIL once it is gone, and abort
"""
ALONE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
"""What leaves nothing but the network."""


def observed(folder: Path, **params: Any) -> list[dict[str, Any]]:
    """Facts of each rank, with NCCL's variables `at_init`: when it entered the group."""
    outputs = [folder / f"{seat}.out" for seat in range(WORLD)]
    ranks = [
        Forked(
            [str(seat), str(WORLD), str(folder), json.dumps(params)],
            {name: value for name, value in os.environ.items() if "NCCL" not in name},
            folder=folder,
            out=out,
            err=out.with_suffix(".err"),
            code=RANK,
        )
        for seat, out in enumerate(outputs)
    ]
    try:
        for rank in ranks:
            rank.wait(LIMIT_S)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD
    return [json.loads(out.read_text().splitlines()[-1]) for out in outputs]


def test_nvlink_and_shared_memory_are_off_before_the_group_forms(tmp_path: Path) -> None:
    for facts in observed(tmp_path):
        assert ALONE.items() <= facts["at_init"].items()
        assert not {"NCCL_IB_HCA", "NCCL_NET"} & set(facts["at_init"])
        sizes = [each["bytes"] for each in facts["all_reduce"]]
        assert sizes
        assert sizes == [1 << 20, 1 << 24, 1 << 27][: len(sizes)]
        assert all(each["busbw"] == pytest.approx(each["algbw"]) for each in facts["all_reduce"])
        assert facts["slowing"] == {"NCCL_ALGO": "Ring"}
        assert "nic" not in facts


def test_one_nic_is_named_to_nccl_and_no_other_network_is_left(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path, 4)
    for facts in observed(tmp_path, rails={"0": 0, "1": 2}):
        wanted = {**ALONE, "NCCL_IB_HCA": "=mlx5_2:1", "NCCL_NET": "IB"}
        assert wanted.items() <= facts["at_init"].items()
        assert (facts["rail"], facts["nic"]) == (2, "mlx5_2:1")
        assert facts["all_reduce"]
