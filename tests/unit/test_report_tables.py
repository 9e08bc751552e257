"""Facts that are tables."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.report import facts as facts_page
from nccl_doctor.report.lines import Table, is_table, lay_out
from nccl_doctor.report.text import render
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, made_check, through_json

TABLE = {"columns": ["layer", "seconds"], "rows": [["store", 600.0], ["watchdog", None]]}


def report_of(*hosts: Any) -> Any:
    names = [f"nd{i}" for i in range(len(hosts))]
    by_host = {name: {"waits": table} for name, table in zip(names, hosts, strict=True)}
    made = make_cluster(names, check="shm", by_host=by_host)
    return through_json(conclude(made, [made_check("shm")], run=RUN))


def test_a_table_that_all_hosts_share_comes_once_and_only_behind_v() -> None:
    report = report_of(TABLE, TABLE)
    text = render(report, verbose=2)
    lines = text.splitlines()
    at = lines.index("shm: waits")
    assert [line.split() for line in lines[at + 1 : at + 5]] == [
        ["layer", "seconds"],
        ["--------", "---------"],
        ["store", "600"],
        ["watchdog", "–"],
    ]
    assert text.count("watchdog") == 1
    assert "watchdog" not in render(report)


def test_tables_that_differ_say_whose_they_are() -> None:
    other = {**TABLE, "rows": [["store", 1800.0], ["watchdog", 0.5]]}
    lines = render(report_of(TABLE, other, TABLE), verbose=2).splitlines()
    assert "shm: waits on nd0, nd2" in lines
    assert "shm: waits on nd1" in lines
    assert ["watchdog", "0.5"] in [line.split() for line in lines]


def test_long_and_foreign_text_stays_within_the_page() -> None:
    rows = [["x" * 500, "words " * 80, 1, "\x1b[31mred\nline"]] * 100
    table = {"columns": ["a", "b", "c", "d"], "rows": rows}
    text = render(report_of(table), verbose=2, width=60)
    lines = text.splitlines()
    at = lines.index("shm: waits")
    assert all(len(line) <= 60 for line in lines[at:] if not line.startswith("checks:"))
    assert "\x1b" not in text
    assert "and 60 more" in lines
    render(report_of(table), verbose=2, ascii=True).encode("ascii")


NOT_TABLES: list[Any] = [
    None,
    [],
    {"columns": [], "rows": []},
    {"columns": ["a"], "rows": [["b", "c"]]},
    {"columns": ["a"], "rows": "b"},
    {"columns": ["a"], "rows": [["b"]], "more": 1},
    {"columns": "a", "rows": [["b"]]},
]


@pytest.mark.parametrize("value", NOT_TABLES, ids=str)
def test_what_is_no_table_is_left_alone(value: Any) -> None:
    assert not is_table(value)
    assert "shm: waits" not in render(report_of(value), verbose=2)


def test_the_facts_of_a_host_have_a_line_per_row() -> None:
    lines = [line.split() for line in facts_page.render(report_of(TABLE)).splitlines()]
    assert ["waits.store", "600"] in lines
    assert ["waits.watchdog", "–"] in lines


def test_words_are_broken_only_where_there_is_no_room() -> None:
    rows = [["one", "a sentence of several words that needs room", "/a/path/in/one/word"]]
    found = Table("t", (), True, ("k", "words", "path"), tuple(tuple(row) for row in rows))
    out = "\n".join(lay_out(found, 50))
    assert "/a/path/in/one/word" in out
    assert max(map(len, out.splitlines())) <= 50
    assert "/a/path/in/one/word" not in "\n".join(lay_out(found, 30))
