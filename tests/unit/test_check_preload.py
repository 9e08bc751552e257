"""Interposers of CUDA on made-up hosts, and libraries that are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Outcome, OutcomeStatus, Severity, Skip
from nccl_doctor.checks.preload import Preload
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = Preload()
HAMI = "/usr/local/vgpu/libvgpu.so"
CUDA, ALLOCATOR = "/usr/lib/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"


def maps(*paths: str) -> str:
    lines = ["55d0c0000000-55d0c0001000 rw-p 00000000 00:00 0                          [heap]"]
    for path in paths:
        lines += [f"7f00{at}000-7f00{at}fff r-xp 00000000 08:01 99         {path}" for at in "12"]
    return "\n".join(lines)


def host(root: Path, *mapped: str, preload: str = "", **env: str) -> dict[str, Any]:
    """Facts of a host whose process has mapped these; `preload`: its /etc/ld.so.preload."""
    fabrics.add_gpus(root)
    fabrics.write(root, "proc/self/maps", maps(CUDA, *mapped))
    if preload:
        fabrics.write(root, "etc/ld.so.preload", preload)
    return observe(Preload, env, backend="nccl", root=root)


def cluster(*hosts: dict[str, Any]) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    seen = dict(zip(names, hosts, strict=True))
    return make_cluster(names, check="preload", by_host=seen, backend="nccl")


def with_collectives(made: Cluster, end: Outcome) -> Cluster:
    facts = {"collectives": {"world": end}}
    return replace(made, ranks=tuple(replace(rank, facts=facts) for rank in made.ranks))


def test_hami_by_the_file_is_named_on_its_host_alone(tmp_path: Path) -> None:
    bare = host(tmp_path / "a")
    shared = host(tmp_path / "b", HAMI, preload=HAMI)
    found = only(CHECK, cluster(bare, shared, bare), "cuda-intercepted", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.POSSIBLE)
    assert found.message == f"{HAMI} (HAMi), by /etc/ld.so.preload"
    assert found.fix.startswith("if the pod has whole GPUs: CUDA_DISABLE_CONTROL=true")


def test_hami_by_the_variable(tmp_path: Path) -> None:
    shared = host(tmp_path, HAMI, LD_PRELOAD=f"{ALLOCATOR}:{HAMI}")
    found = only(CHECK, cluster(shared), "cuda-intercepted", hosts=["nd0"])
    assert found.message == f"{HAMI} (HAMi), by LD_PRELOAD"


def test_a_library_that_nothing_names_is_mapped_all_the_same(tmp_path: Path) -> None:
    found = only(CHECK, cluster(host(tmp_path, HAMI)), "cuda-intercepted", hosts=["nd0"])
    assert found.message == f"{HAMI} (HAMi)"


@pytest.mark.parametrize("value", ["true", "True", "1"])
def test_one_that_is_turned_off_is_information(tmp_path: Path, value: str) -> None:
    shared = host(tmp_path, HAMI, preload=HAMI, CUDA_DISABLE_CONTROL=value)
    found = only(CHECK, cluster(shared), "cuda-intercepted", hosts=["nd0"])
    assert found.level is Severity.INFO
    assert "passes calls on" in found.message


def test_collectives_that_worked_clear_torch_and_not_vllm(tmp_path: Path) -> None:
    made = cluster(host(tmp_path, HAMI, preload=HAMI))
    good = only(CHECK, with_collectives(made, outcome({})), "cuda-intercepted", hosts=["nd0"])
    assert good.level is Severity.INFO
    assert good.message.endswith("vLLM may still hang")
    hung = with_collectives(made, Outcome(OutcomeStatus.HUNG))
    assert only(CHECK, hung, "cuda-intercepted", hosts=["nd0"]).level is Severity.WARN


@pytest.mark.parametrize(
    ("path", "project"),
    [
        ("/usr/lib/nvshare/libnvshare.so", "nvshare"),
        ("/etc/vgpu-manager/driver/libvgpu-control.so", "vgpu-manager"),
        ("/usr/lib64/libcuda-control.so.1", "gpu-manager"),
    ],
)
def test_others_are_information(tmp_path: Path, path: str, project: str) -> None:
    made = cluster(host(tmp_path, path, LD_PRELOAD=path))
    found = only(CHECK, made, "cuda-intercepted", hosts=["nd0"])
    assert found.level is Severity.INFO
    assert found.message == f"{path} ({project}), by LD_PRELOAD"


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"LD_PRELOAD": ALLOCATOR}, id="an allocator"),
        pytest.param({"preload": f"# {HAMI}\n"}, id="a comment"),
        pytest.param({"LD_PRELOAD": HAMI}, id="a file that was not there, so it was not loaded"),
    ],
)
def test_hosts_without_one_are_fine(tmp_path: Path, seen: dict[str, str]) -> None:
    assert judge(CHECK, cluster(host(tmp_path, ALLOCATOR, **seen))) == []


def test_without_gpus_or_nccl_it_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no NVIDIA GPU"):
        observe(Preload, backend="nccl", root=tmp_path)
    with pytest.raises(Skip, match="does not use NCCL"):
        observe(Preload, root=tmp_path)
