"""A DeepSpeed configuration against a made-up cluster, and against this host."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Job, Launch, Outcome, OutcomeStatus, Severity, Skip
from nccl_doctor.checks.deepspeed_config import DeepspeedConfig
from nccl_doctor.judge.causes import explain
from nccl_doctor.model.findings import Status
from tests.support.clusters import change_rank, make_cluster
from tests.support.findings import judge, only

CHECK = DeepspeedConfig()
GIB = 1 << 30
FINE: dict[str, Any] = {
    "ops": {"cpu_adam": False, "async_io": False},
    "ninja": True,
    "compiler": True,
    "libaio": True,
    "locked": None,
    "paths": {},
}
HERE = {"nearest": "/nvme", "error": "", "free": 1 << 40, "direct": True}
NVME = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1 << 28},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
    },
}
CPU = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def cluster(
    config: dict[str, Any] | None,
    odd: dict[str, Any] | None = None,
    *,
    memory: dict[str, Any] | None = None,
    version: str | None = "0.19.8",
    **job: Any,
) -> Cluster:
    """Two hosts of two ranks; what is `odd`, and `memory`, are of nd1."""
    facts = {
        name: {"deepspeed": version, "offload": {**FINE, **(odd or {})} if name == "nd1" else FINE}
        for name in ("nd0", "nd1")
    }
    made = make_cluster(check=CHECK.name, by_host=facts)
    if memory is not None:
        room = {"available": 64 * GIB, "group": None, "oom_kills": 0, "local_ranks": 2, **memory}
        of_memory = make_cluster(check="memory", by_host={"nd1": room}).hosts[1].facts
        host = replace(made.hosts[1], facts={**made.hosts[1].facts, **of_memory})
        ranks = tuple(replace(r, host=host) if r.host.id == host.id else r for r in made.ranks)
        made = replace(made, hosts=(made.hosts[0], host), ranks=ranks)
    return replace(made, job=Job(deepspeed_config=config, deepspeed_path="ds.json", **job))


def test_a_configuration_that_fits() -> None:
    assert judge(CHECK, cluster({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2})) == []
    assert judge(CHECK, cluster(NVME, {"paths": {"/nvme": HERE}}, memory={})) == []
    assert judge(CHECK, cluster(CPU, memory={})) == []
    assert judge(CHECK, cluster(None)) == []


def test_a_batch_that_does_not_divide_blames_no_host() -> None:
    config = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1}
    found = only(CHECK, cluster(config), "batch-does-not-divide")
    assert found.level is Severity.FAIL
    assert '"train_batch_size": 8' in found.fix
    assert found.evidence == {"file": "ds.json"}
    assert judge(CHECK, cluster(config, mesh=(("dp", 2), ("sp", 2)))) == []


def test_a_configuration_for_another_world() -> None:
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
    }
    found = only(CHECK, cluster(config), "world-size-config-mismatch")
    assert "start 8 ranks" in found.fix


def test_it_is_judged_without_any_facts_and_with_an_old_version() -> None:
    config = {"train_batch_size": 4, "amp": {"enabled": True}}
    (found,) = judge(CHECK, cluster(config, version="0.15.0"))
    assert (found.code, found.level) == ("deepspeed-config-deprecated-key", Severity.INFO)
    bare = replace(make_cluster(), job=Job(deepspeed_config=config))
    (found,) = judge(CHECK, bare)
    assert found.level is Severity.WARN


@pytest.mark.parametrize(
    ("config", "odd", "code", "severity", "words"),
    [
        (NVME, {"paths": {"/nvme": {**HERE, "error": "no"}}}, "path-unusable", "fail", "/nvme: no"),
        (NVME, {"paths": {"/nvme": {**HERE, "direct": False}}}, "path-unusable", "warn", "direct"),
        (
            NVME,
            {"paths": {"/nvme": {**HERE, "free": GIB}}},
            "path-unusable",
            "warn",
            "1.0 GiB free",
        ),
        (NVME, {"locked": 8 << 20}, "memory-low", "fail", "each rank locks 2.5 GiB"),
        (CPU, {"ninja": False}, "operator-unavailable", "fail", "cpu_adam at the start of the job"),
        (CPU, {"compiler": False}, "operator-unavailable", "warn", "no a C++ compiler"),
        (NVME, {"libaio": False}, "operator-unavailable", "warn", "libaio"),
    ],
)
def test_a_host_that_lacks_what_offloading_needs(
    config: Any, odd: Any, code: str, severity: str, words: str
) -> None:
    found = only(CHECK, cluster(config, odd), f"offload-{code}", hosts=["nd1"])
    assert found.level.value == severity
    assert words in found.message


def test_operators_that_were_built_need_no_compiler() -> None:
    built = {"ops": {"cpu_adam": True}, "ninja": False, "compiler": False}
    assert judge(CHECK, cluster(CPU, built)) == []
    torch_adam = {**CPU, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    assert judge(CHECK, cluster(torch_adam, {"ninja": False})) == []
    assert judge(CHECK, cluster(CPU, {"ops": None, "ninja": False})) == []


@pytest.mark.parametrize(
    ("config", "memory", "severity", "words"),
    [
        (NVME, {"available": 4 * GIB}, "warn", "4.0 GiB are left"),
        (NVME, {"group": {"limit": 4 * GIB, "used": 0}}, "fail", "2 ranks lock 2.5 GiB each"),
        (CPU, {"available": 4 * GIB}, "warn", "hold a model of 536 million"),
    ],
)
def test_a_host_with_too_little_memory(config: Any, memory: Any, severity: str, words: str) -> None:
    found = only(CHECK, cluster(config, memory=memory), "offload-memory-low", hosts=["nd1"])
    assert found.level.value == severity
    assert words in found.message


def test_it_explains_nothing_that_was_seen_and_nothing_explains_it() -> None:
    from nccl_doctor.checks.collectives import Collectives
    from nccl_doctor.checks.port import Port
    from nccl_doctor.model.findings import Finding, Where

    made = cluster({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1})
    hang = next(kind for kind in Collectives.kinds if kind.code == "collective-hang")
    port = next(kind for kind in Port.kinds if kind.code == "port-blocked")
    others = [
        Finding(hang, "hangs", Where(ranks=(1,))),
        Finding(port, "blocked", Where(hosts=("nd1",))),
    ]
    by_code = {f.code: f.explained_by for f in explain([*judge(CHECK, made), *others], made)}
    assert by_code["batch-does-not-divide"] is None
    assert by_code["collective-hang"] != "batch-does-not-divide"
    assert by_code["port-blocked"] is None


def test_it_blocks_no_check_that_broke() -> None:
    from nccl_doctor.checks.collectives import Collectives
    from nccl_doctor.judge.status import check_results
    from tests.support.clusters import outcome

    made = cluster({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1})
    raised = outcome(Outcome(OutcomeStatus.RAISED, reason="odd"))
    made = change_rank(made, 0, facts={"collectives": {"world": raised}})
    (result,) = check_results(made, [Collectives()], judge(CHECK, made))
    assert result.status is Status.UNKNOWN


# --- this host ---


def observe(config: dict[str, Any] | None, **env: str) -> dict[str, Any]:
    job = Job(deepspeed_config=config, deepspeed_path="ds.json")
    context = Context(launch=Launch(), env={"PATH": os.environ["PATH"], **env}, job=job)
    return dict(json.loads(json.dumps(CHECK.observe(context))))


def test_it_does_not_apply_without_a_configuration() -> None:
    with pytest.raises(Skip, match="--deepspeed-config is not given"):
        observe(None)


def test_this_host_is_looked_at_only_where_something_is_offloaded() -> None:
    assert observe({"train_batch_size": 4})["offload"] is None
    assert observe(CPU)["offload"]["paths"] == {}


def test_folders_of_this_host(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def look(path: Path) -> dict[str, Any]:
        zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(path)}}
        paths = observe({"zero_optimization": zero})["offload"]["paths"]
        return dict(paths[str(path)])

    before = sorted(tmp_path.iterdir())
    there = look(tmp_path / "not" / "yet")
    assert (there["nearest"], there["error"]) == (str(tmp_path), "")
    assert there["free"] > 0
    assert look(tmp_path / "file" / "below")["error"].endswith("file is not a folder")
    assert sorted(tmp_path.iterdir()) == before


def test_no_compiler_on_this_path(tmp_path: Path) -> None:
    found = observe(CPU, PATH=str(tmp_path))["offload"]
    assert found["compiler"] is False
    assert observe(CPU, CXX=str(tmp_path / "none"))["offload"]["compiler"] is False
