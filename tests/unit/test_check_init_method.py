"""The file in which ranks meet: rules on made-up hosts, and a real one."""

from __future__ import annotations

import errno
import fcntl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Context, Finding, Job, Launch, Severity, Skip
from nccl_doctor.checks.init_method import InitMethod
from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.toolkit.storage.steps import PathDesk, ranks_of_store
from tests.support.clusters import make_cluster, outcome, reread
from tests.support.findings import judge, only
from tests.support.rows import each_row
from tests.support.storages import LOCAL, Storage

CHECK = InitMethod()
FILE = {"regular": True, "size": 438, "age_s": 200.0, "owner": 1000, "ranks": 4}


class World(Storage):
    """Hosts that share the folder of the file, which is not there, with locks that work."""

    def __init__(self, count: int, *mount: Any, **fields: Any) -> None:
        super().__init__(count, *mount, path="/ckpt", **fields)
        for name in self.names:
            feels = dict.fromkeys(self.facts[name]["sees"], True)
            self.change(name, file=None, lock_error="", feels=feels)

    def made(self) -> Cluster:
        cluster = self.cluster(CHECK.name, job=Job(init_file="/ckpt/init"))
        hosts = []
        for host in cluster.hosts:
            told = {"paths": [self.facts[host.name or ""]], "name": "init"}
            hosts.append(replace(host, facts=reread({CHECK.name: {"hosts": outcome(told)}})))
        ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
        return replace(cluster, hosts=tuple(hosts), ranks=ranks)


def found(world: World, code: str, *hosts: str, **where: Any) -> Finding:
    one = only(CHECK, world.made(), code, hosts=hosts, **where)
    assert one.level is Severity.FAIL
    return one


@each_row("world", [
    World(3),
    World(1, LOCAL),
    # Made by mktemp, as torch wants it: an empty file is a new one.
    World(2).change("nd0", "nd1", file={**FILE, "size": 0, "ranks": None}),
    # Little room is enough for it, and nobody waits for a slow disk.
    World(4).change("nd1", free=1 << 20, write_s=4.0),
    # A lock that could not be tried says nothing.
    World(2).change("nd1", feels={"0": None}),
])  # fmt: skip
def test_what_is_healthy_is_silent(world: World) -> None:
    assert judge(CHECK, world.made()) == []


def test_a_file_of_an_earlier_run() -> None:
    world = World(2).change("nd0", file=FILE).change("nd1", file={**FILE, "age_s": 201.0})
    one = found(world, "init-file-left-over", "nd0", "nd1")
    assert one.message == "/ckpt/init: 438 bytes, last written 3 minutes ago, used by 4 ranks"
    assert one.fix == "rm /ckpt/init"
    world.change("nd0", file={**FILE, "ranks": 16, "age_s": 3 * 86400})
    one = found(world, "init-file-left-over", "nd0", "nd1")
    assert one.message.endswith("3 days ago, used by 16 ranks (this job has 4)")
    world = World(2).change("nd0", "nd1", file={**FILE, "ranks": None, "age_s": 7.0})
    assert found(world, "init-file-left-over", "nd0", "nd1").message.endswith("written 7 s ago")


def test_a_folder_in_place_of_the_file() -> None:
    world = World(2).change("nd0", "nd1", file={**FILE, "regular": False})
    one = found(world, "init-file-left-over", "nd0", "nd1")
    assert (one.message, one.fix) == ("/ckpt/init is there, and no file", "give another file")


def test_one_host_without_the_shared_folder() -> None:
    world = World(3)
    world.apart(["nd1"], ["nd0", "nd2"])
    world.change("nd1", mount=LOCAL)
    one = found(world, "init-file-not-shared", "nd1")
    assert one.message == "/ckpt/init: nfs4 fs1:/export on nd0, nd2; ext4 /dev/sda1 on nd1"
    assert one.fix == "mount -t nfs4 fs1:/export /ckpt"


def test_of_two_hosts_the_one_without_the_network_is_named() -> None:
    world = World(2, share=False)
    found(world.change("nd1", mount=LOCAL), "init-file-not-shared", "nd1")


def test_a_file_on_the_disk_of_each_host() -> None:
    one = found(World(2, LOCAL, share=False), "init-file-not-shared", "nd0", "nd1")
    assert one.message == "/ckpt/init: another ext4 /dev/sda1 on nd1; ext4 /dev/sda1 on nd0"
    assert one.confidence is Confidence.LIKELY


def test_locks_that_are_not_there() -> None:
    world = World(3).change("nd2", lock_error="Function not implemented")
    world.change("nd0", "nd1", feels={"4": False})
    one = found(world, "init-file-no-lock", "nd2")
    assert one.message == "/ckpt: flock: Function not implemented"
    assert "-o flock" in one.kind.fix


def test_locks_that_only_this_host_feels() -> None:
    world = World(2).change("nd0", feels={"2": False}).change("nd1", feels={"0": False})
    both = [("nd0", "nd1"), ("nd1", "nd0")]
    one = found(world, "init-file-no-lock", "nd0", "nd1", links=both)
    assert "(nfs4): a lock of one host does not keep another one out (2 of 2" in one.message


def test_a_folder_that_is_missing_or_hangs_is_that_of_check_paths() -> None:
    one = found(World(3).fail("nd1", errno.ENOENT), "path-missing", "nd1")  # type: ignore[arg-type]
    assert "mount -t nfs4 fs1:/export /ckpt; or mkdir -p /ckpt" in one.fix
    one = found(World(3).fail("nd1", errno.EACCES, "write"), "path-not-writable", "nd1")  # type: ignore[arg-type]
    assert ":ro" not in one.fix


def test_without_a_file_it_is_skipped() -> None:
    with pytest.raises(Skip, match="--init-method file:///PATH was not given"):
        CHECK.plan(make_cluster())
    (one,) = CHECK.plan(make_cluster(job=Job(init_file="/a/b")))
    assert (one.groups, one.params) == (((0, 2),), {"file": "/a/b"})
    assert decode(Job, Node("job", encode(Job(init_file="/a/b")))).init_file == "/a/b"


def test_a_file_that_torch_has_left(tmp_path: Path) -> None:
    path = tmp_path / "init"
    key, value = b"\x17\0\0\0/default_pg/0//cpu//0/1", b"\x03\0\0\0abc"
    counts = [b"\x09\0\0\0refcount/\x01\0\0\0" + number for number in (b"1", b"2", b"1")]
    path.write_bytes(counts[0] + key + value + counts[1] + key + value + counts[2])
    context = Context(launch=Launch(), env={}, params={"file": str(path)})
    (here,) = CHECK.observe(context)["paths"]
    assert here["file"]["size"] == path.stat().st_size
    assert here["file"]["ranks"] == 2
    assert here["lock_error"] == ""
    assert path.exists()
    assert [each.name for each in tmp_path.iterdir()] == ["init"]


@each_row(
    "content", [b"", b"x", b"\xff\xff\xff\xff", b"\x09\0\0\0refcount/\x01\0\0\0x", b"\0" * 99]
)
def test_what_is_no_store(content: bytes) -> None:
    assert ranks_of_store(content) is None


def test_a_lock_of_another_host_is_felt(tmp_path: Path) -> None:
    """Locks of two open files keep each other out, whoever has opened them."""
    desks = [PathDesk(str(tmp_path)) for _ in "12"]
    for desk in desks:
        desk.steps["look"]()
    files = [[told["name"], told["token"]] for told in (desk.steps["write"]() for desk in desks)]
    for desk in desks:
        assert desk.steps["lock"]() == {"lock_error": ""}
    assert desks[0].steps["find"](files={"2": files[1]}, limit_s=1)["feels"] == {"2": True}
    fcntl.flock(desks[1]._locked, fcntl.LOCK_UN)
    assert desks[0].steps["find"](files={"2": files[1]}, limit_s=1)["feels"] == {"2": False}
    for desk in desks:
        desk.put_away()
    assert list(tmp_path.iterdir()) == []
