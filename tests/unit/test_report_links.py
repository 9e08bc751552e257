"""The small matrix of links in the report for people."""

from __future__ import annotations

from itertools import product

import pytest

from nccl_doctor.api import Finding, Where
from nccl_doctor.registry import installed
from nccl_doctor.report import text
from nccl_doctor.report.lines import lay_out_links
from tests.support.clusters import make_cluster
from tests.support.pages import NOTE, PORT, SLOW, broken, measured, report_of
from tests.support.rows import each_row

ONE = Finding(PORT, "shut", Where(links=(("nd1", "nd2"),)))


def matrix(report, width: int = 80) -> list[str]:
    return lay_out_links(report, width, installed)


def test_where_a_link_is_blamed():
    slow = Finding(SLOW, "slow", Where(links=(("nd3", "nd0"), ("nd0", "nd3"))))
    assert matrix(report_of(measured(4), ONE, slow)) == [
        "      nd0 nd1 nd2 nd3",
        "  nd0  ·   ✓   ✓   !",
        "  nd1  ✓   ·   ✗   ✓",
        "  nd2  ✓   ✓   ·   ✓",
        "  nd3  !   ✓   ✓   ·",
    ]


def test_it_stands_below_what_to_fix_but_not_in_a_quiet_report():
    report = broken()
    out = text.render(report, checks=installed)
    assert out.index("fix ") < out.index("Links between hosts") < out.index("checks: ")
    assert "  nd1  ✓   ·   ✗   ✓\n" in out
    assert "Links between hosts" not in text.render(report, quiet=True, checks=installed)
    plain = text.render(report, ascii=True, checks=installed)
    assert plain.isascii()
    assert "  nd1  +   -   x   +\n" in plain


def test_what_nobody_tried_is_not_good():
    assert matrix(report_of(make_cluster(("nd0", "nd1", "nd2")), ONE))[2] == "  nd1  ?   ·   ✗"


def test_a_host_that_only_a_finding_knows_has_one_line_for_both_directions():
    both = Finding(PORT, "shut", Where(links=(("nd1", "nd9"), ("nd9", "nd1"))))
    assert matrix(report_of(make_cluster(("nd0", "nd1")), both)) == [
        "      nd0 nd1 nd9",
        "  nd0  ·   ?   ?",
        "  nd1  ?   ·   ✗",
        "  nd9  ?   ✗   ·",
    ]


@pytest.mark.parametrize(
    "findings",
    [
        [],
        [Finding(PORT, "shut", Where(hosts=("nd1",)))],
        [Finding(NOTE, "fyi", Where(links=(("nd1", "nd2"),)))],
        [Finding(PORT, "shut", Where(links=(("nd1", "nd2"),)), explained_by="port-shut")],
    ],
    ids=["none", "host", "info", "explained"],
)
def test_no_link_is_blamed(findings):
    report = report_of(measured(3), *findings)
    assert matrix(report) == [] or findings[0].explained_by


@pytest.mark.parametrize(("count", "lines"), [(2, 0), (3, 4), (16, 17), (17, 0)])
def test_only_few_hosts(count, lines):
    hosts = tuple(f"nd{i}" for i in range(count))
    link = Finding(PORT, "shut", Where(links=(("nd0", "nd1"),)))
    assert len(matrix(report_of(make_cluster(hosts, 1), link))) == lines


@each_row(
    ("width", "count", "name"),
    product([40, 57, 60, 80, 100], [3, 12, 16], ["n{}", "gpu-node-{}.rack7.cluster.example"]),
)
def test_it_fits_or_is_left_out(width, count, name):
    hosts = tuple(name.format(i) for i in range(count))
    link = Finding(PORT, "shut", Where(links=((hosts[0], hosts[1]),)))
    lines = matrix(report_of(make_cluster(hosts, 1), link), width)
    assert len(lines) in (0, count + 1)
    assert all(len(line) <= width for line in lines)
    assert lines or (width < 60 and count > 3)
    if lines:
        assert "\n".join(lines).count("✗") == 1


def test_names_are_made_safe():
    hosts = ("nd\033[2J0", "nd1", "nd2")
    link = Finding(PORT, "shut", Where(links=((hosts[0], "nd1"),)))
    lines = matrix(report_of(make_cluster(hosts, 1), link))
    assert lines[1].startswith("  nd\\x1b[2J0 ")
