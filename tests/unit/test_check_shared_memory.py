"""Room in /dev/shm: real allocations, and what is said of them."""

from __future__ import annotations

import json
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import (
    ALONE,
    Cluster,
    Confidence,
    Context,
    Launch,
    Outcome,
    OutcomeStatus,
    Severity,
)
from nccl_doctor.checks.shared_memory import SharedMemory
from nccl_doctor.checks.shared_memory.left import pattern_of
from nccl_doctor.model.job import Job
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.rows import each_row

CHECK = SharedMemory()
MIB = 1 << 20
FULL = "No space left on device"


def facts(size: int = 16384, needed: int = 147, **fields: Any) -> dict[str, Any]:
    seen = {"size": size * MIB, "free": size * MIB, "needed": needed * MIB}
    return {**seen, "error": "", "stale": [], **fields}


def cluster(bad: dict[str, Any], backend: str = "nccl") -> Cluster:
    seen = {"nd0": facts(), "nd1": json.loads(json.dumps(bad)), "nd2": facts()}
    return make_cluster(list(seen), check="shared_memory", by_host=seen, backend=backend)


def test_a_gibibyte_is_enough() -> None:
    assert judge(CHECK, cluster(facts(1024))) == []
    assert judge(CHECK, cluster(facts(64, needed=0), backend="gloo")) == []


def test_what_cannot_be_allocated_stops_nccl() -> None:
    bad = cluster(facts(64, error=FULL))
    found = only(CHECK, bad, "shm-too-small", hosts=["nd1"])
    assert found.level is Severity.FAIL
    assert found.message == f"64 MiB free of 64 MiB, 147 MiB needed ({FULL})"
    assert "--shm-size" in found.kind.fix
    for error, title, fix in (
        ("Read-only file system", "cannot write to /dev/shm", "remount,rw"),
        ("Permission denied", "cannot write to /dev/shm", "chmod 1777"),
        ("the control group has 20 MiB of memory left", "The memory limit", "--memory"),
    ):
        found = only(CHECK, cluster(facts(8192, error=error)), "shm-too-small", hosts=["nd1"])
        assert title in found.kind.title
        assert fix in (found.fix or found.kind.fix)
        assert "--shm-size" not in (found.fix or found.kind.fix)
    gone = {**facts(error="No such file or directory"), "size": None, "free": None}
    found = only(CHECK, cluster(gone), "shm-too-small", hosts=["nd1"])
    assert found.kind.title == "There is no /dev/shm"


def test_who_may_mount_is_told_to_make_it_larger_and_a_container_to_be_given_more() -> None:
    def fix(**more: Any) -> Any:
        seen = cluster({**facts(64, error=FULL), **more})
        return only(CHECK, seen, "shm-too-small", hosts=["nd1"]).fix

    for more in ({}, {"container": ""}, {"container": "docker", "may_mount": True}):
        (step,) = fix(**more).steps
        assert step.command == "mount -o remount,size=50% /dev/shm"
        assert step.undo == "mount -o remount,size=65536k /dev/shm"
    assert fix(container="docker", may_mount=False).startswith("# docker run --shm-size=16g")
    assert "emptyDir" in fix(container="kubernetes", may_mount=False)


@pytest.mark.parametrize(
    ("status", "severity"),
    [(OutcomeStatus.OK, Severity.WARN), (OutcomeStatus.RAISED, Severity.FAIL)],
)
def test_but_not_where_collectives_were_seen_to_work(
    status: OutcomeStatus, severity: Severity
) -> None:
    bad = cluster(facts(64, error=FULL))
    for seat in range(6):
        ended = outcome(Outcome(status if seat == 3 else OutcomeStatus.OK))
        bad = change_rank(bad, seat, facts={"collectives": {"world": ended}})
    (found,) = judge(CHECK, bad)
    assert found.level is severity


JOINED = {"name": "NVIDIA B200", "nvlinks": [1] * 18, "fabric": {"state": "COMPLETED"}}
BRIDGED = {"name": "NVIDIA A100 80GB PCIe", "nvlinks": [1] * 12, "fabric": None}


@each_row(
    ("gpus", "severity"),
    [
        ([JOINED] * 8, Severity.WARN),
        ([{**JOINED, "name": "NVIDIA A100-SXM4-80GB", "fabric": None}] * 4, Severity.WARN),
        ([JOINED] * 7 + [{**JOINED, "nvlinks": [0] * 18, "fabric": None}], Severity.FAIL),
        ([{**JOINED, "fabric": {"state": "IN_PROGRESS"}}] * 8, Severity.FAIL),
        ([{**JOINED, "name": "Tesla V100-SXM2-32GB", "nvlinks": [1] * 6, "fabric": None}] * 8,
         Severity.FAIL),
        ([BRIDGED] * 4, Severity.FAIL),
        ([{"index": 0, "wedged": {"call": "nvmlDeviceGetUUID"}}], Severity.FAIL),
        ([], Severity.FAIL),
    ],
)  # fmt: skip
def test_gpus_that_nvlink_joins_need_little(gpus: list[dict[str, Any]], severity: Severity) -> None:
    """As on HGX B200, or in a container, where no device file tells of the switches."""
    short = facts(64, error=FULL, least=32 * MIB, least_error="")
    made = cluster(short)
    state = {"gpu_state": {ALONE: outcome({"gpus": gpus})}}
    hosts = tuple(replace(host, facts={**host.facts, **state}) for host in made.hosts)
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    made = replace(made, hosts=hosts, ranks=ranks)
    found = only(CHECK, made, "shm-too-small", hosts=["nd1"])
    assert found.level is severity
    need = "32 MiB needed" if severity is Severity.WARN else f"147 MiB needed ({FULL})"
    assert found.message == f"64 MiB free of 64 MiB, {need}"


def test_not_even_the_least_fits_where_nvlink_joins() -> None:
    made = cluster(facts(64, error=FULL, least=70 * MIB, least_error=FULL))
    state = {"gpu_state": {ALONE: outcome({"gpus": [JOINED] * 8})}}
    hosts = tuple(replace(host, facts={**host.facts, **state}) for host in made.hosts)
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    found = only(CHECK, replace(made, hosts=hosts, ranks=ranks), "shm-too-small", hosts=["nd1"])
    assert found.level is Severity.FAIL
    assert found.message == f"64 MiB free of 64 MiB, 70 MiB needed ({FULL})"


def test_docker_s_default_is_a_risk_where_the_least_fits() -> None:
    found = only(CHECK, cluster(facts(64, needed=37)), "shm-too-small", hosts=["nd1"])
    assert found.level is Severity.WARN


@pytest.mark.parametrize(
    "bad",
    [
        facts(1, needed=0),
        facts(64, needed=0, error="Read-only file system"),
        {**facts(needed=0), "size": None, "free": None, "error": "No such file or directory"},
    ],
)
def test_without_nccl_it_is_a_risk_for_workers_only(bad: dict[str, Any]) -> None:
    found = only(CHECK, cluster(bad, backend="gloo"), "shm-too-small", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert found.message.startswith("no /dev/shm" if bad["size"] is None else "")


def test_what_the_dead_left_is_told() -> None:
    stale = [[f"nccl-{i}", 9 * MIB] for i in range(7)]
    found = only(CHECK, cluster(facts(stale=stale)), "shm-stale", hosts=["nd1"])
    assert found.level is Severity.INFO
    assert found.message == "63 MiB in 7 files that no process has open: 7 files nccl-*"
    assert found.fix == 'for f in /dev/shm/nccl-*; do fuser -s "$f" || rm "$f"; done'


def test_what_the_dead_left_is_the_cause_where_it_would_fit_without() -> None:
    bad = facts(256, needed=147, free=40 * MIB, error=FULL, stale=[["nccl-dead", 200 * MIB]])
    found = only(CHECK, cluster(bad), "shm-stale", hosts=["nd1"])
    assert found.level is Severity.FAIL
    small = facts(64, needed=147, free=4 * MIB, error=FULL, stale=[["nccl-dead", 60 * MIB]])
    found, stale = judge(CHECK, cluster(small))
    assert (found.code, found.explained_by) == ("shm-too-small", None)
    assert stale.level is Severity.INFO


def group(pattern: str, size: int, **fields: Any) -> dict[str, Any]:
    base = {"pattern": pattern, "files": 4, "bytes": size, "owner": "root", "gone": []}
    return {**base, "named": True, **fields}


def test_files_of_any_dead_program_are_the_cause_with_their_owner() -> None:
    leaked = group("sgl_shm_mm_*", 18_000 * MIB, files=852, gone=[4711])
    data = group("set.bin", 300 * MIB, named=False, files=1)
    bad = facts(18_400, needed=147, free=4 * MIB, error=FULL, left=[leaked, data])
    found = only(CHECK, cluster(bad), "shm-stale", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert "852 files sgl_shm_mm_* of root (process 4711 gone)" in found.message
    assert "set.bin" not in found.message, "it need not go"
    assert found.fix.startswith("for f in /dev/shm/sgl_shm_mm_*; do fuser -s")


def test_files_of_nobody_knows_whom_are_named_only_where_they_take_the_room() -> None:
    data = group("set.bin", 2000 * MIB, named=False, files=1)
    full = facts(2048, needed=147, free=4 * MIB, error=FULL, left=[data])
    found = only(CHECK, cluster(full), "shm-filled", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.POSSIBLE)
    assert "rm /dev/shm" not in found.to_json()["fix"], "somebody may need it"
    assert judge(CHECK, cluster(facts(needed=147, left=[data]))) == []


def test_no_command_has_a_name_that_a_shell_would_run() -> None:
    odd = group("nccl-$(reboot)", 5 * MIB)
    found = only(CHECK, cluster(facts(left=[odd])), "shm-stale", hosts=["nd1"])
    assert "reboot" not in found.to_json()["fix"]


@each_row(
    "name, pattern",
    [
        ("sgl_shm_mm_4711_0", "sgl_shm_mm_*"),
        ("psm_1a2b3c4d", "psm_*"),
        ("psm_deadbeef", "psm_*"),
        ("nccl-AbCdEf", "nccl-*"),
        ("torch_4711_99_0", "torch_*"),
        ("sem.mp-1a2b3c4d", "sem.mp-*"),
        ("set.bin", "set.bin"),
    ],
)
def test_files_of_one_program_have_one_pattern(name: str, pattern: str) -> None:
    assert pattern_of(name) == pattern


# Observing ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shared memory of a host that has the processes of this one."""
    (tmp_path / "proc").symlink_to("/proc")
    shm = tmp_path / "dev/shm"
    shm.mkdir(parents=True)
    return shm


def observe(
    folder: Path,
    backend: str = "gloo",
    ranks: int = 2,
    env: dict[str, str] | None = None,
    *,
    hosts: int = 1,
    mesh: tuple[tuple[str, int], ...] = (),
) -> Any:
    launch = replace(Launch(), local_world_size=ranks, world_size=hosts * ranks)
    quiet = {"NCCL_CONF_FILE": "/nonexistent", **(env or {})}
    context = Context(
        launch=launch, env=quiet, backend=backend, root=folder.parents[1], job=Job(mesh=mesh)
    )
    return CHECK.observe(context)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_it_really_allocates_and_leaves_nothing(folder: Path) -> None:
    seen = observe(folder, "nccl", 2)
    assert seen["error"] == ""
    assert seen["needed"] == 2 * 2 * 9_637_892
    assert seen["size"] >= seen["free"] > 0
    with largest_file(MIB):
        assert observe(folder, "nccl", 2)["error"] == "File too large"
        assert observe(folder, "gloo")["error"] == ""
    assert list(folder.iterdir()) == []


def test_device_files_of_nvswitches_are_looked_for_below_the_root(folder: Path) -> None:
    assert observe(folder, "nccl", 8)["least"] == 8 * 4_194_660
    (folder.parent / "nvidia-nvswitch0").touch()
    seen = observe(folder, "nccl", 8)
    assert seen["needed"] == seen["least"] == 8 * 4_194_660


def test_what_does_not_fit_is_tried_once_more_with_the_least(folder: Path) -> None:
    with largest_file(10 * MIB):
        seen = observe(folder, "nccl", 2)
    assert (seen["error"], seen["least_error"]) == ("File too large", "")
    with largest_file(MIB):
        assert observe(folder, "nccl", 2)["least_error"] == "File too large"
    assert observe(folder, "gloo", 2)["least"] == 0
    assert list(folder.iterdir()) == []


def test_one_rank_or_no_shared_memory_needs_little(folder: Path) -> None:
    assert observe(folder, "nccl", 1)["needed"] == 4_194_660
    assert observe(folder, "nccl", 8, {"NCCL_SHM_DISABLE": "1"})["needed"] == 0
    assert observe(folder, "gloo", 8)["needed"] == 0


POOL = 33_030_144


@pytest.mark.parametrize(
    ("ranks", "hosts", "mesh", "pools"),
    [
        (8, 1, (), 0),
        (8, 2, (), 1),
        (1, 2, (), 1),
        (8, 2, (("dp", 16),), 1),  # the default group itself
        (8, 2, (("dp", 2), ("tp", 8)), 2),
        (8, 4, (("pp", 2), ("dp", 2), ("tp", 8)), 3),
        (8, 2, (("dp", 1), ("tp", 16)), 2),
    ],
)
def test_several_hosts_need_a_file_for_each_rank_and_communicator(
    folder: Path, ranks: int, hosts: int, mesh: tuple[tuple[str, int], ...], pools: int
) -> None:
    (folder.parent / "nvidia-nvswitch0").touch()
    for env in ({}, {"NCCL_SHM_DISABLE": "1"}):
        inside = 0 if env else ranks * 4_194_660
        with largest_file(MIB):
            seen = observe(folder, "nccl", ranks, env, hosts=hosts, mesh=mesh)
        assert seen["needed"] == inside + ranks * pools * POOL
        assert seen["least"] == inside + min(ranks, 2) * pools * POOL
    assert observe(folder, "gloo", ranks, hosts=hosts, mesh=mesh)["needed"] == 0


def test_docker_s_64_mib_are_too_few_for_several_hosts(folder: Path) -> None:
    """Two ranks at least use the network: not even their files fit, and eight need 264 MB."""
    with largest_file(64 * MIB):
        assert observe(folder, "nccl", 8, {"NCCL_SHM_DISABLE": "1"})["error"] == ""
        seen = observe(folder, "nccl", 8, {"NCCL_SHM_DISABLE": "1"}, hosts=2)
    assert seen["error"] == "File too large"
    assert 264e6 < seen["needed"] < 265e6
    found = only(CHECK, cluster({**seen, "size": 64 * MIB, "free": 64 * MIB, "stale": []}),
                 "shm-too-small", hosts=["nd1"])  # fmt: skip
    assert found.level is Severity.FAIL


@pytest.mark.parametrize(
    ("env", "needed"),
    [
        ({"NCCL_MIN_NCHANNELS": "8"}, 2 * 8 * 9_637_892),
        ({"NCCL_MIN_CTAS": "4", "NCCL_MAX_NCHANNELS": "4"}, 2 * 4 * 9_637_892),
        ({"NCCL_MAX_NCHANNELS": "1"}, 2 * 9_637_892),
        ({"NCCL_BUFFSIZE": "8388608"}, 2 * 2 * (9_637_892 + 4 * MIB)),
        ({"NCCL_BUFFSIZE": "lots", "NCCL_MIN_NCHANNELS": "-2"}, 2 * 2 * 9_637_892),
        ({"NCCL_BUFFSIZE": "\u00b2"}, 2 * 2 * 9_637_892),
    ],
)
def test_what_is_needed_follows_the_variables(
    folder: Path, env: dict[str, str], needed: int
) -> None:
    assert observe(folder, "nccl", 2, env)["needed"] == needed


def test_nothing_is_allocated_where_the_control_group_would_kill(folder: Path) -> None:
    root = folder.parents[1]
    (root / "proc").unlink()
    for name, text in (
        ("proc/self/cgroup", "0::/\n"),
        ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
        ("sys/fs/cgroup/memory.max", f"{600 * MIB}\n"),
        ("sys/fs/cgroup/memory.current", f"{500 * MIB}\n"),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert observe(folder, "nccl", 1)["error"] == ""
    seen = observe(folder, "nccl", 8)
    assert seen["error"] == "the control group has 100 MiB of memory left"
    found = only(CHECK, cluster(seen), "shm-too-small", hosts=["nd1"])
    assert found.level is Severity.FAIL
    assert observe(folder, "gloo", 8)["error"] == ""


def test_a_folder_that_is_not_there(folder: Path) -> None:
    folder.rmdir()
    assert observe(folder)["size"] is None
    assert observe(folder)["error"] == "No such file or directory"


def test_files_that_somebody_has_open_are_not_stale(folder: Path) -> None:
    for name in ("nccl-dead", "nccl-held", "torch_1_2", "mine.txt"):
        (folder / name).write_bytes(b"x" * 5000)
    with (folder / "nccl-held").open("rb"):
        stale = observe(folder)["stale"]
    assert [name for name, _ in stale] == ["nccl-dead", "torch_1_2"]
    assert all(size >= 5000 for _, size in stale)
    assert sorted(os.listdir(folder)) == ["mine.txt", "nccl-dead", "nccl-held", "torch_1_2"]


def test_where_not_all_processes_are_seen_nothing_is_certain(folder: Path, tmp_path: Path) -> None:
    (folder / "nccl-dead").write_bytes(b"x" * 5000)
    (tmp_path / "proc").unlink()
    namespace = tmp_path / "proc/self/ns"
    namespace.mkdir(parents=True)
    (namespace / "pid").write_text("")
    seen = observe(folder)
    assert seen["sees_all"] is False
    stale = {"stale": [["nccl-dead", 5 * MIB]]}
    found = only(CHECK, cluster(facts(**stale, sees_all=False)), "shm-stale", hosts=["nd1"])
    assert found.confidence is Confidence.POSSIBLE
    assert found.message.endswith("unless other containers use them")
    sure = only(CHECK, cluster(facts(**stale)), "shm-stale", hosts=["nd1"])
    assert sure.confidence is Confidence.LIKELY


def test_a_mapped_file_is_in_use_though_nobody_has_it_open(folder: Path) -> None:
    path = folder / "nccl-mapped"
    path.write_bytes(b"x" * 5000)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    try:
        assert observe(folder)["stale"] == []
    finally:
        mapped.close()
    assert [name for name, _ in observe(folder)["stale"]] == ["nccl-mapped"]


def test_a_process_id_in_a_name_tells_whether_its_owner_is_gone(folder: Path) -> None:
    dead, alive = 4_199_999, os.getpid()  # more than any kernel gives, and this process
    for name in (f"sgl_shm_mm_{dead}_0", f"sgl_shm_mm_{alive}_0", "psm_1a2b3c4d"):
        (folder / name).write_bytes(b"x" * 5000)
    seen = observe(folder)
    groups = {each["pattern"]: each for each in seen["left"]}
    assert set(groups) == {"sgl_shm_mm_*", "psm_*"}
    assert groups["sgl_shm_mm_*"]["files"] == 1
    # In a PID namespace of its own, numbers in names may be those of another one.
    assert groups["sgl_shm_mm_*"]["gone"] == ([dead] if seen["sees_all"] else [])
