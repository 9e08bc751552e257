"""Random numbers of a made-up cluster, and of this host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Severity, Skip, Untested
from nccl_doctor.checks.seeds import Seeds
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.forked_code import run_code

pytestmark = pytest.mark.xdist_group("torch")

CHECK = Seeds()


def drew(
    exact: str = "a",
    normal: str = "n",
    *,
    torch: str = "2.13.0",
    cpu: str = "AVX2",
    gpu: tuple[str, str, str] | None = None,
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "torch": torch,
        "cpu": {"is": cpu, "exact": exact, "normal": normal},
        "gpu": None,
    }
    if gpu is not None:
        facts["gpu"] = dict(zip(("is", "exact", "normal"), gpu, strict=True))
    return facts


def cluster(*ranks: dict[str, Any]) -> Cluster:
    hosts = [f"nd{i}" for i in range(len(ranks) // 2)]
    return make_cluster(hosts, check=CHECK.name, by_rank=dict(enumerate(ranks)))


def test_ranks_that_draw_the_same_are_fine() -> None:
    assert judge(CHECK, cluster(*[drew()] * 4)) == []
    assert judge(CHECK, cluster(*[drew(gpu=("H100", "x", "y"))] * 4)) == []
    other = drew(torch="2.12.0", cpu="AVX512")
    assert judge(CHECK, cluster(drew(), drew(), other, other)) == []


@pytest.mark.parametrize("odd", [drew("b"), drew("a", "m"), drew("b", "m")])
def test_an_odd_rank_with_the_same_torch_is_blamed_once(odd: dict[str, Any]) -> None:
    made = cluster(drew(), drew(), drew(), odd)
    found = only(CHECK, made, "seed-differs", hosts=["nd1"], ranks=[3])
    assert found.level is Severity.FAIL
    assert "though all have torch 2.13.0 on AVX2" in found.message
    assert found.fix


def test_two_ranks_are_a_tie() -> None:
    found = only(CHECK, cluster(drew(), drew("b")), "seed-differs", hosts=["nd0"], ranks=[0, 1])
    assert found.confidence.value == "likely"
    assert "the ranks are equally divided" in found.message


def test_another_torch_is_a_warning() -> None:
    old = drew("b", "m", torch="2.1.0")
    made = cluster(drew(), drew(), drew(), drew(), old, old)
    found = only(CHECK, made, "seed-differs", hosts=["nd2"], ranks=[4, 5])
    assert found.level is Severity.WARN
    assert "torch 2.1.0 on AVX2, where the others have torch 2.13.0 on AVX2" in found.message


def test_another_cpu_or_gpu_that_draws_other_normal_numbers_is_worth_knowing() -> None:
    plain = drew("a", "m", cpu="DEFAULT")
    made = cluster(drew(), drew(), drew(), drew(), plain, plain)
    found = only(CHECK, made, "seed-differs", hosts=["nd2"], ranks=[4, 5])
    assert found.level is Severity.INFO
    h100, a100 = drew(gpu=("H100", "x", "y")), drew(gpu=("A100", "x", "z"))
    found = only(
        CHECK, cluster(*[h100] * 4, a100, a100), "seed-differs", hosts=["nd2"], ranks=[4, 5]
    )
    assert found.level is Severity.INFO
    assert "of the GPU differ" in found.message
    assert "torch 2.13.0 on A100" in found.message


def test_a_bad_rank_among_old_ones_is_blamed_apart() -> None:
    """Those that only have another torch are not taken for broken."""
    old = drew("b", torch="2.1.0")
    made = cluster(*[drew()] * 4, old, old, old, drew("c", torch="2.1.0"))
    found = {f.level.value: f.where.ranks for f in judge(CHECK, made)}
    assert found == {"fail": (7,), "warn": (4, 5, 6)}


def test_a_bad_gpu_generator() -> None:
    good, bad = drew(gpu=("H100", "x", "y")), drew(gpu=("H100", "q", "r"))
    found = only(CHECK, cluster(good, good, good, bad), "seed-differs", hosts=["nd1"], ranks=[3])
    assert found.level is Severity.FAIL


# --- this host ---


def observe(backend: str = "gloo", world: int = 2) -> dict[str, Any]:
    launch = Launch(rank=0, world_size=world, local_rank=0)
    return dict(CHECK.observe(Context(launch=launch, env={}, backend=backend)))


def test_this_host_draws_the_same_twice() -> None:
    first = json.loads(json.dumps(observe()))
    assert first == observe()
    assert first["gpu"] is None
    assert first["cpu"]["exact"] != first["cpu"]["normal"]


def test_one_rank_alone() -> None:
    with pytest.raises(Skip):
        observe(world=1)


def test_a_gpu_that_is_not_there_was_not_tested() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(Untested, match="the GPU cannot draw"):
        observe("nccl")


OBSERVE = """
import json
from nccl_doctor.api import Context, Launch
from nccl_doctor.checks.seeds import Seeds
launch = Launch(rank=0, world_size=2, local_rank=0)
print(json.dumps(Seeds().observe(Context(launch=launch, env={}, backend="gloo"))))
"""


def test_what_is_exact_does_not_depend_on_the_cpu(tmp_path: Path) -> None:
    env = {"ATEN_CPU_CAPABILITY": "default"}  # read when torch first computes
    done = run_code(OBSERVE, tmp_path, env=env, timeout_s=60)
    assert done.returncode == 0, done.stderr
    plain, here = json.loads(done.stdout.splitlines()[-1]), observe()
    assert plain["cpu"]["is"].lower() in ("default", "no avx")
    assert plain["cpu"]["exact"] == here["cpu"]["exact"]
