"""Check `network_speed` in real processes, where gloo stands in for NCCL."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from nccl_doctor.api import Context, Launch
from nccl_doctor.checks.network_speed.verbs import PROGRAM, gid_index, written_both_ways
from nccl_doctor.checks.network_speed.verbs_python import MODULE, has_pyverbs, written_by_pyverbs
from nccl_doctor.system.helpers import send_foreign
from nccl_doctor.toolkit.host import addresses
from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.net.interfaces import is_loopback
from tests.support import fabrics
from tests.support.forkserver import Forked
from tests.support.made_up_verbs import install_pyverbs
from tests.support.perftest import install_perftest

WORLD = 2
LIMIT_S = 60
RANK = """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist
from nccl_doctor.api import Context, Launch
from nccl_doctor.checks.network_speed import NetworkSpeed

seat, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
params, path, master, limit_s = sys.argv[4:]
sys.path.insert(0, str(folder / "site"))
real, at_init = dist.init_process_group, {}

def init_process_group(*args, **kwargs):
    at_init.update({name: value for name, value in os.environ.items() if "NCCL" in name})
    return real(*args, **kwargs)

dist.init_process_group = init_process_group

class OnFile:
    def store(self):
        return dist.FileStore(str(folder / "store"), world)

    def post(self, tag, value):
        (folder / f".{tag}-{seat}").write_text(json.dumps(value))
        (folder / f".{tag}-{seat}").rename(folder / f"{tag}-{seat}")

    def collect(self, tag, timeout_s, of=None):
        end = time.monotonic() + timeout_s
        files = {each: folder / f"{tag}-{each}" for each in range(world)}
        while time.monotonic() < end and not all(file.exists() for file in files.values()):
            time.sleep(0.01)
        return {each: json.loads(file.read_text()) for each, file in files.items() if file.exists()}

facts = NetworkSpeed().observe(Context(
    launch=Launch(local_rank=1, master_addr=master),
    env={"NCCL_CONF_FILE": "/nonexistent", "NCCL_ALGO": "Ring", "PATH": path},
    deadline=time.monotonic() + float(limit_s), round="network-0", seat=seat,
    group=tuple(range(world)), params=json.loads(params), root=folder, peers=OnFile(),
))
print(json.dumps({**facts, "at_init": at_init}), flush=True)
os._exit(0)  # as probe children leave: gloo's threads may want the GIL once it is gone, and abort
"""
END = {"qpn": 1, "psn": 2, "rkey": 3, "address": 4, "lid": 5, "mtu": 4,
       "gid": "fe80:0000:0000:0000:0000:0000:0000:0001"}  # fmt: skip
ALONE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
"""What leaves nothing but the network."""


def observed(
    folder: Path,
    *,
    path: str = "/nonexistent",
    master: str = "127.0.0.1",
    limit_s: int = 6,
    code: str = RANK,
    **params: Any,
) -> list[dict[str, Any]]:
    """Facts of each rank, with NCCL's variables `at_init`: when it entered the group."""
    outputs = [folder / f"{seat}.out" for seat in range(WORLD)]
    ranks = [
        Forked(
            [str(seat), str(WORLD), str(folder), json.dumps(params), path, master, str(limit_s)],
            {name: value for name, value in os.environ.items() if "NCCL" not in name},
            folder=folder,
            out=out,
            err=out.with_suffix(".err"),
            code=code,
        )
        for seat, out in enumerate(outputs)
    ]
    try:
        for rank in ranks:
            rank.wait(LIMIT_S)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD
    return [json.loads(out.read_text().splitlines()[-1]) for out in outputs]


def test_nvlink_and_shared_memory_are_off_before_the_group_forms(tmp_path: Path) -> None:
    for facts in observed(tmp_path):
        assert ALONE.items() <= facts["at_init"].items()
        assert not {"NCCL_IB_HCA", "NCCL_NET"} & set(facts["at_init"])
        sizes = [each["bytes"] for each in facts["all_reduce"]]
        assert sizes
        assert sizes == [1 << 20, 1 << 24, 1 << 27][: len(sizes)]
        assert all(each["busbw"] == pytest.approx(each["algbw"]) for each in facts["all_reduce"])
        assert facts["slowing"] == {"NCCL_ALGO": "Ring"}
        assert "nic" not in facts


def test_one_nic_is_named_to_nccl_and_no_other_network_is_left(tmp_path: Path) -> None:
    fabrics.connectx7(tmp_path, 4)
    for facts in observed(tmp_path, rails={"0": 0, "1": 2}):
        wanted = {**ALONE, "NCCL_IB_HCA": "=mlx5_2:1", "NCCL_NET": "IB"}
        assert wanted.items() <= facts["at_init"].items()
        assert (facts["rail"], facts["nic"]) == (2, "mlx5_2:1")
        assert facts["all_reduce"]
        assert "by" not in facts


# --- RDMA writes in place of NCCL ---


@pytest.fixture
def own_address() -> str:
    """An address of this machine by which another one could call it."""
    found = [each.address for each in addresses()]
    usable = [each for each in found if ":" not in each and not is_loopback(each)]
    return usable[0] if usable else pytest.skip("this machine has no IPv4 address but loopback")


def test_rdma_writes_go_both_ways_in_place_of_nccl(tmp_path: Path, own_address: str) -> None:
    fabrics.connectx7(tmp_path, 4)
    path = install_perftest(tmp_path / "bin", gbps=366.5)
    for facts in observed(tmp_path, path=str(path), master=own_address, limit_s=16, rails={"1": 2}):
        assert (facts["by"], facts["nic"], facts["gbps"]) == (
            "ib_write_bw",
            "mlx5_2:1",
            [366.5, 366.5],
        )
        (timed,) = facts["all_reduce"]
        assert timed["busbw"] == pytest.approx(366.5 * 125e6)
        assert facts["at_init"] == {}, "no group was formed"
        assert facts["slowing"] == {}, "nothing of NCCL slows it down"
    calls = [json.loads(line) for line in (path / "calls").read_text().splitlines()]
    assert [call["server"] for call in calls].count(None) == 2
    assert [call["server"] for call in calls].count(own_address) == 2
    assert {(call["d"], call["i"], call["x"]) for call in calls} == {("mlx5_2", "1", None)}


def test_where_writes_fail_nccl_is_asked(tmp_path: Path, own_address: str) -> None:
    fabrics.connectx7(tmp_path, 4)
    path = install_perftest(tmp_path / "bin", broken=["mlx5_2"])
    for facts in observed(tmp_path, path=str(path), master=own_address, limit_s=16, rails={"1": 2}):
        assert "by" not in facts
        assert facts["at_init"]["NCCL_IB_HCA"] == "=mlx5_2:1"
        assert facts["all_reduce"]


def test_pyverbs_writes_where_a_host_has_no_program(tmp_path: Path, own_address: str) -> None:
    fabrics.connectx7(tmp_path, 4)
    site = install_pyverbs(tmp_path / "site")
    found = observed(tmp_path, master=own_address, limit_s=16, rails={"1": 2})
    assert found[0]["all_reduce"] == found[1]["all_reduce"]
    for facts in found:
        assert (facts["by"], facts["nic"], facts["slowing"]) == ("pyverbs", "mlx5_2:1", {})
        assert facts["at_init"] == {}, "no group was formed"
        (timed,) = facts["all_reduce"]
        assert timed["busbw"] == pytest.approx(min(facts["gbps"]) * 125e6)
        assert timed["bytes"] % (1 << 20) == 0
        assert timed["cpu"]["cpu_s"] > 0
    written = {file.read_bytes()[:8] for file in site.glob("pyverbs/world/mr-*[0-9]")}
    assert len(written) == 1, "each wrote to the other, the second what the first had written"
    ends = [json.loads(line) for line in (site / "ends").read_text().splitlines()]
    assert [end["ah_attr"]["is_global"] for end in ends] == [0, 0]
    assert {end["path_mtu"] for end in ends} <= {4, 5}


def test_the_program_is_preferred_to_the_module(tmp_path: Path, own_address: str) -> None:
    fabrics.connectx7(tmp_path, 4)
    install_pyverbs(tmp_path / "site", fault="crash")
    path = install_perftest(tmp_path / "bin")
    for facts in observed(tmp_path, path=str(path), master=own_address, limit_s=16, rails={"1": 2}):
        assert facts["by"] == "ib_write_bw"


def test_where_pyverbs_crashes_nccl_is_asked(tmp_path: Path, own_address: str) -> None:
    fabrics.connectx7(tmp_path, 4)
    install_pyverbs(tmp_path / "site", fault="crash")
    for facts in observed(tmp_path, master=own_address, limit_s=16, rails={"1": 2}):
        assert "by" not in facts
        assert facts["at_init"]["NCCL_IB_HCA"] == "=mlx5_2:1"
        assert facts["all_reduce"]


def wrote(site: Path, gid_index: int, limit_s: float = 20) -> list[Any]:
    """What `written_by_pyverbs` returns to each of two members; in a process of its own."""

    def work() -> bytes:
        sys.path.insert(0, str(site))
        letters: dict[tuple[str, int], Queue[Any]] = defaultdict(Queue)

        def member(position: int) -> Any:
            def exchange(what: str, value: Any) -> Any:
                letters[what, position].put(json.loads(json.dumps(value)))
                return letters[what, 1 - position].get(timeout=2 * limit_s)

            return written_by_pyverbs("mlx5_2:1", gid_index, position, exchange, limit_s)

        with ThreadPoolExecutor(2) as pool:
            return json.dumps(list(pool.map(member, (0, 1)))).encode()

    return list(json.loads(send_foreign("wrote", work, 60)))


@pytest.mark.parametrize("fault", ["open", "crash", "hang", "status"])
def test_both_learn_that_writes_failed(tmp_path: Path, fault: str) -> None:
    site = install_pyverbs(tmp_path / "site", fault=fault)
    started = time.monotonic()
    assert wrote(site, -1, limit_s=1 if fault == "hang" else 20) == [None, None]
    assert time.monotonic() - started < 15, "it did not wait for one that has ended"


@pytest.mark.parametrize(
    ("link_layer", "gid_index", "index"), [(2, 3, 3), (2, -1, 0), (1, 1, 1), (1, -1, None)]
)
def test_an_end_is_found_by_its_gid_on_roce_or_where_one_is_named(
    tmp_path: Path, link_layer: int, gid_index: int, index: int | None
) -> None:
    site = install_pyverbs(tmp_path / "site", fault="status", link_layer=link_layer)
    assert wrote(site, gid_index) == [None, None]
    for end in map(json.loads, (site / "ends").read_text().splitlines()):
        assert end["ah_attr"]["is_global"] == (index is not None)
        assert end.get("index") == index
        assert index is None or (end["dgid"].endswith(f":{index:04x}") and end["hops"] == 255)


@pytest.mark.parametrize(
    "told",
    [None, 7, [], {}, {"gid": "x"}, {**END, "qpn": "1"}, {**END, "lid": -1}, {**END, "gid": None}],
)
def test_what_is_no_end_of_a_connection_is_refused(tmp_path: Path, told: Any) -> None:
    site = install_pyverbs(tmp_path / "site")
    said: list[Any] = []

    def exchange(what: str, value: Any) -> Any:
        said.append(what)
        return told if what == "end" else True

    def work() -> bytes:
        sys.path.insert(0, str(site))
        return json.dumps([written_by_pyverbs("mlx5_2:1", -1, 0, exchange, 20), said]).encode()

    assert json.loads(send_foreign("end", work, 60)) == [None, ["end", "ready"]]
    assert not (site / "ends").exists()


def test_the_gid_is_the_one_that_nccl_would_take(tmp_path: Path) -> None:
    fabrics.roce(tmp_path)
    fixed = {"NCCL_IB_GID_INDEX": Setting("1", "environment")}
    assert gid_index("mlx5_0:1", {}, tmp_path) == 3
    assert gid_index("mlx5_0:1", fixed, tmp_path) == 1
    assert (gid_index("ib9:1", {}, tmp_path), gid_index("ib9:1", fixed, tmp_path)) == (-1, 1)


@pytest.mark.parametrize(("files", "there"), [(["__init__", "qp"], True), (["__init__"], False)])
def test_a_pyverbs_that_does_not_fit_this_python_is_none(
    tmp_path: Path, files: list[str], there: bool
) -> None:
    (tmp_path / "pyverbs").mkdir()
    for name in files:
        (tmp_path / f"pyverbs/{name}.py").touch()

    def work() -> bytes:
        sys.path.insert(0, str(tmp_path))
        return json.dumps(has_pyverbs()).encode()

    assert json.loads(send_foreign("has", work, 20)) is there


class Stranger:
    """The other member of a round, who posts what nobody would."""

    def __init__(self, has: Any) -> None:
        self.has = has
        self.said: list[str] = []

    def post(self, key: str, value: Any) -> None:
        self.said.append(key)

    def collect(self, key: str, timeout_s: float, of: Any = None) -> Mapping[int, Any]:
        return {1: self.has if key == "verbs" else 7}


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.9", True),
        ("--out_json_file=/x", False),
        ("10.0.0.1 --x", False),
        ("", False),
        (None, False),
        (["10.0.0.1"], False),
    ],
)
def test_only_an_address_of_another_host_becomes_a_word_of_a_command(
    tmp_path: Path, own_address: str, address: Any, told: bool
) -> None:
    program, words = tmp_path / PROGRAM, tmp_path / "words"
    program.write_text(f'#!/bin/sh\necho "$@" >> {words}\nexit 1\n')
    program.chmod(0o755)
    ctx = Context(
        Launch(master_addr=own_address),
        {"PATH": str(tmp_path)},
        deadline=time.monotonic() + 8,
        root=tmp_path,
        group=(0, 1),
        peers=Stranger({PROGRAM: address}),
    )
    assert written_both_ways(ctx, "mlx5_0:1", {}) is None
    assert words.exists() is told
    assert not told or words.read_text().endswith("-p 7 127.0.0.9\n")


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    "theirs", [None, 7, {}, {PROGRAM: "127.0.0.9"}, {MODULE: False}, {MODULE: "1"}, {MODULE: True}]
)
def test_what_one_host_lacks_is_not_used(tmp_path: Path, own: bool, theirs: Any) -> None:
    site = install_pyverbs(tmp_path / "site")

    def work() -> bytes:
        others = [path for path in sys.path if not Path(path, MODULE).exists()]
        sys.path[:] = [str(site)] * own + others
        peers = Stranger(theirs)
        ctx = Context(Launch(), {}, deadline=time.monotonic() + 8, group=(0, 1), peers=peers)
        return json.dumps([written_both_ways(ctx, "mlx5_0:1", {}), peers.said]).encode()

    measured, said = json.loads(send_foreign("lacks", work, 20))
    assert measured is None
    assert (said != ["verbs"]) == (own and theirs == {MODULE: True})
