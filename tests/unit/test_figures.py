"""What checks say is worth comparing, and where it has become slower: many figures, few places."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nccl_doctor.api import Check, Cluster, Confidence, Figure, Job, Where
from nccl_doctor.checks.cpus import Cpus
from nccl_doctor.checks.environment import Environment
from nccl_doctor.checks.gpu_state import GpuState
from nccl_doctor.checks.gpu_work import GpuWork
from nccl_doctor.checks.group_speed import GroupSpeed
from nccl_doctor.checks.interfaces import Interfaces
from nccl_doctor.checks.limits import Limits
from nccl_doctor.checks.links import Links
from nccl_doctor.checks.nccl_library import NcclLibrary
from nccl_doctor.checks.network_speed import NetworkSpeed
from nccl_doctor.checks.rdma import Rdma
from nccl_doctor.checks.shared_memory import SharedMemory
from nccl_doctor.checks.software import Software
from nccl_doctor.judge.history import difference
from nccl_doctor.judge.history.compare import slower_places
from nccl_doctor.judge.history.figures import Change, sheet_of
from tests.support import environments, exchanges, peers
from tests.support.clusters import make_cluster
from tests.support.gpu_facts import H200, cluster, rates, worked
from tests.support.pasts import held_against, of, saved
from tests.support.reports import made_check
from tests.support.rows import each_row
from tests.support.timed_rounds import BUSY
from tests.unit.test_check_group_speed import held, hosts

SPEED = GroupSpeed()


def figures(check: Check, cluster: Cluster) -> list[Figure]:
    return list(check.figures(cluster))


def named(check: Check, cluster: Cluster) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures(check, cluster)}


# --- what checks say ---


SETUP = (Limits(), SharedMemory(), Cpus(), Rdma(), GpuState())


@each_row(
    "check",
    [
        *(Links(), SPEED, NetworkSpeed(), GpuWork(), Software(), Environment(), Interfaces()),
        *(NcclLibrary(), *SETUP),
    ],
)
def test_without_facts_there_is_nothing(check):
    assert figures(check, make_cluster()) == []


def test_links_give_the_better_of_two_tries():
    world = exchanges.World(3).slow([("nd0", "nd1")], tries=[exchanges.FIRST])
    by_place = {(f.name, f.where.links): f for f in figures(Links(), world.cluster())}
    assert by_place["bandwidth", (("nd0", "nd1"),)].value == pytest.approx(10.0)
    assert by_place["round-trip time", (("nd2", "nd1"),)].value == 50.0
    assert len(by_place) == 12
    busy = figures(Links(), exchanges.World(2).starve("nd0").cluster())
    assert {figure.counts for figure in busy} == {False}


def test_group_speed_gives_each_kind_of_group():
    made = replace(hosts(3), job=Job(mesh=(("dp", 3), ("tp", 2))))
    found = figures(SPEED, held(made, lambda *_: 0.01))
    places: dict[str, list[Where]] = {}
    for figure in found:
        places.setdefault(figure.name, []).append(figure.where)
    assert set(places) == {
        "time to compute, local rank 0",
        "time to compute, local rank 1",
        "all-reduce of all 6 ranks, 4 MiB",
        "all-reduce inside a host, 2 ranks, 4 MiB",
        "all-reduce between two hosts, 4 MiB",
        "all-reduce of dp groups, 3 ranks, 4 MiB",
        "all-reduce of tp groups, 2 ranks, 4 MiB",
    }
    assert places["all-reduce of all 6 ranks, 4 MiB"] == [Where()]
    assert [where.hosts for where in places["all-reduce inside a host, 2 ranks, 4 MiB"]] == [
        ("nd0",),
        ("nd1",),
        ("nd2",),
    ]
    assert len(places["all-reduce between two hosts, 4 MiB"]) == 3
    rate = next(f for f in found if f.name == "all-reduce of all 6 ranks, 4 MiB")
    assert (rate.value, rate.unit) == (pytest.approx(0.699, abs=1e-3), "GB/s")


def test_group_speed_of_a_busy_machine_does_not_count():
    found = figures(SPEED, held(hosts(2), lambda *_: 0.01, BUSY))
    assert {figure.counts for figure in found} == {False}


def test_gpus_and_their_rates():
    seen = named(GpuWork(), cluster({1: worked(1, rates(half=600), rates(half=700))}))
    assert seen["GPU GPU-1"].value == H200
    product = seen["bf16 matrix product"]
    assert (product.value, product.unit, product.better) == (700.0, "TFLOP/s", "higher")
    assert product.where.devices == ("GPU-1",)


def test_variables_interfaces_and_libraries():
    made = environments.cluster_of([{"NCCL_IB_TC": "106"}] * 2)
    assert named(Environment(), made)["NCCL_IB_TC"].value == "106"
    nics = named(Interfaces(), peers.World(2).cluster())
    assert nics["interface eth0"].value.endswith("MTU 1500")
    loaded = {"loaded": {"path": "/lib/libnccl.so.2", "version": "2.30.7", "fingerprint": "a"}}
    made = make_cluster(check="nccl_library", by_rank={0: loaded, 1: {"loaded": None}})
    (library,) = figures(NcclLibrary(), made)
    assert library.value == "2.30.7 from /lib/libnccl.so.2"


def test_a_variable_that_is_new_or_gone():
    old, new = ([{}] * 2, [{"NCCL_IB_TC": "106"}] * 2)
    check = (Environment(),)
    for before, now, words in (
        (old, new, "NCCL_IB_TC absent → 106"),
        (new, old, "NCCL_IB_TC 106 → absent"),
    ):
        runs = [saved(environments.cluster_of(before), day, check) for day in range(1, 5)]
        found = held_against(environments.cluster_of(now), runs, check).findings
        (changed,) = of(found, "setup-changed")
        assert words in changed.message


def test_words_of_ranks_that_differ_come_together_and_numbers_outlive_new_ranks():
    def sheet(*ranks: tuple[int, str]):
        facts = {r: {"torch": v, "python": "3.11"} for r, v in ranks}
        made = make_cluster(check="software", by_rank=facts)
        return sheet_of(made, [Software()])

    (torch,) = [f for k, f in sheet((0, "2.13"), (1, "2.12")).words.items() if k[1] == "torch"]
    assert torch.value == "2.12 / 2.13"
    assert torch.where == Where(hosts=("nd0",), ranks=(0, 1))


# --- where it is slower ---


def change(name: str, where: Where, share: float = -0.3, *, worse: bool = True) -> Change:
    sure = Confidence.LIKELY if worse else None
    figure = Figure(name, 100.0 * (1 + share), where, "GB/s", "higher")
    return Change("made", figure, 100.0, 10, confidence=sure)


def link(a: str, b: str) -> Where:
    return Where(links=((a, b),))


def pair(a: str, b: str) -> Where:
    return Where(links=((a, b), (b, a)))


def test_one_link_in_several_figures_is_one_place():
    names = ["nd0", "nd1", "nd2"]
    ways = [(a, b) for a in names for b in names if a != b]
    bad = ("nd0", "nd1")
    judged = [change("bandwidth", link(*way), worse=way == bad) for way in ways]
    judged += [
        change("all-reduce between two hosts", pair(*way), worse=way == bad)
        for way in ways
        if way[0] < way[1]
    ]
    judged += [change("all-reduce of all ranks", Where())]
    one, echo = slower_places(judged)
    assert (one.where, len(one.changes), one.echo) == (link("nd0", "nd1"), 2, False)
    assert (echo.where, echo.echo) == (Where(), True)


def test_the_pairs_of_a_slow_host_are_the_host():
    names = ["nd0", "nd1", "nd2", "nd3"]
    ways = [(a, b) for a in names for b in names if a != b]
    judged = [change("bandwidth", link(*way), worse="nd1" in way) for way in ways]
    judged += [change("ring", pair("nd0", "nd1")), change("ring", pair("nd1", "nd2"))]
    judged += [change("time", Where(hosts=("nd1",), ranks=(3,)))]
    (one,) = slower_places(judged)
    assert one.where == Where(hosts=("nd1",), ranks=(3,))


def test_a_group_over_a_slow_host_is_an_echo():
    judged = [
        change("inside", Where(hosts=("nd1",))),
        change("dp", Where(hosts=("nd0", "nd1"), ranks=(0, 2))),
        change("dp", Where(hosts=("nd2", "nd3"), ranks=(4, 6))),
    ]
    found = {place.where.hosts: place.echo for place in slower_places(judged)}
    assert found == {("nd1",): False, ("nd0", "nd1"): True, ("nd2", "nd3"): False}


def test_what_is_good_is_no_place():
    assert slower_places([]) == []
    assert slower_places([change("x", link("a", "b"), worse=False)]) == []
    (one,) = slower_places([change("x", Where())])
    assert (one.where, one.echo) == (Where(), False)


# --- what hosts are given, and how they are set ---

GPU = {
    "bus_id": "0000:18:00.0",
    "uuid": "GPU-1",
    "name": "NVIDIA H100 80GB HBM3",
    "vbios": "96.00.99.00.01",
    "ecc": [1, 1],
    "mig": [0, 0],
    "power_limit_mw": 700000,
}
PORT = {"device": "mlx5_0", "port": "1", "state": "ACTIVE", "link": "InfiniBand"}
GIVEN = {
    "limits": {"files": 1024, "locked": None, "processes": 4096},
    "shared_memory": {"size": 25276502016},
    "cpus": {"allowed": 64, "quota": None},
    "rdma": {"road": "infiniband", "ports": [{**PORT, "rate": "400 Gb/sec (4X NDR)"}]},
    "gpu_state": {"gpus": [GPU, {"index": 1, "uuid": None, "wedged": {"call": "x"}}]},
}
SAID = {
    "limit of open files": "1024",
    "limit of locked memory, MiB": "unlimited",
    "limit of processes": "4096",
    "size of /dev/shm": "24 GiB",
    "CPUs allowed": "64",
    "NCCL's network": "infiniband",
    "RDMA port mlx5_0:1": "ACTIVE, InfiniBand, 400 Gb/sec (4X NDR)",
    "GPU 0000:18:00.0": "NVIDIA H100 80GB HBM3, GPU-1, VBIOS 96.00.99.00.01, ECC on, MIG off, "
    "power limit 700 W",
}
CHANGED = {
    "limits": {"files": 1024, "locked": 64 << 10, "processes": None},
    "shared_memory": {"size": 64 << 20},
    "cpus": {"allowed": 64, "quota": 6.5},
    "rdma": {"road": "sockets", "ports": [{**PORT, "state": "DOWN", "rate": ""}]},
    "gpu_state": {"gpus": [{**GPU, "uuid": "GPU-7", "ecc": None, "power_limit_mw": 300000}]},
}
NOW = {
    "limit of locked memory, MiB": "0.0625",
    "limit of processes": "unlimited",
    "size of /dev/shm": "64 MiB",
    "CPUs allowed": "64, CPU time of 6.5 CPUs",
    "NCCL's network": "sockets",
    "RDMA port mlx5_0:1": "DOWN, InfiniBand",
    "GPU 0000:18:00.0": "NVIDIA H100 80GB HBM3, GPU-7, VBIOS 96.00.99.00.01, MIG off, power limit "
    "300 W",
}


@pytest.mark.parametrize("check", SETUP, ids=lambda check: check.name)
def test_what_a_host_is_given_and_what_changed_there(check):
    def made(of_second):
        facts = {"nd0": GIVEN[check.name], "nd1": of_second[check.name]}
        return make_cluster(check=check.name, by_host=facts)

    # Nothing here judges: the rules of these checks want more facts than these.
    then, now, nobody = made(GIVEN), made(CHANGED), [made_check(check.name)]
    for figure in figures(check, then):
        assert figure.value == SAID[figure.name]
        assert len(figure.where.hosts) == 1
    changed = difference(saved(then, 1, nobody), saved(now, 2, nobody), [check]).words
    words = {word.name: (word.before, word.now) for word in changed}
    assert words == {name: (SAID[name], NOW[name]) for name in NOW if name in named(check, then)}
    assert {word.where.hosts for word in changed} == {("nd1",)}
    runs = [saved(then, day, nobody) for day in range(1, 5)]
    (found,) = of(held_against(now, runs, [check]).findings, "setup-changed")
    assert found.where.hosts == ("nd1",)
    assert of(held_against(then, runs, [check]).findings, "setup-changed") == []
