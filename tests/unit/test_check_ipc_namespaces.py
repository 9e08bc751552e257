"""Ranks that NCCL takes to be neighbours, in one container or in several."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Severity
from nccl_doctor.checks.ipc_namespaces import IpcNamespaces
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only

CHECK = IpcNamespaces()


def at(host: str, ipc: int | None = 1, pid: int | None = 2, shm: int | None = 3) -> dict[str, Any]:
    return {"host": host, "ipc": ipc, "pid": pid, "shm": shm}


def cluster(*seen: dict[str, Any], backend: str = "nccl") -> Cluster:
    half = len(seen) // 2
    return make_cluster(
        ["nd0", "nd1"], half, check="ipc_namespaces", by_rank=dict(enumerate(seen)), backend=backend
    )


def test_hosts_of_their_own_are_fine() -> None:
    assert judge(CHECK, cluster(at("a"), at("a"), at("b", 7, 8, 9), at("b", 7, 8, 9))) == []
    # Containers with names of their own: NCCL goes over the network.
    assert judge(CHECK, cluster(*(at(f"box{i}", i) for i in range(4)))) == []


def test_the_odd_rank_of_a_host_is_named() -> None:
    seen = [at("a")] * 3 + [at("b"), at("b", ipc=9), at("b")]
    found = only(CHECK, cluster(*seen), "ipc-namespace-split", hosts=["nd1"], ranks=[4])
    assert found.level is Severity.FAIL
    assert found.message == "3 ranks in different IPC namespaces"
    (found,) = judge(CHECK, cluster(*seen, backend="gloo"))
    assert found.level is Severity.INFO


def test_one_container_for_each_rank_names_all_of_the_host() -> None:
    seen = [at("a"), at("a"), at("b", 4, 5, 6), at("b", 7, 8, 9)]
    found = only(CHECK, cluster(*seen), "ipc-namespace-split", hosts=["nd1"], ranks=[2, 3])
    assert "PID namespaces, file systems on /dev/shm" in found.message


def test_what_could_not_be_looked_at_is_not_different() -> None:
    assert judge(CHECK, cluster(at("a"), at("a", None), at("b"), at("b", shm=None))) == []


def test_this_process_and_the_name_that_nccl_is_told() -> None:
    quiet = {"NCCL_CONF_FILE": "/nonexistent"}
    mine = CHECK.observe(Context(launch=Launch(), env=quiet))
    assert mine == CHECK.observe(Context(launch=Launch(), env=quiet))
    assert None not in mine.values()
    told = CHECK.observe(Context(launch=Launch(), env={**quiet, "NCCL_HOSTID": "rack7"}))
    assert told["host"] != mine["host"]
    assert "rack7" not in told["host"]


def test_a_container_of_its_own_on_the_same_host() -> None:
    """Real namespaces: what one that was started apart sees, against this process."""
    program = (
        "import json; from nccl_doctor.api import Context, Launch;"
        "from nccl_doctor.checks.ipc_namespaces import IpcNamespaces;"
        "env = {'NCCL_CONF_FILE': '/nonexistent'};"
        "print(json.dumps(dict(IpcNamespaces().observe(Context(launch=Launch(), env=env)))))"
    )
    apart = ["unshare", "--ipc", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    may = shutil.which("unshare") and subprocess.run([*apart[:4], "true"], check=False)
    if not may or may.returncode:
        pytest.skip("needs the right to make namespaces")
    done = subprocess.run(apart, capture_output=True, text=True, timeout=60, check=True)
    other = json.loads(done.stdout)
    here = dict(CHECK.observe(Context(launch=Launch(), env={"NCCL_CONF_FILE": "/nonexistent"})))
    assert other["host"] == here["host"]  # NCCL takes both for one host
    found = only(
        CHECK,
        make_cluster(
            ["nd0"],
            4,
            check="ipc_namespaces",
            by_rank={0: here, 1: here, 2: other, 3: here},
            backend="nccl",
        ),
        "ipc-namespace-split",
        hosts=["nd0"],
        ranks=[2],
    )
    assert found.message == "4 ranks in different IPC namespaces, PID namespaces"
