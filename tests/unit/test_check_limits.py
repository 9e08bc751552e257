"""Limits on open files, locked memory and processes."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Context, Launch, Severity
from nccl_doctor.checks.limits import Limits
from nccl_doctor.system.shortage import limits_of_tasks
from tests.support import fabrics
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.observing import observe
from tests.support.rows import each_row

CHECK = Limits()
KIB, GIB = 1024, 1 << 30
MEMLOCK, NPROC = resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC
NOTHING: dict[str, Any] = {
    "files": None,
    "files_hard": None,
    "locked": None,
    "rdma": [],
    "processes": None,
    "tasks": None,
    "pids": None,
    "addresses": None,
    "stack": 8 << 20,
    "user_namespace": False,
    "container": "",
    "root": True,
    "local_ranks": 2,
}


def cluster(backend: str = "gloo", world: int = 4, bad: str = "nd1", **fields: Any) -> Cluster:
    seen = dict.fromkeys(("nd0", "nd1", "nd2"), NOTHING)
    seen[bad] = json.loads(json.dumps({**NOTHING, **fields}))
    made = {"check": "limits", "by_host": seen, "backend": backend, "world_size": world}
    return make_cluster(list(seen), **made)


def test_no_limits_and_usual_limits_are_fine() -> None:
    assert judge(CHECK, cluster()) == []
    assert judge(CHECK, cluster(files=1024, files_hard=4096, world=256)) == []
    assert judge(CHECK, cluster("nccl", rdma=["mlx5_0"])) == []
    assert judge(CHECK, cluster("nccl", locked=64 * KIB)) == []
    assert judge(CHECK, cluster(processes=4096, tasks=100)) == []


def test_fewer_files_than_gloo_has_sockets_stop_it() -> None:
    bad = cluster(files=1024, files_hard=1024, world=2048)
    found = only(CHECK, bad, "open-files-limit-low", hosts=["nd1"])
    assert found.level is Severity.FAIL
    assert "limit of open files 1024" in found.message
    assert "as root" in found.fix


def test_nccl_needs_them_where_the_store_is() -> None:
    for bad, severity in (("nd0", Severity.FAIL), ("nd1", Severity.WARN)):
        made = cluster("nccl", world=2048, bad=bad, files=1024, files_hard=100_000)
        found = only(CHECK, made, "open-files-limit-low", hosts=[bad])
        assert found.level is severity
        assert found.fix.startswith("ulimit -n 100000; or ")


@pytest.mark.parametrize(("files", "severity"), [(24, Severity.FAIL), (25, Severity.WARN)])
def test_rank_0_needs_more_for_the_store(files: int, severity: Severity) -> None:
    """As measured: of four ranks of gloo, rank 0 needs 25 files and the others 12 to form it."""
    bad = cluster(files=files, files_hard=files, bad="nd0")
    assert only(CHECK, bad, "open-files-limit-low", hosts=["nd0"]).level is severity
    other = cluster(files=12, files_hard=12)
    assert only(CHECK, other, "open-files-limit-low", hosts=["nd1"]).level is Severity.WARN


def test_few_files_are_a_risk_for_a_small_job() -> None:
    found = only(CHECK, cluster(files=200), "open-files-limit-low", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert found.fix.startswith("ulimit -n 65536; or ")


@pytest.mark.parametrize(
    ("locked", "severity"), [(64 * KIB, Severity.FAIL), (GIB // 2, Severity.WARN), (GIB, None)]
)
def test_rdma_needs_locked_memory(locked: int, severity: Severity | None) -> None:
    made = cluster("nccl", locked=locked, rdma=["mlx5_0"])
    if severity is None:
        assert judge(CHECK, made) == []
        return
    found = only(CHECK, made, "memlock-limit-low", hosts=["nd1"])
    assert found.level is severity
    assert found.message.endswith("RDMA on mlx5_0")


@pytest.mark.parametrize(
    "limit",
    [{"processes": 1000, "tasks": 990}, {"pids": {"limit": 1000, "used": 990}}],
)
def test_no_room_for_threads_stops_the_ranks(limit: dict[str, Any]) -> None:
    found = only(CHECK, cluster(**limit), "process-limit-low", hosts=["nd1"])
    assert found.level is Severity.FAIL
    assert "is 1000, 990 in use: 10 left for 2 ranks" in found.message


def test_the_tighter_one_is_named_and_nccl_needs_more() -> None:
    limits: dict[str, Any] = {"processes": 2000, "tasks": 1000, "pids": {"limit": 200, "used": 100}}
    assert judge(CHECK, cluster(**limits)) == []
    found = only(CHECK, cluster("nccl", **limits), "process-limit-low", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert found.message.startswith("pids.max of the cgroup is 200")
    assert "--pids-limit" in found.fix
    found = only(CHECK, cluster("nccl", processes=900, tasks=800), "process-limit-low",
                 hosts=["nd1"])  # fmt: skip
    assert found.fix.startswith("ulimit -u unlimited")


def test_cuda_needs_addresses() -> None:
    for limit in (16 * GIB, 512 * GIB):
        found = only(
            CHECK, cluster("nccl", addresses=limit), "address-space-limit-low", hosts=["nd1"]
        )
        assert found.level is Severity.WARN
    assert judge(CHECK, cluster("nccl", addresses=2048 * GIB)) == []
    assert judge(CHECK, cluster("gloo", addresses=16 * GIB)) == []


@pytest.mark.parametrize("limit", ["addresses", "stack"])
def test_a_report_that_does_not_know_of_a_limit(limit: str) -> None:
    old = {name: value for name, value in NOTHING.items() if name != limit}
    made = make_cluster(["nd0"], check="limits", by_host={"nd0": old}, backend="nccl")
    assert judge(CHECK, made) == []


def with_stack(
    limit: int | None, nccl: str = "2.27.5", gpu: str = "NVIDIA H100 80GB HBM3", **more: Any
) -> Cluster:
    """Three hosts, of which nd1 has this limit on the stack; more: of check `nccl_library`."""
    seen = {"nd0": NOTHING, "nd1": {**NOTHING, "stack": limit}, "nd2": NOTHING}
    made = make_cluster(list(seen), check="limits", by_host=seen, backend="nccl")
    library = {"loaded": {"version": nccl}, "built": nccl, "cuda": "12.8", **more}
    states = {"gpu_state": {ALONE: outcome({"gpus": [{"name": gpu}]})}}
    for rank in made.ranks:
        facts = {"nccl_library": {ALONE: outcome(library)}, **states}
        made = change_rank(made, rank.seat, facts=facts)
    return made


def test_an_unlimited_stack_is_a_small_one_for_threads() -> None:
    found = only(CHECK, with_stack(None), "stack-limit-unsafe", hosts=["nd1"])
    assert found.level is Severity.INFO
    assert found.message == ("stack limit unlimited, which is 2 MiB for new threads; NCCL 2.27.5")
    assert found.kind.fix.startswith("ulimit -s 8192")
    small = only(CHECK, with_stack(2 << 20), "stack-limit-unsafe", hosts=["nd1"])
    assert small.message.startswith("stack limit 2048 KiB")


def test_it_is_a_risk_where_nvlink_joins_many_hosts() -> None:
    found = only(CHECK, with_stack(None, gpu="NVIDIA GB200"), "stack-limit-unsafe", hosts=["nd1"])
    assert found.level is Severity.WARN


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(with_stack(8 << 20), id="the default"),
        pytest.param(with_stack(64 << 20), id="a large one"),
        pytest.param(with_stack(None, "2.28.3"), id="NCCL that sets it"),
        pytest.param(with_stack(None, "2.30.7"), id="a newer NCCL"),
        pytest.param(with_stack(None, cuda=None), id="RCCL"),
        pytest.param(cluster("nccl", stack=None), id="an NCCL that is not known"),
        pytest.param(replace(with_stack(None), backend="gloo"), id="gloo"),
    ],
)
def test_stacks_that_are_fine(made: Cluster) -> None:
    assert judge(CHECK, made) == []


def test_the_limit_on_the_stack_is_read() -> None:
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    assert observe(Limits)["stack"] == (None if soft == resource.RLIM_INFINITY else soft)


@pytest.mark.parametrize(
    ("tree", "env", "devices"),
    [
        (fabrics.connectx7, {}, ["mlx5_0", "mlx5_1"]),
        (fabrics.connectx7, {"NCCL_IB_HCA": "=mlx5_1"}, ["mlx5_1"]),
        (fabrics.connectx7, {"NCCL_IB_DISABLE": "2"}, []),
        (fabrics.connectx7, {"NCCL_NET": "Socket"}, []),
        (fabrics.efa, {}, ["rdmap0s0", "rdmap1s0"]),  # it locks its buffers too
    ],
)
def test_which_devices_lock_memory(
    tmp_path: Path, tree: Callable[[Path, int], Path], env: dict[str, str], devices: list[str]
) -> None:
    told = {"NCCL_CONF_FILE": "/nonexistent", **env}
    assert observe(Limits, told, backend="nccl", root=tree(tmp_path, 2))["rdma"] == devices


def held_to(tree: Path) -> dict[str, bool]:
    """Of which limits this process says that they hold, with another view of /proc/self."""

    stat = f"7 (python) S 1 {'0 ' * 48}"
    fabrics.write(tree, "proc/7/stat", stat)
    uid = os.getuid()
    fabrics.write(tree, "proc/7/status", f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nThreads:\t3\n")
    before = {kind: resource.getrlimit(kind) for kind in (MEMLOCK, NPROC)}
    try:
        for kind, low in ((MEMLOCK, 64 * KIB), (NPROC, 4096)):
            hard = before[kind][1]
            resource.setrlimit(kind, (low if hard == -1 else min(low, hard), hard))
        seen = CHECK.observe(Context(launch=Launch(), env={}, root=tree))
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)
    return {"locked": seen["locked"] is not None, "processes": seen["tasks"] == 3}


CAPABLE = "CapEff:\t000001ffffffffff\n"
WITHOUT = "CapEff:\t00000000a80425fb\n"
"""Docker's own set: neither IPC_LOCK, nor SYS_ADMIN, nor SYS_RESOURCE."""
HERE = "         0          0 4294967295\n"


@pytest.mark.parametrize(
    ("capabilities", "uid_map", "uid", "holds"),
    [
        pytest.param(CAPABLE, HERE, 0, "", id="root"),
        pytest.param(CAPABLE, "", 0, "", id="a kernel without user namespaces"),
        pytest.param(CAPABLE, HERE, 1000, "", id="a user who was given all"),
        pytest.param(WITHOUT, HERE, 0, "locked", id="root in Docker"),
        pytest.param(WITHOUT, HERE, 1000, "locked processes", id="a user"),
        pytest.param(CAPABLE, "0 1000 1\n1 100000 65536\n", 0, "locked processes", id="rootless"),
        pytest.param(CAPABLE, "1000 1000 1\n", 1000, "locked processes", id="enroot"),
    ],
)
def test_capabilities_count_where_the_kernel_asks_for_them(
    tmp_path: Path, capabilities: str, uid_map: str, uid: int, holds: str
) -> None:
    """`holds`: the limits that do."""
    fabrics.write(tmp_path, "proc/self/status", f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n{capabilities}")
    if uid_map:
        fabrics.write(tmp_path, "proc/self/uid_map", uid_map)
    assert held_to(tmp_path) == {each: each in holds for each in ("locked", "processes")}


def test_what_cannot_be_read_gives_no_capability(tmp_path: Path) -> None:
    assert held_to(tmp_path) == {"locked": True, "processes": True}
    fabrics.write(tmp_path, "proc/self/status", "CapEff:\n")
    assert held_to(tmp_path) == {"locked": True, "processes": True}


def test_root_in_a_user_namespace_is_told_that_the_limit_holds() -> None:
    made = cluster("nccl", locked=64 * KIB, rdma=["mlx5_0"], user_namespace=True)
    found = only(CHECK, made, "memlock-limit-low", hosts=["nd1"])
    assert "in a user namespace, where CAP_IPC_LOCK does not lift it" in found.message
    assert "on the host" in found.fix
    assert "IPC_LOCK" not in found.fix


@each_row(
    ("runtime", "root", "ways", "useless"),
    [
        ("kubernetes", False, ["containerd.service.d", "runAsUser: 0"], "docker"),
        ("kubernetes", True, ["IPC_LOCK in capabilities", "containerd.service.d"], "docker"),
        ("docker", False, ["docker run --ulimit memlock=-1", "docker.service.d"], "IPC_LOCK"),
        ("docker", True, ["docker run --ulimit memlock=-1", "--cap-add=IPC_LOCK"], "runAsUser"),
        ("podman", False, ["podman run --ulimit memlock=-1"], "docker"),
    ],
)
def test_what_helps_in_a_container(runtime: str, root: bool, ways: list[str], useless: str) -> None:
    made = cluster("nccl", locked=64 * KIB, rdma=["mlx5_0"], container=runtime, root=root)
    found = only(CHECK, made, "memlock-limit-low", hosts=["nd1"])
    assert "in a container" in found.message
    assert ("user other than root" in found.message) != root
    told = " | ".join([found.fix, *map(str, found.fix.alternatives)])
    assert all(way in told for way in ways), told
    # Nobody can raise the hard limit from inside.
    assert "ulimit -l" not in told
    assert useless not in told


def test_the_fix_of_locked_memory_names_every_way() -> None:
    made = cluster("nccl", locked=64 * KIB, rdma=["mlx5_0"])
    found = only(CHECK, made, "memlock-limit-low", hosts=["nd1"])
    fix = found.fix or found.kind.fix
    for way in ("ulimit -l", "--ulimit memlock=-1", "limits.d", "--cap-add=IPC_LOCK"):
        assert way in fix


def test_the_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    for name, text in {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cgroup.controllers": "pids\n",
        "sys/fs/cgroup/pids.max": "100\n",
        "sys/fs/cgroup/pids.current": "95\n",
    }.items():
        fabrics.write(tmp_path, name, text)

    seen = observe(Limits, root=tmp_path)
    assert seen["pids"] == {"limit": 100, "used": 95}
    made = make_cluster(["nd0"], check="limits", by_host={"nd0": {**NOTHING, "pids": seen["pids"]}})
    found = only(CHECK, made, "process-limit-low", hosts=["nd0"])
    assert (found.level, "pids.max" in found.message) == (Severity.FAIL, True)


def test_this_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
    try:
        seen = CHECK.observe(Context(launch=Launch(), env={"NCCL_CONF_FILE": "/nonexistent"}))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert set(seen) == set(NOTHING)
    assert seen["files"] == min(soft, 300)
    assert seen["rdma"] == []  # gloo does not use it
    json.dumps(seen)


@pytest.mark.parametrize("capability", ["root", "sys_admin", "sys_resource"])
def test_a_limit_that_does_not_hold_for_this_process_is_not_named(capability: str) -> None:
    assert "RLIMIT_NPROC" in limits_of_tasks(frozenset({"ipc_lock"}))
    assert "RLIMIT_NPROC" not in limits_of_tasks(frozenset({capability}))
