"""`--redact`, `report bundle` and `report issue`, as a user meets them."""

from __future__ import annotations

import hashlib
import io
import json
import socket
import stat
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nccl_doctor.cli import cli
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.report.formats import formats
from nccl_doctor.report.formats import json as json_format
from nccl_doctor.toolkit.host import host_name
from tests.cli.program import program
from tests.support.clusters import make_cluster
from tests.support.planted import leaks, secret_report
from tests.support.reports import RUN

NCCL_LOG = """\
bilbo17:1:2 [0] NCCL INFO Bootstrap: Using eth0:10.20.30.42<0>
gimli:3:4 [0] NCCL INFO NCCL version 2.27.5+cuda12.9
gimli:3:4 [0] NCCL WARN no answer from gimli /home/gloin/x token=hunter2
"""


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved report full of names, in the working directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "saved.json"
    file.write_text(json_format.render(secret_report()))
    return file


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vendor's tool that tells secrets, and one that fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, lines in {
        "ibstat": "echo \"CA 'mlx5_0'\"; echo 'Node GUID: 0x0c42a103003b2c5a of gandalf'",
        "nvidia-smi": "echo No devices were found; exit 6",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def invoke(*arguments: str, **more) -> Result:
    done = CliRunner().invoke(cli, [*arguments], **more)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def names_in(file: Path) -> dict[str, dict[str, str]]:
    """The names of a map; asserts that nobody else can read it."""
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    return json.loads(file.read_text())["pseudonyms"]


def files_of(archive: Path) -> dict[str, bytes]:
    """Files of a bundle; asserts that neither owner nor names are in their heads."""
    with tarfile.open(archive) as packed:
        members = packed.getmembers()
        assert {(each.uid, each.gid, each.uname, each.gname) for each in members} == {
            (0, 0, "", "")
        }
        found = {}
        for each in members:
            file = packed.extractfile(each)
            assert file is not None
            found[each.name.removeprefix("nccl-doctor-bundle/")] = file.read()
    return found


def test_show_redacted_keeps_the_map_beside_the_report(saved):
    first = invoke("report", "show", "--redact", "saved.json")
    assert first.exit_code == 0
    assert leaks(first.output) == []
    names = names_in(Path("saved.json.map.json"))
    assert "gandalf" in names["host"].values()
    (pseudonym,) = (made for made, real in names["host"].items() if real == "gandalf")
    assert pseudonym in first.output
    # The map's key is used again.
    again = invoke("report", "show", "--redact", "saved.json", "--format", "json")
    assert pseudonym in again.output
    assert leaks(again.output) == []


@pytest.mark.parametrize("command", ["judge", "merge"])
def test_redacted_in_every_format_with_one_map(saved, command):
    outputs = [word for form in formats() for word in (f"--{form}", f"out.{form}")]
    summary = {"GITHUB_STEP_SUMMARY": "summary.md"}
    done = invoke(*("report", command, "saved.json", "--redact", "--github", *outputs), env=summary)
    for name in (*(f"out.{form}" for form in formats()), "summary.md"):
        text = Path(name).read_text()
        assert text
        assert leaks(text) == [], name
    assert leaks(done.output) == []
    assert "::error title=port-made" in done.stdout
    assert sorted(path.name for path in Path().glob("*.map.json")) == ["out.json.map.json"]
    assert json.loads(Path("out.json").read_text())["redacted"] is True
    # What is redacted can be shown and judged like any other report.
    again = invoke("report", "judge", "out.json", "--json", "again.json")
    assert again.exit_code == done.exit_code
    assert json.loads(Path("again.json").read_text())["redacted"] is True
    assert invoke("report", "show", "out.json").exit_code == 0


def test_diff_redacted(saved):
    cluster = make_cluster(("gandalf", "bilbo18.shire.example.com"))
    now = conclude(cluster, [], run=replace(RUN, id="now"))
    Path("now.json").write_text(json_format.render(now))
    for form in ("text", "json"):
        command = ("report", "diff", "saved.json", "now.json", "-v", "--format", form)
        assert leaks(invoke(*command).output)
        done = invoke(*command, "--redact")
        assert done.exit_code == 0
        assert leaks(done.output) == []
    names = names_in(Path("now.json.map.json"))["host"]
    assert {"gandalf", "bilbo17", "bilbo18"} <= set(names.values())
    assert not Path("saved.json.map.json").exists()
    # One of them redacted before: with its key the names agree.
    Path("now.json.map.json").unlink()
    invoke("report", "judge", "saved.json", "--redact", "--json", "given.json")
    done = invoke("report", "diff", "given.json", "now.json", "--redact")
    assert "their names do not match" not in done.output
    assert leaks(done.output) == []
    rows = [line for line in done.output.splitlines() if line.startswith("host-")]
    assert len(rows) == 3, "one changed, one gone, one new: with other names they were four"
    lost = invoke("report", "diff", "saved.json", "now.json", "--redact-key", "x")
    assert lost.exit_code == 2


def test_stdin_has_no_place_for_a_map(saved):
    done = program("report", "show", "-", "--redact", input=saved.read_text(), cwd=saved.parent)
    assert done.returncode == 0
    assert leaks(done.stdout) == []
    assert "the map of the pseudonyms is not saved" in done.stderr
    assert not list(saved.parent.glob("*.map.json"))


def test_two_reports_with_one_key(saved):
    Path("other.json").write_text(saved.read_text())
    Path("key").write_text("a phrase that nobody guesses\n")
    key = ("--redact", "--redact-key", "key", "--format", "json")
    one = invoke("report", "show", "saved.json", *key).output
    assert invoke("report", "show", "other.json", *key).output == one
    by_map = ("--redact", "--redact-key", "saved.json.map.json", "--format", "json")
    assert invoke("report", "show", "other.json", *by_map).output == one
    assert invoke("report", "show", "other.json", "--redact", "--format", "json").output == one
    Path("key").write_text("another phrase")
    assert invoke("report", "show", "other.json", *key).output != one


def test_a_map_that_cannot_be_written_gives_nothing_away(saved):
    Path("saved.json.map.json").mkdir()
    done = invoke("report", "show", "--redact", "saved.json")
    assert done.exit_code == 3
    (line,) = done.stderr.splitlines()
    assert "the map of the pseudonyms was not written: saved.json.map.json" in line
    assert "nccl-doctor: FAIL" in done.stdout, "the verdict is told, with pseudonyms"
    assert leaks(done.output) == []


def test_bundle(saved, tools):
    Path("nccl.gimli.3").write_text(NCCL_LOG)
    Path("core.bin").write_bytes(b"\x7fELF\0gandalf")
    done = invoke("report", "bundle", "saved.json", "--log", "nccl.gimli.3", "--log", "core.bin")
    assert done.exit_code == 0, done.output
    files = files_of(Path("saved.bundle.tar.gz"))
    assert {"manifest.json", "report.json", "report.txt", "logs/01.txt"} <= set(files)
    for name, data in files.items():
        words = data.decode() + name
        assert [*leaks(words), *(n for n in ("gimli", "gloin", "core.bin") if n in words)] == []
    log = files["logs/01.txt"].decode().splitlines()
    assert len(log) == 3
    assert "NCCL version 2.27.5+cuda12.9" in log[1]
    assert log[1].split(":")[0] == log[2].split(":")[0]
    assert "CA 'mlx5_0'" in files["tools/ibstat.txt"].decode()
    manifest = json.loads(files.pop("manifest.json"))
    assert manifest["redacted"] is True
    assert manifest["tool"]["name"] == "nccl-doctor"
    assert {each["name"] for each in manifest["files"]} == set(files)
    for each in manifest["files"]:
        assert each["bytes"] == len(files[each["name"]])
        assert each["sha256"] == hashlib.sha256(files[each["name"]]).hexdigest()
    why = {each["what"]: each["why"] for each in manifest["left_out"]}
    assert why["nvidia-smi -q"] == "exit code 6"
    assert "no host of the report" in why.values()  # collect_env
    assert "not text, so names in it cannot be replaced by pseudonyms" in why.values()
    names = names_in(Path("saved.bundle.tar.gz.map.json"))
    assert {"gandalf", "gimli"} <= set(names["host"].values())
    assert "gandalf" not in done.output


def test_bundle_as_it_is(saved):
    Path("nccl.log").write_text(NCCL_LOG)
    done = invoke(
        *("report", "bundle", "saved.json", "--no-redact", "--no-tools", "--log", "nccl.log"),
        *("--output", "x.tgz"),
    )
    assert done.exit_code == 0
    files = files_of(Path("x.tgz"))
    assert set(files) == {"manifest.json", "report.json", "report.txt", "logs/01-nccl.log"}
    assert files["logs/01-nccl.log"].decode() == NCCL_LOG.replace("hunter2", "***")
    assert files["report.json"] == saved.read_bytes()
    assert not list(saved.parent.glob("*.map.json"))


def test_bundle_finds_what_nccl_wrote_and_nothing_else(saved, tmp_path):
    data = json.loads(saved.read_text())
    (tmp_path / "nccl.a.1").write_text(NCCL_LOG)
    (tmp_path / "nccl.b.2").write_text("root:x:0:0\n")
    (tmp_path / "topo.xml").write_text(
        '<system version="1">\n <cpu host_hash="0x0c42a103003b2c5a"/>'
    )
    data["ranks"][0]["env"] |= {
        "NCCL_DEBUG_FILE": f"{tmp_path}/nccl.%h.%p",
        "NCCL_TOPO_DUMP_FILE": f"{tmp_path}/topo.xml",
    }
    data["ranks"][1]["env"] |= {
        "NCCL_DEBUG_FILE": "/etc/passwd",
        "NCCL_TOPO_DUMP_FILE": "/dev/zero",
    }
    saved.write_text(json.dumps(data))
    assert invoke("report", "bundle", "saved.json", "--no-tools").exit_code == 0
    files = files_of(Path("saved.bundle.tar.gz"))
    logs = [data.decode() for name, data in files.items() if name.startswith("logs/")]
    assert len(logs) == 2
    assert "root:x" not in "".join(logs)
    assert leaks("".join(logs)) == []


def test_bundle_of_a_long_log_keeps_both_ends_by_whole_lines(saved):
    lines = ["0 gandalf\n", *[f"- gandalf {'x' * 9000}\n"] * 1000, "999 gandalf\n"]
    Path("long.log").write_text("".join(lines))
    assert (
        invoke("report", "bundle", "saved.json", "--no-tools", "--log", "long.log").exit_code == 0
    )
    files = files_of(Path("saved.bundle.tar.gz"))
    kept = files["logs/01.txt"].decode().splitlines()
    assert kept[0].startswith("0 host-")
    assert kept[-1].startswith("999 host-")
    assert "[...]" in kept
    assert leaks("".join(kept)) == []
    left = json.loads(files["manifest.json"])["left_out"]
    assert any("its middle part" in each["why"] for each in left)


@pytest.mark.parametrize("output", ["no/folder.tgz", "."])
def test_bundle_that_cannot_be_written(saved, output):
    done = invoke("report", "bundle", "saved.json", "--no-tools", "--output", output)
    assert done.exit_code == 2
    assert "a folder, or in a folder that is not writable" in done.output


@pytest.mark.parametrize("project", ["nccl", "pytorch", "deepspeed"])
def test_issue(saved, project):
    done = invoke("report", "issue", project, "saved.json")
    assert done.exit_code == 0
    assert leaks(done.output) == []
    assert "2.27.5" in done.output or "2.13.0" in done.output or "port-made" in done.output
    assert "gandalf" in names_in(Path("saved.json.map.json"))["host"].values()
    raw = invoke("report", "issue", project, "saved.json", "--no-redact")
    assert "gandalf" in raw.output


def test_what_collect_env_prints_is_in_form_and_bundle_on_a_host_of_the_report(saved):
    data = json.loads(saved.read_text())
    data["hosts"][0]["host"] = host_name()
    saved.write_text(json.dumps(data))
    form = invoke("report", "issue", "pytorch", "saved.json").output
    printed = form.partition("`python -m torch.utils.collect_env`: \n\n```text\n")[2]
    assert "PyTorch version: " in printed.partition("\n```\n")[0]
    assert invoke("report", "bundle", "saved.json").exit_code == 0
    files = files_of(Path("saved.bundle.tar.gz"))
    assert b"PyTorch version: " in files["tools/collect_env.txt"]


def test_elsewhere_what_collect_env_prints_is_left_to_people(saved):
    form = invoke("report", "issue", "pytorch", "saved.json").output
    assert "`python -m torch.utils.collect_env`: _(please fill in)_\n" in form


def test_a_bundle_and_an_issue_have_the_same_pseudonyms(saved):
    invoke("report", "issue", "nccl", "saved.json")
    invoke("report", "bundle", "saved.json", "--no-tools")
    one = names_in(Path("saved.json.map.json"))["host"]
    other = names_in(Path("saved.bundle.tar.gz.map.json"))["host"]
    assert one.items() <= other.items()


def test_a_bundle_can_be_read_on_any_machine(saved):
    invoke("report", "bundle", "saved.json", "--no-tools")
    report = io.BytesIO(files_of(Path("saved.bundle.tar.gz"))["report.json"])
    Path("theirs.json").write_bytes(report.getvalue())
    assert invoke("report", "show", "theirs.json").exit_code == 0


def test_a_run_is_redacted_as_it_is_written(tmp_path):
    done = program(
        *("run", "--nproc-per-node", "1", "--backend", "gloo", "--select", "own_address"),
        *("--redact", "--json", "r.json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done
    report = json.loads((tmp_path / "r.json").read_text())
    names = names_in(tmp_path / "r.json.map.json")
    host = report["hosts"][0]["host"]
    assert report["redacted"] is True
    assert names["host"][host.partition(".")[0]] == socket.gethostname().partition(".")[0]
    assert report["ranks"][0]["host"] == host
    facts = report["hosts"][0]["facts"]["own_address"]["alone"]["facts"]
    assert facts["address"] in {*names.get("ipv4", ()), *names.get("ipv6", ()), "127.0.0.1"}
