"""The report as one HTML page."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace

import pytest

from nccl_doctor.api import Finding, Outcome, OutcomeStatus, Where
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.report.formats.html import render
from nccl_doctor.report.html.findings import fix_of
from nccl_doctor.report.html.markup import Html, element
from nccl_doctor.report.story import Story
from tests.support.clusters import make_cluster
from tests.support.pages import (
    EMPTY,
    HOSTILE,
    NOTE,
    PORT,
    SLOW,
    Page,
    broken,
    healthy,
    hostile,
    page_of,
    report_of,
)
from tests.support.reports import RUN, made_check, through_json


@pytest.fixture(scope="module")
def page() -> Page:
    return page_of(broken())


@pytest.fixture(scope="module")
def hostile_page() -> Page:
    return page_of(hostile())


# --- what is in it, and in which order ---


def test_the_verdict_and_what_to_fix_come_first(page):
    report = broken()
    headings = [each.text for each in page.all("h2")]
    assert headings[0] == "What to fix"
    order = ["Links between hosts", "Who waited for whom", "Groups", "Checks", "Facts"]
    assert [each for each in headings if each in order] == order
    assert Story(report).headline in page.one("p", "verdict").text
    assert page.one("b", "badge").text == "✗ FAIL"
    card = page.all("article")[0]
    root = report.root_causes[0]
    for words in (root.code, root.kind.title, root.message, root.kind.why, root.fix, "nd1 → nd2"):
        assert words in card.text


def test_every_finding_and_every_check_is_there(page):
    report = broken()
    cards = {each.text for card in page.all("article") for each in card.under if each.tag == "code"}
    assert {finding.code for finding in report.findings} <= cards
    table = page.section("checks")
    assert table is not None
    assert all(check.name in table.text for check in report.checks)


@pytest.mark.parametrize("make", [healthy, lambda: EMPTY], ids=["healthy", "empty"])
def test_nothing_to_fix_has_no_such_section(make):
    found = page_of(make())
    assert found.section("causes") is None
    assert found.one("p", "verdict")
    assert found.section("picture") is None


def test_of_a_pass_what_was_measured_comes_first():
    found = page_of(replace(healthy(), verdict="pass", exit_code=0))
    assert found.all("h2")[0].text == "What was measured"
    measured = found.section("measured")
    assert measured is not None
    assert "round trip 50 µs" in measured.text
    assert "Next: " in measured.text
    assert "Who waited for whom" not in [each.text for each in found.all("h2")]
    assert page_of(broken()).section("measured") is None


def test_the_picture_has_each_host_and_of_the_links_only_the_broken_ones_in_red(page):
    drawn = page.one("svg", "picture")
    names = [each.text for each in drawn.under if each.tag == "text"]
    assert {"nd0", "nd1", "nd2", "nd3"} <= set(names)
    assert [each.tag for each in drawn.under].count("circle") == 4
    bad = [each for each in drawn.under if each.has("bad-link")]
    codes = {cause.code for cause in broken().root_causes if cause.where.links}
    assert len(bad) == len(codes) == len([each for each in drawn.under if each.has("bad-label")])
    assert {f"✗ {code}" for code in codes} <= set(names)
    assert "these links fail: nd1 to nd2" in drawn.text
    headings = [each.text for each in page.all("h2")]
    assert headings[0] == "What to fix"  # the picture stands above it


def test_many_hosts_are_counted_and_not_drawn():
    hosts = tuple(f"n{i}" for i in range(40))
    link = Finding(PORT, "no answer", Where(links=((hosts[3], hosts[20]),), hosts=(hosts[3],)))
    found = page_of(report_of(make_cluster(hosts, 1), link))
    assert not found.all("svg", "picture")
    assert any(
        each.text == "To blame: 1 of 1560 links and 1 of 40 hosts." for each in found.all("p")
    )


def test_an_empty_report_is_a_whole_page():
    found = page_of(EMPTY)
    assert found.one("b", "badge").text == "? UNKNOWN"
    assert not found.cells()
    assert found.section("links") is None
    assert found.section("timeline") is None


def test_a_redacted_report_says_so():
    report = healthy()
    assert "redacted" not in page_of(report).one("header").text
    assert "redacted" in page_of(replace(report, redacted=True)).one("header").text


def test_warnings_notes_and_what_is_explained(page):
    found = page_of(
        report_of(
            make_cluster(),
            Finding(PORT, "shut", Where(hosts=("nd0",))),
            Finding(SLOW, "it crawls", Where(hosts=("nd1",))),
            Finding(NOTE, "fyi"),
        )
    )
    notes = found.section("notes")
    assert notes is not None
    assert "fyi" in notes.text
    warnings = found.section("warnings") or found.section("explained")
    assert warnings is not None
    assert "it crawls" in warnings.text


def test_what_is_not_known_is_said():
    hung = Outcome(OutcomeStatus.HUNG, breadcrumbs=({"step": "open /dev/x", "at_s": 0.0},))
    cluster = make_cluster(check="shm", by_host={"nd0": {"x": 1}, "nd1": hung})
    gaps = page_of(report_of(cluster)).section("gaps")
    assert gaps is not None
    assert "hung in open /dev/x" in gaps.text


def test_the_header_has_versions_and_gpus():
    facts = {"torch": "2.9", "cuda": "12.9", "nccl": "2.27.5", "python": "3.12", "driver": None}
    cluster = make_cluster(check="software", by_rank=dict.fromkeys(range(4), facts))
    text = page_of(report_of(cluster)).one("header").text
    for words in ("torch 2.9", "CUDA 12.9", "NCCL 2.27.5", "Python 3.12"):
        assert words in text
    assert "driver" not in text
    cluster = make_cluster(check="software", by_rank={0: {"torch": "2.9"}, 2: {"torch": "2.8"}})
    assert "torch 2.9 (1 host), 2.8 (1 host)" in page_of(report_of(cluster)).one("header").text


def test_skipped_checks_are_folded_away():
    skipped = Outcome(OutcomeStatus.SKIPPED, reason="no RDMA here")
    cluster = make_cluster(check="rdma", by_host=dict.fromkeys(("nd0", "nd1"), skipped))
    checks = [made_check("shm"), made_check("rdma")]
    found = page_of(conclude(cluster, checks, run=RUN)).section("checks")
    assert found is not None
    outer, inner = (each for each in found.under if each.tag == "details")
    assert outer.text.startswith("2 checks: 1 skipped, 1 unknown")
    assert inner.text.startswith("1 skipped")
    assert "open" not in inner.attributes
    assert "rdma" in inner.text
    assert "shm" not in inner.text


def test_a_finding_leads_to_its_page(page):
    ids = {each.attributes.get("id") for each in page.elements}
    targets = {each.attributes["href"].removeprefix("#") for each in page.all("a")}
    assert targets
    assert targets <= ids
    about = page.section("pages")
    for finding in broken().root_causes:
        assert f"about-{finding.code}" in targets
        assert " ".join(finding.kind.why.split()) in " ".join(about.text.split())
    assert "When it is wrong" in about.text


def test_commands_are_code_below_their_hosts_and_prose_is_prose():
    text = "# on nd1, until it restarts\nip link set lo up\nip addr\n# on every host\nexport A=1"
    made = Page(fix_of(text))
    parts = made.all("div", "typed")
    assert [part.text for part in parts] == [
        "on nd1, until it restartsip link set lo up\nip addr",
        "on every hostexport A=1",
    ]
    assert [each.text for each in made.all("code")] == ["ip link set lo up\nip addr", "export A=1"]
    prose = Page(fix_of("open the port (`ss -ltn` shows it) <b>"))
    assert not prose.all("pre")
    assert [each.text for each in prose.all("code")] == ["ss -ltn"]
    assert prose.one("p").text == "open the port (ss -ltn shows it) <b>"


def test_evidence_has_units():
    finding = Finding(PORT, "m", Where(hosts=("nd1",)), {"took_s": 1.5, "rtt_us": {"p50_us": 80}})
    text = page_of(report_of(make_cluster(), finding)).section("causes").text
    assert "took_s in seconds1.5" in text
    assert "rtt_us in µs" in text


# --- nothing from outside becomes HTML, and nothing is loaded ---

TAGS = set(
    re.findall(
        r"\w+",
        "html head meta title link style body header h1 h2 h3 main section article div p b i span "
        "ul li table caption thead tbody tr th td details summary dl dt dd code pre label input "
        "svg rect script a figure g circle line text marker path defs",
    )
)
LOADING = {"src", "srcset", "action", "formaction", "data", "style", "xlink:href", "poster"}


def harmless(page: Page) -> None:
    assert {each.tag for each in page.elements} <= TAGS
    for each in page.elements:
        assert not [name for name in each.attributes if name.startswith("on")]
        assert not LOADING & each.attributes.keys()
        target = each.attributes.get("href", "data:,")
        assert target == "data:," or (each.tag, target[:7]) == ("a", "#about-")
    for tag in ("script", "style", "head", "body"):
        assert len(page.all(tag)) == 1
    for element_ in (page.one("style"), page.one("script")):
        assert not re.search(r"url\(|@import|https?:|//\w|\bimport\b|fetch", element_.text)


def test_hostile_text_stays_text(hostile_page):
    harmless(hostile_page)
    shown = HOSTILE.replace("\u202e", "\\u202e")
    body = hostile_page.one("body").text
    # Title, message, reason, fix, stack, facts, environment: all of it can be read.
    assert body.count(shown) > 30
    assert hostile_page.all("title")[0].text.endswith(shown)
    assert (f"{shown}0", f"{shown}1") in hostile_page.cells()
    assert "\u202e" not in body
    assert "plain\\ud800" in body


@pytest.mark.parametrize("make", [broken, healthy, lambda: EMPTY], ids=["broken", "healthy", "0"])
def test_a_page_loads_nothing(make):
    harmless(page_of(make()))


def test_the_page_forbids_the_network(page):
    (policy,) = [
        each.attributes["content"]
        for each in page.all("meta")
        if each.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for tag in ("style", "script"):
        digest = hashlib.sha256(page.one(tag).text.encode()).digest()
        assert rules[f"{tag}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert set(rules) == {
        "default-src",
        "style-src",
        "script-src",
        "img-src",
        "base-uri",
        "form-action",
    }
    assert rules["img-src"] == "data:"


def test_an_element_escapes_all_but_html():
    made = element(
        "p", '<b>&"', Html("<i></i>"), None, 3, title="\"><'", data_from="x\0", hidden=True
    )
    assert made == (
        '<p title="&quot;&gt;&lt;&#x27;" data-from="x\\x00" hidden>&lt;b&gt;&amp;&quot;<i></i>3</p>'
    )


def test_a_page_is_the_same_every_time_and_after_a_trip_through_a_file():
    facts = {"b": {"z": 1, "a": list(range(40))}, "a": {"y": "long" * 30, "x": None}}
    finding = Finding(PORT, "m", Where(hosts=("nd1",)), {"z": 1, "a": facts})
    cluster = make_cluster(check="shm", by_host=dict.fromkeys(("nd0", "nd1"), facts))
    checks = [made_check("shm", finds=[finding])]
    report = conclude(cluster, checks, run=RUN)
    assert render(report) == render(report) == render(through_json(report))
    assert render(broken()) == render(broken())
