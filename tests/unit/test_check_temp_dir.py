"""Temporary folders: real files and sockets, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Outcome, OutcomeStatus, Severity
from nccl_doctor.checks.temp_dir import TempDir, _fix, _make_file
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only

CHECK = TempDir()
MIB = 1 << 20


def facts(*tried: tuple[str, str, str], free: int | None = 5000, sock: str = "") -> dict[str, Any]:
    room = None if free is None else free * MIB
    return {"tried": [list(entry) for entry in tried], "free": room, "socket": sock}


FINE = facts(("", "/tmp", ""))


def cluster(bad: dict[str, Any] | Outcome, backend: str = "gloo") -> Cluster:
    seen = {"nd0": FINE, "nd1": bad, "nd2": FINE}
    return make_cluster(list(seen), check="temp_dir", by_host=seen, backend=backend)


def test_a_folder_that_works_is_fine() -> None:
    assert judge(CHECK, cluster(facts(("TMPDIR", "/scratch", "")))) == []


def test_a_bad_variable_is_a_risk() -> None:
    bad = facts(("TMPDIR", "/scratch", "Read-only file system"), ("", "/tmp", ""))
    found = only(CHECK, cluster(bad), "temp-dir-unwritable", hosts=["nd1"])
    assert found.level is Severity.WARN
    assert found.message == "TMPDIR=/scratch: Read-only file system (Python uses /tmp instead)"
    assert found.fix == "export TMPDIR=/tmp; or findmnt -T /scratch (repair the folder)"
    for error, command in (
        ("No space left on device", "df -h"),
        ("Permission denied", "ls -ld"),
    ):
        bad = facts(("TMPDIR", "/a b", error), ("", "/tmp", ""))
        found = only(CHECK, cluster(bad), "temp-dir-unwritable", hosts=["nd1"])
        assert found.fix.alternatives == (f"{command} '/a b' (repair the folder)",)


def test_a_folder_that_is_missing_is_made_and_a_variable_set_by_whole_commands() -> None:
    error = "No such file or directory"
    bad = facts(("TMPDIR", "/a b", error), ("", "/tmp", ""))
    found = only(CHECK, cluster(bad), "temp-dir-unwritable", hosts=["nd1"])
    (step,), (other,) = found.fix.steps, found.fix.alternatives
    assert (step.command, step.undo) == ("mkdir -p '/a b'", "rmdir '/a b'")
    (step,) = other.steps
    assert (step.command, step.undo) == ("export TMPDIR=/tmp", "export TMPDIR='/a b'")
    nowhere = facts(("TMPDIR", "/a b", error), ("", "/tmp", error))
    nowhere["free"] = None
    found = only(CHECK, cluster(nowhere), "temp-dir-unwritable", hosts=["nd1"])
    assert found.fix.alternatives[0].steps[0].command == "# export TMPDIR=FOLDER"


def stuck(state: str) -> Outcome:
    crumb = {"step": "making a file", "variable": "TMPDIR", "folder": "/nfs/tmp", "at_s": 0.0}
    return Outcome(
        OutcomeStatus.HUNG,
        breadcrumbs=(crumb,),
        duration_s=15.0,
        state=state,
        wchan="rpc_wait_bit_killable",
    )


def test_a_folder_that_does_not_answer_fails() -> None:
    found = only(CHECK, cluster(stuck("D")), "temp-dir-unwritable", hosts=["nd1"])
    assert found.level is Severity.FAIL
    assert found.message == (
        "TMPDIR=/nfs/tmp: creating a file did not end within 15 s, without an error "
        "(process state D in rpc_wait_bit_killable)"
    )
    assert "does not answer" in found.fix


def test_one_that_was_stopped_says_nothing_of_the_folder() -> None:
    assert judge(CHECK, cluster(stuck("T"))) == []


def test_no_folder_at_all_fails() -> None:
    bad = facts(("", "/tmp", "No space left on device"), ("", "/app", "nope"), free=None)
    found = only(CHECK, cluster(bad), "temp-dir-unwritable", hosts=["nd1"])
    assert found.level is Severity.FAIL
    assert found.message == "/tmp: No space left on device; /app: nope"


def test_a_full_one_is_a_risk_where_much_is_compiled() -> None:
    bad = facts(("", "/tmp", ""), free=40)
    for backend, severity in (("gloo", Severity.INFO), ("nccl", Severity.WARN)):
        found = only(CHECK, cluster(bad, backend), "temp-dir-unwritable", hosts=["nd1"])
        assert found.level is severity
        assert found.message == "40 MiB free in /tmp"


def test_a_path_that_is_too_long_for_sockets() -> None:
    bad = facts(("TMPDIR", "/long", ""), sock="AF_UNIX path too long")
    for backend, severity in (("gloo", Severity.INFO), ("nccl", Severity.WARN)):
        found = only(CHECK, cluster(bad, backend), "temp-dir-unwritable", hosts=["nd1"])
        assert found.level is severity
        assert found.message == "no socket can be created in /long: AF_UNIX path too long"


def observe(monkeypatch: pytest.MonkeyPatch, usual: Path, **env: str) -> Any:
    monkeypatch.setattr(TempDir, "usual", (str(usual),))
    return CHECK.observe(Context(launch=Launch(), env=env))


def test_it_tries_in_python_s_order_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, gone = tmp_path / "usual", tmp_path / "gone"
    usual.mkdir()
    seen = observe(monkeypatch, usual, TMP=str(gone), TMPDIR=str(tmp_path / "file"), TEMP="")
    assert seen["tried"] == [
        ["TMPDIR", str(tmp_path / "file"), "No such file or directory"],
        ["TMP", str(gone), "No such file or directory"],
        ["", str(usual), ""],
    ]
    assert seen["free"] > 0
    assert list(usual.iterdir()) == []


def test_sockets_are_tried_at_the_length_that_they_will_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path("/tmp") / tmp_path.name  # pytest's own path may be long
    fits, long = base / "a", base / ("b" * 70)
    long.mkdir(parents=True)
    fits.mkdir()
    try:
        assert observe(monkeypatch, fits)["socket"] == ""
        assert "too long" in observe(monkeypatch, long)["socket"]
        assert list(long.iterdir()) == []
    finally:
        fits.rmdir()
        long.rmdir()
        base.rmdir()


def test_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc")  # nobody makes files there
    seen = observe(monkeypatch, tmp_path / "gone")
    assert seen["free"] is None
    assert len(seen["tried"]) == 2


def test_a_folder_that_is_there_and_takes_no_files_is_not_made_and_removed_again() -> None:
    """/proc says of a file that cannot be made in it that there is no such file."""
    entry = ["TMPDIR", "/proc", _make_file("/proc")]
    assert entry[2] == "it takes no files"
    fix = _fix(entry, "/tmp")
    assert not any("mkdir" in step.command or "rmdir" in step.undo for step in fix.steps)
    assert fix.steps[0].command == "export TMPDIR=/tmp"
    missing = ["TMPDIR", "/nonexistent", _make_file("/nonexistent")]
    assert _fix(missing, "/tmp").steps[0].command == "mkdir -p /nonexistent"
