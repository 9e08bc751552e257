"""Commands about checks and saved reports."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor import registry
from nccl_doctor.api import Finding, Where
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.report import manual
from nccl_doctor.report.formats import json as json_format
from tests.cli.program import error_of, program
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, SCHEMA, kind, made_check, validate

SCREEN = 60
"""Most lines of what `explain` prints without --all."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    check = made_check("shm", finds=[Finding(kind("shm-small"), "64 MiB", Where(hosts=("nd1",)))])
    cluster = make_cluster(check="shm", by_host={"nd0": {"mib": 8192}, "nd1": {"mib": 64}})
    file = tmp_path / "saved.json"
    file.write_text(json_format.render(conclude(cluster, [check], run=RUN)))
    return file


def test_schema():
    done = program("schema")
    assert done.returncode == 0
    assert json.loads(done.stdout) == SCHEMA


def test_checks_lists_every_code():
    done = program("checks")
    assert done.returncode == 0, done.stderr
    for check in registry.load().checks:
        assert check.name in done.stdout
        for kind_ in check.kinds:
            assert kind_.code in done.stdout
    assert "nccl-doctor" in done.stdout


@pytest.mark.parametrize("code", ["host-absent", "port-blocked", "collective-hang"])
def test_explain_prints_the_page(code):
    done = program("explain", code)
    assert done.returncode == 0
    kind_, check = registry.load().kinds[code]
    words = " ".join(done.stdout.replace("`", "").split())
    for part in (kind_.title, kind_.why, kind_.fix):
        assert " ".join(part.replace("`", "").split()) in words
    assert "How to fix" in done.stdout
    assert registry.question(check) in " ".join(done.stdout.split())


def test_checks_come_in_the_order_in_which_they_run():
    names = [row["check"] for row in json.loads(program("checks", "--json").stdout)]
    checks = [check for check in registry.load().checks if check.name in names]
    alone = [check.name for check in checks if not check.together]
    together = [check.name for check in checks if check.together]
    assert alone
    assert together
    assert [name for name in names if name in {*alone, *together}] == alone + together


def test_explain_prints_the_page_of_a_check():
    done = program("explain", "collectives")
    assert done.returncode == 0
    (check,) = [check for check in registry.load().checks if check.name == "collectives"]
    for kind_ in check.kinds:
        assert f"{kind_.code} ({kind_.severity.value}): {kind_.title}" in done.stdout
    question, _, rest = registry.page(check).partition("\n")
    assert question in done.stdout
    assert rest.strip() in done.stdout


def test_explain_knows_the_engines_own():
    assert "found by the engine, in no check" in program("explain", "rank-silent").stdout


def test_explain_is_one_screen():
    for code, (kind_, _) in registry.load().kinds.items():
        screen = manual.code_page(registry.load(), code, "nft")
        assert len(screen.splitlines()) <= SCREEN, code
        assert " ".join(kind_.title.split()) in " ".join(screen.split()), code


def test_explain_tells_the_fix_for_one_firewall():
    screens = {
        tool: manual.code_page(registry.load(), "peer-one-way", tool)
        for tool in ("nft", "firewalld", "ufw", "iptables", "")
    }
    words = {"nft": "nft insert", "firewalld": "--add-source", "ufw": "ufw prepend", "": "AWS"}
    for tool, command in words.items():
        found = {each for each, screen in screens.items() if command in screen}
        assert found == {tool, ""}, tool
    assert program("explain", "peer-one-way").stdout.endswith("explain --all peer-one-way\n")


def test_a_long_page_goes_through_the_pager_on_a_terminal_and_never_in_a_pipe():
    pager = {"PAGER": "sed s/^/>/"}
    assert on_a_terminal("explain", "peer-one-way", lines=20, **pager).startswith(">peer-one-way")
    assert on_a_terminal("checks", lines=20, **pager).startswith(">check ")
    assert on_a_terminal("explain", "peer-one-way", lines=200, **pager).startswith("peer-one-way")
    assert program("explain", "peer-one-way", env={**os.environ, **pager}).stdout[0] == "p"


def test_fixes_as_data(saved):
    (found,) = json.loads(program("report", "fixes", "--json", str(saved)).stdout)
    assert found["code"] == "shm-small"


def test_explain_finds_a_part_of_a_name():
    listed = program("explain", "mtu").stdout.splitlines()
    assert {line.split()[0] for line in listed} >= {"mtu-blackhole", "mtu-differs"}
    assert all(len(line.split()) > 2 for line in listed)
    assert program("explain", "peer_one").stdout == program("explain", "peer-one-way").stdout
    (found,) = json.loads(program("explain", "--json", "peer-one-way").stdout)
    assert (found["code"], found["severity"]) == ("peer-one-way", "fail")
    assert "firewall" in found["checks"]


def on_a_terminal(*words: str, lines: int, **env: str) -> str:
    """What the program prints on a terminal of so many lines."""
    ours, theirs = pty.openpty()
    given = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "LINES": str(lines), **env}
    streams = {"stdin": theirs, "stdout": theirs}
    command = [sys.executable, "-m", "nccl_doctor", *words]
    with subprocess.Popen(command, env=given, **streams) as program_:
        os.close(theirs)
        pieces = []
        with suppress(OSError):  # EIO: nobody holds the other end
            while piece := os.read(ours, 1 << 16):
                pieces.append(piece)
    os.close(ours)
    assert program_.returncode == 0
    return b"".join(pieces).decode()


def test_checks_on_a_terminal_are_a_table_that_breaks_no_code():
    lines = on_a_terminal("checks", lines=500).splitlines()
    assert lines[0].split() == ["check", "layer", "scope", "cost", "from", "finds"]
    found = registry.load()
    assert {check.name for check in found.checks} <= {each.partition(" ")[0] for each in lines}
    codes = {kind_.code for check in found.checks for kind_ in check.kinds}
    assert codes <= set(" ".join(lines).split())


def test_checks_in_a_pipe_are_one_line_for_each_code():
    lines = program("checks").stdout.splitlines()
    assert [line.split()[0] for line in lines].count("peer-one-way") == 1
    assert len(lines) == sum(len(check.kinds) for check in registry.load().checks)


def test_show(saved):
    done = program("report", "show", str(saved))
    assert done.returncode == 0
    assert done.stdout.startswith("nccl-doctor: FAIL: Title of shm-small (nd1)")
    assert "64 MiB" in done.stdout
    assert "why" not in program("report", "show", "--quiet", str(saved)).stdout
    assert "2 hosts" in program("report", "show", "-v", str(saved)).stdout


def test_show_as_json_from_stdin(saved):
    done = program("report", "show", "-", "--format", "json", input=saved.read_text())
    assert done.returncode == 0
    assert done.stdout == saved.read_text()


def test_show_writes_the_files_of_run(saved, tmp_path):
    page, metrics = tmp_path / "report.html", tmp_path / "report.prom"
    outputs = ("--html", str(page), "--prometheus", str(metrics))
    done = program("report", "show", str(saved), *outputs)
    assert done.returncode == 0
    assert done.stdout.startswith("nccl-doctor: FAIL")
    assert page.read_text().startswith("<!doctype html>")
    assert "nccl_doctor_" in metrics.read_text()
    again = program("report", "show", str(saved), "--format", "html", "--json", str(tmp_path / "r"))
    assert again.stdout == page.read_text()
    assert (tmp_path / "r").read_text() == saved.read_text()
    in_a_step = program("report", "show", str(saved), env={"GITHUB_ACTIONS": "true"})
    assert "::error" not in in_a_step.stdout + in_a_step.stderr


def test_judge(saved, tmp_path):
    target = tmp_path / "again.json"
    done = program("report", "judge", str(saved), "--json", str(target))
    assert done.returncode == 1
    assert done.stdout.startswith("nccl-doctor: FAIL")
    data = json.loads(target.read_text())
    validate(data)
    assert [finding["code"] for finding in data["root_causes"]] == ["shm-small"]
    statuses = {check["name"]: check["status"] for check in data["checks"]}
    assert statuses.pop("shm") == "fail"
    assert set(statuses.values()) == {"skipped"}
    only = program("report", "judge", str(saved), "--json", "-")
    validate(json.loads(only.stdout))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a report of nccl-doctor: report is a list, not an object"),
        ("{}", 'is not a report of nccl-doctor: report has no "schema_version"'),
        ('{"schema_version": "9"}', 'this version of nccl-doctor reads "1", "2", "3"'),
    ],
)
@pytest.mark.parametrize("command", ["show", "judge", "merge"])
def test_a_bad_file(tmp_path, command, text, words):
    file = tmp_path / "bad.json"
    file.write_text(text)
    assert words in error_of(program("report", command, str(file)))


def test_a_file_that_is_not_text(tmp_path):
    file = tmp_path / "bad.json"
    file.write_bytes(b"\xff\xfe\x00\x80")
    assert "is not JSON" in error_of(program("report", "show", str(file)))


# --- merge ---


def own_view(folder: Path, **fields: Any) -> Path:
    """The report of host nd1, which never reached rank 0."""
    cluster = make_cluster()
    host = replace(cluster.hosts[1], joined=False)
    ranks = (replace(cluster.ranks[2], host=host),)
    cluster = replace(cluster, hosts=(host,), ranks=ranks, complete=False)
    finding = Finding(kind("shm-small"), "64 MiB", Where(hosts=("nd1",)), check="shm")
    report = conclude(cluster, [], run=RUN, problems=[finding])
    file = folder / "report.node1.json"
    file.write_text(json_format.render(replace(report, **fields)))
    return file


@pytest.fixture
def coordinators(tmp_path: Path) -> Path:
    file = tmp_path / "report.json"
    file.write_text(json_format.render(conclude(make_cluster(absent_nodes=[1]), [], run=RUN)))
    return file


def test_merge(coordinators, tmp_path):
    target = tmp_path / "merged.json"
    files = [str(own_view(tmp_path)), str(coordinators), str(coordinators)]
    done = program("report", "merge", *files, "--json", str(target))
    assert done.returncode == 1, done
    assert done.stderr == ""
    assert done.stdout.startswith("nccl-doctor: FAIL: Title of shm-small (nd1)")
    data = json.loads(target.read_text())
    validate(data)
    assert [finding["code"] for finding in data["root_causes"]] == ["shm-small"]
    assert [(host["host"], host["joined"]) for host in data["hosts"]] == [
        ("nd0", True),
        ("nd1", False),
    ]
    only = program("report", "merge", *files, "--json", "-")
    assert json.loads(only.stdout) == data
    assert "why" not in program("report", "merge", "-q", *files).stdout


def test_merge_one_file_and_stdin(coordinators, tmp_path):
    done = program("report", "merge", "-", str(own_view(tmp_path)), input=coordinators.read_text())
    assert done.returncode == 1
    assert done.stdout.startswith("nccl-doctor: FAIL: Title of shm-small (nd1)")
    alone = program("report", "merge", str(own_view(tmp_path)))
    assert alone.returncode == 1
    assert "1 of 2 hosts" in alone.stdout


def test_merge_with_a_file_that_is_no_report(coordinators, tmp_path):
    other = tmp_path / "package.json"
    other.write_text('{"name": "x"}')
    words = error_of(program("report", "merge", str(coordinators), str(other)))
    assert words.startswith(f"{other} is not a report of nccl-doctor")


def test_merge_what_does_not_go_together(coordinators, tmp_path):
    view = own_view(tmp_path, redacted=True)
    words = error_of(program("report", "merge", str(coordinators), str(view)))
    assert words.startswith(f"cannot merge {coordinators}, {view}: some reports are redacted")
    data = json.loads(own_view(tmp_path).read_text())
    data["run"]["alone"] = True
    view.write_text(json.dumps(data))
    assert "nccl-doctor env" in error_of(program("report", "merge", str(view)))


def test_an_issue_begins_with_whose_fault_it_is(saved):
    done = program("report", "issue", "nccl", str(saved), "--no-redact")
    assert done.returncode == 0
    first = done.stdout.splitlines()[0]
    assert first.startswith("<!-- Is this a fault of NCCL? no: shm-small is a matter of this clust")
    assert "# [Issue]" in done.stdout


def test_fixes_are_printed_for_one_host_or_for_all(saved):
    done = program("report", "fixes", str(saved))
    assert (done.returncode, done.stderr) == (0, "")
    assert "# shm-small: Title of shm-small\n# nd1: 64 MiB\n# by hand: " in done.stdout
    assert "# For nd1 only.\n" in program("report", "fixes", "--host", "nd1", str(saved)).stdout
    words = error_of(program("report", "fixes", "--host", "ux9", str(saved)))
    assert f"--host ux9: no such host in {saved}: nd0, nd1" in words
