"""The links of a report as a map, on its HTML page."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import permutations, product

import pytest

from nccl_doctor.api import Finding, Layer, Severity, Where
from nccl_doctor.model.report import Report
from nccl_doctor.registry import installed
from nccl_doctor.report.network import network_of
from tests.support.clusters import make_cluster, reread
from tests.support.pages import NOTE, PORT, Page, broken, healthy, measured, page_of, report_of
from tests.support.reports import kind
from tests.support.rows import each_row


@pytest.fixture(scope="module")
def page() -> Page:
    return page_of(broken())


# --- the map of the links ---


def test_a_cell_for_every_link(page):
    report = broken()
    cells = page.cells()
    names = [host.name for host in report.cluster.hosts]
    assert set(cells) == set(permutations(names, 2))
    blamed = {
        (a, b) for f in report.findings if f.level is not Severity.INFO for a, b in f.where.links
    }
    assert blamed == {("nd1", "nd2"), ("nd0", "nd3"), ("nd3", "nd0")}
    assert {pair for pair, cell in cells.items() if cell.has("blamed")} == blamed
    assert {pair for pair, cell in cells.items() if cell.has("r4")} == {("nd1", "nd2")}
    assert {pair for pair, cell in cells.items() if cell.has("b4")} == {
        ("nd0", "nd3"),
        ("nd3", "nd0"),
    } or {pair for pair, cell in cells.items() if cell.has("b3")} == {
        ("nd0", "nd3"),
        ("nd3", "nd0"),
    }
    words = cells["nd1", "nd2"].attributes["title"]
    assert words.startswith("nd1 → nd2: no answer")
    assert words.endswith("blamed by peer-one-way")
    assert "10 Gbit/s" in cells["nd0", "nd1"].text
    listed = page.section("links")
    assert listed is not None
    rows = [each for each in listed.under if each.tag == "tr" and each.inside[-1].tag == "tbody"]
    assert sum("peer-one-way" in row.text and "nd1" in row.text for row in rows) == 1


def chosen(page: Page) -> str:
    (view,) = [each for each in page.all("input") if "checked" in each.attributes]
    return view.attributes["class"].split()[-1]


def test_the_map_shows_first_what_is_wrong(page):
    assert chosen(page) == "pick-r"
    link = (("nd0", "nd1"),)
    slow = Finding(kind("link-slow", Layer.SPEED, Severity.WARN), "slow", Where(links=link))
    late = Finding(kind("latency-high", Layer.SPEED, Severity.WARN), "late", Where(links=link))
    assert chosen(page_of(report_of(measured(3), slow))) == "pick-b"
    assert chosen(page_of(report_of(measured(3), late))) == "pick-l"
    assert chosen(page_of(healthy())) == "pick-r"


def test_links_that_nobody_tried_are_empty_cells():
    found = page_of(report_of(make_cluster(("nd0", "nd1"))))
    cells = found.cells()
    assert len(cells) == 2
    assert all(cell.has("rn") and cell.has("ln") and cell.has("bn") for cell in cells.values())
    assert all(cell.text == "" for cell in cells.values())


def test_a_host_that_never_came_has_a_row():
    found = page_of(report_of(make_cluster(("nd0", "nd1", "nd2"), absent_nodes=[2])))
    assert ("node 2", "nd0") in found.cells()
    marked = [each.attributes["title"] for each in found.all("th", "absent")]
    assert marked == ["node 2: never signed in"] * 2


def test_a_blamed_host_is_marked_at_both_edges():
    found = page_of(report_of(make_cluster(), Finding(PORT, "m", Where(hosts=("nd1",)))))
    marked = [each.attributes["title"] for each in found.all("th", "blamed")]
    assert marked == ["nd1: blamed by port-shut"] * 2


def test_hosts_that_share_a_name_are_told_apart():
    cells = page_of(report_of(make_cluster(("nd0", "nd0", "nd1")))).cells()
    assert ("nd0 (node 0)", "nd0 (node 1)") in cells
    assert len(cells) == 6


def test_the_end_of_a_link_may_be_no_host_of_the_report():
    link = Finding(PORT, "m", Where(links=(("nd1", "head.example"),)))
    cells = page_of(report_of(make_cluster(), link)).cells()
    assert cells["nd1", "head.example"].has("blamed")
    assert len(cells) == 6


def test_what_is_only_worth_knowing_blames_no_link():
    link = Finding(NOTE, "m", Where(links=(("nd0", "nd1"),)))
    cells = page_of(report_of(make_cluster(), link)).cells()
    assert not any(cell.has("blamed") for cell in cells.values())


def test_large_packets_are_lost_in_the_direction_that_stood_still():
    stuck = {"outcome": "mtu", "detail": "", "stalled": "download"}
    found = network_of(report_of(measured(3)), installed)
    assert all(link.reach == "ok" for link in found.links.values())
    cluster = measured(3)
    facts = reread(cluster.hosts[0].facts)
    facts["firewall"]["matrix"].facts["peers"]["2"][0]["attempts"] = [stuck, stuck]
    hosts = (replace(cluster.hosts[0], facts=facts), *cluster.hosts[1:])
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    found = network_of(report_of(replace(cluster, hosts=hosts, ranks=ranks)), installed)
    assert found.links[1, 0].words == "large packets are lost"
    assert found.links[0, 1].reach == ""
    # Once is not enough to say that a call fails.
    facts["firewall"]["matrix"].facts["peers"]["2"][0]["attempts"] = [stuck]
    hosts = (replace(cluster.hosts[0], facts=facts), *cluster.hosts[1:])
    found = network_of(report_of(replace(cluster, hosts=hosts, ranks=ranks)), installed)
    assert found.links[1, 0].reach == "ok"


def many(count: int, *links: tuple[str, str]) -> Page:
    hosts = tuple(f"n{i:03}" for i in range(count))
    finding = Finding(PORT, "m", Where(links=links))
    return page_of(report_of(make_cluster(hosts, 1), *([finding] if links else [])))


def test_64_hosts_are_a_whole_map():
    found = many(64, ("n003", "n060"))
    assert len(found.cells()) == 64 * 63
    assert [pair for pair, cell in found.cells().items() if cell.has("blamed")] == [
        ("n003", "n060")
    ]


def test_65_hosts_are_folded_by_finding():
    found = many(65, ("n003", "n060"), ("n003", "n061"))
    assert set(permutations(("n003", "n060", "n061"), 2)) < set(found.cells())
    section = found.section("links")
    assert section is not None
    assert "2 links of 3 hosts" in section.text
    assert "65 hosts, 4160 links" in section.text
    assert not any(pair[0].startswith("n003") for pair in many(65).cells() if "[" not in pair[0])


def test_of_a_finding_with_very_many_links_the_worst_hosts_are_shown():
    hosts = [f"n{i:03}" for i in range(100)]
    found = many(100, *(("n000", other) for other in hosts[1:]))
    section = found.section("links")
    assert section is not None
    assert "99 links of 100 hosts; shown: the 24 hosts with most of them, 23 links" in section.text
    assert "and 79 more that are blamed" in section.text


ODD = [
    None,
    7,
    "x",
    [],
    [1],
    {},
    {"0": None},
    {"0": [None, 7, {}]},
    {"0": {"attempts": 3}},
    10**400,
]


@each_row("odd", ODD)
def test_facts_of_another_version_are_not_known(odd):
    def change(check, outcome):
        key = {"firewall": "peers", "links": "sent"}.get(check, "steps")
        outcome["facts"] = {**outcome.get("facts", {}), key: odd}
        outcome["breadcrumbs"] = [{"step": odd, "at_s": odd, "sequence": odd}]

    cells = page_of(Report.from_json(changed(change))).cells()
    assert len(cells) == 12
    assert all(cell.has("rn") and cell.has("bn") for cell in cells.values())


@each_row(("key", "odd"), product(["breadcrumbs", "group", "stack", "duration_s", "facts"], ODD))
def test_outcomes_of_another_version_are_refused_or_drawn(odd, key):
    data = changed(lambda _, outcome: outcome.update({key: odd}))
    try:
        report = Report.from_json(data)
    except ValueError:
        with pytest.raises(ValueError, match=rf"facts\.\w+\.[\w-]+\.{key}"):
            Report.from_json(data)
    else:
        assert len(page_of(report).cells()) == 12


@cache
def broken_text() -> str:
    return json.dumps(broken().to_json())


def changed(change):
    """A report as data, with each of its outcomes changed."""
    data = json.loads(broken_text())
    for place in (*data["hosts"], *data["ranks"]):
        for check, rounds in place["facts"].items():
            for outcome in rounds.values():
                change(check, outcome)
    return data


def test_a_record_of_another_version_is_not_known():
    data = json.loads(broken_text())
    for host in data["hosts"]:
        for outcome in host["facts"]["links"].values():
            for record in outcome["facts"]["sent"].values():
                record.update(rtt_us="fast", rate=None, segments=[], lost=-3)
        for entries in host["facts"]["firewall"]["matrix"]["facts"]["peers"].values():
            entries[0] = {"roles": None, "attempts": [{"outcome": "teleported"}] * 2}
    found = network_of(Report.from_json(data), installed)
    assert {link.words for link in found.links.values()} == {"teleported"}
    assert all(link.rtt_us is None and not link.lost for link in found.links.values())
