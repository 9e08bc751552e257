"""Paths that cannot be written, a disk that is full, and a reader of stdout that leaves: for every
subcommand of `report`, every format, `env` and `run`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nccl_doctor.cli import cli
from nccl_doctor.report.formats import formats
from nccl_doctor.system.helpers import PATIENCE_S
from tests.cli.program import CLEAN, program
from tests.support import disks
from tests.support.forkserver import quick_python_path
from tests.support.rows import also
from tests.support.waiting import until
from tests.support.ways import GIVES, MOST_S, PRINTS, SAVED, SUMMARY, files_in

START_S = 10.0


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the good report in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "GOOD").write_text(SAVED)
    return tmp_path


@pytest.mark.parametrize("form", formats())
@pytest.mark.parametrize("name", GIVES)
def test_a_path_that_cannot_be_written(there, name, form):
    for path in ("no/such/file", ".", "", "GOOD/file"):
        with pytest.raises(click.UsageError, match=f"^--{form} ") as caught:
            cli.main(["report", *GIVES[name], f"--{form}={path}"], standalone_mode=False)
        assert caught.value.exit_code == 2
        assert "\n" not in caught.value.format_message()
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


def test_the_report_says_with_which_code_the_process_left(tmp_path):
    few = ("--select", "own_address", "--backend", "gloo")
    for lost in ("--html", "--junit"):  # by name before JSON, and after
        done = program("env", *few, lost, "/dev/full", "--json", "kept", cwd=tmp_path)
        assert done.returncode == 3, done
        kept = json.loads((tmp_path / "kept").read_text())
        assert (kept["verdict"], kept["exit_code"]) == ("pass", 3)


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
        ["unshare", "-m", "sh", "-c", "\n".join(lines), "sh", quick_python_path()],
        cwd=folder,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )


def test_nothing_half_is_left_on_a_full_disk(there):
    outputs = " ".join(f"--{form} full/report.{form}" for form in formats())
    done = on_a_full_disk(
        there, f'"$1" -m nccl_doctor report judge GOOD {outputs}; echo left with $?'
    )
    verdict, code, left = done.stdout.partition("left with 3\n")
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
        done = on_a_full_disk(
            there, f'"$1" -m nccl_doctor report {arguments} GOOD; echo left with $?'
        )
        assert done.stdout.splitlines() == ["left with 3", "fill", "report.json", "old"], done
        (line,) = done.stderr.splitlines()
        assert line.endswith("No space left on device")
        (there / "full").rmdir()
    for arguments in ("issue nccl", "show --redact", "diff --redact full/GOOD"):
        script = f'ln -s ../GOOD full/GOOD; "$1" -m nccl_doctor report {arguments} full/GOOD'
        done = on_a_full_disk(there, f"{script}; echo left with $?; rm full/GOOD")
        assert "left with 3\nfill\nreport.json\nold\n" in done.stdout, done
        (line,) = done.stderr.splitlines()
        assert line.endswith("No space left on device")
        assert "gandalf" not in done.stdout
        (there / "full").rmdir()


def test_a_run_whose_folders_are_full_is_no_success(there):
    options = "--nproc-per-node 1 --backend gloo --select own_address"
    outputs = "--json full/report.json --output-dir full"
    done = on_a_full_disk(
        there, f'"$1" -m nccl_doctor run {options} {outputs} --no-github; echo left with $?'
    )
    verdict, code, left = done.stdout.partition("left with 3\n")
    assert verdict.startswith("nccl-doctor: PASS"), done
    assert code
    assert left.splitlines() == ["fill", "report.json", "old"]
    assert done.stderr.splitlines() == [
        "nccl-doctor: the partial report was not saved: full/node0.json: No space left on device",
        "nccl-doctor: the report was not saved: full/report.json: No space left on device",
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


def printed_to(stdout: int, folder: Path, *arguments: str, python: str = "") -> tuple[int, str]:
    """Exit code and stderr of the program with a certain stdout."""
    done = subprocess.run(
        [python or quick_python_path(), "-m", "nccl_doctor", *arguments],
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


def test_a_python_that_is_started_afresh_does_the_same(there):
    """Its own end writes what is left in a buffer; that of a forked one is made after it."""
    judge, code = ("report", *PRINTS["judge"]), expected_code(PRINTS["judge"])
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert printed_to(writing, there, *judge, python=sys.executable) == (code, "")
        assert printed_to(writing, there, "--version", python=sys.executable) == (0, "")
    finally:
        os.close(writing)
    with open("/dev/full", "wb") as full:
        code, said = printed_to(full.fileno(), there, *judge, python=sys.executable)
    assert (code, len(said.splitlines())) == (3, 1)


def test_stdout_that_is_closed_is_taken_by_no_file(there):
    """Its descriptor would be the next one that is opened: the report would be written there."""
    script = '"$1" -m nccl_doctor report judge GOOD --json kept 0<&- >&- 2>err; echo $? > code'
    subprocess.run(
        ["sh", "-c", script, "sh", sys.executable], cwd=there, env=CLEAN, check=True, timeout=MOST_S
    )
    assert (there / "code").read_text() == "1\n"
    assert (there / "err").read_text() == ""
    assert json.loads((there / "kept").read_text())["exit_code"] == 1


def test_the_verdict_is_printed_before_the_files_are_written(there):
    os.mkfifo(there / "slow")
    with started(there, subprocess.PIPE, "--json", "slow") as process:
        assert process.stdout.readline().startswith(f"nccl-doctor: {SUMMARY}")
        assert json.loads((there / "slow").read_text())["exit_code"] == 1
        assert "· exit code 1\n" in process.stdout.read()
    assert process.returncode == 1


def full_pipe(free: int = 0) -> tuple[int, int]:
    """Ends of a pipe that nobody reads, with room for so many bytes."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, bytes(1 << 12)):
            pass
    os.set_blocking(writing, True)
    if free:
        os.read(reading, free)
    return reading, writing


@pytest.mark.parametrize("free", [0, 1 << 12])
def test_a_reader_that_does_not_read_costs_no_file(there, free):
    """As a terminal that is stopped; or one that is stopped when the first lines are there."""
    reading, writing = full_pipe(free)
    with started(there, writing, "--json", "kept") as process:
        os.close(writing)
        until((there / "kept").exists)
        with open(reading, encoding="utf-8") as stream:
            text = stream.read().lstrip("\0")
    assert text.startswith(f"nccl-doctor: {SUMMARY}")
    assert text.count("exit code 1\n") == 1
    assert process.returncode == 1


@pytest.mark.parametrize("printed", [("--html", "-"), *map(also, [(), ("--html", "/dev/stdout")])])
@pytest.mark.parametrize("command", ["run --nproc-per-node 2 --timeout 24", also("env")])
def test_a_reader_that_never_reads_costs_neither_file_nor_deadline(there, command, printed):
    """The process leaves long before the deadline, and says with which code."""
    reading, writing = full_pipe()
    few = ("--select", "own_address", "--backend", "gloo", "--json", "kept", "--junit", "too")
    begun = time.monotonic()
    try:
        code, said = printed_to(writing, there, *command.split(), *few, *printed)
    finally:
        os.close(writing)
        os.close(reading)
    limit_s = 24 if command.startswith("run") else 60
    assert time.monotonic() - begun < limit_s * 2 / 3
    assert code == 3
    assert "nobody has read it for " in said
    kept = json.loads((there / "kept").read_text())
    assert (kept["verdict"], kept["exit_code"]) == ("pass", 3)
    assert (there / "too").exists()


def test_stdout_by_its_other_name_is_taken_by_the_file(there):
    done = program("report", "judge", "GOOD", "--json", "/dev/stdout", cwd=there)
    assert json.loads(done.stdout)["verdict"] == "fail"
    assert (done.returncode, done.stderr) == (1, "")


def started(folder: Path, stdout: int, *arguments: str) -> subprocess.Popen[str]:
    """The program, which judges the good report once more."""
    return subprocess.Popen(
        [quick_python_path(), "-m", "nccl_doctor", "report", "judge", "GOOD", *arguments],
        cwd=folder,
        env=CLEAN,
        stdout=stdout,
        text=True,
    )


def test_a_descriptor_of_our_own(there):
    """As of `--markdown >(gzip > report.gz)`."""
    code = """
import os, sys
from nccl_doctor.__main__ import main
ours, theirs = os.pipe()
sys.argv.append(f"--markdown=/dev/fd/{theirs}")
try:
    main()
finally:
    os.close(theirs)
    with open("heard", "wb") as file:
        file.write(os.read(ours, 1 << 16))
"""
    done = program("report", "judge", "GOOD", cwd=there, code=code)
    assert (there / "heard").read_text().startswith("##"), done
    assert done.returncode == 1, done


def test_a_disk_that_does_not_answer(there):
    """As `test_a_path_that_is_full`; the verdict is told, and nobody is left to be waited for."""
    with disks.frozen(there) as disk:
        outputs = [word for form in formats() for word in (f"--{form}", f"{disk}/{form}")]
        for name in GIVES:
            started = time.monotonic()
            done = program("report", *GIVES[name], *outputs, cwd=there)
            assert time.monotonic() - started < PATIENCE_S + START_S
            assert done.returncode == 3, done
            assert done.stdout.startswith(f"nccl-doctor: {SUMMARY}")
            first, *others = done.stderr.splitlines()
            assert first.endswith(": no answer within 5.0 s")
            assert len(others) == len(formats()) - 1
            assert all(line.endswith(": no answer before, so not tried again") for line in others)
        packed = ("report", "bundle", "GOOD", "--no-tools", "--output", f"{disk}/b.tar.gz")
        for redact, what in (((), "the map of the pseudonyms"), (("--no-redact",), "the bundle")):
            done = program(*packed, *redact, cwd=there)
            assert done.returncode == 3, done
            assert done.stderr.startswith(f"nccl-doctor: error: {what} was not written: ")
            assert done.stderr.endswith("no answer within 5.0 s\n")
