"""The report as data: saved, read again, judged again."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import jsonschema
import pytest

from nccl_doctor.api import Finding, Layer, Outcome, OutcomeStatus, Scope, Severity, Where
from nccl_doctor.judge.conclusion import conclude, judge_again
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.codec import encode
from nccl_doctor.model.findings import Level
from nccl_doctor.model.launch import LaunchProblem
from nccl_doctor.model.report import Report, hosts_to_json, ranks_to_json
from nccl_doctor.registry import Registry
from nccl_doctor.report.formats import json as json_format
from tests.support.clusters import change_rank, make_cluster
from tests.support.reports import RUN, SCHEMA, VALIDATOR, kind, made_check, through_json
from tests.support.rows import each_row

HOST = kind("low-host", Layer.HOST)
GROUP = kind("top-group", Layer.GROUP)


def rich_cluster() -> Cluster:
    """One of everything: absent host, duplicate rank, launch problem, every outcome field."""
    died = Outcome(
        OutcomeStatus.DIED,
        reason="r",
        breadcrumbs=({"step": "barrier", "at_s": 1.25},),
        stack="File x",
        state="T",
        wchan="futex",
        log_tail="end",
        exit_code=-6,
        signal="SIGABRT",
        duration_s=1.5,
    )
    cluster = make_cluster(
        ("nd0", "nd1", "nd2"),
        check="shm",
        by_host={"nd0": {"free": 1.5, "deep": {"list": [1, None, "x"]}}, "nd1": died},
        absent_nodes=[2],
        env={0: {"NCCL_DEBUG": "INFO"}},
        level=Level.FULL,
        complete=False,
        join_timeout_s=7.5,
        collective_timeout_s=3.25,
        expected={"gpus_per_host": 8},
    )
    problem = LaunchProblem("launch-bad-value", "RANK=x", {"RANK": "x", "MASTER_ADDR": None}, "fix")
    cluster = change_rank(
        cluster,
        1,
        launch={"rank": None, "problems": (problem,), "sources": {"rank": "RANK"}},
        rank=None,
        signed_in_s=0.125,
        device="cpu",
        backend="auto",
        last_breadcrumb="barrier",
    )
    return change_rank(cluster, 2, rank=0, facts={"gpu": {"alone": died}})


def report_of(cluster: Cluster, *checks) -> Report:
    return conclude(cluster, checks, run=RUN)


def full_report() -> Report:
    checks = [
        made_check("shm", finds=[Finding(HOST, "64 MiB", Where(hosts=("nd1",)), {"free": 1})]),
        made_check(
            "gpu",
            Layer.GROUP,
            Scope.RANK,
            kinds=[GROUP],
            finds=[Finding(GROUP, "hung", Where(ranks=(2,), links=(("nd0", "nd1"),)))],
        ),
    ]
    return report_of(rich_cluster(), *checks)


def test_the_cluster_comes_back_exactly():
    cluster = rich_cluster()
    assert through_json(report_of(cluster)).cluster == cluster


def test_every_field_of_a_cluster_is_recorded():
    told = {*encode(rich_cluster()), "hosts", "ranks"}
    of_record = {"run_id"}  # `id` of the record of the run
    assert told == set(Cluster.__dataclass_fields__) - of_record


def test_records_refer_to_each_other():
    hosts, ranks = hosts_to_json(rich_cluster()), ranks_to_json(rich_cluster())
    assert [host["host"] for host in hosts] == ["nd0", "nd1", None]
    assert {rank["host_id"] for rank in ranks} == {host["id"] for host in hosts}


def test_a_report_goes_through_a_file_unchanged():
    report = full_report()
    again = through_json(report)
    assert [f.explained_by for f in again.findings] == ["low-host", None] or [
        f.explained_by for f in again.findings
    ] == [None, "low-host"]
    assert again.to_json() == report.to_json()


def test_unknown_keys_are_for_newer_versions():
    data = full_report().to_json()
    data["new"] = data["run"]["new"] = data["findings"][0]["new"] = data["hosts"][0]["new"] = 1
    data["ranks"][0]["launch"]["new"] = 1
    VALIDATOR.validate(data)
    assert Report.from_json(data).verdict == "fail"


def test_keys_of_another_version_are_written_again():
    data = full_report().to_json()
    places = [data["run"], data["hosts"][0], data["ranks"][1]]
    places += [data["hosts"][1]["facts"]["shm"]["alone"], data["ranks"][2]["facts"]["gpu"]["alone"]]
    for place in places:
        place["new"] = {"deep": [1]}
    data = json.loads(json.dumps(data))
    again = Report.from_json(data)
    assert again.to_json() == data
    assert judge_again(again, registry_of()).to_json() == data


def test_render_is_stable_ascii_with_sorted_keys():
    text = json_format.render(full_report())
    assert text.isascii()
    assert text.endswith("}\n")
    assert json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n" == text


def test_facts_that_json_cannot_hold_do_not_cost_the_report():
    facts = {"nan": float("nan"), "inf": [float("-inf")], "set": {2, 1}, "when": object, 3: "x"}
    cluster = make_cluster(("nd0",), 1, check="shm", by_host={"nd0": facts})
    data = json.loads(json_format.render(report_of(cluster, made_check("shm"))))
    held = data["hosts"][0]["facts"]["shm"]["alone"]["facts"]
    assert held["nan"] == "NaN"
    assert held["inf"] == ["-Infinity"]
    assert held["set"] == [1, 2]
    assert held["3"] == "x"


def spoil(path: str, value: object) -> dict:
    data = json.loads(json_format.render(full_report()))
    *way, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    node = data
    for part in way:
        node = node[part]
    if value is KeyError:
        del node[last]
    else:
        node[last] = value
    return data


@each_row(
    ("path", "value", "words"),
    [
        ("schema_version", KeyError, 'report has no "schema_version"'),
        ("schema_version", "4", 'is "4"; this version of nccl-doctor reads "1", "2", "3"'),
        ("schema_version", 1, "report.schema_version is a whole number, not a text"),
        ("verdict", "good", 'report.verdict is "good", not one of'),
        ("exit_code", "1", "report.exit_code is a text"),
        ("exit_code", True, "report.exit_code is true or false"),
        ("exit_code", 0, 'report.exit_code is 0, but report.verdict is "fail"'),
        ("findings", {}, "report.findings is an object, not a list"),
        ("findings.0", "x", "report.findings[0] is a text, not an object"),
        ("findings.0.layer", "roof", 'report.findings[0].layer is "roof", not one of launch,'),
        ("findings.0.where", None, "report.findings[0].where is null"),
        ("findings.0.where.hosts", "nd0", "report.findings[0].where.hosts is a text"),
        ("findings.0.where.ranks", ["0"], "report.findings[0].where.ranks[] is a text"),
        ("findings.0.where.links", [["nd0"]], "where.links[] has 1 values, not 2"),
        ("findings.0.evidence", [], "report.findings[0].evidence is a list"),
        ("checks.0.status", "good", 'report.checks[0].status is "good"'),
        ("checks.0.hosts_or_ranks_tested", [1], "hosts_or_ranks_tested[] is a whole number"),
        ("run.world_size", KeyError, 'report.run has no "world_size"'),
        ("run.level", "huge", 'report.run.level is "huge"'),
        ("hosts.0.id", "a", "report.hosts[0].id is a text"),
        ("hosts.0.facts.shm.alone.status", "fine", 'facts.shm.alone.status is "fine"'),
        ("hosts.0.facts.shm.alone", 3, "facts.shm.alone is a whole number"),
        ("hosts.0.facts.shm", 3, "facts.shm is a whole number, not an object"),
        ("ranks.0.host_id", 99, "report.ranks[0].host_id is 99, but no host has that id"),
        ("ranks.0.launch", {"problems": [1]}, "report.ranks[0].launch is not a launch record"),
    ],
)
def test_a_bad_file_is_one_clear_line(path, value, words):
    with pytest.raises(ValueError, match=r"^report") as error:
        Report.from_json(spoil(path, value))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_not_a_report_at_all(data):
    with pytest.raises(ValueError, match=r"report is .*, not an object"):
        Report.from_json(data)


def test_the_schema_itself_is_valid_and_describes_every_key():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)

    def walk(node: object, path: str) -> None:
        if isinstance(node, dict):
            for name, inner in node.get("properties", {}).items():
                assert "description" in inner or "$ref" in inner, f"{path}.{name}"
                walk(inner, f"{path}.{name}")
            for name, inner in node.get("$defs", {}).items():
                walk(inner, name)

    walk(SCHEMA, "report")


def test_the_schema_refuses_what_breaks_the_contract():
    for path, value in (
        ("verdict", "good"),
        ("summary", KeyError),
        ("findings.0.code", "Not Kebab"),
        ("findings.0.severity", "error"),
        ("hosts.0.reported", 1),
        ("ranks.0.facts", KeyError),
    ):
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate(spoil(path, value))


# --- frozen: additions are made here on purpose, removals never ---

KEYS = {
    "": "schema_version tool verdict exit_code summary run root_causes findings checks hosts ranks "
    "redacted",
    "tool": "name version",
    "run": "id started duration_s launcher backend level world_size nnodes command options "
    "complete join_timeout_s collective_timeout_s expected job alone",
    "findings.0": "code check layer severity title message fix where evidence explained_by "
    "confidence why drains fix_steps fix_alternatives",
    "findings.0.where": "hosts ranks links devices interfaces nodes",
    "checks.0": "name layer scope status reason duration_s hosts_or_ranks_tested",
    "hosts.0": "id host node_rank reported joined key addresses facts",
    "ranks.0": "seat rank local_rank host host_id device backend reported last_breadcrumb launch "
    "env pid signed_in_s facts",
}


@each_row("path", KEYS)
def test_frozen_json_keys(path):
    node = full_report().to_json()
    for part in path.split(".") if path else ():
        node = node[int(part) if part.isdecimal() else part]
    assert set(node) == set(KEYS[path].split())


# --- judged again ---


def registry_of(*checks) -> Registry:
    kinds = {k.code: (k, check) for check in checks for k in check.kinds}
    return Registry(tuple(checks), (), kinds)


def test_newer_rules_on_saved_facts():
    cluster = make_cluster(check="shm", by_host={"nd0": {"free": 1}, "nd1": {"free": 9}})
    saved = through_json(report_of(cluster, made_check("shm")))
    assert saved.verdict == "pass"
    newer = made_check("shm", finds=[Finding(HOST, "now known bad", Where(hosts=("nd0",)))])
    again = through_json(judge_again(saved, registry_of(newer, made_check("later"))))
    assert (again.verdict, again.exit_code) == ("fail", 1)
    assert again.run == saved.run
    statuses = {check.name: (check.status.value, check.reason) for check in again.checks}
    assert statuses == {
        "shm": ("fail", "low-host"),
        "later": ("skipped", "not part of the saved run"),
    }


def test_what_cannot_be_judged_again_stands_as_saved():
    saved = through_json(full_report())
    again = judge_again(saved, registry_of())
    assert again.to_json() == saved.to_json()


def test_the_engines_own_findings_stand():
    from nccl_doctor.model.kinds import RANK_SILENT

    cluster = make_cluster(check="shm", by_host={"nd0": {"a": 1}, "nd1": {"a": 1}})
    check = made_check("shm")
    silent = Finding(RANK_SILENT, "no word for 20 s", Where(ranks=(3,)))
    saved = conclude(cluster, [check], run=RUN, problems=[silent])
    again = judge_again(through_json(saved), registry_of(check))
    assert again.to_json() == saved.to_json()
    assert again.exit_code == 3


def test_a_broken_judge_that_was_repaired_is_forgotten():
    cluster = make_cluster(check="shm", by_host={"nd0": {"a": 1}, "nd1": {"a": 1}})
    saved = report_of(cluster, made_check("shm", error=KeyError("x")))
    assert saved.verdict == "unknown"
    assert judge_again(saved, registry_of(made_check("shm"))).verdict == "pass"


def test_strict_is_remembered():
    cluster = make_cluster(check="shm", by_host={"nd0": {"a": 1}, "nd1": {"a": 1}})
    warn = Finding(HOST, "m", severity=Severity.WARN)
    check = made_check("shm", finds=[warn])
    saved = conclude(cluster, [check], run=replace(RUN, options={"strict": True}), strict=True)
    assert judge_again(through_json(saved), registry_of(check)).exit_code == 1


def test_judging_leaves_the_saved_report_alone():
    saved = full_report()
    before = copy.deepcopy(saved.to_json())
    judge_again(replace(saved), registry_of(made_check("shm")))
    assert saved.to_json() == before
