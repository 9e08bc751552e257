"""Storage of the job: rules on made-up hosts."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Confidence, Context, Job, Launch, Severity, Skip
from nccl_doctor.checks.paths import Paths
from nccl_doctor.judge.causes import explain
from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.toolkit.host import Mount
from nccl_doctor.toolkit.storage.examine import ALL, HEADS
from nccl_doctor.toolkit.storage.file_systems import is_network, may_be_shared, mount_of, server_of
from nccl_doctor.toolkit.storage.rules import paths_of
from tests.support.clusters import make_cluster
from tests.support.findings import calls, judge, only
from tests.support.rows import each_row
from tests.support.storages import LOCAL, PATH, Storage

CHECK = Paths()
OTHER_NFS = ("nfs4", "fs2:/old", "/ckpt")


def found(world: Storage, code: str, *hosts: str, **where: Any) -> Any:
    return only(CHECK, world.cluster("paths"), code, hosts=hosts, **where)


# Healthy


@each_row("world", [
    Storage(4),
    Storage(1),
    Storage(1, LOCAL),
    # A disk of its own on every host; two containers of one machine see the same.
    Storage(3, LOCAL, share=False),
    Storage(3, LOCAL).apart(["nd0", "nd1"], ["nd2"]),
    Storage(4, LOCAL).apart(["nd0", "nd1"], ["nd2", "nd3"]),
    Storage(2, ("tmpfs", "tmpfs", "/dev/shm"), share=False),
    # The file server is a host of the job.
    Storage(3).change("nd0", mount=LOCAL),
    # By two names of the server; it is the same, as they see each other.
    Storage(2).change("nd1", mount=("nfs4", "10.0.0.9:/export", "/ckpt")),
    # Hosts without disks: each has an export of its own.
    Storage(2, share=False).change("nd1", mount=("nfs4", "fs1:/nodes/nd1", "/")),
    # Each virtual machine has a folder of the machine around it, by the same name.
    Storage(3, ("9p", "share0", "/ckpt"), share=False),
    Storage(3, ("fuse.unknown", "unknown", "/ckpt"), share=False),
    # Only read: nobody could see anything of the others.
    Storage(3, LOCAL, share=False).change("nd0", "nd1", "nd2", writes=False, sees={}),
    # File systems that do not know how much room they have.
    Storage(2).change("nd0", "nd1", free=None, inodes_free=None),
    # Slow everywhere, and slower than others by what nobody feels.
    Storage(4).change("nd0", "nd1", "nd2", "nd3", write_s=3.0),
    Storage(4).change("nd1", write_s=0.4),
    # A whole host did not answer: nobody sees it.
    Storage(2).change("nd0", sees={"99": None}),
])  # fmt: skip
def test_what_is_healthy_is_silent(world: Storage) -> None:
    assert judge(CHECK, world.cluster("paths")) == []


# Shared, or not


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_host_without_the_mount_is_named(count: int) -> None:
    world = Storage(count).change("nd1", mount=LOCAL)
    world.apart(["nd1"], [name for name in world.names if name != "nd1"])
    one = found(world, "path-not-shared", "nd1")
    assert one.message.startswith(f"{PATH}: ")
    assert "ext4 /dev/sda1 on nd1" in one.message
    assert "nfs4 fs1:/export on nd0" in one.message
    assert one.fix == "mount -t nfs4 fs1:/export /ckpt"
    assert (one.level, one.confidence) == (Severity.FAIL, Confidence.CERTAIN)


def test_a_disk_of_the_server_is_another_one_than_that_of_the_host_without_the_mount() -> None:
    world = Storage(4).change("nd0", "nd3", mount=LOCAL).apart(["nd0", "nd1", "nd2"], ["nd3"])
    one = found(world, "path-not-shared", "nd3")
    assert "another ext4 /dev/sda1 on nd3" in one.message
    assert one.fix == "mount -t nfs4 fs1:/export /ckpt"


def test_a_host_with_another_export_is_named() -> None:
    world = Storage(3).change("nd2", mount=OTHER_NFS).apart(["nd0", "nd1"], ["nd2"])
    found(world, "path-not-shared", "nd2")


def test_what_most_hosts_share_from_outside_of_their_machine() -> None:
    world = Storage(3, ("virtiofs", "pool", "/ckpt")).apart(["nd0", "nd2"], ["nd1"])
    one = found(world, "path-not-shared", "nd1")
    assert one.fix == ""  # nothing that could be typed in the machine


def test_of_two_halves_nobody_knows_which_is_right() -> None:
    world = Storage(4).change("nd2", "nd3", mount=OTHER_NFS)
    world.apart(["nd0", "nd1"], ["nd2", "nd3"])
    one = found(world, "path-not-shared", "nd0", "nd1", "nd2", "nd3")
    assert (one.level, one.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert "nfs4 fs1:/export on nd0, nd1; nfs4 fs2:/old on nd2, nd3" in one.message


def test_what_is_only_read_is_compared_by_its_mount() -> None:
    world = Storage(3).change("nd0", "nd1", "nd2", writes=False, sees={})
    one = found(world.change("nd1", mount=LOCAL), "path-not-shared", "nd1")
    assert (one.level, one.confidence) == (Severity.WARN, Confidence.LIKELY)


def test_what_one_host_does_not_see_with_the_same_mount() -> None:
    world = Storage(4).sees("nd2", ["nd0", "nd1", "nd3"], None)
    links = [("nd2", "nd0"), ("nd2", "nd1"), ("nd2", "nd3")]
    one = found(world, "path-not-visible", "nd2", links=links)
    assert "not visible within 8 s (3 of 12 ordered pairs)" in one.message
    assert (one.level, one.confidence) == (Severity.WARN, Confidence.LIKELY)


def test_with_two_hosts_the_link_is_named() -> None:
    found(Storage(2).sees("nd1", ["nd0"], None), "path-not-visible", links=[("nd1", "nd0")])


# One host


@each_row("number step code words", [
    (errno.ENOENT, "look", "path-missing", "mount -t nfs4 fs1:/export /ckpt; or mkdir -p"),
    (errno.ENOTDIR, "look", "path-missing", "mkdir -p"),
    (errno.EACCES, "look", "path-not-readable", f"ls -ld {PATH}"),
    (errno.EACCES, "write", "path-not-writable", f"--path {PATH}:ro"),
    (errno.EPERM, "write", "path-not-writable", "root is nobody"),
    (errno.EROFS, "write", "path-read-only", "mount -o remount,rw /ckpt"),
    (errno.ENOSPC, "write", "path-full", f"df -h {PATH}"),
    (errno.EDQUOT, "write", "path-full", "quota -s"),
    (errno.ESTALE, "look", "path-stale", "umount -l /ckpt && mount /ckpt"),
    (errno.ESTALE, "find", "path-stale", "umount -l /ckpt"),
    (errno.EIO, "write", "path-io-error", "dmesg"),
    (errno.ENOTCONN, "look", "path-io-error", "dmesg"),
    (errno.ENOENT, "write", "path-io-error", "dmesg"),
    (None, "write", "path-io-error", "dmesg"),
])  # fmt: skip
def test_each_error_of_one_host(number: int, step: str, code: str, words: str) -> None:
    one = found(Storage(3).fail("nd1", number, step, "the reason"), code, "nd1")
    assert "the reason" in one.message
    assert words in (one.fix or one.kind.fix)
    assert one.level is Severity.FAIL


def test_what_is_missing_everywhere_is_one_finding() -> None:
    world = Storage(3)
    for name in world.names:
        world.fail(name, errno.ENOENT, text="No such file or directory")
    cluster = world.cluster("paths")
    hosts = [f.where.hosts for f in explain(judge(CHECK, cluster), cluster)]
    assert hosts == [("nd0",), ("nd1",), ("nd2",)]
    assert {(f.message, f.fix) for f in judge(CHECK, cluster)} == {
        (f"{PATH}: No such file or directory", f"mkdir -p {PATH}; or correct the option")
    }


def test_a_dead_file_server_is_named_with_what_the_process_waits_for() -> None:
    hung = {"step": "look", "after_s": 8.0, "state": "D", "wchan": "rpc_wait_bit_killable"}
    world = Storage(3).change("nd1", hung=hung, sees={}).apart(["nd0", "nd2"], ["nd1"])
    one = found(world, "path-hangs", "nd1")
    assert one.message == (
        f"{PATH}: looking at it did not end within 8 s (process state D, which waits for NFS)"
    )
    assert "umount -f -l" in one.fix
    assert one.confidence is Confidence.CERTAIN
    world.change("nd1", mount=LOCAL, hung={**hung, "step": "write", "wchan": "", "state": ""})
    one = found(world, "path-hangs", "nd1")
    assert one.message.endswith("writing a file of 4 KiB with fsync did not end within 8 s")
    assert one.confidence is Confidence.LIKELY  # it may only be slow


def test_little_room() -> None:
    one = found(Storage(2, LOCAL, share=False).change("nd1", free=5 << 20), "path-full", "nd1")
    assert one.message == f"{PATH}: 5 MiB free"
    world = Storage(2).change("nd0", free=6 << 20, inodes_free=7).change("nd1", free=5 << 20)
    one = found(world, "path-full", "nd0", "nd1")  # it is one, a moment later
    assert one.message == f"{PATH}: 5 MiB free, 7 inodes free"
    assert one.level is Severity.WARN
    assert judge(CHECK, Storage(1).change("nd0", free=0, writes=False).cluster("paths")) == []


def test_one_slow_host_among_equals() -> None:
    one = found(Storage(4).change("nd3", write_s=2.5), "path-slow", "nd3")
    assert "takes 2.5 s, on the other hosts 0.004 s" in one.message


def test_a_file_where_the_others_have_a_folder() -> None:
    one = found(Storage(3).change("nd2", form="file"), "path-missing", "nd2")
    assert one.message == f"{PATH} is a folder on nd0, nd1; a file on nd2"


# The check


def test_without_the_option_it_is_skipped() -> None:
    with pytest.raises(Skip, match="--path DIR was not given"):
        CHECK.plan(make_cluster())


def test_many_hosts_meet_in_groups_and_then_their_first_ones() -> None:
    names = [f"nd{i}" for i in range(70)]
    cluster = make_cluster(names, 1, job=Job(paths=(("/a", True),)))
    first, second = CHECK.plan(cluster)
    assert (first.name, [len(group) for group in first.groups]) == (ALL, [32, 32, 6])
    assert (second.name, second.groups) == (HEADS, ((0, 32, 64),))
    assert first.params == {"paths": [["/a", True]]}
    (alone,) = CHECK.plan(make_cluster(["nd0"], job=Job(paths=(("/a", True),))))
    assert alone.groups == ((0,),)


def test_what_the_first_hosts_of_groups_see_counts_as_well() -> None:
    first, then = Storage(2, share=False), Storage(2).change("nd0", sees={"4": 0.1})
    both = first.cluster("paths")
    later = then.cluster("paths", HEADS)
    hosts = [
        replace(host, facts={"paths": {**host.facts["paths"], **late.facts["paths"]}})
        for host, late in zip(both.hosts, later.hosts, strict=True)
    ]
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in both.ranks)
    seen = paths_of(replace(both, hosts=tuple(hosts), ranks=ranks), "paths")[PATH]
    assert seen[0]["sees"] == {"2": None, "4": 0.1}


def test_the_work_grows_with_the_hosts() -> None:
    def work(count: int) -> int:
        world = Storage(2)
        facts = world.facts["nd0"]
        world.names = [f"nd{i}" for i in range(count)]
        world.facts = {name: {**facts, "sees": {"2": 0.1}} for name in world.names}
        cluster = world.cluster("paths")
        return calls(lambda: list(CHECK.judge(cluster)))

    assert work(400) < 5 * work(100)


def test_a_record_of_a_job_keeps_the_paths() -> None:
    job = Job(paths=(("/a", True), ("/b", False)))
    assert decode(Job, Node("job", encode(job))) == job
    assert decode(Job, Node("job", {})).paths == ()


def test_observed_here(tmp_path: Any) -> None:
    params = {"paths": [[str(tmp_path), True], [str(tmp_path / "none"), True]]}
    here = CHECK.observe(Context(launch=Launch(), env={}, params=params))["paths"]
    assert here[0]["form"] == "folder"
    assert here[0]["write_s"] >= 0
    assert here[1]["error"] == {
        "step": "look",
        "errno": errno.ENOENT,
        "text": "No such file or directory",
    }
    assert list(tmp_path.iterdir()) == []


# File systems


def test_the_mount_of_a_path() -> None:
    mounts = [
        Mount("/", "overlay", "rw", "overlay"),
        Mount("/data", "autofs", "rw", "auto"),
        Mount("/data", "nfs4", "rw", "fs1:/data"),
        Mount("/data/own", "ext4", "rw", "/dev/sdb"),
    ]
    assert mount_of("/data/x", mounts) is mounts[2]
    assert mount_of("/data", mounts) is mounts[2]
    assert mount_of("/database", mounts) is mounts[0]
    assert mount_of("/data/own/x", mounts) is mounts[3]
    assert mount_of("/x", []) is None


@each_row("source server", [
    ("fs1.corp:/export", "fs1.corp"),
    ("//fs1/share", "fs1"),
    ("10.0.0.1@o2ib:/scratch", ""),
    ("/dev/sda1", ""),
    ("overlay", ""),
])  # fmt: skip
def test_the_server_of_a_file_system(source: str, server: str) -> None:
    assert server_of(source) == server


@each_row("kind network shared", [
    ("nfs4", True, True),
    ("nfs", True, True),
    ("nfsd", False, False),
    ("lustre", True, True),
    ("fuse.juicefs", True, True),
    ("fuse.encfs", False, True),
    ("virtiofs", False, True),
    ("ext4", False, False),
    ("", False, False),
])  # fmt: skip
def test_types_of_file_systems(kind: str, network: bool, shared: bool) -> None:
    assert (is_network(kind), may_be_shared(kind)) == (network, shared)
