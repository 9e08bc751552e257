"""A report that somebody made to hurt whoever looks at it, by every way out of the program."""

from __future__ import annotations

import copy
import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from nccl_doctor.api import (
    Finding,
    Fix,
    Layer,
    Outcome,
    OutcomeStatus,
    Severity,
    Step,
    Where,
    shell,
)
from nccl_doctor.gather.progress import Progress
from nccl_doctor.judge.history import difference
from nccl_doctor.model.report import Report
from nccl_doctor.registry import installed
from nccl_doctor.report import difference as difference_text
from nccl_doctor.report import facts, github, issue, profiles, script, text
from nccl_doctor.report.formats import formats, renderer
from nccl_doctor.report.story import PlaceWords
from nccl_doctor.system import terminal
from tests.cli.program import error_of, program
from tests.support.ci import GROUP, NOTE, PORT, RISK, SHM, report_of
from tests.support.reports import kind, made_check

ESCAPES = "\x1b[2J\x1b]0;x\x07\r\x08\x00\x7f\x9b\x85\u202e\u2066\u2028\u200b\ud800\ufffe"
HOSTILE = f"::error::a\n::stop-commands::x\n##[error]b\n  ::c {ESCAPES} ##[add-mask]d"
SLOW = kind("road-slow", Layer.SPEED, Severity.WARN)
HUNG = Outcome(
    OutcomeStatus.HUNG,
    reason="no end",
    breadcrumbs=({"step": "open /dev/x", "at_s": 0.0},),
    log_tail="NCCL WARN lost\nmore",
    stack="frame",
)
OPEN = Fix(
    Step(shell("open it"), undo=shell("shut it"), note="now"),
    alternatives=[Fix(Step(shell("wait")))],
)
TABLE = {"columns": ["a", "b"], "rows": [["1", "2"], ["3", "4"]]}


def whole() -> dict[str, Any]:
    """The JSON of a report that fills every part of every renderer."""
    report = report_of(
        Finding(SHM, "64 MiB", Where(hosts=("nd0",), devices=("GPU 1",), interfaces=("eth0",))),
        Finding(
            PORT, "no answer", Where(links=(("nd1", "nd0"),)), evidence={"tried": ["a"]}, fix=OPEN
        ),
        Finding(GROUP, "hung", Where(ranks=(0, 1, 2, 3))),
        Finding(RISK, "so so", Where(hosts=("nd2",))),
        Finding(SLOW, "slow", Where(links=(("nd0", "nd2"),))),
        Finding(NOTE, "fyi", Where(nodes=(1,))),
        hosts=("nd0", "nd1", "nd2"),
        by_host={"nd0": {"name": "x", "table": TABLE, "deep": {"a": {"b": ["c"]}}}, "nd1": HUNG},
        others=(made_check("other"),),
        env={number: {"NCCL_DEBUG": "INFO"} for number in range(6)},
    )
    data = json.loads(json.dumps(report.to_json(), default=str))
    data["run"] |= {"alone": True, "baseline": {"text": "5 runs"}, "hostfile": "hosts"}
    data["tool"] |= {"name": "nccl-doctor", "version": "1"}
    for rank in data["ranks"]:
        rank |= {"device": "cuda:0", "backend": "gloo", "last_breadcrumb": "doing"}
    return dict(data)


def ends(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every text in it, and to every key."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield (*path, key)
            yield from ends(value, (*path, key))
    elif isinstance(data, list):
        for i, value in enumerate(data):
            yield from ends(value, (*path, i))
    elif isinstance(data, str):
        yield (*path, None)


def spoiled(data: Any, path: tuple[Any, ...], hostile: str) -> Any:
    """A copy in which that text, or that key, is another; it shares all that is not on the way."""
    *way, last = path
    is_text = last is None
    if is_text:
        *way, last = way
    made = place = copy.copy(data)
    for step in way:
        place[step] = copy.copy(place[step])
        place = place[step]
    place[last if is_text else hostile] = hostile if is_text else place.pop(last)
    return made


def readable(data: Any) -> Report | str:
    """The report, or why it is none."""
    try:
        return Report.from_json(data)
    except ValueError as error:
        return str(error)


@pytest.fixture(scope="module")
def hostile() -> dict[str, Any]:
    """The same report with hostile text in every place where one is taken, and every such key."""
    data = whole()
    for path in list(ends(data)):
        if path[-1] is None and isinstance(readable(made := spoiled(data, path, HOSTILE)), Report):
            data = made
    for number, path in enumerate(reversed(list(ends(data)))):
        is_free = set(path[:-1]) & {"facts", "env", "evidence"} and path[-1] is not None
        if is_free and not set(path) & {"breadcrumbs", "status", "columns", "rows"}:
            made = spoiled(data, path, f"{HOSTILE}{number}")
            if isinstance(readable(made), Report):
                data = made
    assert json.dumps(data).count("u202e") > 150
    return data


def check(out: str, *, log: bool = False, source: str = "") -> None:
    """Nothing in it is obeyed by a terminal; nor, with `log`, by the runner that reads it."""
    for number, line in enumerate(out.split("\n")):
        for char in line:
            assert char == "\t" or unicodedata.category(char) not in ("Cc", "Cs", "Cf"), (
                f"{source}, line {number}: {char!r} in {line[:200]!r}"
            )
        if log:
            assert not line.lstrip().startswith("::"), (source, line[:200])
            assert "##[" not in line, (source, line[:200])


def ways(report: Report) -> Iterator[tuple[str, str, str]]:
    """Name, format and text of everything that is made of a report."""
    for name in formats():
        yield name, name, renderer(name, installed)(report)
    for plain in (True, False):
        how: Any = {"verbose": 2, "ascii": plain, "checks": installed}
        yield "text", "text", text.render(report, **how)
        yield "narrow text", "text", text.render(report, width=40, **how)
        yield "facts", "text", facts.render(report, ascii=plain)
    yield "script", "text", terminal.inert(script.render(report))
    for project in issue.projects():
        yield project, "text", issue.fill(issue.form_of(project), report, installed)
    yield "summary", "markdown", github.summary(report)
    for profile in profiles.PROFILES:
        for code in range(4):
            told = profiles.tell(report, profile, code)
            if told is not None:
                yield profile, "text", f"{told.line}\n"
    other = Report.from_json(whole())
    for old, new in ((report, other), (other, report)):
        found = difference(old, new, installed())
        yield "diff", "text", difference_text.render(found, PlaceWords(new), verbose=True)
        yield "diff", "json", json.dumps(found.to_json())


def test_no_way_out_lets_anything_through(hostile: dict[str, Any]) -> None:
    report = Report.from_json(hostile)
    for name, form, out in ways(report):
        check(out, source=name)
        check(github.inert_as(form, out), log=True, source=name)
        if form in ("html", "junit"):
            check(html.unescape(out), source=f"{name}, as it is shown")
            check(html.unescape(github.inert_as(form, out)), source=f"{name}, as it is shown")
        if form == "junit":
            ElementTree.fromstring(github.inert_as(form, out))
        if form == "json":
            assert json.loads(github.inert_as(form, out)) == json.loads(out)


def test_annotations_are_the_only_commands(hostile: dict[str, Any]) -> None:
    out = github.commands(Report.from_json(hostile))
    check(out)
    for line in out.splitlines():
        assert line.startswith(("::error title=", "::warning title=")), line
        assert "##[" not in line


@pytest.mark.parametrize("profile", profiles.PROFILES)
def test_a_call_without_a_report(profile: str) -> None:
    told = profiles.unable(profile, HOSTILE)
    check("" if told is None else f"nccl-doctor: {told.line}", source=profile)


def test_why_a_file_is_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is wrong, and wherever the hostile text is, what is said of it is one clean line."""
    data = whole()
    told = 0
    for path in ends(data):
        for made in (HOSTILE, f"x{ESCAPES}"):
            why = readable(spoiled(data, path, made))
            if isinstance(why, str):
                told += 1
                terminal.complain(f"error: {why}")
                out = capsys.readouterr().err
                assert out.count("\n") == 1
                check(out, log=True, source=str(path))
    assert told > 30


def test_progress_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress(shown=True, deadline=float("inf"), speaks=True)
    progress.say(HOSTILE)
    moves = r"\r|\x1b\[(K|J|\d+A)"  # the board's own are no part of what it says
    line = re.sub(moves, "", capsys.readouterr().err)
    assert "error::a" in line
    check(line)
    progress.tell(HOSTILE)
    progress.hear({"tell": True, "step": HOSTILE})
    told = re.sub(moves, "", capsys.readouterr().err)
    assert told.count("\n") == 2
    check(told, log=True)


# --- the program itself ---

STEP = {"GITHUB_ACTIONS": "true"}


@pytest.fixture
def file(hostile: dict[str, Any], tmp_path: Path) -> Callable[..., str]:
    def write(name: str = "report.json", **changed: Any) -> str:
        (tmp_path / name).write_text(json.dumps({**hostile, **changed}))
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize("form", ["text", "json", "markdown"])
def test_the_program_in_a_step_of_github(file: Callable[..., str], form: str) -> None:
    done = program("report", "show", "-v", "--format", form, file(), env=STEP)
    assert done.returncode == 0, done.stderr
    check(done.stdout + done.stderr, log=True)


def test_errors_of_the_program(file: Callable[..., str], tmp_path: Path) -> None:
    for changed in ({"schema_version": HOSTILE}, {"verdict": HOSTILE}, {"hosts": [{HOSTILE: 1}]}):
        check(error_of(program("report", "show", file(**changed), env=STEP)), log=True)
    named = tmp_path / "a\x1b[2J##[error]b"
    check(error_of(program("report", "show", str(named), env=STEP)), log=True)
    check(error_of(program("explain", "x\x1b[2J\u202e##[error]", env=STEP)), log=True)
    done = program("report", "show", "--exit-profile", "nagios", str(named), env=STEP)
    check(done.stdout + done.stderr, log=True)
    assert done.stdout.startswith("NCCL-DOCTOR UNKNOWN - ")
