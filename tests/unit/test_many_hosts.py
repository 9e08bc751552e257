"""What grows with the hosts, and how: what is written must not, and rules only as fast as they."""

from __future__ import annotations

import cProfile
import json
import pstats
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from nccl_doctor.api import Cluster
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.report import Report
from nccl_doctor.registry import installed
from nccl_doctor.report import text
from nccl_doctor.report.formats import html, junit, markdown, prometheus
from nccl_doctor.report.html.matrix import BlockLink, in_blocks, worst_links
from nccl_doctor.report.network import network_of
from nccl_doctor.report.redaction import redact
from tests.support.many_hosts import Faults, checks, many_hosts, met, name_of
from tests.support.reports import RUN

SMALL, LARGE = 66, 132
"""Hosts: more than are called by all others, and twice as many."""
LINES = 60
CUT = frozenset({frozenset(met(SMALL)[5])})
FAULTS = {
    "healthy": Faults(),
    "silent": Faults(silent=frozenset({40})),
    "cut": Faults(cut=CUT),
    "odd": Faults(odd=frozenset(range(3, 66, 10))),
    "slow": Faults(slow=CUT),
    "deaf": Faults(deaf=frozenset(range(0, 66, 3))),
}


@cache
def judged(name: str, count: int = SMALL) -> Report:
    cluster = many_hosts(count, FAULTS[name], ranks=2)
    return conclude(cluster, checks(), run=RUN)


@pytest.mark.parametrize(
    ("name", "codes", "hosts"),
    [
        ("healthy", set(), set()),
        ("silent", {"host-absent"}, set()),
        ("cut", {"peer-blocked"}, set()),
        ("odd", {"env-differs"}, {name_of(node) for node in range(3, 66, 10)}),
        ("slow", {"link-slow"}, set()),
        ("deaf", {"peer-one-way"}, {name_of(node) for node in range(0, 66, 3)}),
    ],
)
def test_of_many_hosts_the_fault_is_named_and_nobody_else(
    name: str, codes: set[str], hosts: set[str]
) -> None:
    report = judged(name)
    assert {cause.code for cause in report.root_causes} == codes
    assert {host for cause in report.root_causes for host in cause.where.hosts} == hosts
    links = {frozenset(link) for cause in report.root_causes for link in cause.where.links}
    if name in ("cut", "slow"):
        assert links == {frozenset(map(name_of, pair)) for pair in CUT}
    if name == "silent":
        assert [cause.where.nodes for cause in report.root_causes] == [(40,)]


def test_facts_that_are_one_object_are_judged_and_redacted_as_equal_ones() -> None:
    """Rules look at what ranks have in common once; in JSON each rank has facts of its own."""
    odd = Faults(odd=frozenset({3}), silent=frozenset({5}))
    shared = conclude(many_hosts(9, odd, ranks=2), checks(), run=RUN)
    data = json.loads(json.dumps(shared.to_json()))
    apart = conclude(Report.from_json(data).cluster, checks(), run=RUN)
    assert apart.to_json() == shared.to_json()
    assert {"env-differs", "host-absent"} <= {cause.code for cause in apart.root_causes}
    one, other = (redact(report, b"0" * 32)[0].to_json() for report in (shared, apart))
    assert one == other


@pytest.mark.parametrize("name", FAULTS)
def test_the_text_is_a_screen_and_the_other_formats_are_small(name: str) -> None:
    report = judged(name)
    assert len(text.render(report, checks=installed).splitlines()) <= LINES
    assert len(markdown.render(report)) < 8_000
    assert len(junit.render(report)) < 40_000
    assert len(prometheus.render(report)) < 12_000


def test_the_page_is_small() -> None:
    assert len(html.render(judged("deaf"), installed)) < 5e6


FORMATS: dict[str, Callable[[Report], str]] = {
    "text": lambda report: text.render(report, checks=installed),
    "all of the text": lambda report: text.render(report, verbose=1, checks=installed),
    "html": lambda report: html.render(report, installed),
    "junit": junit.render,
    "markdown": markdown.render,
    "prometheus": prometheus.render,
}


@pytest.mark.wide
@pytest.mark.parametrize("name", ["healthy", "odd", "deaf"])
@pytest.mark.parametrize("form", FORMATS)
def test_twice_as_many_hosts_are_hardly_more_to_read(form: str, name: str) -> None:
    small, large = (len(FORMATS[form](judged(name, count))) for count in (SMALL, LARGE))
    assert large < 1.2 * small + 2_000


def calls(work: Callable[[], Any]) -> int:
    """Calls of functions, of Python and of C, that something makes."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return sum(row[0] for row in pstats.Stats(profile).stats.values())  # type: ignore[attr-defined]


@pytest.mark.wide
@pytest.mark.parametrize("name", ["healthy", "odd", "deaf"])
def test_twice_as_many_hosts_are_twice_the_work_to_judge(name: str) -> None:
    def work(cluster: Cluster) -> int:
        return calls(lambda: conclude(replace(cluster), checks(), run=RUN))

    clusters = [many_hosts(count, FAULTS[name], ranks=2) for count in (SMALL, LARGE)]
    work(clusters[0])  # what is read once, as the table of variables
    small, large = map(work, clusters)
    assert large < 2.3 * small


@pytest.mark.wide
def test_twice_as_many_hosts_are_twice_the_work_to_redact() -> None:
    small, large = (
        calls(lambda count=count: redact(judged("healthy", count), b"0" * 32))  # type: ignore[misc]
        for count in (SMALL, LARGE)
    )
    assert large < 2.3 * small


def test_a_cell_of_the_map_is_the_worst_link_of_two_blocks() -> None:
    report = judged("slow")
    network = network_of(report, installed)
    blocks = in_blocks(network, report.cluster)
    assert blocks.hosts == ("leaf0", "leaf1", "leaf2")
    ((one, other),) = CUT
    cell = blocks.links[one // 32, other // 32]
    slow = network.links[one, other]
    assert isinstance(cell, BlockLink)
    assert (cell.rate, cell.blame) == (slow.rate, ("link-slow",))
    assert cell.in_words().startswith(f"{cell.tried} of {cell.whole} links tried")
    tried = sum(link.is_known for link in network.links.values())
    assert sum(each.tried for each in blocks.links.values() if isinstance(each, BlockLink)) == tried
    worst = {frozenset((link.start, link.end)) for link in worst_links(network, 2)}
    assert worst == {frozenset(map(name_of, (one, other)))}


def test_a_file_of_leaf_switches_makes_the_blocks() -> None:
    report = judged("slow")
    ranks = tuple(replace(rank, env={}) for rank in report.cluster.ranks)
    leaves = (("rack.1", "gpu[0001-0040]"), ("rack.2", f"gpu[0041-{SMALL:04d}]"))
    job = replace(report.cluster.job, leaves=leaves)
    cluster = replace(report.cluster, ranks=ranks, job=job)
    assert in_blocks(network_of(report, installed), cluster).hosts == ("rack.1", "rack.2")
    some = replace(cluster, job=replace(job, leaves=leaves[:1]))
    assert in_blocks(network_of(report, installed), some).hosts == ("rack.1", "unknown")


def test_without_switches_blocks_are_ranges_of_hosts() -> None:
    report = judged("silent")
    ranks = tuple(replace(rank, env={}) for rank in report.cluster.ranks)
    cluster = replace(report.cluster, ranks=ranks)
    blocks = in_blocks(network_of(report, installed), cluster)
    assert len(blocks.hosts) == 33
    assert blocks.hosts[:2] == ("gpu[0001-0002]", "gpu[0003-0004]")
    assert not blocks.absent
