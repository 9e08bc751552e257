"""MPS on made-up hosts: processes, its pipe, users and compute modes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Severity, Skip
from nccl_doctor.checks.mps import Mps
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = Mps()
DAEMON, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
PIPE = "/tmp/nvidia-mps"


def host(
    root: Path, *programs: str, pipe: str = "", container: bool = False, **env: str
) -> dict[str, Any]:
    fabrics.add_gpus(root)
    fabrics.write(root, "proc/1/comm", "systemd")
    if not container:
        fabrics.write(root, "proc/2/comm", "kthreadd")
    for pid, program in enumerate(programs, 700):
        fabrics.write(root, f"proc/{pid}/comm", program[:15])
        fabrics.write(root, f"proc/{pid}/cmdline", f"/usr/bin/{program}\0-d\0")
    if pipe:
        fabrics.write(root, f"{pipe.lstrip('/')}/control", "")
    return observe(Mps, env, root=root)


def cluster(*hosts: dict[str, Any], mode: int = 0) -> Cluster:
    """One rank for each host; `mode`: the compute mode of the GPUs."""
    seen = {f"nd{i}": facts for i, facts in enumerate(hosts)}
    made = make_cluster(list(seen), 1, check="mps", by_host=seen, backend="nccl")
    state = {"gpu_state": {ALONE: outcome({"gpus": [{"compute_mode": mode}]})}}
    ranks = tuple(replace(rank, facts=state) for rank in made.ranks)
    return replace(made, ranks=ranks)


class TestHealthy:
    def test_no_mps(self, tmp_path: Path) -> None:
        same = host(tmp_path, "bash", "nvidia-persistenced")
        assert (same["daemons"], same["servers"], same["control"]) == ([], [], False)
        assert judge(CHECK, cluster(same, same)) == []
        assert judge(CHECK, cluster(same, same, mode=3)) == []

    def test_what_a_daemon_left_that_has_ended(self, tmp_path: Path) -> None:
        assert judge(CHECK, cluster(host(tmp_path, pipe=PIPE))) == []

    def test_mps_for_others_on_gpus_that_anybody_may_use(self, tmp_path: Path) -> None:
        facts = host(tmp_path, DAEMON, SERVER, pipe="/var/mps")
        assert judge(CHECK, cluster(facts)) == []

    def test_no_gpu(self, tmp_path: Path) -> None:
        with pytest.raises(Skip):
            observe(Mps, root=tmp_path)


class TestActive:
    @pytest.mark.parametrize("programs", [(DAEMON,), (DAEMON, SERVER)])
    def test_it_is_a_note(self, tmp_path: Path, programs: tuple[str, ...]) -> None:
        shared = host(tmp_path / "a", *programs, pipe=PIPE)
        found = only(
            CHECK, cluster(shared, host(tmp_path / "b"), mode=3), "mps-active", hosts=["nd0"]
        )
        assert (found.level, found.confidence) == (Severity.INFO, Confidence.CERTAIN)
        assert f"{PIPE}/control; pid 700 of uid {os.getuid()}" in found.message
        assert found.message.endswith("; compute mode Exclusive Process")
        assert "SIGTERM" in found.kind.fix

    def test_a_pipe_elsewhere(self, tmp_path: Path) -> None:
        facts = host(tmp_path, DAEMON, pipe="/var/mps", CUDA_MPS_PIPE_DIRECTORY="/var/mps")
        found = only(CHECK, cluster(facts), "mps-active", hosts=["nd0"])
        assert "/var/mps/control" in found.message

    def test_a_container_that_sees_the_pipe_only(self, tmp_path: Path) -> None:
        facts = host(tmp_path, pipe=PIPE, container=True)
        found = only(CHECK, cluster(facts), "mps-active", hosts=["nd0"])
        assert found.confidence is Confidence.LIKELY


class TestOtherUser:
    def facts(self, root: Path, uid: int, **more: Any) -> dict[str, Any]:
        seen = host(root, DAEMON, SERVER, pipe=PIPE)
        return {**seen, "servers": [[701, uid]], "uid": 1000, **more}

    def test_cuda_waits_for_the_other_user(self, tmp_path: Path) -> None:
        facts = self.facts(tmp_path, 1001)
        found = only(CHECK, cluster(facts), "mps-other-user", hosts=["nd0"])
        assert found.level is Severity.WARN
        assert found.message == "the MPS server (pid 701) is of uid 1001, this job of uid 1000"

    @pytest.mark.parametrize("more", [{}, {"all_seen": False}])
    def test_servers_that_may_serve_this_job(self, tmp_path: Path, more: dict[str, Any]) -> None:
        """That of root may be for all users; numbers of a container may mean anybody."""
        facts = self.facts(tmp_path, 1001 if more else 0, **more)
        assert only(CHECK, cluster(facts), "mps-active", hosts=["nd0"]).level is Severity.INFO


def test_a_gpu_that_mps_has_for_itself(tmp_path: Path) -> None:
    facts = host(tmp_path, DAEMON, SERVER)
    found = only(CHECK, cluster(facts, mode=3), "mps-not-reached", hosts=["nd0"])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert f"{PIPE}/control is not there; compute mode Exclusive Process" in found.message
