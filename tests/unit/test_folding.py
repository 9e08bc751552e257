"""Facts of many ranks, kept once: nothing is lost, little is written, and no file does harm."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.judge.conclusion import judge_again
from nccl_doctor.model.cluster import Cluster, Host, Outcome, OutcomeStatus, Trail, facts_to_json
from nccl_doctor.model.codec import Node
from nccl_doctor.model.folding.fold import Folder
from nccl_doctor.model.folding.plain import compact, plain
from nccl_doctor.model.folding.report import Records
from nccl_doctor.model.folding.texts import Texts
from nccl_doctor.model.folding.unfold import Unfolder
from nccl_doctor.model.report import Report, host_to_json, rank_to_json
from nccl_doctor.report.formats import json as json_format
from nccl_doctor.report.redaction import redact
from tests.cli.program import error_of, program
from tests.support.big_reports import RECORDED, grown, recorded
from tests.support.checks import REGISTRY
from tests.support.clusters import change_rank
from tests.support.reports import validate
from tests.support.rows import each_row

MOST_FOR_A_RANK = 2048
MOST_FOR_16384 = 64 << 20


@cache
def text_of(hosts: int) -> str:
    return json_format.render(grown(hosts))


def read(text: str) -> Report:
    return Report.from_json(json.loads(text))


# --- what is written ---


def test_bytes_of_a_healthy_rank():
    """Count what one of 8 ranks of a host adds, with its own times and speeds: its line, and its
    parts of the line of its host and of the lists of what was tested.
    """
    text = json_format.render(grown(8, partners=7))
    own = sum(len(line) for line in text.splitlines() if line.startswith("  {"))
    lists = sum(len(compact(each)) for each in lists_of(json.loads(text)["shared"]))
    for_a_rank = (own + lists) / 64
    assert for_a_rank <= MOST_FOR_A_RANK
    assert len(text) + (16384 - 64) * for_a_rank <= MOST_FOR_16384


def lists_of(shared: Any) -> list[Any]:
    tested = (each["value"].get("hosts_or_ranks_tested") for each in shared.values())
    return [each for each in tested if each]


def test_the_folded_report_is_valid_and_complete():
    report = grown(4)
    data = json.loads(text_of(4))
    validate({**data, "ranks": data["ranks"][:5]})
    assert data["schema_version"] == "2"
    assert [rank["rank"] for rank in data["ranks"]] == list(range(32))
    assert all("$same" in rank and "facts" not in rank for rank in data["ranks"])
    assert {name for rank in data["ranks"] for name in [rank["$same"]]} <= data["shared"].keys()
    again = read(text_of(4))
    assert again.cluster == report.cluster
    assert again.checks == report.checks
    assert json_format.render(again) == text_of(4)


def test_each_rank_stands_on_its_line():
    lines = [line for line in text_of(4).splitlines() if '"local_rank":' in line]
    lines = [line for line in lines if line.startswith("  {")]
    assert [json.loads(line.rstrip(","))["rank"] for line in lines] == list(range(32))


def test_few_ranks_stand_in_full():
    text = json_format.render(Report.from_json(recorded()))
    assert "shared" not in json.loads(text)
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"


def test_the_full_form():
    full = json_format.render(grown(4), expand=True)
    data = json.loads(full)
    validate({**data, "ranks": data["ranks"][:2]})
    assert "shared" not in data
    assert json_format.render(read(full)) == text_of(4)
    assert json_format.render(read(text_of(4)), expand=True) == full


def test_what_one_host_has_of_its_own_stands_on_its_line_alone():
    cluster = grown(4).cluster
    odd = {**cluster.ranks[13].env, "NCCL_DEBUG": "TRACE"}
    report = replace(grown(4), cluster=change_rank(cluster, 13, env=odd))
    text = json_format.render(report)
    assert [rank["rank"] for rank in json.loads(text)["ranks"] if "TRACE" in compact(rank)] == [13]
    own = next(rank for rank in json.loads(text)["ranks"] if rank["rank"] == 13)["$but"]
    assert own == {"/env/NCCL_DEBUG": "TRACE"}
    assert read(text).cluster == report.cluster


def test_calls_to_healthy_peers_are_short_and_one_that_failed_stands_in_full():
    report = grown(4)
    host = report.cluster.hosts[1]
    matrix = host.facts["firewall"]["matrix"]
    failed = {"duration_s": 3.0, "outcome": "dropped", "detail": "no answer for 3 s"}
    peers = {**matrix.facts["peers"]}
    peers["0"] = [{**peers["0"][0], "attempts": [failed, failed]}]
    odd = replace(matrix, facts={**matrix.facts, "peers": peers})
    facts = {**host.facts, "firewall": {"matrix": odd}}
    cluster = with_host(report.cluster, replace(host, facts=facts))
    text = json_format.render(replace(report, cluster=cluster))
    assert read(text).cluster == cluster
    lines = [line for line in text.splitlines() if "no answer for 3 s" in line]
    assert [json.loads(line.rstrip(","))["host"] for line in lines] == [host.name]


def with_host(cluster: Cluster, host: Host) -> Cluster:
    hosts = tuple(host if each.id == host.id else each for each in cluster.hosts)
    ranks = (
        replace(rank, host=host) if rank.host.id == host.id else rank for rank in cluster.ranks
    )
    return replace(cluster, hosts=hosts, ranks=tuple(ranks))


def test_two_kinds_of_hosts():
    """Each kind has a template; none stands in full."""
    report = grown(4)
    ranks = [
        replace(rank, facts={k: v for k, v in rank.facts.items() if k != "groups" or rank.seat % 2})
        for rank in report.cluster.ranks
    ]
    cluster = replace(report.cluster, ranks=tuple(ranks))
    text = json_format.render(replace(report, cluster=cluster))
    assert len(text) < len(text_of(4))
    assert read(text).cluster == cluster


# --- the same verdict ---


def judged(report: Report) -> Any:
    return judge_again(report, REGISTRY).to_json()["findings"]


def test_judged_again_it_says_the_same():
    report = grown(2, 5)
    assert judged(read(json_format.render(report))) == judged(report)


BROKEN = {
    "another torch": ("software", {"torch": "2.12.0"}),
    "a small /dev/shm": ("shared_memory", {"free": 1 << 20, "size": 1 << 20}),
    "few files": ("limits", {"files": 256, "files_hard": 256}),
}


@each_row("check, changed", BROKEN.values())
def test_a_fault_of_one_host_is_found_again(check, changed):
    report = grown(3, 3)

    def spoiled(facts: Any) -> Any:
        if check not in facts:
            return facts
        alone = facts[check]["alone"]
        return {**facts, check: {"alone": replace(alone, facts={**alone.facts, **changed})}}

    host = report.cluster.hosts[1]
    cluster = with_host(report.cluster, replace(host, facts=spoiled(host.facts)))
    for rank in cluster.ranks_on(host):
        cluster = change_rank(cluster, rank.seat, facts=spoiled(rank.facts))
    broken = replace(report, cluster=cluster)
    found = judged(broken)
    assert found != judged(report)
    assert judged(read(json_format.render(broken))) == found


def test_redacted():
    report = grown(3, 3)
    red, _ = redact(report, b"the key of the test")
    text = json_format.render(red)
    validate(json.loads(text))
    names = [name for host in report.cluster.hosts for name in (host.name, *host.addresses)]
    assert [name for name in names if name in text] == []
    again = read(text)
    assert again.redacted
    assert judged(again) == judged(red)
    from_folded, _ = redact(read(json_format.render(report)), b"the key of the test")
    assert json_format.render(from_folded) == text


# --- any value ---

SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, -0.5, "a", ""])
)
KEYS = st.sampled_from(["a", "b", "/", "~1", "", "0", "$same", "$literal", "$each"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
ALIKE = st.lists(VALUES, max_size=2).flatmap(
    lambda some: st.lists(
        st.dictionaries(KEYS, st.sampled_from(some) if some else VALUES, max_size=4), max_size=9
    )
)


@given(st.lists(VALUES, max_size=6) | ALIKE, st.integers(0, 9))
def test_nothing_is_lost(values, learned):
    pad = {"long": "word " * 20, "more": [{"at": 1, "step": "the same words"}] * 3}
    records = [plain({**pad, "own": value, "other": [value, value]}) for value in values]
    folder = Folder(records[:learned])
    folded = json.loads(compact([folder.fold(record) for record in records]))
    shared = {each.name: each.content for each in folder.templates()}
    unfolder = Unfolder(Node("report.shared", json.loads(compact(shared))), len(records))
    again = [unfolder.record(record, "record") for record in folded]
    assert compact(again) == compact(records)


@given(st.lists(VALUES, min_size=2, max_size=6) | ALIKE, VALUES)
def test_what_is_alike_by_its_text_is_so_value_by_value(values, other):
    pad = {"long": "word " * 20, "more": [{"at": 1, "step": "the same words"}] * 3}
    records = [plain({**pad, "own": value, "number": at}) for at, value in enumerate(values)]
    folder = Folder(records)
    shared = {each.name: each.content for each in folder.templates()}
    for record in [*records, plain({**pad, "own": other, "number": "1"}), other]:
        if (found := folder.alike(compact(record))) is None:
            continue
        name, own = found
        line = {
            "$same": name,
            "$each": [json.loads(each) for each in own.each],
            "$but": {where: json.loads(each) for where, each in own.but.items()},
        }
        unfolder = Unfolder(Node("report.shared", json.loads(compact(shared))), 1)
        assert compact(unfolder.record(line, "record")) == compact(record)


def test_a_number_that_is_not_the_usual_one_stands_beside_the_template():
    many = {f"check {number}": {"took": 0.001, "words": "the same words"} for number in range(40)}
    folder = Folder([{**many, "rank": number} for number in range(20)])
    odd = {**many, "check 3": {"took": 0.0015, "words": "the same words"}, "rank": 7}
    found = folder.alike(compact(odd))
    assert found is not None
    assert found[1].each == ["7"]
    assert found[1].but == {"/check 3/took": "0.0015"}
    assert folder.fold(odd)["$but"] == {"/check 3/took": 0.0015}
    strange = {name: {"took": 0.5, "words": "others"} for name in many}
    assert folder.alike(compact({**strange, "rank": 7})) is None  # and in no time


@pytest.mark.parametrize(("name", "to_json"), [("hosts", host_to_json), ("ranks", rank_to_json)])
def test_nearly_all_are_seen_to_be_alike_by_their_text(name, to_json):
    """Hosts, too, each of which has a table with its own partners."""
    made = getattr(grown(64).cluster, name)
    records = Records(name, made, to_json, facts_of=lambda each: each.facts)
    short = [line for line in map(records._like_others, made) if line]
    assert len(short) > 0.9 * len(made)
    assert set(short) <= {line.strip().rstrip(",") for line in text_of(64).splitlines()}
    if name == "hosts":
        assert all('"$rows"' in line for line in short)  # the table is folded, too


CRUMBS = st.lists(
    st.fixed_dictionaries({"step": st.text(max_size=5)}, optional={"zeal": SCALARS, "a": SCALARS}),
    max_size=3,
)
TIMES = st.floats(0, 100) | st.sampled_from([float("nan"), 0.1 + 0.2, 3.0])
ENDED = st.builds(
    Outcome,
    st.sampled_from(OutcomeStatus),
    facts=st.dictionaries(KEYS, VALUES, max_size=3),
    reason=st.text(max_size=5),
    duration_s=TIMES,
    group=st.none() | st.integers(0, 9),
    state=st.sampled_from(["", "", "", "S"]),
    exit_code=st.sampled_from([None, None, None, 0, 1]),
    signal=st.sampled_from([None, None, None, "SIGKILL"]),
    extra=st.sampled_from([{}, {}, {"later": 1}]),
    witness=st.sampled_from([{}, {}, {"gone": []}]),
    breadcrumbs=st.builds(lambda crumbs, at: Trail(crumbs, [at] * len(crumbs)), CRUMBS, TIMES)
    | CRUMBS.map(lambda crumbs: tuple({**crumb, "at_s": 1} for crumb in crumbs)),
)


@given(st.dictionaries(KEYS, st.dictionaries(KEYS, ENDED, max_size=2), max_size=3))
def test_the_text_of_facts_is_that_of_their_plain_data(facts):
    def text_or_error(make: Callable[[], str]) -> str:
        try:
            return make()
        except ValueError as error:
            return type(error).__name__

    texts = Texts()
    expected = text_or_error(lambda: compact(facts_to_json(facts)))
    for _ in range(3):  # what comes again is not made again
        assert text_or_error(lambda: texts.of_facts(facts)) == expected


def test_facts_that_json_does_not_know():
    cluster = grown(2).cluster
    odd = {"software": {"alone": replace(cluster.ranks[3].facts["software"]["alone"])}}
    foreign = {"nan": float("nan"), "set": {2, 1}, 5: (1, 2), "$same": {"$each": [b"x"]}}
    odd["software"]["alone"] = replace(odd["software"]["alone"], facts=foreign)
    cluster = change_rank(cluster, 3, facts={**cluster.ranks[3].facts, **odd})
    again = read(json_format.render(replace(grown(2), cluster=cluster)))
    assert again.cluster.ranks[3].facts["software"]["alone"].facts == {
        "nan": "NaN",
        "set": [1, 2],
        "5": [1, 2],
        "$same": {"$each": ["b'x'"]},
    }


# --- files that are wrong, or made to do harm ---

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


# --- every way to read a report ---


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reports")
    report = grown(2, 5)
    forms = {"folded": json_format.render(report), "full": json_format.render(report, expand=True)}
    forms["old"] = forms["full"].replace('"schema_version": "2"', '"schema_version": "1"')
    for name, text in forms.items():
        (folder / f"{name}.json").write_text(text)
    return {name: str(folder / f"{name}.json") for name in forms}


COMMANDS = {
    "show": ("show", "-vv"),
    "judge": ("judge",),
    "diff": ("diff", str(RECORDED)),
    "fixes": ("fixes",),
    "issue": ("issue", "nccl", "--no-redact"),
    "merge": ("merge",),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_both_versions_read_the_same(files, command):
    new = program("report", *COMMANDS[command], files["folded"])
    old = program("report", *COMMANDS[command], files["old"])
    assert new.stdout
    assert (new.returncode, new.stdout, new.stderr) == (old.returncode, old.stdout, old.stderr)


def test_show_expands(files):
    done = program("report", "show", "--format", "json", "--expand", files["folded"])
    assert done.stdout == Path(files["full"]).read_text()
    folded = program("report", "show", "--format", "json", files["full"])
    assert folded.stdout == Path(files["folded"]).read_text()
    wrong = error_of(program("report", "show", "--expand", files["folded"]))
    assert "--expand is for JSON: add --format json or --json PATH" in wrong
