"""Files, folders and archives that a job left, and what is wrong with some of them."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from nccl_doctor.autopsy.examine import examine
from nccl_doctor.autopsy.inputs import Content, content_of, read_error_file, read_stacks
from nccl_doctor.model.report import Report
from nccl_doctor.report.formats import renderer
from nccl_doctor.report.text import render
from tests.support.consoles import CLOSED, raised

DEATH = raised(0, CLOSED) + raised(1, "KeyError: 'a'")


def report(*paths: Path | str, stdin: bytes = b"") -> Report:
    return examine([str(path) for path in paths], io.BytesIO(stdin), started="2026-11-28T00:00:00")


def cause(*paths: Path | str, stdin: bytes = b"") -> tuple[str, Sequence[int]]:
    found = report(*paths, stdin=stdin).root_causes[0]
    return found.code, found.where.ranks


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder as torchrun --log-dir makes it."""
    for attempt in (0, 1):
        for local in (0, 1):
            folder = tmp_path / "logs" / "run_x" / f"attempt_{attempt}" / str(local)
            folder.mkdir(parents=True)
            error = "KeyError: 'a'" if (attempt, local) == (0, 1) else CLOSED
            (folder / "stderr.log").write_text(raised(local, error))
            (folder / "stdout.log").write_text("step 1\n")
    return tmp_path / "logs"


def test_the_files_of_every_rank_in_a_folder(logs: Path) -> None:
    found = report(logs)
    assert (found.verdict, found.exit_code) == ("fail", 1)
    assert cause(logs) == ("rank-raised", (1,))
    assert found.root_causes[0].evidence["file"].endswith("attempt_0/1/stderr.log")
    assert found.run.extra["files"] == 8


def test_archives_are_read_as_folders_are(logs: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "logs.tar.gz", "w:gz") as tape:
        tape.add(logs, "logs")
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as archive:
        for each in sorted(logs.rglob("*.log")):
            archive.write(each, each.relative_to(logs))
    (tmp_path / "job.log.gz").write_bytes(gzip.compress(DEATH.encode()))
    for name in ("logs.tar.gz", "logs.zip", "job.log.gz"):
        assert cause(tmp_path / name) == ("rank-raised", (1,)), name


def test_standard_input_may_be_text_or_an_archive(tmp_path: Path) -> None:
    assert cause("-", stdin=DEATH.encode()) == ("rank-raised", (1,))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("job.log", DEATH)
    assert cause("-", stdin=(tmp_path / "a.zip").read_bytes()) == ("rank-raised", (1,))


def test_an_error_file_of_torchelastic_is_an_exception_of_its_rank(tmp_path: Path) -> None:
    stack = raised(None, "KeyError: 'a'")
    data = {"message": {"message": "KeyError: 'a'", "extraInfo": {"py_callstack": stack}}}
    folder = tmp_path / "attempt_0" / "1"
    folder.mkdir(parents=True)
    (folder / "error.json").write_text(json.dumps(data))
    (tmp_path / "console.log").write_text(
        "  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 9)\n" + raised(0, CLOSED)
    )
    assert cause(tmp_path) == ("rank-raised", (1,))
    (found,) = read_error_file(b'{"message": "KeyError"}', "error.json")
    assert found.error == "KeyError"


def test_a_job_that_ended_well(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("[rank0]: step 1\ndone\n")
    found = report(tmp_path / "job.log")
    assert (found.verdict, found.exit_code, found.findings) == ("pass", 0, ())
    assert found.summary == "Nothing in the given files shows a failure of a rank"


def test_a_job_that_failed_and_does_not_say_why(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(raised(0, CLOSED) + raised(1, CLOSED))
    found = report(tmp_path / "job.log")
    assert (found.verdict, found.exit_code) == ("unknown", 3)
    assert [each.code for each in found.root_causes] == ["cause-not-told"]


def test_the_report_is_read_again_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(DEATH)
    made = report(tmp_path / "job.log").to_json()
    again = Report.from_json(json.loads(json.dumps(made)))
    assert again.to_json() == made
    assert made["run"]["source"] == "autopsy"
    made["run"]["bytes"] = "many"  # as a stranger may write it
    assert "read: 1 file, 0.0 kB" in render(Report.from_json(made))


def _broken(folder: Path) -> dict[str, str]:
    """Names of inputs that cannot be examined, each with a part of the error."""
    folder.mkdir(exist_ok=True)
    (folder / "empty").mkdir()
    (folder / "nothing.log").touch()
    (folder / "binary").write_bytes(b"\x7fELF" + bytes(range(256)))
    (folder / "half.zip").write_bytes(b"PK\x03\x04" + b"x" * 40)
    (folder / "half.gz").write_bytes(gzip.compress(b"x" * 9999)[:40])
    (folder / "error.json").write_text('{"message": {"extraInfo": 7}}')
    (folder / "report.json").write_text('{"schema_version": "3", "tool": {}}')
    with open(folder / "huge.log", "wb") as file:
        os.truncate(file.fileno(), 4 << 30)
    return {
        "absent.log": "cannot read .*absent.log: No such file",
        "empty": "there is no text of a job",
        "nothing.log": "there is no text of a job",
        "binary": "neither text nor a dump",
        "half.zip": "is damaged",
        "half.gz": "is damaged",
        "error.json": "an error file without a message",
        "report.json": "nccl-doctor report show",
        "huge.log": "has 4.3 GB.*tail -c 500M",
    }


def test_a_report_is_known_in_the_form_in_which_it_is_saved(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(DEATH)
    (tmp_path / "report.json").write_text(renderer("json")(report(tmp_path / "job.log")))
    with pytest.raises(ValueError, match=r"nccl-doctor report show .*report\.json"):
        report(tmp_path / "report.json")
    assert report(tmp_path).run.extra["files"] == 1  # beside the text of a job it is left out


def test_what_cannot_be_examined_is_named(tmp_path: Path) -> None:
    for name, words in _broken(tmp_path / "broken").items():
        with pytest.raises(ValueError, match=words):
            report(tmp_path / "broken" / name)


def test_a_file_that_is_no_text_is_left_out_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "core.4711").write_bytes(b"\x7fELF" + bytes(1000))
    (tmp_path / "job.log").write_text(DEATH)
    assert cause(tmp_path) == ("rank-raised", (1,))


@pytest.mark.parametrize(
    ("head", "content"),
    [
        (b"", Content.CONSOLE),
        (b"step 1\n", Content.CONSOLE),
        (b"{'loss': 0.5}\n", Content.CONSOLE),
        (b'{"message": {"message": "x", "extraInfo": {}}}', Content.ERROR_FILE),
        (b'{"schema_version": "3", "tool": {"name": "nccl-doctor"}}', Content.REPORT),
        (b'{"entries": [], "pg_status": {}', Content.DUMP),
        (pickle.dumps({"entries": [], "version": "2.10"}, protocol=2), Content.DUMP),
        (b"a\0b", Content.BINARY),
    ],
)
def test_content_is_told_by_the_first_bytes(head: bytes, content: Content) -> None:
    assert content_of(head) is content


PY_SPY = [
    {
        "pid": 7,
        "thread_name": "MainThread",
        "frames": [{"name": "read", "filename": "/home/job.py", "line": 3}],
    },
    {"pid": 7, "thread_name": "pin", "frames": []},
]


def test_stacks_as_json_are_those_of_the_main_thread() -> None:
    data = json.dumps(PY_SPY, indent=1).encode()
    assert content_of(data) is Content.STACKS
    (stack,) = read_stacks(data, "pyspy.json")
    assert (stack.origin.pid, str(stack.own_frame)) == (7, "job.py:3 in read")


@pytest.mark.parametrize(
    "data",
    [
        b'[{"thread_name": "MainThread", "frames": [',
        b'[{"thread_name": "MainThread"}]',
        b'[{"thread_name": "MainThread", "pid": "x", "frames": []}]',
        b'[1, "thread_name"]',
        b'[{"thread_name": ' + b"[" * 5000,
    ],
)
def test_stacks_that_are_cut_off_are_said(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "pyspy.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"pyspy\.json: no stacks of py-spy: "):
        report(tmp_path / "pyspy.json")


def test_a_damaged_file_among_others_is_left_out_and_said(tmp_path: Path) -> None:
    _broken(tmp_path)
    whole = gzip.compress(DEATH.encode() * 999)
    (tmp_path / "other.log.gz").write_bytes(whole[: len(whole) // 2])
    alone = report(tmp_path)
    assert (alone.verdict, alone.root_causes[0].code) == ("fail", "rank-raised")
    words = "; ".join(alone.run.extra["damaged"])
    for name in ("half.zip", "half.gz", "error.json", "huge.log", "other.log.gz"):
        assert name in words
    assert "not read: " in render(alone)


def test_a_damaged_file_beside_text_without_a_failure_is_no_pass(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("step 1\n")
    assert report(tmp_path).exit_code == 0
    (tmp_path / "rank1.log.gz").write_bytes(gzip.compress(DEATH.encode())[:40])
    found = report(tmp_path)
    assert (found.verdict, found.exit_code, found.root_causes) == ("unknown", 3, ())
    with pytest.raises(ValueError, match="is damaged"):
        report(tmp_path / "rank1.log.gz")


def test_a_large_dump_in_an_archive_is_read_whole(tmp_path: Path) -> None:
    data = json.dumps(PY_SPY + [{"pid": 7, "thread_name": "x", "frames": []}] * 20_000).encode()
    (tmp_path / "pyspy.json.gz").write_bytes(gzip.compress(data))
    assert report(tmp_path).run.extra["bytes"] == len(data)
