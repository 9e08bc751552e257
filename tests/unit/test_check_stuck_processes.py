"""Processes that are stuck in the kernel, on made-up folders of /proc and clusters."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Context, Launch, Severity, Skip, Untested
from nccl_doctor.checks.stuck_processes import StuckProcesses, stuck
from tests.support import fabrics
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.observing import observe
from tests.support.rows import each_row

CHECK = StuckProcesses()
CONTEXT = Context(launch=Launch(), env={})
KERNEL_THREAD = 0x00200000
YOUNG = 1 << 60


def add(
    proc: Path,
    pid: int,
    name: str,
    state: str = "S",
    *,
    parent: int = 1,
    flags: int = 0x00400000,
    ticks: int = 7,
    started: int = 100,
    switches: int | None = 3,
    wchan: str | None = None,
) -> None:
    """A process as the kernel shows it; `started` in clock ticks since boot."""
    fields = [state, parent, pid, pid, 0, -1, flags, 0, 0, 0, 0, ticks, 0, 0, 0, 20, 0, 1, 0,
              started, 1000]  # fmt: skip
    fabrics.write(proc, f"{pid}/stat", f"{pid} ({name}) {' '.join(map(str, fields))}")
    if switches is not None:
        text = f"Name:\t{name}\nvoluntary_ctxt_switches:\t{switches}\n"
        fabrics.write(proc, f"{pid}/status", f"{text}nonvoluntary_ctxt_switches:\t1")
    if wchan is not None:
        fabrics.write(proc, f"{pid}/wchan", wchan)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    proc = tmp_path / "proc"
    add(proc, 1, "systemd")
    add(proc, 2, "kthreadd", flags=KERNEL_THREAD, parent=0)
    add(proc, 40, "python (3) x)")  # a name may hold any character
    fabrics.write(proc, "self/mounts", "proc /proc proc rw,nosuid 0 0")
    return proc


def look(folder: Path) -> dict[str, Any]:
    return observe(StuckProcesses, root=folder.parent)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of every pause between two looks, which are not spent."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def test_a_host_where_nothing_is_stuck_is_looked_at_once(proc: Path, pauses: list[float]) -> None:
    assert look(proc) == {"seen": 3, "hidden": False, "stuck": [], "mounts": []}
    assert pauses == []
    add(proc, 50, "python", "D", wchan="rpc_wait_bit_killable")
    assert len(look(proc)["stuck"]) == len(pauses) == 1


def test_processes_that_do_not_move_are_found_with_where_they_wait(proc: Path) -> None:
    add(proc, 50, "python", "D", wchan="rpc_wait_bit_killable")
    add(proc, 51, "df", "D", wchan="0")  # as for processes of others
    add(proc, 52, "lvm", "D", switches=None)
    fabrics.write(proc, "self/mounts", "proc /proc proc rw 0 0\nfs1:/home /my\\040home nfs4 rw 0 0")
    seen = look(proc)
    assert seen["stuck"] == [
        {"pid": 50, "name": "python", "wchan": "rpc_wait_bit_killable"},
        {"pid": 51, "name": "df", "wchan": ""},
        {"pid": 52, "name": "lvm", "wchan": ""},
    ]
    assert seen["mounts"] == [["/my home", "nfs4"]]


def test_what_always_waits_or_is_young_is_left_out(proc: Path, pauses: list[float]) -> None:
    add(proc, 60, "kworker/3:1", "D", flags=KERNEL_THREAD, parent=2)
    add(proc, 61, "bash", "D", wchan="kernel_clone")
    add(proc, 62, "paused", "D", wchan="__refrigerator")
    add(proc, 63, "ls", "D", started=YOUNG)
    add(proc, 64, "gone", "Z")
    assert look(proc)["stuck"] == []
    assert pauses == []  # nor does anybody wait for these


@pytest.mark.parametrize(
    "change",
    [
        {"ticks": 8},
        {"switches": 4},
        {"started": 101},
        {"state": "S"},
        {"name": "other"},
    ],
)
def test_one_that_moved_in_between_is_not_stuck(proc: Path, change: dict[str, Any]) -> None:
    add(proc, 50, "dd", "D")
    first = stuck.waiting(proc, stuck.processes(proc), 1000)
    assert {one.pid for one in stuck.again(proc, first)} == {50}
    add(proc, 50, **{"name": "dd", "state": "D", **change})
    assert stuck.again(proc, first) == set()


def test_one_that_ended_in_between_is_not_stuck(proc: Path) -> None:
    add(proc, 50, "dd", "D")
    first = stuck.waiting(proc, stuck.processes(proc), 1000)
    (proc / "50/stat").unlink()
    assert stuck.again(proc, first) == set()


def test_our_own_processes_are_left_out(proc: Path) -> None:
    mine = os.getpid()
    rank, launcher, then = 10_000_001, 10_000_002, -90_000
    add(proc, launcher, "torchrun", "D", started=then - 100)
    add(proc, rank, "python", "D", parent=launcher, started=then)
    add(proc, mine, "ncd:host", "D", parent=rank)
    add(proc, 10_000_003, "ncd:gpu_state", "D", parent=rank)
    add(proc, 10_000_004, "python", "D", parent=launcher, started=then + 1)  # the next rank
    add(proc, 10_000_005, "sh", "D", parent=10_000_004)
    assert look(proc)["stuck"] == []
    add(proc, 10_000_006, "python", "D", parent=launcher)  # of another run
    add(proc, 10_000_007, "python", "D")  # whose launcher is gone
    assert [one["pid"] for one in look(proc)["stuck"]] == [10_000_006, 10_000_007]


def test_where_processes_of_others_are_hidden_it_is_skipped(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(proc, 50, "python", "D", wchan="rpc_wait_bit_killable")
    (proc / "1/stat").unlink()
    assert look(proc)["hidden"]  # and one's own is stuck all the same
    (proc / "50/stat").unlink()
    with pytest.raises(Skip, match="hidepid"):
        look(proc)


@pytest.mark.parametrize("option", ["hidepid=2", "hidepid=invisible", "gid=4,hidepid=noaccess"])
def test_a_mount_option_hides_processes_from_everybody_but_root(proc: Path, option: str) -> None:
    fabrics.write(proc, "self/mounts", f"proc /proc proc rw,{option},nosuid 0 0")
    assert stuck.hides_processes(proc.parent) == (os.geteuid() != 0)
    fabrics.write(proc, "self/mounts", "proc /proc proc rw,hidepid=0 0 0")
    assert not stuck.hides_processes(proc.parent)


def test_without_proc_it_could_not_look(tmp_path: Path) -> None:
    with pytest.raises(Untested, match="cannot be read"):
        look(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "50 (x", "50 (x) D 1", "nonsense"])
def test_files_that_are_torn_are_no_process(proc: Path, text: str) -> None:
    fabrics.write(proc, "50/stat", text)
    assert look(proc)["seen"] == 3


def test_this_machine() -> None:
    assert CHECK.observe(CONTEXT)["seen"] > 1


# Whose fault it is --------------------------------------------------------------------------------


def host(*found: tuple[str, str], mounts: Any = ()) -> dict[str, Any]:
    stuck_ones = [{"pid": 50 + i, "name": n, "wchan": w} for i, (n, w) in enumerate(found)]
    return {"seen": 300, "hidden": False, "stuck": stuck_ones, "mounts": list(mounts)}


def cluster(bad: dict[str, Any]) -> Cluster:
    hosts = {"nd0": host(), "nd1": bad, "nd2": host()}
    return make_cluster(list(hosts), check="stuck_processes", by_host=hosts)


def test_a_host_where_processes_wait_for_a_file_server() -> None:
    nfs = "rpc_wait_bit_killable"
    mounts = [["/home", "nfs4"], ["/scratch", "lustre"]]
    bad = host(("python", nfs), ("python", nfs), ("df", "nfs_getattr"), mounts=mounts)
    found = only(CHECK, cluster(bad), "process-stuck", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert found.message == (
        "3 processes are stuck in NFS: df in nfs_getattr, python x 2 in rpc_wait_bit_killable"
        ", of /home (nfs4)"
    )
    assert "umount -f -l /home" in found.fix


@each_row(
    ("name", "wchan", "words"),
    [
        ("python", "uvm_va_space_destroy", "NVIDIA's driver"),
        ("python", "_nv012345rm", "NVIDIA's driver"),
        ("nvidia-smi", "", "NVIDIA's driver"),
        ("nvidia-smi", "rwsem_down_read_slowpath", "NVIDIA's driver"),
        ("python", "nvme_submit_user_cmd", "NVMe"),
        ("mount.nfs4", "", "NFS"),
        ("nvidia-smi", "nfs_wait_on_request", "NFS"),
        ("python", "request_wait_answer", "a file system in user space (FUSE)"),
        ("python", "ldlm_completion_ast", "Lustre"),
        ("python", "ceph_mdsc_wait_request", "Ceph"),
        ("python", "mlx5_cmd_exec", "RDMA"),
    ],
)
def test_what_they_wait_for(name: str, wchan: str, words: str) -> None:
    found = only(CHECK, cluster(host((name, wchan))), "process-stuck", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert found.message.startswith(f"1 process is stuck in {words}: {name}")
    assert found.fix


@pytest.mark.parametrize("wchan", ["", "io_schedule", "folio_wait_bit_common", "exit_aio"])
def test_what_nobody_can_tell_is_only_worth_knowing(wchan: str) -> None:
    found = only(CHECK, cluster(host(("python", wchan))), "process-stuck", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.INFO, Confidence.POSSIBLE)
    assert found.message.startswith("1 process is stuck in the kernel: python")
    assert "blocked for more than" in found.kind.fix


def test_two_causes_on_one_host_are_two_findings() -> None:
    found = judge(CHECK, cluster(host(("a", "nfs_x"), ("b", "nvme_x"), ("c", "io_schedule"))))
    assert [one.level.value for one in found] == ["warn", "warn", "info"]
    assert {one.where.hosts for one in found} == {("nd1",)}
