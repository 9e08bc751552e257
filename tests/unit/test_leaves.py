"""Leaf switches: the user's file, what is wrong with it, and hosts that it does not name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.api import Cluster, Severity
from nccl_doctor.checks.firewall.sampled import judge_places
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.job import Job
from nccl_doctor.model.report import Report
from nccl_doctor.toolkit.leaves import (
    Leaves,
    TopologyError,
    leaf_switch,
    leaf_switches,
    read_leaves,
)
from nccl_doctor.toolkit.peers.schedule import plan_schedule
from nccl_doctor.toolkit.slurm import host_ranges, slurm_hosts
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, through_json

TREE = """
# as `scontrol show topology` knows it
SwitchName=leaf1 Nodes=nd[0-31] LinkSpeed=400
switchname=leaf2  nodes=nd[32-63] \\
    # the rest of the line
SwitchName=leaf3 Nodes=nd[64-90],nd9[1-9]
SwitchName=spine Switches=leaf[1-3]
"""
LEAVES: Leaves = (("leaf1", "nd[0-31]"), ("leaf2", "nd[32-63]"), ("leaf3", "nd[64-90],nd9[1-9]"))


def cluster(names: list[str], leaves: Leaves) -> Cluster:
    return replace(make_cluster(names, 1), job=Job(leaves=leaves), run_id="a run")


def test_a_tree_and_blocks_of_slurm() -> None:
    assert read_leaves(TREE) == LEAVES
    blocks = "BlockName=b1 Nodes=nd[0-17]\nBlockName=b2 Nodes=nd[18-35]\nBlockSizes=18,36\n"
    assert read_leaves(blocks) == (("b1", "nd[0-17]"), ("b2", "nd[18-35]"))


def test_a_switch_on_several_lines_has_the_hosts_of_all() -> None:
    lines = "SwitchName=r1 Nodes=a\nSwitchName=r2 Nodes=b\nSwitchName=r1 Nodes=c"
    assert read_leaves(lines) == (("r1", "a,c"), ("r2", "b"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line names hosts: SwitchName=NAME Nodes=LIST"),
        ("SwitchName=s Switches=leaf[1-2]", "no line names hosts"),
        ("SwitchName=a Nodes=nd1\nleaf2 nd2", "line 2 is neither SwitchName=NAME Nodes=LIST nor"),
        ("SwitchName= Nodes=nd1", "line 1 is neither"),
        ("SwitchName=a", "line 1 is neither"),
        ("SwitchName=a Nodes=nd1 Switches=b", "line 1 is neither"),
        ("Include more.conf", "line 1 is neither"),
        ("SwitchName=a Nodes=nd[1-", "line 1: 'nd[1-' is no list of hosts"),
        ("SwitchName=a Nodes=nd[1-999999999]", "line 1: 'nd[1-999999999]' is no list of hosts"),
        ("SwitchName=a Nodes=", "line 1: '' is no list of hosts"),
        ("SwitchName=a Nodes=nd[1-9] \\\nLinkSpeed=1\nSwitchName=b Nodes=ND7", "line 3: ND7 is"),
        ("SwitchName=a Nodes=nd1\nSwitchName=b Nodes=nd1", "nd1 is below a and below b"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(text: str, words: str) -> None:
    with pytest.raises(TopologyError) as error:
        read_leaves(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_report_keeps_the_switches() -> None:
    report = through_json(conclude(cluster(["nd0"], LEAVES), [], run=RUN))
    assert report.cluster.job.leaves == LEAVES
    data = report.to_json()
    for wrong in ({}, "x", 4, {"leaf_switch": "leaf1"}):
        data["run"]["job"]["leaves"] = [wrong]
        with pytest.raises(ValueError, match=r"run\.job is not a job record"):
            Report.from_json(data)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        leaves = read_leaves(text)
    except TopologyError:
        return
    assert all(name and slurm_hosts(hosts) for name, hosts in leaves)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=120))
def test_every_host_is_found_below_its_switch(below: list[int]) -> None:
    hosts: dict[int, list[str]] = {}
    for host, leaf in enumerate(below):
        hosts.setdefault(leaf, []).append(f"nd{host}")
    text = "\n".join(
        f"SwitchName=s{leaf} Nodes={host_ranges(each)}" for leaf, each in hosts.items()
    )
    made = cluster([f"nd{host}" for host in range(len(below))], read_leaves(text))
    numbers, wrong = leaf_switches(made, range(len(below)))
    assert wrong == ""
    if len(hosts) == 1:
        assert numbers == {}
    else:
        same = {(numbers[a], below[a]) for a in range(len(below))}
        assert len(same) == len(hosts)


@pytest.mark.parametrize(
    ("name", "listed", "known"),
    [
        ("nd1", "nd1", True),
        ("ND1", "nd1", True),
        ("nd1.cluster.example", "nd1", True),
        ("nd1", "nd1.cluster.example", True),
        ("nd1", "nd1.a.example,nd1.b.example", True),  # below the same switch
        ("nd1", "nd10", False),
        ("other", "192.168.77.1", True),
    ],
)
def test_a_host_is_known_by_its_name_long_or_short_or_by_its_address(
    name: str, listed: str, known: bool
) -> None:
    rank = make_cluster([name], 1).ranks[0]
    rank = replace(rank, host=replace(rank.host, addresses=("192.168.77.1",)))
    assert leaf_switch(rank, (("leaf1", listed),)) == ("leaf1" if known else "")


def test_a_short_name_of_two_hosts_below_two_switches_is_not_known() -> None:
    rank = make_cluster(["nd1"], 1).ranks[0]
    leaves = (("leaf1", "nd1.a.example"), ("leaf2", "nd1.b.example"))
    assert leaf_switch(rank, leaves) == ""


def test_the_file_counts_and_not_what_slurm_says() -> None:
    made = cluster([f"nd{i}" for i in range(100)], LEAVES)
    said = {"SLURM_TOPOLOGY_ADDR": "spine.x.nd0", "SLURM_TOPOLOGY_ADDR_PATTERN": "a.b.node"}
    made = replace(made, ranks=tuple(replace(rank, env=said) for rank in made.ranks))
    numbers, wrong = leaf_switches(made, range(100))
    assert (wrong, set(numbers.values())) == ("", {0, 1, 2})
    met = {
        frozenset((numbers[a], numbers[b]))
        for slot in plan_schedule(made, range(100)).slots
        for a, b in slot
    }
    assert {frozenset(pair) for pair in ((0, 1), (0, 2), (1, 2))} <= met


def test_hosts_that_the_file_does_not_name_are_named() -> None:
    names = [f"nd{i}" for i in range(98)] + ["new1", "new2"]
    made = cluster(names, LEAVES)
    (found,) = judge_places(made)
    assert (found.code, found.level) == ("topology-lacks-host", Severity.INFO)
    assert found.where.hosts == ("new1", "new2")
    assert found.message.startswith("2 of 100 hosts")
    numbers, wrong = leaf_switches(made, range(100))
    assert (len(numbers), wrong) == (98, "")
    met = {seat for slot in plan_schedule(made, range(100)).slots for pair in slot for seat in pair}
    assert met == set(range(100))


@pytest.mark.parametrize("leaves", [(), LEAVES])
def test_nothing_is_said_where_every_host_is_known_or_no_file_is_given(leaves: Leaves) -> None:
    assert list(judge_places(cluster(["nd0", "nd40"], leaves))) == []
