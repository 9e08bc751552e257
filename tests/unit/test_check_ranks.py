"""The rules of the check `ranks`, on made-up clusters."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Context,
    Job,
    Launch,
    LaunchProblem,
    On,
    Severity,
    Where,
)
from nccl_doctor.model.codec import Node, decode, encode
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster, shut_out, with_round
from tests.support.findings import calls, everywhere
from tests.support.rows import each_row

CHECK = CHECKS["ranks"]
THREE = ("nd0", "nd1", "nd2")
NO_RESTARTS = "elastic-without-restarts"
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)


def explained(cluster: Cluster) -> list[tuple[str, str]]:
    return sorted((f.code, f.explained_by) for f in judge(cluster) if f.explained_by is not None)


def claim(cluster: Cluster, seat: int, rank: int) -> Cluster:
    """A participant that says it is another rank."""
    return change_rank(cluster, seat, rank=rank, launch={"rank": rank})


def twin(cluster: Cluster, node: int, of: int, nproc: int) -> Cluster:
    """Host `node` claims the node rank of host `of`; the ranks it should have had are absent."""
    own = [rank for rank in cluster.ranks if rank.host.id == node]
    gone = replace(cluster.hosts[node], id=len(cluster.hosts), name=None, reported=False)
    absent = [
        replace(r, seat=len(cluster.ranks) + i, host=gone, reported=False, launch=None)
        for i, r in enumerate(own)
    ]
    hosts = [replace(h, node_rank=of) if h.id == node else h for h in cluster.hosts]
    cluster = replace(cluster, hosts=(*hosts, gone), ranks=(*cluster.ranks, *absent))
    for local, rank in enumerate(own):
        cluster = claim(cluster, rank.seat, of * nproc + local)
        cluster = change_rank(cluster, rank.seat, host=hosts[node], launch={"node_rank": of})
    return cluster


class TestHealthy:
    @pytest.mark.parametrize(("hosts", "nproc"), [(("nd0",), 1), (("nd0",), 8), (THREE, 4)])
    def test_nothing(self, hosts: Sequence[str], nproc: int) -> None:
        assert judge(make_cluster(hosts, nproc)) == []

    def test_after_a_trip_through_json(self) -> None:
        cluster = everywhere(make_cluster(THREE), [4, 5], nnodes=4, world_size=8)
        again = cluster
        for rank in cluster.ranks:
            assert rank.launch is not None
            data = json.loads(json.dumps(encode(rank.launch)))
            again = change_rank(again, rank.seat, launch=vars(decode(Launch, Node("launch", data))))
        assert judge(again) == judge(cluster) != []

    def test_observe_says_who_it_takes_itself_for(self) -> None:
        sources = {"nnodes": "derived from WORLD_SIZE and LOCAL_WORLD_SIZE"}
        launch = Launch(rank=3, world_size=4, nnodes=2, sources=sources)
        facts = CHECK.observe(Context(launch=launch, env={}))
        assert facts["rank"] == 3
        assert facts["world_size"] == 4
        assert facts["nnodes"] is None
        json.dumps(facts)

    def test_a_big_cluster_is_judged_quickly(self) -> None:
        small, large = (make_cluster([f"nd{n}" for n in range(count)], 8) for count in (64, 128))
        assert judge(large) == []
        assert calls(lambda: judge(large)) < 2.5 * calls(lambda: judge(small))


class TestAbsent:
    def test_host(self) -> None:
        cluster = make_cluster(THREE, absent_nodes=[1])
        finding = only(cluster, "host-absent", ranks=[2, 3], nodes=[1])
        assert finding.level is Severity.FAIL
        assert "1 of 3 hosts" in finding.message
        assert "60 s" in finding.message
        assert finding.message.endswith("; node 0 listens on nd0, at 192.168.77.1 port 29500")
        assert "--node-rank=1 --master-addr=nd0 --master-port=29500" in finding.fix

    def test_the_address_at_which_node_0_listens(self) -> None:
        def said(*answers: str) -> str:
            nics = [["docker0", ["172.17.0.1"]], ["eth1", ["10.0.0.1"]]]
            seen = {"master": {"answers": list(answers)}, "interfaces": nics}
            made = make_cluster(THREE, 1, absent_nodes=[1])
            made = with_round(made, "master_addr", "alone", {"nd0": seen})
            return only(made, "host-absent", ranks=[1], nodes=[1]).message

        assert "nd0, at 192.168.77.1 port" in said("127.0.1.1", "192.168.77.1")
        assert "nd0, at 10.0.0.1 port" in said("127.0.1.1")  # not docker0

    def test_several_hosts_are_one_finding(self) -> None:
        finding = only(
            make_cluster(THREE, absent_nodes=[1, 2]),
            "host-absent",
            ranks=[2, 3, 4, 5],
            nodes=[1, 2],
        )
        assert "2 of 3 hosts" in finding.message

    def test_a_host_that_the_scheduler_names(self) -> None:
        cluster = make_cluster(THREE, absent_nodes=[1])
        named = replace(cluster.hosts[1], name="gpu08")
        ranks = [replace(r, host=named) if r.host.id == 1 else r for r in cluster.ranks]
        hosts = (cluster.hosts[0], named, cluster.hosts[2])
        cluster = replace(cluster, hosts=hosts, ranks=tuple(ranks))
        finding = only(cluster, "host-absent", hosts=["gpu08"], ranks=[2, 3], nodes=[1])
        (shown,) = finding.fix.steps
        assert (shown.on, shown.shows) == (On.HERE, True)
        assert shown.command == (
            "nccl-doctor run --nnodes=3 --node-rank=1 --master-addr=nd0 --master-port=29500"
        )

    def test_a_host_of_a_job_whose_agents_meet_at_an_endpoint(self) -> None:
        cluster = make_cluster(THREE, absent_nodes=[1])
        sources = dict.fromkeys(("master_addr", "master_port"), "--rdzv-endpoint")
        for rank in cluster.present:
            cluster = change_rank(cluster, rank.seat, launch={"sources": sources})
        fix = only(cluster, "host-absent", ranks=[2, 3], nodes=[1]).fix
        line = "torchrun --nnodes=3 --rdzv-backend=c10d --rdzv-endpoint=nd0:29500"
        assert fix.steps[0].command == f"nccl-doctor run -- {line} --no-python hostname"
        assert f"# {line}" in fix
        assert "node-rank" not in fix

    def test_rank(self) -> None:
        cluster = change_rank(make_cluster(), 3, reported=False, launch=None)
        only(cluster, "rank-absent", hosts=["nd1"], ranks=[3])

    def test_own_view_misses_nobody(self) -> None:
        cluster = make_cluster(absent_nodes=[1], complete=False)
        assert judge(change_rank(cluster, 0, launch={"nnodes": 7})) == []

    def test_rank_of_a_host_nobody_can_tell(self) -> None:
        cluster = make_cluster()
        nowhere = replace(cluster.hosts[1], id=2, name=None, node_rank=None, reported=False)
        gone = replace(cluster.ranks[3], host=nowhere, reported=False, launch=None)
        cluster = replace(
            cluster, ranks=(*cluster.ranks[:3], gone), hosts=(*cluster.hosts, nowhere)
        )
        only(cluster, "rank-absent", ranks=[3])

    def test_a_full_host_is_not_where_the_absent_rank_is(self) -> None:
        cluster = make_cluster()
        guess = replace(cluster.ranks[3], seat=4, rank=4, reported=False, launch=None)
        cluster = replace(cluster, ranks=(*cluster.ranks, guess), world_size=5)
        only(cluster, "rank-absent", ranks=[4])


class TestTwins:
    def test_two_hosts_with_one_node_rank(self) -> None:
        cluster = twin(make_cluster(THREE), 2, 1, nproc=2)
        finding = only(
            cluster, "node-rank-duplicate", hosts=["nd1", "nd2"], ranks=[2, 3], nodes=[1]
        )
        assert finding.message == "2 hosts claim node rank 1"
        (step,) = finding.fix.steps  # node 2 is free
        assert (step.on, step.command) == (("nd2",), "# --node-rank 2")
        assert explained(cluster) == [("host-absent", "node-rank-duplicate")]

    @each_row(
        ("tasks", "fix"),
        [
            ("3", ["# --node-rank $SLURM_NODEID"]),
            ("6", ["# srun --ntasks-per-node=1", "# --node-rank $SLURM_NODEID"]),
        ],
    )
    def test_what_to_type_where_slurm_has_numbered_the_hosts(
        self, tasks: str, fix: list[str]
    ) -> None:
        cluster = twin(make_cluster(THREE), 2, 1, nproc=2)
        for seat in range(6):
            numbers = {"SLURM_NODEID": str(seat // 2), "SLURM_NTASKS": tasks, "SLURM_NNODES": "3"}
            cluster = change_rank(cluster, seat, env=numbers)
        finding = only(
            cluster, "node-rank-duplicate", hosts=["nd1", "nd2"], ranks=[2, 3], nodes=[1]
        )
        assert [step.command for step in finding.fix.steps] == fix

    def test_one_rank_per_host(self) -> None:
        cluster = twin(make_cluster(THREE, nproc=1), 2, 1, nproc=1)
        only(cluster, "node-rank-duplicate", hosts=["nd1", "nd2"], ranks=[1], nodes=[1])

    def test_a_host_that_is_absent_besides_is_not_explained_away(self) -> None:
        hosts = ("nd0", "nd1", "nd2", "nd3")
        cluster = twin(make_cluster(hosts, absent_nodes=[3]), 2, 1, nproc=2)
        roots = {f.code: f for f in judge(cluster) if f.explained_by is None}
        assert set(roots) == {"node-rank-duplicate", "host-absent"}
        assert roots["host-absent"].where == Where(ranks=(4, 5, 6, 7), nodes=(2, 3))

    def test_beside_a_host_that_only_sent_its_own_report(self) -> None:
        cluster = twin(make_cluster(THREE), 2, 0, nproc=2)
        cluster = change_rank(shut_out(cluster, "nd1"), 3, reported=False, launch=None)
        roots = sorted((f.code, f.where.hosts) for f in judge(cluster) if f.explained_by is None)
        assert roots == [("host-absent", ("nd1",)), ("node-rank-duplicate", ("nd0", "nd2"))]
        assert explained(cluster) == [("host-absent", "node-rank-duplicate")]

    def test_two_processes_with_one_rank(self) -> None:
        cluster = claim(make_cluster(), 3, 2)
        gone = replace(cluster.ranks[3], seat=4, rank=3, reported=False, launch=None)
        cluster = replace(cluster, ranks=(*cluster.ranks, gone))
        finding = only(cluster, "rank-duplicate", hosts=["nd1"], ranks=[2])
        assert finding.message == "claimed by 2 processes of one host"
        assert explained(cluster) == [("rank-absent", "rank-duplicate")]

    def test_one_rank_on_two_hosts(self) -> None:
        cluster = claim(make_cluster(), 3, 1)
        finding = only(cluster, "rank-duplicate", hosts=["nd0", "nd1"], ranks=[1])
        assert finding.evidence["claims"] == [
            {"rank": 1, "host": "nd0", "pid": 1001},
            {"rank": 1, "host": "nd1", "pid": 1003},
        ]

    def test_counting_from_one(self) -> None:
        problem = LaunchProblem("rank-out-of-range", "RANK=4 with WORLD_SIZE=4", {"RANK": "4"})
        cluster = change_rank(claim(make_cluster(), 3, 4), 3, launch={"problems": (problem,)})
        gone = replace(cluster.ranks[3], seat=4, rank=3, reported=False, launch=None)
        cluster = replace(cluster, ranks=(*cluster.ranks, gone))
        assert explained(cluster) == [("rank-absent", "rank-out-of-range")]
        assert len(judge(cluster)) == 1


class TestLocalRanks:
    def shared(self, **fields: Any) -> Cluster:
        return change_rank(make_cluster(**fields), 3, local_rank=0, launch={"local_rank": 0})

    def test_nccl(self) -> None:
        cluster = self.shared(backend="nccl")
        finding = only(cluster, "local-rank-duplicate", hosts=["nd1"], ranks=[2, 3])
        assert finding.level is Severity.FAIL
        assert "LOCAL_RANK=0" in finding.message

    def test_gloo_does_not_mind(self) -> None:
        finding = only(self.shared(), "local-rank-duplicate", hosts=["nd1"], ranks=[2, 3])
        assert finding.level is Severity.WARN

    def test_each_task_sees_a_gpu_of_its_own(self) -> None:
        env = {2: {"CUDA_VISIBLE_DEVICES": "0"}, 3: {"CUDA_VISIBLE_DEVICES": "1"}}
        assert judge(self.shared(backend="nccl", env=env)) == []

    def test_the_same_visible_devices_do_not_help(self) -> None:
        env = {2: {"CUDA_VISIBLE_DEVICES": "0,1"}, 3: {"CUDA_VISIBLE_DEVICES": "0,1"}}
        cluster = self.shared(backend="nccl", env=env)
        only(cluster, "local-rank-duplicate", hosts=["nd1"], ranks=[2, 3])


class TestStories:
    def test_nnodes(self) -> None:
        cluster = everywhere(make_cluster(THREE), [4, 5], nnodes=4, world_size=8)
        finding = only(cluster, "nnodes-differs", hosts=["nd2"])
        assert finding.message == "nnodes=4, elsewhere nnodes=3"
        assert finding.confidence is Confidence.CERTAIN
        assert explained(cluster) == [("world-size-differs", "nnodes-differs")]

    def test_world_size_of_a_host(self) -> None:
        cluster = everywhere(make_cluster(THREE), [2, 3], world_size=4)
        finding = only(cluster, "world-size-differs", hosts=["nd1"], ranks=[2, 3])
        assert finding.fix == "set WORLD_SIZE=6 there, as elsewhere"

    def test_world_size_of_one_rank(self) -> None:
        cluster = everywhere(make_cluster(THREE), [3], world_size=4)
        only(cluster, "world-size-differs", hosts=["nd1"], ranks=[3])

    def test_a_big_host_does_not_outvote_two_small_ones(self) -> None:
        cluster = make_cluster(THREE, nproc=4)
        # nd1 and nd2 run one rank each: by ranks it is 4 against 2, by hosts 1 against 2
        cluster = replace(
            cluster, ranks=tuple(r for r in cluster.ranks if r.seat < 4 or r.seat in (4, 8))
        )
        cluster = everywhere(cluster, range(4), world_size=16)
        roots = [f for f in judge(cluster) if f.code == "world-size-differs"]
        assert [f.where.hosts for f in roots] == [("nd0",)]

    def test_a_tie_is_said_to_be_a_tie(self) -> None:
        cluster = everywhere(make_cluster(), [2, 3], nnodes=3, world_size=6)
        finding = only(cluster, "nnodes-differs", hosts=["nd0", "nd1"])
        assert finding.confidence is Confidence.POSSIBLE
        assert finding.message.startswith("nnodes=2 on nd0; nnodes=3 on nd1: equally divided")
        assert finding.evidence == {"values": {"nd0": [2], "nd1": [3]}}

    def test_derived_counts_are_not_compared(self) -> None:
        derived = {"nnodes": "derived from WORLD_SIZE and LOCAL_WORLD_SIZE"}
        cluster = everywhere(make_cluster(), [2, 3], nnodes=4, sources=derived)
        assert judge(cluster) == []

    def test_nobody_is_absent_whom_only_the_odd_side_expects(self) -> None:
        # the coordinator itself counts three hosts, the two others two
        cluster = make_cluster(("nd0", "nd1", "nd2", "nd3"), absent_nodes=[3])
        cluster = everywhere(cluster, range(2, 6), nnodes=3, world_size=6)
        only(cluster, "nnodes-differs", hosts=["nd0"])
        assert explained(cluster) == [
            ("host-absent", "nnodes-differs"),
            ("world-size-differs", "nnodes-differs"),
        ]

    def test_nobody_is_absent_whom_only_the_odd_number_of_hosts_expects(self) -> None:
        # the own launcher: the world size follows from the hosts, and nobody told it
        derived = {"world_size": "derived from the hosts' numbers of ranks"}
        cluster = make_cluster(("nd0", "nd1", "nd2", "nd3"), absent_nodes=[3])
        cluster = everywhere(cluster, range(6), sources=derived)
        cluster = everywhere(cluster, range(2, 6), nnodes=3)
        only(cluster, "nnodes-differs", hosts=["nd0"])
        assert explained(cluster) == [("host-absent", "nnodes-differs")]

    def test_nobody_is_absent_whom_only_the_odd_side_expects_if_worlds_are_derived(self) -> None:
        # as with the own launcher: only numbers of hosts are told
        cluster = make_cluster(("nd0", "nd1", "nd2", "nd3"), absent_nodes=[3])
        derived = {"world_size": "derived from the hosts' numbers of ranks"}
        cluster = everywhere(cluster, range(6), sources=derived)
        cluster = everywhere(cluster, range(2, 6), nnodes=3)
        only(cluster, "nnodes-differs", hosts=["nd0"])
        assert explained(cluster) == [("host-absent", "nnodes-differs")]

    def test_who_is_absent_on_both_sides_is_absent(self) -> None:
        cluster = make_cluster(("nd0", "nd1", "nd2", "nd3", "nd4"), absent_nodes=[3, 4])
        derived = {"world_size": "derived from the hosts' numbers of ranks"}
        cluster = everywhere(cluster, range(6), sources=derived)
        cluster = everywhere(cluster, range(2, 6), nnodes=4)
        roots = {f.code: f.where for f in judge(cluster) if f.explained_by is None}
        assert roots == {
            "nnodes-differs": Where(hosts=("nd0",)),
            "host-absent": Where(ranks=(6, 7), nodes=(3,)),
        }

    def test_a_host_that_most_expect_is_absent(self) -> None:
        cluster = make_cluster(("nd0", "nd1", "nd2", "nd3"), absent_nodes=[3])
        cluster = everywhere(cluster, [4, 5], nnodes=3, world_size=6)
        roots = {f.code: f.where for f in judge(cluster) if f.explained_by is None}
        assert roots == {
            "nnodes-differs": Where(hosts=("nd2",)),
            "host-absent": Where(ranks=(6, 7), nodes=(3,)),
        }


class TestLate:
    @pytest.mark.parametrize(
        ("after_s", "join_timeout_s", "severity"),
        [
            (4.0, 60.0, None),
            (6.0, 60.0, Severity.INFO),
            (19.0, 60.0, Severity.INFO),
            (21.0, 60.0, Severity.WARN),
            (21.0, 3600.0, Severity.WARN),
            (8.0, 10.0, Severity.INFO),  # the doctor's own patience is no fault of the job
            (4.0, 6.0, None),
        ],
    )
    def test_levels(self, after_s: float, join_timeout_s: float, severity: Severity | None) -> None:
        cluster = make_cluster(THREE, join_timeout_s=join_timeout_s)
        for seat in (4, 5):
            cluster = change_rank(cluster, seat, signed_in_s=after_s)
        if severity is None:
            assert judge(cluster) == []
        else:
            finding = only(cluster, "rank-late", hosts=["nd2"], ranks=[4, 5])
            assert finding.level is severity
            assert finding.evidence == {"after_s": {"4": after_s, "5": after_s}}

    def test_all_late_together_is_nobody_late(self) -> None:
        cluster = make_cluster()
        for seat in range(4):
            cluster = change_rank(cluster, seat, signed_in_s=40.0)
        assert judge(cluster) == []

    def test_a_twin_is_not_late_as_well(self) -> None:
        cluster = twin(make_cluster(THREE), 2, 1, nproc=2)
        for seat in (4, 5):
            cluster = change_rank(cluster, seat, signed_in_s=59.0)
        only(cluster, "node-rank-duplicate", hosts=["nd1", "nd2"], ranks=[2, 3], nodes=[1])


def test_an_elastic_job_without_restarts_does_not_outlive_a_host() -> None:
    cluster = make_cluster(THREE)
    finding = only(replace(cluster, job=Job(elastic=(1, 3), max_restarts=0)), NO_RESTARTS)
    assert (finding.level, finding.where) == (Severity.INFO, Where())
    assert "--nnodes=1:3 with --max-restarts=0" in finding.message
    assert finding.kind.fix.startswith("on every host: # --max-restarts 3")
    for job in (
        Job(elastic=(1, 3), max_restarts=3),
        Job(elastic=(1, 3)),  # of an older version: not known
        Job(max_restarts=0),  # the default of a job that needs all of its hosts
    ):
        assert judge(replace(cluster, job=job)) == []


def test_a_rank_knows_the_restarts_of_the_agent_that_started_it() -> None:
    """Where torchrun's line is above the ranks, and not behind `--`."""
    env = {"TORCHELASTIC_MAX_RESTARTS": "0", "PET_NNODES": "1:3"}
    launch = Launch("torchrun", rank=0, world_size=3)
    told = CHECK.observe(Context(launch, env))
    assert told["agent"] == {"elastic": (1, 3), "max_restarts": 0}

    def cluster(agent: dict[str, Any], **job: Any) -> Cluster:
        facts = {rank: {**told, "rank": rank, "agent": agent} for rank in range(3)}
        return replace(make_cluster(THREE, check="ranks", by_rank=facts, nproc=1), job=Job(**job))

    finding = only(cluster(told["agent"]), NO_RESTARTS)
    assert "--nnodes=1:3 with --max-restarts=0" in finding.message
    assert judge(cluster({**told["agent"], "max_restarts": 2})) == []
    assert judge(cluster(told["agent"], launcher="torchrun", max_restarts=3)) == []
    for other in (
        Context(Launch("srun", rank=0, world_size=3), env),
        Context(launch, {"PET_NNODES": "1:3"}),
    ):
        assert "agent" not in CHECK.observe(other)
    static = CHECK.observe(Context(launch, {**env, "PET_NNODES": "3"}))["agent"]
    assert static == {"elastic": None, "max_restarts": 0}
    assert judge(cluster(static)) == []


def test_the_line_of_the_agent_is_above_its_variable() -> None:
    look = (
        "from nccl_doctor.toolkit.c10d import elastic_range as e; print(e({'PET_NNODES': '2:4'}))"
    )
    shell = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, look]  # it stays, as an agent does
    for line, said in (("--nnodes=1:3", "(1, 3)"), ("--nnodes 2", "None"), ("", "(2, 4)")):
        done = subprocess.run([*shell, *line.split()], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == said


@given(st.data())
def test_every_absent_rank_is_named_exactly_once(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 5))
    nproc = data.draw(st.integers(1, 3))
    gone = data.draw(st.sets(st.integers(1, nodes), max_size=nodes - 1).map(sorted))
    cluster = make_cluster([f"nd{n}" for n in range(nodes)], nproc, absent_nodes=gone)
    for seat in range(1, nodes * nproc):
        if data.draw(st.booleans()):
            cluster = change_rank(cluster, seat, reported=False, launch=None)
        elif data.draw(st.integers(0, 4)) == 0 and cluster.ranks[seat].reported:
            cluster = claim(cluster, seat, data.draw(st.integers(0, nodes * nproc)))
    named = [
        rank
        for finding in judge(cluster)
        if finding.code in ("host-absent", "rank-absent")
        for rank in finding.where.ranks
    ]
    assert sorted(named) == sorted(rank.rank for rank in cluster.absent if rank.rank is not None)


@pytest.mark.parametrize(
    ("facts", "words", "where"),
    [
        ({}, "began, and ended or hung before it tried to sign in", Where(hosts=("nd2",))),
        ({"nd2": {}}, "could not reach rank 0", Where(links=(("nd2", "nd0"),))),
    ],
    ids=["nothing examined", "examined"],
)
def test_a_host_known_by_its_own_report_alone_may_have_ended_before_it_tried(
    facts: dict[str, Any], words: str, where: Where
) -> None:
    cluster = make_cluster(("nd0", "nd1", "nd2"), nproc=1, check="memory", by_host=facts)
    hosts = tuple(replace(host, joined=host.name != "nd2") for host in cluster.hosts)
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    (found,) = judge(replace(cluster, hosts=hosts, ranks=ranks))
    assert (found.code, words in found.message) == ("host-absent", True)
    assert found.fix.startswith("read its own report")
    assert (found.where.hosts, found.where.links) == (where.hosts, where.links)
