"""The variant `beside-gloo` of check `groups`, in real processes: NCCL is gloo here as well."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.forkserver import Forked

WORLD = 3
LIMIT_S = 60
RANK = """
import json, os, sys, time
import torch.distributed as dist
from nccl_doctor.api import Context, Launch
from nccl_doctor.checks.groups import BESIDE_GLOO, Groups

seat, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

class OnFile:
    def store(self):
        return dist.FileStore(path, world)

params = {"groups": {"world": [0, 1, 2], "evens": [0, 2]}, "use": BESIDE_GLOO, "bind": False}
facts = Groups().observe(Context(
    launch=Launch(), env={}, deadline=time.monotonic() + 50, round=BESIDE_GLOO, seat=seat,
    group=tuple(range(world)), params=params, peers=OnFile(),
))
print(json.dumps(facts), flush=True)
os._exit(0)  # as probe children leave: gloo's threads may want the GIL once it is gone, and abort
"""


def test_every_rank_uses_its_groups_and_the_default_one_as_often(tmp_path: Path) -> None:
    outputs = [tmp_path / f"{seat}.out" for seat in range(WORLD)]
    ranks = [
        Forked(
            [str(seat), str(WORLD), str(tmp_path / "store")],
            dict(os.environ),
            folder=tmp_path,
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
    told = [out.read_text() for out in outputs]
    assert [rank.returncode for rank in ranks] == [0] * WORLD
    seen = [json.loads(text.splitlines()[-1]) for text in told]
    assert [len(facts["steps"]) for facts in seen] == [6, 4, 6]  # two or one, and the default one
    assert [facts["wrong"] for facts in seen] == [[]] * WORLD
    assert seen[0]["made"]["evens"]["backend_class"] == "ProcessGroupGloo"
    assert [set(facts["made"]) for facts in seen] == [
        {"beside-gloo", "world", "evens"},
        {"beside-gloo", "world"},
        {"beside-gloo", "world", "evens"},
    ]
