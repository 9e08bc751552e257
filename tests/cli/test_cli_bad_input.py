"""Bad input for every subcommand of `report` and every format: files that are no report, paths that
cannot be written, a disk that is full, a reader that leaves.

The tables are made from the program: a new format or subcommand is covered by itself, or is missed
by a test that says so.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from nccl_doctor import registry
from nccl_doctor.cli import cli, saving
from nccl_doctor.history import difference
from nccl_doctor.pseudonyms import redact
from nccl_doctor.record import Report
from nccl_doctor.report import difference as report_difference
from nccl_doctor.report import facts, github, issue
from nccl_doctor.report import text as report_text
from nccl_doctor.report.formats import formats, renderer
from nccl_doctor.report.places import Places
from nccl_doctor.verdict import judge_again
from tests.cli.program import CLEAN, program
from tests.planted import secret_report

REPORT = cli.commands["report"]
assert isinstance(REPORT, click.Group)
SAVED = renderer("json")(secret_report())
SUMMARY = "FAIL: 1 problem on 1 of 2 hosts"
MOST_S = 100.0

READS = {  # subcommand of `report` → every way in which it reads the file BAD, beside the good GOOD
    "show": [["show", "BAD"], *(["show", "--format", form, "BAD"] for form in formats())],
    "judge": [["judge", "BAD"]],
    "merge": [["merge", "BAD"], ["merge", "GOOD", "BAD"]],
    "diff": [["diff", "BAD", "GOOD"], ["diff", "GOOD", "BAD"]],
    "bundle": [["bundle", "--no-tools", "BAD"]],
    "issue": [["issue", name, "BAD"] for name in issue.projects()],
}
GIVES = {  # subcommand → how it is called to write a report to a path, or to stdout
    "judge": ["judge", "GOOD"],
    "merge": ["merge", "GOOD"],
}
PRINTS = {
    **{f"show as {form}": ["show", "--format", form, "GOOD"] for form in ("text", *formats())},
    "show with a profile": ["show", "--exit-profile", "nagios", "GOOD"],
    "judge": ["judge", "GOOD"],
    "judge to -": ["judge", "--json", "-", "GOOD"],
    "merge": ["merge", "GOOD"],
    "diff": ["diff", "GOOD", "GOOD"],
    "diff as json": ["diff", "--format", "json", "GOOD", "GOOD"],
    "bundle": ["bundle", "--no-tools", "GOOD"],
    "issue": ["issue", "nccl", "GOOD"],
}


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
    "newer": (broken("schema_version", value="2"), 'schema_version is "2"; this version of'),
    "no version": (broken("schema_version", value=1), "schema_version is a whole number"),
    "another verdict": (broken("verdict", value="good"), 'report.verdict is "good"'),
    "another exit code": (broken("exit_code", value=9), "report.exit_code is 9"),
    "no run": (broken("run", value=None), "report.run is null, not an object"),
    "odd options": (broken("run", "options", value=[]), "report.run.options is a list"),
    "odd findings": (broken("findings", value={"a": 1}), "report.findings is an object"),
    "odd launch": (
        broken("ranks", 0, "launch", "sources", value=7),
        "report.ranks[0].launch is not",
    ),
    "a rank of no host": (broken("ranks", 0, "host_id", value=7), "which is the id of no host"),
}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the good report in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "GOOD").write_text(SAVED)
    return tmp_path


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


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


def has_outputs(command: click.Command) -> bool:
    return set(formats()) <= {param.name for param in command.params}


# --- files that are no report ---


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_is_no_report_is_refused_by_all(there, capfd, what):
    content, words = BAD[what]
    (there / "BAD").write_bytes(content if isinstance(content, bytes) else content.encode())
    before = files_in(there)
    for ways in READS.values():
        for arguments in ways:
            said = refused(capfd, *arguments)
            assert said.startswith("BAD is not "), arguments
            assert words in said, arguments
    assert files_in(there) == before


def test_a_file_that_cannot_be_read_is_refused_by_all(there, capfd):
    for ways in READS.values():
        for arguments in ways:
            assert refused(capfd, *arguments) == "cannot read BAD: No such file or directory"
    (there / "BAD").mkdir()
    for ways in READS.values():
        for arguments in ways:
            assert refused(capfd, *arguments) == "cannot read BAD: Is a directory"
    assert set(files_in(there)) == {"GOOD"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(there, capfd):
    (there / "BAD").touch(0o000)
    assert "Permission denied" in refused(capfd, "show", "BAD")


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
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("nccl-doctor: error: BAD is not JSON: ")


# --- reports of 100 MB ---


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of 100 MB, of which most is what tools printed on two hosts."""
    data = json.loads(SAVED)
    lines = [f"{i} " + "nvidia-smi says that all is well; " * 30 for i in range(1000)]
    for host in data["hosts"]:
        outcome = {"status": "ok", "facts": {"lines": lines}}
        host["facts"]["tools"] = {f"round {i}": outcome for i in range(50)}
    file = tmp_path_factory.mktemp("large") / "large.json"
    file.write_text(json.dumps(data))
    assert file.stat().st_size > 100e6
    return file


@pytest.mark.parametrize("form", ["text", *formats()])
def test_a_report_of_100_mb_is_shown_in_every_format(large, form, tmp_path):
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "nccl_doctor", "report", "show", "--format", form, str(large)],
            stdout=out,
            stderr=subprocess.PIPE,
            env=CLEAN,
            timeout=MOST_S,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")
    size = (tmp_path / "out").stat().st_size
    assert size > 100
    if form not in ("json", "html"):  # which hold all facts
        assert size < 1e6


@pytest.mark.parametrize("name", ["judge", "merge", "diff", "bundle", "issue"])
def test_a_report_of_100_mb_is_read_by_every_subcommand(large, name, tmp_path):
    (tmp_path / "GOOD").write_text(SAVED)
    arguments = [str(large) if word == "BAD" else word for word in READS[name][0]]
    raw = ["--no-redact"] if name in ("bundle", "issue") else []
    done = program("report", *arguments, *raw, cwd=tmp_path, timeout_s=MOST_S)
    assert done.returncode == (1 if name in ("judge", "merge") else 0), done.stderr
    assert done.stderr == ""


def test_100_mb_of_something_else_are_refused(tmp_path):
    (tmp_path / "BAD").write_text(json.dumps([["x" * 1000] * 1000] * 100))
    assert (tmp_path / "BAD").stat().st_size > 100e6
    done = program("report", "show", "BAD", cwd=tmp_path, timeout_s=MOST_S)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("is not a report of nccl-doctor: report is a list, not an object")


# --- records that are odd, but can be read ---

JUNK: tuple[Any, ...] = (
    *(None, True, -1, 1e308, 10**30, "", "x\ud800\x1b[2J\n", "9" * 5000, [], {}),
    *([1], ["x"], {"a": {}}, [{}], float("nan")),
)
REGISTRY = registry.load()


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
    for number in range(400):
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


def test_every_renderer_bears_whatever_is_read():
    plain = Report.from_json(json.loads(SAVED))
    ways = {
        **{form: renderer(form) for form in formats()},
        "text": lambda report: report_text.render(report, verbose=True),
        "facts": facts.render,
        "github": github.commands,
        "github summary": github.summary,
        **{
            f"issue {name}": lambda report, name=name: issue.fill(issue.form_of(name), report)
            for name in issue.projects()
        },
        "redact": lambda report: renderer("json")(redact(report, b"a key of the test")[0]),
        "judge": lambda report: renderer("json")(judge_again(report, REGISTRY)),
        "diff": lambda report: report_difference.render(
            difference(report, plain, REGISTRY.checks), Places(plain)
        ),
    }
    number = 0
    for report in odd_reports():
        number += 1
        for render in ways.values():
            render(report).encode()  # what a file is written with
    assert number > 100


# --- paths that cannot be written ---


@pytest.mark.parametrize("form", formats())
@pytest.mark.parametrize("name", GIVES)
def test_a_path_that_cannot_be_written(there, capfd, name, form):
    for path in ("no/such/file", ".", "", "GOOD/file"):
        words = refused(capfd, *GIVES[name], f"--{form}={path}")
        assert words.startswith(f"--{form} ")
    assert files_in(there) == {"GOOD": SAVED.encode()}


@pytest.mark.parametrize("form", formats())
@pytest.mark.parametrize("name", GIVES)
def test_a_path_that_is_full(there, name, form):
    """One line, exit code 3, the verdict, and the other formats all the same."""
    other = "json" if form != "json" else "junit"
    arguments = [*GIVES[name], f"--{form}", "/dev/full", f"--{other}", "kept"]
    done = CliRunner().invoke(cli, ["report", *arguments])
    assert done.exit_code == 3, done.output
    assert done.stdout.startswith(f"nccl-doctor: {SUMMARY}")
    assert done.stderr == (
        "nccl-doctor: the report was not saved: /dev/full: No space left on device\n"
    )
    assert set(files_in(there)) == {"GOOD", "kept"}


def test_env_and_run_say_the_same(tmp_path):
    few = ("--select", "own_address", "--backend", "gloo")
    for command in (("env",), ("run", "--nproc-per-node", "1")):
        done = program(*command, *few, "--json", "/dev/full", "--html", "kept", cwd=tmp_path)
        assert done.returncode == 3, done
        assert done.stdout.startswith("nccl-doctor: PASS")
        assert done.stderr == (
            "nccl-doctor: the report was not saved: /dev/full: No space left on device\n"
        )
        assert (tmp_path / "kept").read_text().startswith("<!doctype html>")
        (tmp_path / "kept").unlink()


def on_a_full_disk(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a folder where `full` is a disk without any room, but with an old
    report.json; prints what is on it afterwards.
    """
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace of one's own is not allowed here")
    (folder / "full").mkdir()
    lines = (
        "mount -t tmpfs -o size=64k tmpfs full",
        "echo old > full/report.json",
        "dd if=/dev/zero of=full/fill bs=4k 2>/dev/null || true",
        script,
        "cd full; ls -A; cat report.json",
    )
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", "\n".join(lines), "sh", sys.executable],
        cwd=folder,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )


def test_nothing_half_is_left_on_a_full_disk(there):
    outputs = " ".join(f"--{form} full/report.{form}" for form in formats())
    done = on_a_full_disk(there, f'"$1" -m nccl_doctor report judge GOOD {outputs}; echo code $?')
    verdict, code, left = done.stdout.partition("code 3\n")
    assert verdict.startswith(f"nccl-doctor: {SUMMARY}"), done
    assert code
    assert left.splitlines() == ["fill", "report.json", "old"]
    said = done.stderr.splitlines()
    assert len(said) == len(formats())
    for form, line in zip(formats(), said, strict=True):
        assert line == (
            f"nccl-doctor: the report was not saved: full/report.{form}: No space left on device"
        )


def test_neither_archive_nor_map_is_left_half_on_a_full_disk(there):
    for arguments in (
        "bundle --no-tools --output full/x.tar.gz",
        "bundle --no-tools --no-redact --output full/x.tar.gz",
    ):
        done = on_a_full_disk(there, f'"$1" -m nccl_doctor report {arguments} GOOD; echo code $?')
        assert done.stdout.splitlines() == ["code 3", "fill", "report.json", "old"], done
        (line,) = done.stderr.splitlines()
        assert line.endswith("No space left on device")
        (there / "full").rmdir()
    for arguments in ("issue nccl", "show --redact", "diff --redact full/GOOD"):
        script = f'ln -s ../GOOD full/GOOD; "$1" -m nccl_doctor report {arguments} full/GOOD'
        done = on_a_full_disk(there, f"{script}; echo code $?; rm full/GOOD")
        assert "code 3\nfill\nreport.json\nold\n" in done.stdout, done
        (line,) = done.stderr.splitlines()
        assert line.endswith("No space left on device")
        assert "gandalf" not in done.stdout
        (there / "full").rmdir()


def test_a_run_whose_folders_are_full_is_no_success(there):
    options = "--nproc-per-node 1 --backend gloo --select own_address"
    outputs = "--json full/report.json --output-dir full"
    done = on_a_full_disk(
        there, f'"$1" -m nccl_doctor run {options} {outputs} --no-github; echo code $?'
    )
    verdict, code, left = done.stdout.partition("code 3\n")
    assert verdict.startswith("nccl-doctor: PASS"), done
    assert code
    assert left.splitlines() == ["fill", "report.json", "old"]
    assert done.stderr.splitlines() == [
        "nccl-doctor: the report was not saved: full/report.json: No space left on device",
        "nccl-doctor: the own view was not saved: full/node0.json: No space left on device",
    ]


def test_a_step_summary_that_is_full_costs_no_verdict(there):
    done = program(
        *("report", "judge", "GOOD", "--github"),
        cwd=there,
        env={"GITHUB_STEP_SUMMARY": "/dev/full"},
    )
    assert done.returncode == 1
    assert done.stdout.startswith(f"nccl-doctor: {SUMMARY}")
    assert "\n::error title=port-made" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("nccl-doctor: the step summary was not written: /dev/full: ")


# --- stdout ---


def printed_to(stdout: int, folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of the program with a certain stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "nccl_doctor", *arguments],
        cwd=folder,
        env=CLEAN,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=MOST_S,
        check=False,
    )
    return done.returncode, done.stderr


def expected_code(arguments: list[str]) -> int:
    if "nagios" in arguments:
        return 2
    return 1 if arguments[0] in ("judge", "merge") else 0


@pytest.mark.parametrize("name", PRINTS)
def test_a_reader_that_leaves_changes_nothing(there, name):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        told = printed_to(writing, there, "report", *PRINTS[name])
    finally:
        os.close(writing)
    assert told == (expected_code(PRINTS[name]), "")


@pytest.mark.parametrize(
    "arguments", ["explain host-absent", "checks", "schema", "run --help", "--version"]
)
def test_a_reader_that_leaves_a_page_changes_nothing(tmp_path, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert printed_to(writing, tmp_path, *arguments.split()) == (0, "")
    finally:
        os.close(writing)


def test_a_reader_that_leaves_a_run_does_not_change_its_verdict(tmp_path):
    (tmp_path / "nccl-doctor.toml").write_text("[expected]\ngpus-per-host = 99\n")
    few = ("--select", "backend_device", "--backend", "gloo")
    for command in (("env",), ("run", "--nproc-per-node", "2")):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            told = printed_to(writing, tmp_path, *command, *few, "--json", "kept", "--github")
        finally:
            os.close(writing)
        assert told == (1, "")
        assert json.loads((tmp_path / "kept").read_text())["exit_code"] == 1


@pytest.mark.parametrize("name", PRINTS)
def test_stdout_that_is_full_is_one_line_and_no_success(there, name):
    with open("/dev/full", "wb") as full:
        code, said = printed_to(full.fileno(), there, "report", *PRINTS[name])
    (line,) = said.splitlines()
    assert "No space left on device" in line
    if name.startswith(("show", "judge", "merge")):
        assert f"; the verdict is {SUMMARY}" in line
    assert code == 3
    assert "Traceback" not in said


def test_stdout_that_is_closed_is_taken_by_no_file(there):
    """Its descriptor would be the next one that is opened: the report would be written there."""
    script = '"$1" -m nccl_doctor report judge GOOD --json kept 0<&- >&- 2>err; echo $? > code'
    subprocess.run(
        ["sh", "-c", script, "sh", sys.executable], cwd=there, env=CLEAN, check=True, timeout=MOST_S
    )
    assert (there / "code").read_text() == "1\n"
    assert (there / "err").read_text() == ""
    assert json.loads((there / "kept").read_text())["exit_code"] == 1
