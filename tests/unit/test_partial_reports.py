"""Own views in a folder that hosts share."""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from nccl_doctor import registry
from nccl_doctor.gather.views import HostReports, not_heard
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.judge.merge import merge_reports
from nccl_doctor.model.report import Report
from nccl_doctor.report.redaction.cover import FolderRedaction
from tests.support.clusters import change_rank, make_cluster
from tests.support.reports import RUN


def view(host: str, *, facts: bool = True, **fields: Any) -> Report:
    """The report of one host, by itself."""
    seen = {"check": "x", "by_host": {host: {"seen": 1}}} if facts else {}
    cluster = make_cluster([host], 1, complete=False, **seen)
    hosts = [replace(each, key=f"key of {host}") for each in cluster.hosts]
    ranks = [replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks]
    made = replace(cluster, hosts=tuple(hosts), ranks=tuple(ranks))
    return replace(conclude(made, [], run=RUN), **fields)


def test_what_one_host_writes_another_reads(tmp_path: Path) -> None:
    reader = HostReports(str(tmp_path), 10)
    assert HostReports(str(tmp_path), 10).write(3, view("nd3")) == ""
    (found,) = reader.of([2, 3], 0.0)
    assert found.cluster.hosts[0].name == "nd3"
    assert [path.name for path in tmp_path.iterdir()] == ["node3.json"]


def test_files_of_earlier_runs_and_no_reports_are_left_out(tmp_path: Path) -> None:
    views = HostReports(str(tmp_path), 10)
    views.write(1, view("nd1"))
    old = time.time() - 60
    os.utime(tmp_path / "node1.json", (old, old))
    (tmp_path / "node2.json").write_text("no JSON")
    (tmp_path / "node3.json").write_text(json.dumps({"schema_version": "99"}))
    assert views.of([1, 2, 3], 0.0) == []


def touched(path: Path, after: float) -> None:
    """As if a file had been written so much later than it was."""
    written = path.stat().st_mtime + after
    os.utime(path, (written, written))


def test_a_file_of_the_run_before_is_none_of_this_run(tmp_path: Path) -> None:
    before = HostReports(str(tmp_path), 60)
    before.write(1, view("nd1"))
    touched(tmp_path / "node1.json", -1.0)
    now = HostReports(str(tmp_path), 60)
    assert now.of([1], 0.0) == []


def test_a_host_that_began_before_rank_0_and_writes_again_counts(tmp_path: Path) -> None:
    early = HostReports(str(tmp_path), 60)
    early.write(1, view("nd1", facts=False))
    touched(tmp_path / "node1.json", -1.0)
    reader = HostReports(str(tmp_path), 60)
    early.write(1, view("nd1"))
    assert len(reader.of([1], 0.0)) == 1


def test_a_host_that_still_leaves_the_run_before_does_not_count(tmp_path: Path) -> None:
    lingering, old = HostReports(str(tmp_path), 60), HostReports(str(tmp_path), 60)
    lingering.run_id = "the run before"
    old._began -= 61  # its host would not wait that long for this run
    reader = HostReports(str(tmp_path), 60)
    reader.run_id = "this run"
    for host in (lingering, old):
        host.write(1, view("nd1"))
        assert reader.of([1], 0.0) == []
    lingering.run_id = "this run"
    lingering.write(1, view("nd1"))
    assert len(reader.of([1], 0.0)) == 1


def test_a_host_that_was_quicker_to_start_is_of_this_run(tmp_path: Path) -> None:
    """Rank 0 imported torch for some seconds while the other host wrote what it knew."""
    quick = HostReports(str(tmp_path), 60)
    quick.write(1, view("nd1"))
    time.sleep(0.05)
    assert HostReports(str(tmp_path), 60).of([1], 0.0) == [], "as of a run before"
    assert len(HostReports(str(tmp_path), 60, age_s=5.0).of([1], 0.0)) == 1


def test_a_host_that_has_not_given_up_is_waited_for(tmp_path: Path) -> None:
    views = HostReports(str(tmp_path), 10)
    for seen in (view("nd1", facts=False), view("nd1")):
        views.write(1, seen)
        began = time.monotonic()
        assert len(views.of([1], 0.3)) == 1, "one that died says no last word"
        assert time.monotonic() - began >= 0.3
    began = time.monotonic()
    assert len(views.of([1, 2], 0.1, 0.6)) == 1
    assert time.monotonic() - began >= 0.6, "it is there, and may still say why it does not come"
    began = time.monotonic()
    assert views.of([2], 0.1, 60.0) == []
    assert time.monotonic() - began < 30.0, "of that one there is no sign"
    views.write(1, view("nd1"), last=True)
    began = time.monotonic()
    assert len(views.of([1], 60.0)) == 1
    assert time.monotonic() - began < 30.0  # it does not wait at all


def test_whose_partial_reports_are_looked_for() -> None:
    assert not_heard(make_cluster(("nd0", "nd1", "nd2"), 1, absent_nodes=[1])) == [1]
    two = make_cluster(("nd0", "nd1"), 1)
    assert not_heard(two) == []
    more = change_rank(two, 1, launch={"nnodes": 4})
    assert not_heard(more) == [2, 3], "nd1 counts on two more"
    derived = {"nnodes": 4, "sources": {"nnodes": "derived from the size of the world"}}
    assert not_heard(change_rank(two, 1, launch=derived)) == []
    many = change_rank(two, 1, launch={"nnodes": 10_000})
    assert len(not_heard(many)) == 64


def test_two_hosts_that_claim_one_node_rank_both_keep_their_view(tmp_path: Path) -> None:
    views = HostReports(str(tmp_path), 10)
    for host in ("nd0", "nd5", "nd0", "nd5"):
        assert views.write(0, view(host)) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node0.json", "node0.nd5.json"]


def test_a_folder_that_went_away_is_told_and_costs_nothing_else(tmp_path: Path) -> None:
    views = HostReports(str(tmp_path / "gone"), 10)
    assert "gone/node0.json: No such file" in views.write(0, view("nd0"))
    assert views.of([1], 0.0) == []


def test_without_a_folder_nothing_is_written_or_read() -> None:
    views = HostReports(None, 10)
    assert views.write(0, view("nd0")) == ""
    assert views.of([0], 5.0) == []


# --- with pseudonyms ---


def files_in(folder: Path) -> dict[str, int]:
    """Every file below a folder, and who may read it."""
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_stays_is_redacted_with_one_key_and_the_names_are_private(
    tmp_path: Path, umask: None
) -> None:
    one, other = (HostReports(str(tmp_path), 10, FolderRedaction(None)) for _ in range(2))
    assert one.write(0, view("gandalf")) == other.write(1, view("bilbo")) == ""
    (heard,) = one.of([1], 0.0)
    assert heard.cluster.hosts[0].name == "bilbo", "hosts hear each other by their real names"
    assert one.leave(0, view("gandalf"), heard=True) == ""
    assert other.leave(1, view("bilbo"), heard=False) == ""
    assert stat.S_IMODE((tmp_path / ".private").stat().st_mode) == 0o700
    assert files_in(tmp_path) == {
        ".private/key": 0o600,
        ".private/node0.json.map.json": 0o600,
        ".private/node1.json.map.json": 0o600,
        "node0.json": 0o644,
        "node1.json": 0o644,
    }
    texts = [path.read_text() for path in sorted(tmp_path.glob("*.json"))]
    assert "gandalf" not in "".join(texts)
    assert "bilbo" not in "".join(texts)
    both = merge_reports(
        [Report.from_json(json.loads(text)) for text in texts], registry.load(["ranks"])
    )
    assert both.redacted
    assert len(both.cluster.hosts) == 2
    names = json.loads((tmp_path / ".private" / "node1.json.map.json").read_text())["pseudonyms"]
    (host,) = json.loads(texts[1])["hosts"]
    assert names["host"] == {host["host"]: "bilbo"}


def test_who_was_not_heard_leaves_its_names_in_private(tmp_path: Path) -> None:
    reader = HostReports(str(tmp_path), 10, FolderRedaction(None))
    shut_out = HostReports(str(tmp_path), 10, FolderRedaction(None))
    shut_out.write(3, view("gandalf"))
    assert shut_out.leave(3, view("gandalf"), heard=False) == ""
    assert files_in(tmp_path)[".private/node3.json"] == 0o600
    assert "gandalf" not in (tmp_path / "node3.json").read_text()
    (heard,) = reader.of([3], 0.0)
    assert heard.cluster.hosts[0].name == "gandalf"
    assert ".private/node3.json" not in files_in(tmp_path)


def test_two_hosts_of_one_node_rank_keep_their_redacted_views(tmp_path: Path) -> None:
    views = HostReports(str(tmp_path), 10, FolderRedaction(None))
    for host in ("gandalf", "bilbo"):
        assert views.leave(0, view(host), heard=True) == ""
    names = [path.name for path in sorted(tmp_path.glob("*.json"))]
    assert len(names) == 2
    assert not [name for name in names if "gandalf" in name or "bilbo" in name]


def test_with_a_key_of_ones_own_and_with_one_that_is_not_there(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a phrase that nobody guesses")
    seen = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        views = HostReports(str(tmp_path / name), 10, FolderRedaction(str(key)))
        assert views.leave(0, view("gandalf"), heard=True) == ""
        seen.append((tmp_path / name / "node0.json").read_text())
    assert seen[0] == seen[1]
    lost = HostReports(str(tmp_path / "one"), 10, FolderRedaction(str(tmp_path / "no")))
    assert "No such file" in lost.leave(7, view("nd7"), heard=True)
    assert not (tmp_path / "one" / "node7.json").exists()
    gone = HostReports(str(tmp_path / "gone"), 10, FolderRedaction(None))
    assert "No such file" in gone.write(0, view("nd0"))
    assert "No such file" in gone.leave(0, view("nd0"), heard=True)
