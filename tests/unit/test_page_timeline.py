"""Who waited for whom, groups and facts, on the HTML page of a report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nccl_doctor.api import Outcome, OutcomeStatus
from tests.support.clusters import make_cluster
from tests.support.pages import Element, Page, broken, crumbs, page_of, report_of, with_round


@pytest.fixture(scope="module")
def page() -> Page:
    return page_of(broken())


# --- who waited for whom ---

FORMING = ("connect to the store", "init_process_group")


def ok(*steps: str, took: float = 1.0, every_s: float = 0.1, group: str = "world") -> Outcome:
    return Outcome(
        OutcomeStatus.OK,
        facts={"steps": []},
        breadcrumbs=crumbs(*FORMING, *steps, group=group, every_s=every_s),
        duration_s=took,
        group=0,
    )


def hung(*steps: str, group: str = "world") -> Outcome:
    return replace(ok(*steps, took=20.0, group=group), status=OutcomeStatus.HUNG)


def lanes(outcomes: dict[int, Outcome], **more) -> dict[str, Element]:
    cluster = with_round(make_cluster(**more), outcomes)
    page = page_of(report_of(cluster, check="collectives"))
    return {each.under[0].text.partition(": ")[0]: each for each in page.all("details", "lane")}


def remarks(outcomes: dict[int, Outcome]) -> list[str]:
    lane = lanes(outcomes)["collectives"]
    return [each.text for each in lane.under if each.has("remark")]


def test_a_row_for_every_rank_with_its_steps(page):
    lane = lanes(dict.fromkeys(range(4), ok("all_reduce", "barrier")))["collectives"]
    assert "open" not in lane.attributes
    rows = [each for each in lane.under if each.has("row")]
    assert [each.under[0].text for each in rows] == [
        "rank 0 on nd0",
        "rank 1 on nd0",
        "rank 2 on nd1",
        "rank 3 on nd1",
    ]
    drawn = [each for each in rows[0].under if each.tag == "rect"]
    assert [each.attributes["class"] for each in drawn] == ["p-form"] * 2 + ["p-talk"] * 2
    ends = [float(e.attributes["x"]) + float(e.attributes["width"]) for e in drawn]
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(1000, abs=1)
    assert not remarks(dict.fromkeys(range(4), ok("all_reduce", "barrier")))


def test_who_came_last_is_inside_for_the_shortest_time():
    outcomes = {
        **dict.fromkeys(range(4), ok("all_reduce", took=3.2)),
        2: ok("all_reduce", took=0.21),
    }
    (words,) = remarks(outcomes)
    assert words == (
        "rank 0 was 2.99 s longer in all_reduce of group world than rank 2: it probably waited "
        "for rank 2."
    )


def test_the_root_of_a_broadcast_leaves_first_and_is_no_laggard():
    step = "broadcast from 0"
    assert not remarks({**dict.fromkeys(range(4), ok(step, took=3.0)), 0: ok(step, took=0.21)})


def test_a_hang_says_who_had_not_come():
    outcomes = {**dict.fromkeys(range(4), hung("all_reduce")), 3: hung()}
    lane = lanes(outcomes)["collectives"]
    assert "open" in lane.attributes
    assert remarks(outcomes) == [
        "ranks 0–2 waited in all_reduce of group world; not known to have reached it: rank 3."
    ]
    stuck = [each for each in lane.under if each.has("p-stuck")]
    assert len(stuck) == 4


def test_a_hang_in_the_same_step_blames_nobody():
    assert remarks(dict.fromkeys(range(4), hung("all_reduce"))) == [
        "All of them were in all_reduce of group world: no one is behind."
    ]


def test_of_several_groups_nothing_is_said():
    other = replace(hung("all_reduce"), breadcrumbs=hung("all_reduce", group="evens").breadcrumbs)
    assert not remarks({**dict.fromkeys(range(4), hung("all_reduce")), 2: other})


def test_the_roll_call():
    cluster = make_cluster(absent_nodes=[1])
    ranks = tuple(
        replace(rank, signed_in_s=4.0 if rank.rank == 1 else 0.5) for rank in cluster.ranks
    )
    lane = page_of(report_of(replace(cluster, ranks=ranks))).all("details", "lane")[0]
    assert [each.text for each in lane.under if each.has("remark")] == [
        "The others waited up to 3.5 s for rank 1 on nd0 to sign in.",
        "Never signed in: rank 2, rank 3.",
    ]


def test_very_many_ranks_are_a_few_rows_and_the_bad_one_is_among_them():
    hosts = tuple(f"n{i:02}" for i in range(25))
    outcomes = {**dict.fromkeys(range(200), ok("all_reduce")), 150: hung("all_reduce")}
    lane = lanes(outcomes, hosts=hosts, nproc=8)["collectives"]
    rows = [each.under[0].text for each in lane.under if each.has("row")]
    assert len(rows) == 64
    assert "rank 150 on n18" in rows
    assert "and 136 more, not worse than these" in lane.text


# --- groups and facts ---


def test_good_groups_are_one_line_and_bad_ones_have_their_own():
    outcomes = {
        **{i: replace(ok("all_reduce"), group=i // 2 * 2) for i in range(8)},
        5: replace(hung("all_reduce"), group=4),
    }
    cluster = with_round(make_cluster(("nd0", "nd1", "nd2", "nd3")), outcomes, "each-host")
    section = page_of(report_of(cluster, check="collectives")).section("groups")
    assert section is not None
    rows = [
        [cell.text for cell in each.under if cell.tag == "td"]
        for each in section.under
        if each.tag == "tr" and each.inside[-1].tag == "tbody"
    ]
    assert [row[:4] for row in rows] == [
        ["each-host", "ranks 4–5", "nd2", "bad"],
        ["each-host", "3 groups of 2: ranks 0–3, 6–7", "nd0, nd1, nd3", "good"],
    ]
    assert rows[0][-1] == "rank 5: hung in all_reduce"


def test_what_could_not_be_tried_is_not_bad():
    blocked = Outcome(OutcomeStatus.UNTESTED, reason="blocked by port-shut", group=0)
    outcomes = {0: blocked, 1: blocked, 2: replace(ok("all_reduce"), group=2)}
    cluster = with_round(make_cluster(), {**outcomes, 3: outcomes[2]}, "pairs")
    found = page_of(report_of(cluster, check="collectives"))
    section = found.section("groups")
    assert section is not None
    assert "2 groups, none bad" in section.text
    rows = [[c.text for c in e.under if c.tag == "td"] for e in section.under if e.tag == "tr"]
    assert [row[3] for row in rows if row] == ["good", "not tested"]
    assert not any(each.has("bad") or each.has("p-stuck") for each in found.all("details")[0].under)
    assert not found.all("span", "bad")


def test_a_fact_that_all_have_is_shown_once():
    hosts = ("nd0", "nd1", "nd2")
    facts = {"limit": 1024, "nested": {"deep": [{"a": [1, 2, 3, 4, 5, 6, 7, 8, 9]}]}}
    cluster = make_cluster(hosts, check="shm", by_host={**dict.fromkeys(hosts, facts)})
    section = page_of(report_of(cluster)).section("facts")
    assert section is not None
    assert sum(each.tag == "dt" and each.text == "limit" for each in section.under) == 1
    assert "nd0, nd1, nd2: ok" in section.text
    assert "[1, 2, 3, 4, 5, 6, 7, 8, 9]" in section.text
    differing = {**dict.fromkeys(hosts, facts), "nd1": {**facts, "limit": 64}}
    section = page_of(report_of(make_cluster(hosts, check="shm", by_host=differing))).section(
        "facts"
    )
    assert section is not None
    assert sum(each.tag == "dt" and each.text == "limit" for each in section.under) == 2
    assert "nd0, nd2: ok" in section.text


def test_every_fact_is_in_a_fold(page):
    section = page.section("facts")
    assert section is not None
    for each in section.under:
        if each.tag in ("dl", "table", "pre"):
            assert any(outer.tag == "details" for outer in each.inside)


def test_every_fact_is_there():
    """Each name and each value of what the checks gathered, and of launch and environment."""
    report = broken()
    section = page_of(report).section("facts")
    assert section is not None
    text = section.text
    leaves = [
        leaf
        for place in (*report.to_json()["hosts"], *report.to_json()["ranks"])
        for key in ("facts", "launch", "env")
        for leaf in leaves_of(place.get(key) or {})
    ]
    ranks = next(each for each in section.under if each.under and each.text.startswith("Ranks (8)"))
    rows = [[c.text for c in e.under if c.tag == "td"] for e in ranks.under if e.tag == "tr"]
    assert rows[-1] == ["7", "nd3", "3", "1", "1007", "–"]
    assert len(leaves) > 500
    assert [leaf for leaf in leaves if leaf not in text] == []


SHOWN_OTHERWISE = ("facts", "breadcrumbs", "at_s", "alone", "local_rank", "node_rank")
"""Names that stand for a part of the page, or for a column."""


def leaves_of(value):
    """Names and scalar values, as the page writes them."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("group", "status", "sequence"):
                continue  # said in words, or by the place
            if not name.isdigit() and name not in SHOWN_OTHERWISE:
                yield name
            yield from leaves_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves_of(inner)
    elif isinstance(value, float):
        return  # durations are rounded
    elif value is None or isinstance(value, bool):
        yield json.dumps(value)
    else:
        yield str(value)
