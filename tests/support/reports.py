"""Made-up checks, and the schema that every report must meet, for tests of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import jsonschema

from nccl_doctor.api import Check, Cluster, Context, Finding, Kind, Layer, Round, Scope, Severity
from nccl_doctor.judge.one_value import settings_of
from nccl_doctor.model.report import Report, RunRecord
from nccl_doctor.report.formats import json as json_format

SCHEMA = json.loads(files("nccl_doctor.report").joinpath("schema.json").read_text("utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
"""In place of `jsonschema.validate`, which checks the schema too, 15 times as long as a report."""
RUN = RunRecord(
    id="0123abcd",
    started="2026-11-21T07:00:00+00:00",
    duration_s=3.5,
    launcher="torchrun",
    command="nccl-doctor run",
)


def validate(data: Any) -> None:
    """Assert that a report, as JSON data, meets the published schema and knows its own ends."""
    VALIDATOR.validate(data)
    codes = {finding["code"] for finding in data["findings"]}
    for finding in data["findings"]:
        assert finding["explained_by"] is None or finding["explained_by"] in codes
    for finding in data["root_causes"]:
        assert finding in data["findings"]
    assert two_values(data) == [], "two proposals for one setting of a host"


def two_values(data: Any) -> list[str]:
    """Settings of hosts for which the fixes of a report, as JSON data, propose several values."""
    proposed: dict[tuple[str, str], set[str]] = {}
    for finding in data["findings"]:
        for way in (finding, *finding["fix_alternatives"]):
            for step in way["fix_steps"]:
                for name, value in settings_of(step["command"]).items():
                    for host in step["hosts"]:
                        proposed.setdefault((host, name), set()).add(value)
    return [f"{' '.join(key)}: {sorted(each)}" for key, each in proposed.items() if len(each) > 1]


@lru_cache(maxsize=64)
def _validate_once(text: str) -> None:
    """Validate a report; what several hosts say, or a test asks twice, is often the same text."""
    validate(json.loads(text))


def through_json(report: Report) -> Report:
    """The report after a trip through a file; asserts that nothing was lost."""
    text = json_format.render(report)
    data = json.loads(text)
    _validate_once(text)
    again = Report.from_json(data)
    assert json_format.render(again) == text
    lines = "".join(json_format.in_lines(report))
    _validate_once(lines)
    assert json_format.render(Report.from_json(json.loads(lines))) == text
    return again


def read_with(report: Report, **run: Any) -> Report:
    """The report as it is read from a file whose `run` holds these values."""
    data = report.to_json()
    return Report.from_json({**data, "run": {**data["run"], **run}})


def kind(code: str, layer: Layer = Layer.HOST, severity: Severity = Severity.FAIL) -> Kind:
    return Kind(code, layer, f"Title of {code}", f"Why {code} matters", f"fix {code}", severity)


def made_check(
    name: str,
    layer: Layer = Layer.HOST,
    scope: Scope = Scope.HOST,
    *,
    kinds: Sequence[Kind] = (),
    finds: Iterable[Finding] = (),
    error: Exception | None = None,
    rounds: Sequence[Round] | None = None,
) -> Check:
    """A check with these findings, which then raises `error`, if there is one."""

    def observe(self: Check, ctx: Context) -> Mapping[str, Any]:
        return {}

    def judge(self: Check, cluster: Cluster) -> Iterable[Finding]:
        yield from finds
        if error is not None:
            raise error

    def plan(self: Check, cluster: Cluster) -> Sequence[Round]:
        return rounds or ()

    made = type(
        "Made",
        (Check,),
        {
            "name": name,
            "layer": layer,
            "scope": scope,
            "kinds": tuple(kinds) or (kind(name.replace("_", "-"), layer),),
            "observe": observe,
            "judge": judge,
            "plan": plan,
            "together": rounds is not None,
        },
    )
    return made()
