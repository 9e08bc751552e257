"""One cluster from the reports of hosts that never met: who is there, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.api import Cluster
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.judge.merge import merge_clusters
from nccl_doctor.model.report import Report
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.merging import (
    HEALTHY,
    REGISTRY,
    THREE,
    coordinators,
    keyed,
    own_view,
    with_facts,
)
from tests.support.reports import RUN


def test_an_own_view_takes_the_empty_place():
    made = merge_clusters([coordinators(HEALTHY, 1), own_view(HEALTHY, 1)])
    assert made.complete
    assert {host.name: host.joined for host in made.hosts} == {
        "nd0": True,
        "nd2": True,
        "nd1": False,
    }
    assert all(host.reported for host in made.hosts)
    assert [rank.rank for rank in made.present] == [0, 1, 2, 4, 5]
    (absent,) = made.absent  # only the first rank speaks for a host that was lost
    assert (absent.rank, absent.host.name) == (3, "nd1")
    seats = {rank.rank: rank.seat for rank in made.ranks}
    assert [seats[rank] for rank in (0, 1, 4, 5)] == [0, 1, 4, 5]


def test_what_observes_together_is_shown_only_those_that_met():
    made = merge_clusters([coordinators(HEALTHY, 1), own_view(HEALTHY, 1)])
    assert [rank.rank for rank in made.met.present] == [0, 1, 4, 5]
    assert {rank.rank for rank in made.met.absent} == {2, 3}
    assert HEALTHY.met is HEALTHY
    alone = own_view(HEALTHY, 1)
    assert alone.met is alone


@given(st.data())
def test_whatever_is_lost_nobody_is_there_twice(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(2, 5))
    cluster = keyed(make_cluster([f"nd{n}" for n in range(nodes)], data.draw(st.integers(1, 3))))
    lost = data.draw(st.sets(st.integers(1, nodes - 1)).map(sorted))
    given_ = data.draw(st.sets(st.sampled_from(lost)).map(sorted)) if lost else []
    views = [own_view(cluster, node) for node in given_]
    views += [own_view(cluster, node) for node in given_ if data.draw(st.booleans())]
    has_coordinator = data.draw(st.booleans())
    if has_coordinator:
        views.append(coordinators(cluster, *lost))
    if not views:
        return
    made = merge_clusters(data.draw(st.permutations(views)))
    assert (made.world_size, made.nnodes) == (cluster.world_size, cluster.nnodes)
    assert sorted(r.rank for r in made.ranks if r.rank is not None) == list(range(made.world_size))
    assert len({rank.seat for rank in made.ranks}) == len(made.ranks)
    assert [host.id for host in made.hosts] == list(range(len(made.hosts)))
    assert sorted(h.node_rank for h in made.hosts if h.node_rank is not None) == list(range(nodes))
    for rank in made.ranks:
        assert rank.host is made.hosts[rank.host.id]
    seen = {host.node_rank for host in made.present_hosts}
    assert seen == set(given_) | (set(range(nodes)) - set(lost) if has_coordinator else set())
    assert made.complete == (has_coordinator or len(seen) == nodes)
    assert {h.node_rank for h in made.present_hosts if not h.joined} == set(given_)


def test_of_one_host_what_the_coordinator_knows_counts():
    stale = change_rank(own_view(HEALTHY, 1), 0, pid=7, env={"NCCL_DEBUG": "INFO"})
    made = merge_clusters([stale, HEALTHY])
    assert made == HEALTHY


def test_reports_without_keys_are_told_apart_by_name_address_and_node():
    cluster = make_cluster(THREE)
    made = merge_clusters([own_view(cluster, 1), coordinators(cluster, 1), own_view(cluster, 1)])
    assert [host.name for host in made.hosts] == ["nd0", "nd2", "nd1"]


def test_a_host_that_was_given_its_node_rank_later_is_the_same_host():
    view = own_view(HEALTHY, 1)
    host = replace(view.hosts[0], node_rank=None)
    view = replace(view, hosts=(host,), ranks=(replace(view.ranks[0], host=host, rank=None),))
    assert merge_clusters([HEALTHY, view]) == HEALTHY


def test_two_node_ranks_on_one_machine_are_two_hosts():
    cluster = keyed(make_cluster(("nd0", "nd1", "nd1")))
    made = merge_clusters([own_view(cluster, node) for node in (2, 0, 1)])
    assert [(host.name, host.node_rank) for host in made.hosts] == [
        ("nd0", 0),
        ("nd1", 1),
        ("nd1", 2),
    ]


def test_two_hosts_that_claim_one_node_both_stay():
    twin = own_view(keyed(make_cluster(("nd0", "other", "nd2"))), 1)
    made = merge_clusters([coordinators(HEALTHY, 2), twin])
    assert {host.name: host.node_rank for host in made.hosts} == {
        "nd0": 0,
        "nd1": 1,
        "other": 1,
        None: 2,
    }


def test_ranks_of_one_host_that_each_speak_for_themselves_are_one_host():
    first = own_view(HEALTHY, 1)
    second = change_rank(first, 0, rank=3, local_rank=1, pid=1003, launch={"rank": 3})
    made = merge_clusters([coordinators(HEALTHY, 1), first, second])
    assert [rank.rank for rank in made.present if rank.host.name == "nd1"] == [2, 3]
    assert made.absent == ()


def test_what_was_observed_together_at_another_table_is_left_out():
    view = with_facts(own_view(HEALTHY, 1), "port", {"nd1": {"port": 1}})
    (host,) = view.hosts
    facts = {**host.facts, "firewall": {"matrix": outcome({"peers": []})}}
    host = replace(host, facts=facts)
    view = replace(view, hosts=(host,), ranks=(replace(view.ranks[0], host=host),))
    made = merge_clusters([coordinators(HEALTHY, 1), view])
    (nd1,) = (host for host in made.hosts if host.name == "nd1")
    assert set(nd1.facts) == {"port"}


def test_without_a_coordinator_the_majority_counts():
    odd = replace(own_view(HEALTHY, 2), world_size=8, nnodes=4)
    made = merge_clusters([odd, own_view(HEALTHY, 0), own_view(HEALTHY, 1)])
    assert (made.world_size, made.nnodes) == (6, 3)
    assert made.complete


def own_launcher(cluster: Cluster, sizes: Sequence[int]) -> list[Cluster]:
    """Own views of hosts of the own launcher, which each take all hosts to be like themselves."""
    views = []
    for node, size in enumerate(sizes):
        launch = {
            "launcher": "nccl-doctor",
            "rank": node * size,
            "world_size": len(sizes) * size,
            "local_world_size": size,
        }
        view = change_rank(own_view(cluster, node), 0, rank=node * size, launch=launch)
        views.append(replace(view, world_size=len(sizes) * size))
    return views


def test_uneven_hosts_of_the_own_launcher_are_laid_out_as_a_roll_call_would():
    made = merge_clusters(own_launcher(HEALTHY, [2, 4, 2]))
    assert made.world_size == 8
    assert {rank.rank: rank.host.name for rank in made.present} == {0: "nd0", 2: "nd1", 6: "nd2"}
    assert "rank-duplicate" not in {f.code for f in merge_of(made).findings}


def test_a_host_of_the_own_launcher_takes_the_place_that_the_coordinator_keeps():
    cluster = change_rank(HEALTHY, 4, launch={"launcher": "nccl-doctor"})
    *_, view = own_launcher(HEALTHY, [2, 2, 1])  # rank 2 by its own count, as nd1's first
    made = merge_clusters([coordinators(cluster, 2), view])
    assert {rank.rank for rank in made.present if rank.host.name == "nd2"} == {4}
    anywhere = change_rank(view, 0, rank=None, launch={"rank": None, "node_rank": None})
    host = replace(anywhere.hosts[0], node_rank=None)
    anywhere = replace(anywhere, hosts=(host,), ranks=(replace(anywhere.ranks[0], host=host),))
    assert merge_clusters([coordinators(cluster, 2), anywhere]) == made


def merge_of(cluster: Cluster) -> Report:
    return conclude(cluster, REGISTRY.checks, run=RUN)


def test_nothing_to_unite():
    with pytest.raises(ValueError, match="no report to merge"):
        merge_clusters([])
