"""Files that are no report, for every subcommand of `report` and every format; and reports of
100 MB, and with junk in them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click
import pytest

from nccl_doctor.cli import cli, saving
from nccl_doctor.judge.conclusion import judge_again
from nccl_doctor.judge.history import difference
from nccl_doctor.model.report import Report
from nccl_doctor.report import difference as report_difference
from nccl_doctor.report import facts, github, issue, script
from nccl_doctor.report import text as report_text
from nccl_doctor.report.formats import formats, renderer
from nccl_doctor.report.redaction import redact
from nccl_doctor.report.story import PlaceWords
from tests.cli.program import CLEAN, error_of, program
from tests.support import many_calls
from tests.support.checks import REGISTRY
from tests.support.ways import GIVES, MOST_S, PRINTS, READS, REPORT, SAVED, files_in, has_outputs

OTHERS = ("merge", "diff", "fixes", "bundle", "issue")
"""Subcommands that read a report as `judge` does, and as large a one."""


def broken(*path: Any, value: Any) -> str:
    data = json.loads(SAVED)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(data)


BAD: dict[str, tuple[str | bytes, str]] = {  # what is wrong → content, and words that say so
    "empty": ("", "is not JSON"),
    "truncated": (SAVED[: len(SAVED) // 2], "is not JSON"),
    "no text": (b"\xff\xfe\x00\x80", "is not JSON"),
    "an archive": (b"\x1f\x8b\x08\0\0\0\0\0", "is not JSON"),
    "XML": ("<testsuites/>", "is not JSON"),
    "too deep": ("[" * 100_000, "is not JSON"),
    "a list": ("[]", "is not a report of nccl-doctor: report is a list"),
    "a number too long": ("9" * 5000, "is not a report of nccl-doctor"),
    "foreign": ('{"name": "x", "version": "1.0"}', 'report has no "schema_version"'),
    "SARIF": ('{"version": "2.1.0", "runs": []}', 'report has no "schema_version"'),
    "newer": (broken("schema_version", value="4"), 'schema_version is "4"; this version of'),
    "no version": (broken("schema_version", value=1), "schema_version is a whole number"),
    "another verdict": (broken("verdict", value="good"), 'report.verdict is "good"'),
    "another exit code": (broken("exit_code", value=9), "report.exit_code is 9"),
    "no run": (broken("run", value=None), "report.run is null, not an object"),
    "a world of a thousand million": (
        broken("run", "world_size", value=10**9),
        "report.run.world_size is 1000000000, outside 0–131072",
    ),
    "a node rank of 4000 digits": (
        broken("ranks", 0, "launch", "node_rank", value=10**4000),
        "launch.node_rank is a number of more than 18 digits, outside 0–131072",
    ),
    "odd options": (broken("run", "options", value=[]), "report.run.options is a list"),
    "odd findings": (broken("findings", value={"a": 1}), "report.findings is an object"),
    "odd launch": (
        broken("ranks", 0, "launch", "sources", value=7),
        "report.ranks[0].launch is not",
    ),
    "a rank of no host": (broken("ranks", 0, "host_id", value=7), "but no host has that id"),
}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the good report in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "GOOD").write_text(SAVED)
    return tmp_path


_REFUSED = """
import gc
import json
import os
import sys

import click

from nccl_doctor.cli import cli

gc.collect()
gc.freeze()
told = []
for folder, arguments in json.loads(sys.argv[1]):
    os.chdir(folder)
    try:
        cli.main(["report", *arguments], standalone_mode=False)
        told.append([0, ""])
    except click.UsageError as error:
        told.append([error.exit_code, error.format_message()])
with open(sys.argv[2], "w") as file:
    json.dump(told, file)
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Kind of BAD → what is said to each of its calls; asserts that it is a usage error, that
    nothing else was printed, and that no file was written.

    One small process makes all these calls: each reads in a child, and a fork of this process, with
    all tests in it, takes far longer.
    """
    top = tmp_path_factory.mktemp("refusals")
    files: dict[str, dict[str, bytes]] = {}
    for number, kind in enumerate(KINDS):
        folder = top / str(number)
        folder.mkdir()
        (folder / "GOOD").write_text(SAVED)
        if kind in BAD:
            content = BAD[kind][0]
            (folder / "BAD").write_bytes(
                content if isinstance(content, bytes) else content.encode()
            )
        elif kind == "a folder":
            (folder / "BAD").mkdir()
        files[kind] = files_in(folder)
    calls = [(str(top / str(n)), call) for n, kind in enumerate(KINDS) for call in calls_of(kind)]
    done = subprocess.run(
        [sys.executable, "-c", _REFUSED, json.dumps(calls), str(top / "told")],
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    told = json.loads((top / "told").read_text())
    assert {code for code, _ in told} == {2}
    assert not any("\n" in words for _, words in told)
    for number, kind in enumerate(KINDS):
        assert files_in(top / str(number)) == files[kind], kind
    said = iter(words for _, words in told)
    return {kind: list(islice(said, len(calls_of(kind)))) for kind in KINDS}


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a usage error says; asserts that it is one, and that nothing else was printed."""
    with pytest.raises(click.UsageError) as caught:
        cli.main(["report", *arguments], standalone_mode=False)
    assert caught.value.exit_code == 2
    assert capfd.readouterr() == ("", "")
    words = caught.value.format_message()
    assert "\n" not in words
    return words


def test_the_tables_know_every_subcommand():
    assert set(READS) == set(REPORT.commands)
    printing = {words[0] for words in PRINTS.values()}
    assert printing == set(REPORT.commands)
    gives = {name for name, each in REPORT.commands.items() if has_outputs(each)}
    assert gives == set(GIVES)


# --- files that are no report ---


NO_FILES = {"none": "No such file or directory", "a folder": "Is a directory"}
KINDS = [*BAD, *NO_FILES]
one_process = pytest.mark.xdist_group("refusals")


def calls_of(kind: str) -> list[list[str]]:
    """Calls that read BAD: the formats of one command, and the projects of another, are asked with
    the first kind alone, as the file is read before them; with every kind in `make test-wide`.
    """
    every = kind == KINDS[0] or os.environ.get("EXAMPLES") == "deep"
    first = {"show": 1, "issue": 1}
    return [
        call for name, ways in READS.items() for call in ways[: None if every else first.get(name)]
    ]


@one_process
@pytest.mark.hypothesis  # so that `make test-wide` runs it
@pytest.mark.parametrize("what", BAD)
def test_a_file_that_is_no_report_is_refused_by_all(refusals, what):
    words = BAD[what][1]
    for said, call in zip(refusals[what], calls_of(what), strict=True):
        assert said.startswith("BAD is not "), call
        assert words in said, call


@one_process
@pytest.mark.parametrize("what", NO_FILES)
def test_a_file_that_cannot_be_read_is_refused_by_all(refusals, what):
    assert refusals[what] == [f"cannot read BAD: {NO_FILES[what]}"] * len(calls_of(what))


def test_what_may_not_be_read_or_written(there):
    """Root may, unless that right is taken away."""
    (there / "BAD").touch(0o000)
    there.chmod(0o555)
    told = {tuple(ways[0]): "cannot read BAD: Permission denied" for ways in READS.values()}
    told |= {
        (*arguments, f"--{form}", "out"): f"--{form} out: the folder . is not writable"
        for arguments in GIVES.values()
        for form in formats()
    }
    code = many_calls.code(
        "from nccl_doctor.__main__ import main\n"
        "from tests.support.limited import keep_rights\n"
        "keep_rights()",
        "main()",
    )
    calls = [["report", *arguments] for arguments in told]
    done = program(json.dumps(calls), code=code, timeout_s=MOST_S)
    for ended, said in zip(many_calls.ended(calls, done), told.values(), strict=True):
        assert error_of(ended) == said
    there.chmod(0o755)
    assert set(files_in(there)) == {"BAD", "GOOD"}


def test_a_file_without_end_is_refused_by_all(there, capfd, monkeypatch):
    monkeypatch.setattr(saving, "LARGEST", 1 << 20)
    (there / "BAD").symlink_to("/dev/zero")
    for ways in READS.values():
        for arguments in ways:
            assert refused(capfd, *arguments) == "cannot read BAD: longer than 1 MiB"


def test_one_clear_line_through_the_program_itself(there):
    (there / "BAD").write_text(SAVED[:500])
    for ways in READS.values():
        done = program("report", *ways[0], cwd=there)
        assert error_of(done).startswith("BAD is not JSON: ")


# --- large reports ---

LARGE = 100 if os.environ.get("EXAMPLES") == "deep" else 25
"""MB of a report, at least."""
one_worker = pytest.mark.xdist_group("large_report")  # written once


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A large report, of which most is what tools printed on two hosts."""
    data = json.loads(SAVED)
    lines = [f"{i} " + "nvidia-smi says that all is well; " * 30 for i in range(1000)]
    for host in data["hosts"]:
        outcome = {"status": "ok", "facts": {"lines": "LINES"}}
        host["facts"]["tools"] = {f"round {i}": outcome for i in range(LARGE // 2 + 1)}
    file = tmp_path_factory.mktemp("large") / "large.json"
    file.write_text(json.dumps(data).replace('"LINES"', json.dumps(lines)))
    assert file.stat().st_size > LARGE * 1e6
    return file


@one_worker
@pytest.mark.wide
def test_a_large_report_is_shown(large):
    done = program("report", "show", str(large), timeout_s=MOST_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert 100 < len(done.stdout) < 1e6


@one_worker
def test_a_large_report_is_written_in_every_format(large, tmp_path):
    """And printed; by one process, so that it is read but once."""
    outputs = [f"--{form}={tmp_path / form}" for form in formats()]
    done = program("report", "judge", str(large), *outputs, timeout_s=MOST_S)
    assert (done.returncode, done.stderr) == (1, "")
    assert 100 < len(done.stdout) < 1e6
    for form in formats():
        size = (tmp_path / form).stat().st_size
        assert size > 100
        if form not in ("json", "html"):  # which hold all facts
            assert size < 1e6


@pytest.mark.wide
@pytest.mark.parametrize("name", OTHERS)
def test_a_large_report_is_read_by_every_subcommand(large, name, tmp_path):
    (tmp_path / "GOOD").write_text(SAVED)
    arguments = [str(large) if word == "BAD" else word for word in READS[name][0]]
    raw = ["--no-redact"] if name in ("bundle", "issue") else []
    done = program("report", *arguments, *raw, cwd=tmp_path, timeout_s=MOST_S)
    assert done.returncode == (1 if name == "merge" else 0), done.stderr
    assert done.stderr == ""


def test_100_mb_of_something_else_are_refused(tmp_path):
    (tmp_path / "BAD").write_text(f"[{', '.join([json.dumps(['x' * 1000] * 1000)] * 100)}]")
    assert (tmp_path / "BAD").stat().st_size > 100e6
    done = program("report", "show", "BAD", cwd=tmp_path, timeout_s=MOST_S)
    words = error_of(done)
    assert words.endswith("is not a report of nccl-doctor: report is a list, not an object")


# --- records that are odd, but can be read ---

JUNK: tuple[Any, ...] = (
    *(None, True, -1, 1e308, 10**30, "", "x\ud800\x1b[2J\n", "9" * 5000, [], {}),
    *([1], ["x"], {"a": {}}, [{}], float("nan")),
)
MOST = 400 if os.environ.get("EXAMPLES") == "deep" else 120
"""Odd records that are made; nearly a third of them are reports: as many as a property gets."""


def places_in(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(data, dict):
        for key, item in data.items():
            yield from places_in(item, (*path, key))
    elif isinstance(data, list):
        for i, item in enumerate(data):
            yield from places_in(item, (*path, i))


def odd_reports() -> Iterator[Report]:
    """Reports with junk in one or more places, as far as they are reports still."""
    dice = random.Random(1)
    places = [path for path in places_in(json.loads(SAVED)) if path]
    for number in range(MOST):
        data = json.loads(SAVED)
        for path in dice.sample(places, 1 + number % 3):
            inner = data
            try:
                for key in path[:-1]:
                    inner = inner[key]
                if dice.random() < 0.3:
                    del inner[path[-1]]
                else:
                    inner[path[-1]] = dice.choice(JUNK)
            except (KeyError, IndexError, TypeError):
                continue  # gone with a place above
        try:
            yield Report.from_json(data)
        except ValueError:
            continue


@pytest.mark.hypothesis  # so that `make test-wide` runs it, on more of them
def test_every_renderer_bears_whatever_is_read():
    plain = Report.from_json(json.loads(SAVED))

    def checks():
        return REGISTRY.checks

    ways = {
        **{form: renderer(form, checks) for form in formats()},
        "text": lambda report: report_text.render(report, verbose=2, checks=checks),
        "facts": facts.render,
        "script": script.render,
        "github": github.commands,
        "github summary": github.summary,
        **{
            f"issue {name}": lambda report, name=name: issue.fill(
                issue.form_of(name), report, checks
            )
            for name in issue.projects()
        },
        "redact": lambda report: renderer("json")(redact(report, b"a key of the test")[0]),
        "judge": lambda report: renderer("json")(judge_again(report, REGISTRY)),
        "diff": lambda report: report_difference.render(
            difference(report, plain, REGISTRY.checks), PlaceWords(plain)
        ),
    }
    number = 0
    for report in odd_reports():
        number += 1
        for render in ways.values():
            render(report).encode()  # what a file is written with
    assert number > MOST // 5
