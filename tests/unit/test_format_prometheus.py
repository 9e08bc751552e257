"""Metrics for the textfile collector: read back by Prometheus' own client, and by the grammar of
the exposition format, which is stricter. docs/monitoring.md shows them as they are.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nccl_doctor.api import Finding, Where
from nccl_doctor.model.report import Report
from nccl_doctor.report.formats import prometheus
from tests.cli.program import program
from tests.support import pages
from tests.support.ci import GROUP, HOSTILE, PORT, RISK, SHM, report_of
from tests.support.reports import read_with

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{LABEL})(?:,{LABEL})*)\}})? (-?\d+(?:\.\d+)?)")


def samples(report) -> dict[tuple[str, ...], float]:
    """(name, label values…) → value; every line of the file is help, type or a sample."""
    text = prometheus.render(report)
    assert text.endswith("\n")
    typed: list[str] = []
    out = {}
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# "):
            word, name, *_ = line[2:].split(" ")
            assert word in ("HELP", "TYPE")
            if word == "TYPE":
                assert name not in typed, "all samples of a metric stand together"
                typed.append(name)
                assert line.endswith(" gauge")
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] == typed[-1]
        key = (match[1], *(value for _, value in re.findall(LABEL, match[2] or "")))
        assert key not in out
        out[key] = float(match[match.lastindex or 0])
    return out


def test_what_is_said():
    report = report_of(
        Finding(PORT, "no answer", Where(links=(("nd1", "nd0"),))),
        Finding(GROUP, "hung", Where(ranks=(0, 1, 2, 3))),
        Finding(RISK, "r", Where(hosts=("nd0",))),
        Finding(RISK, "s", Where(hosts=("nd1",))),
    )
    found = samples(report)
    assert found.pop(("nccl_doctor_info", report.tool["version"])) == 1
    assert found == {
        ("nccl_doctor_verdict", "pass"): 0,
        ("nccl_doctor_verdict", "warn"): 0,
        ("nccl_doctor_verdict", "fail"): 1,
        ("nccl_doctor_verdict", "unknown"): 0,
        ("nccl_doctor_exit_code",): 1,
        ("nccl_doctor_check_status", "shm", "host", "host"): 2,
        ("nccl_doctor_findings", "a-risk", "route", "warn", "false"): 2,
        ("nccl_doctor_findings", "group-hang", "group", "fail", "false"): 1,
        ("nccl_doctor_findings", "port-shut", "port", "fail", "true"): 1,
        ("nccl_doctor_hosts", "expected"): 2,
        ("nccl_doctor_hosts", "reported"): 2,
        ("nccl_doctor_ranks", "expected"): 4,
        ("nccl_doctor_ranks", "reported"): 4,
        ("nccl_doctor_run_timestamp_seconds",): 1795244400,
        ("nccl_doctor_run_duration_seconds",): 3.5,
    }


def test_absent_hosts_are_counted():
    found = samples(report_of(absent_nodes=[1]))
    assert found["nccl_doctor_hosts", "expected"] == 2
    assert found["nccl_doctor_hosts", "reported"] == 1
    assert found["nccl_doctor_ranks", "reported"] == 2


@pytest.mark.parametrize(
    ("started", "seconds"),
    [
        ("2026-11-21T08:00:00+01:00", 1795244400),
        ("2026-11-21T07:00:00.25Z", 1795244400),
        ("2026-13-41T07:00:00+00:00", None),
        ("yesterday", None),
    ],
)
def test_when(started, seconds):
    report = report_of()
    found = samples(read_with(report, started=started))
    assert found.get(("nccl_doctor_run_timestamp_seconds",)) == seconds


def test_hostile_text_stays_in_its_label():
    report = report_of()
    (check,) = report.checks
    for name in (HOSTILE, 'a"b\\c\nd'):
        odd = replace(
            report,
            tool={"version": name},
            checks=(check, replace(check, name=name), replace(check, name=name)),
            run=replace(report.run, started=name, duration_s=float("nan")),
        )
        prometheus.render(odd).encode()
        more, fewer = 1, 2  # a check; neither a start nor a duration
        assert len(samples(odd)) == len(samples(report)) + more - fewer


# --- read back by another program ---

Sample = tuple[str, tuple[tuple[str, str], ...], float]


def families(text: str) -> dict[str, list[Sample]]:
    """Metric → samples, as Prometheus' own client reads them; asserts that all are gauges."""
    parser = pytest.importorskip("prometheus_client.parser")
    found: dict[str, list[Sample]] = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.name not in found, "all samples of a metric stand together"
        assert (family.type, family.unit) == ("gauge", "")
        assert family.documentation
        assert family.samples
        assert all(sample.timestamp is None for sample in family.samples), "node_exporter refuses"
        found[family.name] = [
            (sample.name, tuple(sample.labels.items()), sample.value) for sample in family.samples
        ]
    return found


def odd_reports() -> Iterator[Report]:
    yield report_of()
    yield report_of(absent_nodes=[1])
    yield from (pages.broken(), pages.healthy(), pages.hostile(), pages.EMPTY)
    report = report_of(Finding(PORT, HOSTILE, Where(hosts=(HOSTILE,))))
    (check,) = report.checks
    for name in (HOSTILE, 'a"b\\c\nd', "\\", '"', "é", ""):
        yield replace(report, tool={"version": name}, checks=(check, replace(check, name=name)))


def test_prometheus_client_reads_the_very_same():
    for report in odd_reports():
        text = prometheus.render(report)
        told = [sample for found in families(text).values() for sample in found]
        assert len(told) == len(set(told)) == len(samples(report))
        assert all(math.isfinite(value) for _, _, value in told)
        by_grammar = {
            (name, *(v.replace('\\"', '"').replace("\\\\", "\\") for v in values)): value
            for (name, *values), value in samples(report).items()
        }
        assert {(n, *(v for _, v in labels)): value for n, labels, value in told} == by_grammar


@pytest.mark.parametrize("count", [3, 100])
def test_labels_are_bounded(count):
    """As many series for three hosts as for a hundred, all of them with findings."""
    hosts = tuple(f"gpu{i:03}" for i in range(count))
    findings = [
        Finding(kind, f"{i} MiB", Where(hosts=(host,), devices=(f"GPU-{i}",)), fix=f"fix {host}")
        for i, host in enumerate(hosts)
        for kind in (SHM, RISK)
    ]
    text = prometheus.render(report_of(*findings, hosts=hosts))
    found = families(text)
    assert sum(map(len, found.values())) == 15
    assert dict(labels_and_values(found["nccl_doctor_findings"])) == {
        ("a-risk", "route", "warn", "false"): count,
        ("shm-small", "host", "fail", "true"): count,
    }
    assert "gpu" not in text.lower()
    assert "MiB" not in text


def labels_and_values(found: list[Sample]) -> Iterator[tuple[tuple[str, ...], float]]:
    for _, labels, value in found:
        yield tuple(text for _, text in labels), value


def test_a_run_replaces_the_file_of_the_collector(tmp_path):
    target = tmp_path / "nccl_doctor.prom"
    target.write_text("of the last run\n")
    target.chmod(0o644)
    with target.open() as scrape:  # which had begun to read it
        done = program("env", "--select", "temp_dir", "--quiet", "--prometheus", str(target))
        assert done.returncode == 0, done
        assert scrape.read() == "of the last run\n"
    assert [file.name for file in tmp_path.iterdir()] == ["nccl_doctor.prom"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o644, "node_exporter is another user"
    found = families(target.read_text("utf-8"))
    assert dict(labels_and_values(found["nccl_doctor_verdict"]))[("pass",)] == 1
    assert [labels[0] for labels, _ in labels_and_values(found["nccl_doctor_check_status"])] == [
        "temp_dir"
    ]


# --- docs/monitoring.md ---

PAGE = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"


def test_the_page_names_the_metrics_that_there_are():
    yaml = pytest.importorskip("yaml")
    text = PAGE.read_text("utf-8")
    found = families(prometheus.render(report_of(Finding(PORT, "m", Where(hosts=("nd0",))))))
    rows = dict(re.findall(r"^\| (`nccl_doctor_.*?) \| (.*?) \|", text, re.MULTILINE))
    labels = {
        name: set(re.findall(r"`(\w+)`", words)) - {"expected", "reported"}
        for names, words in rows.items()
        for name in re.findall(r"`(\w+)`", names)
    }
    assert labels == {
        name: {label for _, labels, _ in samples_ for label, _ in labels}
        for name, samples_ in found.items()
    }
    (block,) = re.findall(r"^```yaml\n(groups:.*?)^```", text, re.MULTILINE | re.DOTALL)
    (group,) = yaml.safe_load(block)["groups"]
    for rule in group["rules"]:
        assert set(re.findall(r"nccl_doctor_\w+", rule["expr"])) <= found.keys()
        assert rule["alert"]
        assert rule["annotations"]["summary"]


DASHBOARD = json.loads((PAGE.parent / "examples" / "grafana" / "nccl-doctor.json").read_text())
QUERIES = [(panel["title"], each) for panel in DASHBOARD["panels"] for each in panel["targets"]]


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are():
    """Labels that Prometheus adds, `instance`, are not in the file."""
    found = families(prometheus.render(report_of(Finding(PORT, "m", Where(hosts=("nd0",))))))
    known = {
        name: {label for _, labels, _ in samples_ for label, _ in labels} | {"instance"}
        for name, samples_ in found.items()
    }
    asked = set()
    for title, query in QUERIES:
        for name, inner in re.findall(r"(nccl_doctor_\w+)(?:\{([^}]*)\})?", query["expr"]):
            asked.add(name)
            assert name in known, title
            assert set(re.findall(r"(\w+)\s*=~?", inner)) <= known[name], title
        legend = set(re.findall(r"\{\{(\w+)\}\}", query["legendFormat"]))
        assert legend <= {"instance", "code", "check"}, title
        assert query["expr"].count("(") == query["expr"].count(")"), title
    assert asked == found.keys()


def test_the_dashboard_is_one():
    """What Grafana needs of it, and nothing that lies on something else."""
    assert DASHBOARD["schemaVersion"] >= 36  # since Grafana 9, a datasource is an object
    assert {"title", "uid", "panels", "templating", "time"} <= DASHBOARD.keys()
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables["source"]["type"] == "datasource"
    taken = set()
    for panel in DASHBOARD["panels"]:
        assert {"id", "title", "description", "type", "gridPos", "targets"} <= panel.keys()
        assert panel["type"] in ("stat", "table", "timeseries")
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r"\$\{?([a-z]+)", text)) - {"__all"} == variables.keys()
