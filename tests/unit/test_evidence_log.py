"""What a coordinator makes of the sign-ins of hosts of the own launcher."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.checks.ranks import Ranks
from nccl_doctor.checks.ranks_per_host import RanksPerHost
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.join import grown
from nccl_doctor.gather.messages import SignIn
from nccl_doctor.gather.opening import alone_as
from nccl_doctor.launch.detect import detect
from nccl_doctor.launch.ranks import host_launch
from nccl_doctor.model.cluster import ALONE, Cluster, Outcome, OutcomeStatus
from nccl_doctor.model.job import Job
from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.model.layout import Claim, lay_out
from nccl_doctor.model.options import Flags, Options
from nccl_doctor.toolkit.host import host_name
from nccl_doctor.toolkit.hosts import network_of
from tests.support.findings import judge
from tests.support.launches import MASTER, OPEN_MPI, PLAIN, RAY


def sign_in(node: int, nproc: int, **launch: Any) -> SignIn:
    flags = Flags(nnodes=3, node_rank=node, master_addr="nd0", nproc_per_node=str(nproc))
    return SignIn(
        token=f"token of {node}",
        pid=100 + node,
        launch=replace(host_launch(flags, nproc), **launch),
        host_name=f"nd{node}",
        host_key=f"key {node}",
        device="cpu",
    )


def called(*came: tuple[int, int], waited_s: float | None = None) -> EvidenceLog:
    """A roll call that was closed when these hosts (node rank, ranks) had come."""
    first = sign_in(*came[0])
    flags = Flags(nnodes=3, node_rank=0, master_addr="nd0")
    log = EvidenceLog(host_launch(flags, came[0][1]), {}, {})
    claims = []
    for seat, (node, nproc) in enumerate(came):
        log.sign_in(seat, sign_in(node, nproc) if seat else first, float(seat))
        claims.append(Claim(seat, node, 3, nproc))
    log.lay_out(lay_out(claims, 3), waited_s)
    return log


def test_hosts_on_one_machine_are_known_by_their_network_whatever_their_names() -> None:
    """Names and numbers of the kernel stay on the host."""
    keys = ("nd0|boot|4026531840", "pod|boot|4026531840", "nd0|boot|4026532001", "nd0")
    log = EvidenceLog(host_launch(Flags(nnodes=4, node_rank=0, master_addr="nd0"), 1), {}, {})
    for seat, key in enumerate(keys):
        log.sign_in(seat, replace(sign_in(seat, 1), host_key=key, addresses=("10.0.0.1",)), 0.0)
    made = log.cluster(Options(), "gloo", complete=False)
    assert len({host.key for host in made.hosts}) == 4
    assert not any("boot" in host.key or "402653" in host.key for host in made.hosts)
    assert len(set(map(network_of, made.hosts))) == 3
    first, pod, *_ = made.hosts
    assert network_of(first) == network_of(pod)


def test_who_is_not_here_in_words() -> None:
    flags = Flags(nnodes=3, node_rank=0, master_addr="nd0")
    log = EvidenceLog(host_launch(flags, 2), {}, {})
    log.sign_in(0, sign_in(0, 2), 0.0)
    assert log.not_here() == "nodes 1–2"
    log.sign_in(1, sign_in(2, 2, node_rank=None), 0.0)
    assert log.not_here() == "1 of 3 hosts"
    # Ranks that a host forks once it has its place are not awaited before the hosts are.
    assert called((0, 2), (2, 2)).not_here() == "node 1"
    assert called((0, 2), (1, 2), (2, 2)).not_here() == "ranks 1, 3, 5"
    launch = Launch("torchrun", 0, 6, local_world_size=2, nnodes=3, node_rank=0)
    log = EvidenceLog(launch, {}, {})
    log.sign_in(0, replace(sign_in(0, 2), launch=launch), 0.0)
    assert log.not_here() == "nodes 1–2, rank 1"
    log = EvidenceLog(replace(launch, local_world_size=None), {}, {})
    assert log.not_here() == "ranks 0–5"


def test_a_rank_that_its_agent_restarted_makes_no_second_claim() -> None:
    def of(rank: int, restarts: int, host: str = "nd0", *, agent_store: bool = True) -> SignIn:
        launch = Launch(
            "torchrun", rank, 4, restart_count=restarts, agent_store=agent_store, nnodes=2
        )
        return SignIn(f"token {rank}", 100 + rank, launch, host, f"key of {host}")

    log = EvidenceLog(Launch("torchrun", 0, 4), {}, {})
    log.sign_in(0, of(0, 0), 0.0)
    assert log.has_been(of(0, 1))
    assert not log.has_been(of(0, 0)), "two processes of one start claim it: a fault"
    assert not log.has_been(of(1, 1))
    assert not log.has_been(of(0, 1, "nd1")), "another agent, which counts for itself"
    assert not log.has_been(of(0, 1, agent_store=False))


def test_who_comes_again_takes_the_place_of_one_that_is_gone() -> None:
    def of(token: str, alone: str) -> SignIn:
        made = SignIn(token, 7, Launch("env", 1, 2), "nd1", "key", alone=alone)
        return SignIn.from_json(1, made.to_json())

    log = EvidenceLog(Launch("env", 0, 2), {}, {})
    log.sign_in(1, of("a", "rank 1 of nd1"), 0.0)
    assert log.give_way(of("b", "")) is None, "both live: a fault"
    assert log.give_way(of("b", "rank 1 of nd2")) is None, "another host: a fault"
    gone = log.give_way(of("b", "rank 1 of nd1"))
    assert gone == (1, of("a", "rank 1 of nd1"))
    assert log.seats == ()
    log.sign_in(2, of("b", "rank 1 of nd1"), 1.0)
    assert (log.seats, log.token(2)) == ((2,), "b")


def test_one_living_process_of_a_host_alone_claims_a_place() -> None:
    run = str(os.getpid())  # no other run of the tests
    rank, host = Launch("env", 1, 2, run_id=run), Launch(OWN, run_id=run)

    def alone(launch: Launch, **environ: str) -> str:
        return alone_as(launch, environ, "nd1")

    reader, writer = os.pipe()
    first = os.fork()
    if not first:
        told = [alone(launch) for launch in (rank, host, replace(host, node_rank=1))]
        os.write(writer, " | ".join(told).encode())
        signal.pause()
    try:
        assert os.read(reader, 99) == b"rank 1 of nd1 | host  of nd1 | host 1 of nd1"
        assert alone(rank) == alone(host) == ""
        assert alone(replace(rank, rank=0)) == "rank 0 of nd1"
        assert alone(replace(rank, rank=None)) == ""
        pod = alone(replace(rank, rank=3), KUBERNETES_SERVICE_HOST="10.0.0.1")
        assert pod == f"rank 3 of {host_name()}", "one that is made anew has another key"
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        os.close(reader)
        os.close(writer)
    assert alone(rank) == "rank 1 of nd1"


def ranks_of(cluster: Cluster) -> list[tuple[int | None, str, bool]]:
    return [(rank.rank, rank.host.label, rank.reported) for rank in cluster.ranks]


def test_an_elastic_job_misses_nobody_beyond_its_fewest_hosts() -> None:
    log = EvidenceLog(host_launch(Flags(nnodes=3, node_rank=0, master_addr="nd0"), 1), {}, {})
    for seat in (0, 1):
        log.sign_in(seat, sign_in(seat, 1), 0.0)
    log.lay_out(lay_out([Claim(seat, seat, 3, 1) for seat in (0, 1)], 3, 2))
    made = log.cluster(Options(job=Job(elastic=(1, 3))), "gloo")
    assert (made.nnodes, made.world_size, made.absent) == (2, 2, ())
    assert {rank.launch and rank.launch.nnodes for rank in made.ranks} == {2}
    found = judge(Ranks(), made)
    assert [(each.code, each.level.value) for each in found] == [("hosts-fewer-than-most", "info")]
    assert "2 hosts are here, of 1 to 3" in found[0].message


@pytest.mark.parametrize("environ", [PLAIN, OPEN_MPI, RAY], ids=["env", "mpirun", "ray"])
def test_hosts_with_different_numbers_of_ranks_are_counted(environ: dict[str, str]) -> None:
    """2 ranks on nd0 and 4 on nd1: by what nd0 knows, 6 ranks are 3 hosts."""
    start = "OMPI_COMM_WORLD_" if environ is OPEN_MPI else ""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    names = names if start else ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

    def launch(rank: int) -> Launch:
        local, size = (rank, 2) if rank < 2 else (rank - 2, 4)
        numbers = zip(names, (rank, 6, local, size), strict=True)
        told = {f"{start}{name}": str(n) for name, n in numbers}
        node = {"NODE_RANK": str(int(rank > 1))} if environ is RAY else {}
        return detect({**environ, **MASTER, **told, **node})

    log = EvidenceLog(launch(0), {}, {})
    for rank in range(6):
        if rank == 5:
            assert log.cluster(Options(), "gloo").nnodes == 3, "nobody knows better yet"
        host = f"nd{int(rank > 1)}"
        log.sign_in(rank, SignIn(f"token {rank}", 100 + rank, launch(rank), host, f"key {host}"), 0)
    made = log.cluster(Options(), "gloo")
    assert (made.nnodes, len(made.hosts), made.absent) == (2, 2, ())
    assert [(each.code, each.level.value) for each in judge(RanksPerHost(), made)] == [
        ("nproc-differs", "info")
    ]


def test_absent_ranks_are_those_of_absent_hosts_and_of_siblings() -> None:
    log = called((0, 2), (2, 2))
    assert log.ranks_here() == {0, 4}
    assert ranks_of(log.cluster(Options(), "gloo")) == [
        (0, "nd0", True),
        (4, "nd2", True),
        (1, "nd0", False),
        (2, "node 1", False),
        (3, "node 1", False),
        (5, "nd2", False),
    ]


def test_a_host_that_comes_after_the_places_were_given_does_not_join() -> None:
    log = called((0, 2), (2, 2))
    log.sign_in(7, sign_in(1, 2), 61.0)
    assert log.knows(7)
    assert log.seats == (0, 1)
    cluster = log.cluster(Options(), "gloo")
    assert {host.name: host.joined for host in cluster.hosts} == {
        "nd0": True,
        "nd1": False,
        "nd2": True,
    }
    # Its ranks have the numbers that its place would have given them.
    assert [(rank.rank, rank.reported) for rank in cluster.ranks if rank.host.name == "nd1"] == [
        (2, True),
        (3, False),
    ]


def test_the_cluster_says_how_long_the_hosts_were_waited_for() -> None:
    options = Options(join_timeout_s=30.0)
    assert called((0, 2)).cluster(options, "gloo").join_timeout_s == 30.0
    assert called((0, 2), waited_s=2.5).cluster(options, "gloo").join_timeout_s == 2.5


def test_what_was_found_once_stays_known_until_there_are_more_facts_of_what_it_read() -> None:
    log, options = called((0, 1), (1, 1)), Options()
    found: list[int] = []

    def look() -> list[int]:
        def find() -> int:
            found.append(len(found))
            return found[-1]

        cluster = log.cluster(options, "gloo", steps=False)
        return [cluster.once(key, (key, "both"), find) for key in ("firewall", "loss")]

    outcome = Outcome(OutcomeStatus.OK)
    assert look() == look() == [0, 1]
    log.record(0, "loss", "calls", outcome)
    assert look() == [0, 2]
    log.record(1, "both", "calls", outcome)
    assert look() == [3, 4]
    log.sign_in(2, sign_in(2, 1), 5.0)
    assert look() == [5, 6]


def test_ranks_that_a_host_forked_came_with_their_host() -> None:
    log = called((0, 2), (1, 2), (2, 2))
    log.sign_in(3, sign_in(1, 2, rank=3, local_rank=1), 9.5)
    cluster = log.cluster(Options(), "gloo")
    came = {rank.rank: rank.signed_in_s for rank in cluster.present}
    assert came == {0: 0.0, 2: 1.0, 3: 1.0, 4: 2.0}


def test_a_sign_in_is_the_same_after_its_way_through_the_store() -> None:
    ends = {
        "clock": {ALONE: Outcome(OutcomeStatus.OK, {"offset_s": 0.1}, duration_s=0.25)},
        "port": {ALONE: Outcome(OutcomeStatus.HUNG, breadcrumbs=({"step": "connect"},))},
    }
    who = replace(sign_in(1, 2), env={"NCCL_DEBUG": "INFO"}, addresses=("10.0.0.2",), facts=ends)
    assert SignIn.from_json(1, json.loads(json.dumps(who.to_json()))) == who


@pytest.mark.parametrize(
    ("node", "nproc", "fits"), [(1, 8, True), (100_000, 1, True), (100_000, 8, False)]
)
def test_a_host_with_which_there_were_too_many_ranks_does_not_sign_in(
    node: int, nproc: int, fits: bool
) -> None:
    with nullcontext() if fits else pytest.raises(ValueError, match="more than 131072 ranks"):
        assert grown((2, 1), sign_in(node, nproc).launch) == (max(2, node + 1), nproc)


def test_the_phases_of_joining_come_with_the_sign_in() -> None:
    """Those of another version are left out; what is no number makes the message invalid."""
    who = replace(sign_in(0, 1), joining={"connect_s": 1.5, "load": 0.25})
    data = json.loads(json.dumps(who.to_json()))
    data["joining"]["asleep_s"] = 3.0
    log = EvidenceLog(host_launch(Flags(nnodes=3, node_rank=0, master_addr="nd0"), 1), {}, {})
    log.sign_in(0, SignIn.from_json(0, data), 0.0)
    (rank,) = log.cluster(Options(), "gloo", complete=False).present
    assert rank.joining == {"connect_s": 1.5, "load": 0.25}
    data["joining"]["connect_s"] = "long"
    with pytest.raises(ValueError, match="connect_s"):
        SignIn.from_json(0, data)
