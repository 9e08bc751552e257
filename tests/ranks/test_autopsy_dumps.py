"""Dumps that torch itself writes of a job of gloo, and what is found in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nccl_doctor.autopsy.flight import is_dump, read_dump
from nccl_doctor.autopsy.flight_rules import findings_of_dumps
from tests.support.forkserver import Forked

WORLD = 3
CULPRIT = 2
LIMIT_S = 60
LACKS = 77
"""Exit code where this torch records no call of gloo."""
RANK = (
    f"LACKS = {LACKS}"
    + """
import os, sys, time
import torch
import torch.distributed as dist
try:
    from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
except ImportError:  # before torch 2.8
    sys.exit(LACKS)

rank, world, case, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
store = dist.FileStore(folder + "/store", world)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

def together(step):  # nobody is in a collective meanwhile, so no time-out is waited for
    store.add(step, 1)
    while store.add(step, 0) < world:
        time.sleep(0.01)

tensor = torch.ones(8, 4)
for _ in range(100):  # more than are kept of a group
    dist.all_reduce(tensor)
if rank != 2 or case == "ok":
    work = dist.all_reduce(tensor, async_op=True)
elif case == "op":
    work = dist.broadcast(tensor, 0, async_op=True)
together("called")
written = {"": _dump_fr_trace(True, True, False), "json_": _dump_fr_trace_json(True, False)}
for name, dumped in written.items():
    with open(f"{folder}/dump_{name}{rank}", "wb") as file:
        file.write(dumped.encode() if isinstance(dumped, str) else dumped)
together("dumped")
os._exit(0)  # gloo's threads may want the GIL once it is gone, and abort
"""
)


@pytest.mark.parametrize(
    ("case", "code"),
    [("ok", None), ("skip", "collective-missing"), ("op", "collective-mismatch")],
)
def test_the_rank_that_does_otherwise_is_found(tmp_path: Path, case: str, code: str | None) -> None:
    ranks = [
        Forked(
            [str(rank), str(WORLD), case, str(tmp_path)],
            dict(os.environ),
            folder=tmp_path,
            out=tmp_path / f"{rank}.out",
            err=tmp_path / f"{rank}.err",
            code=RANK,
        )
        for rank in range(WORLD)
    ]
    try:
        for rank in ranks:
            rank.wait(LIMIT_S)
    finally:
        for rank in ranks:
            rank.kill()
    if {rank.returncode for rank in ranks} == {LACKS}:
        pytest.skip("this torch records no call of gloo")
    assert [rank.returncode for rank in ranks] == [0] * WORLD
    for form in ("dump_[0-9]", "dump_json_[0-9]"):
        files = {path.name: path.read_bytes() for path in tmp_path.glob(form)}
        assert len(files) == WORLD
        assert all(is_dump(data[:300]) for data in files.values())
        dumps = [read_dump(data, name) for name, data in files.items()]
        assert sorted(dump.rank or 0 for dump in dumps) == [*range(WORLD)]
        found = [(each.code, each.where.ranks) for each in findings_of_dumps(dumps)]
        assert found == ([(code, (CULPRIT,))] if code else [])
