"""Reports of version 2, where what ranks have in common stands once: read, or refused."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.model.report import Report
from nccl_doctor.report.formats import json as json_format
from tests.cli.program import error_of, program
from tests.support.big_reports import RECORDED, grown, recorded
from tests.support.rows import each_row

FOLDED = RECORDED.with_name("two-hosts-v2.json.gz")
"""`grown(2, 2)`, as 0.1.0 wrote it before version 3."""


def test_version_2_holds_the_same():
    told = Report.from_json(json.loads(gzip.decompress(FOLDED.read_bytes())))
    assert told.cluster == grown(2, 2).cluster
    assert told.checks == grown(2, 2).checks
    assert json_format.render(told) == json_format.render(grown(2, 2))


@pytest.mark.parametrize("command", [("show", "-vv"), ("judge",)])
def test_the_program_says_the_same_of_it(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "new.json").write_text(json_format.render(grown(2, 2)))
    old = program("report", *command, str(FOLDED))
    new = program("report", *command, str(tmp_path / "new.json"))
    assert new.stdout
    assert (old.returncode, old.stdout, old.stderr) == (new.returncode, new.stdout, new.stderr)


SMALL: Any = {"value": {"a": [1, 2], "b": None}, "each": ["/a/0", "/b"]}


def spoiled(own: Any, shared: Any = SMALL, records: int = 1) -> Any:
    """A report whose first host, and so many records of it, are like a template."""
    data = recorded()
    data["schema_version"] = "2"
    data["shared"] = {"x": shared}
    data["hosts"][:1] = [{**data["hosts"][0], **own} for _ in range(records)]
    return data


LIKE = {"$same": "x", "$each": [1, 2]}
WIDE = {"value": {"facts": {str(i): {} for i in range(9000)}}, "each": ["/facts/0"]}
WRONG = {
    "no such template": (spoiled({"$same": "y"}), 'hosts[0] is like "y", which is not shared'),
    "no name": (spoiled({"$same": 1}), "hosts[0].$same is a whole number, not a text"),
    "too few values": (spoiled({"$same": "x", "$each": [1]}), "has 1 values of its own, for 2"),
    "no values": (spoiled({"$each": [1]}), 'hosts[0] has no "$same"'),
    "no pointer": (spoiled({**LIKE, "$but": {"a": 1}}), "is not a JSON pointer"),
    "nowhere": (spoiled({**LIKE, "$but": {"/a/7": 1}}), 'names "/a/7", where nothing is'),
    "through a value": (spoiled({**LIKE, "$but": {"/b/c/d": 1}}), "in what holds nothing"),
    "not there": (spoiled({**LIKE, "$not": ["/z"]}), 'names "/z", where nothing is'),
    "rows of nothing": (spoiled({"$rows": "x"}), 'hosts[0] has no "$same"'),
    "no such rows": (
        spoiled({"$literal": {"facts": {}}, "$same": "x"}, {"value": {"$rows": "x"}, "each": []}),
        "templates cannot",
    ),
    "no list": (spoiled({**LIKE, "$not": "/a"}), "$not is a text, not a list"),
    "no object": (spoiled({"$literal": 5}), "is like a value that is not an object"),
    "shared is a list": ({**spoiled(LIKE), "shared": []}, "report.shared is a list"),
    "a template is a text": (spoiled(LIKE, "t"), "report.shared.x is a text, not an object"),
    "no value": (spoiled(LIKE, {"each": []}), 'report.shared.x has no "value"'),
    "a place in no place": (spoiled(LIKE, {**SMALL, "each": ["/q", "/b"]}), "where nothing is"),
    "a place twice": (spoiled(LIKE, {**SMALL, "each": ["/b", "/b"]}), "or twice"),
    "a place in a place": (spoiled(LIKE, {**SMALL, "each": ["/a", "/a/0"]}), "within another"),
    "a cycle": (spoiled(LIKE, {"value": {"a": {"$same": "x"}}, "each": []}), "templates cannot"),
    "deep": (
        spoiled({"$same": "x", "$each": [json.loads("[" * 60 + "]" * 60), 1]}),
        "nested too deeply",
    ),
    "wide": (spoiled({"$same": "x", "$each": [{}]}, WIDE, 500), "too many in full"),
    "many": (
        spoiled({"$same": "x", "$each": [[{"$same": "x", "$each": [1]}] * 900]}, WIDE),
        "too many in full",
    ),
}


@each_row("name", WRONG)
def test_a_broken_form_is_one_clear_line(name):
    data, words = WRONG[name]
    with pytest.raises(ValueError, match="report") as error:
        Report.from_json(copy.deepcopy(data))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_program_says_so(tmp_path):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(WRONG["many"][0]))
    assert WRONG["many"][1] in error_of(program("report", "judge", str(file)))


def test_a_template_of_many_outcomes_is_read_once():
    """What hosts share is no more than one of it, however many they are."""
    facts = {f"c{i}": {"alone": {"status": "ok"}} for i in range(5000)}
    shared = {"value": {"facts": facts, "addresses": []}, "each": []}
    data = spoiled({"$same": "x"}, shared, 300)
    for host in data["hosts"][:300]:
        del host["facts"], host["addresses"]
    hosts = Report.from_json(data).cluster.hosts
    assert hosts[0].facts is hosts[299].facts


def test_version_1_knows_no_folded_form():
    data = {**recorded(), "shared": {"x": SMALL}}
    data["hosts"][0]["$same"] = "x"
    assert Report.from_json(data).cluster.hosts[0].extra == {"$same": "x"}
