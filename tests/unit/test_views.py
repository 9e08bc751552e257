"""Own views in a folder that hosts share."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from nccl_doctor.record import Report
from nccl_doctor.verdict import conclude
from nccl_doctor.views import Views
from tests.clusters import make_cluster
from tests.reports import RUN


def view(host: str, *, facts: bool = True, **fields: Any) -> Report:
    """The report of one host, by itself."""
    seen = {"check": "x", "by_host": {host: {"seen": 1}}} if facts else {}
    cluster = make_cluster([host], 1, complete=False, **seen)
    hosts = [replace(each, key=f"key of {host}") for each in cluster.hosts]
    ranks = [replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks]
    made = replace(cluster, hosts=tuple(hosts), ranks=tuple(ranks))
    return replace(conclude(made, [], run=RUN), **fields)


def test_what_one_host_writes_another_reads(tmp_path: Path) -> None:
    assert Views(str(tmp_path), 10).write(3, view("nd3")) == ""
    (found,) = Views(str(tmp_path), 10).of([2, 3], 0.0)
    assert found.hosts[0]["host"] == "nd3"
    assert [path.name for path in tmp_path.iterdir()] == ["node3.json"]


def test_files_of_earlier_runs_and_no_reports_are_left_out(tmp_path: Path) -> None:
    views = Views(str(tmp_path), 10)
    views.write(1, view("nd1"))
    old = time.time() - 60
    os.utime(tmp_path / "node1.json", (old, old))
    (tmp_path / "node2.json").write_text("no JSON")
    (tmp_path / "node3.json").write_text(json.dumps({"schema_version": "99"}))
    assert views.of([1, 2, 3], 0.0) == []


def test_a_host_that_has_only_started_is_waited_for(tmp_path: Path) -> None:
    views = Views(str(tmp_path), 10)
    views.write(1, view("nd1", facts=False))
    began = time.monotonic()
    assert len(views.of([1], 0.3)) == 1
    assert time.monotonic() - began >= 0.3
    views.write(1, view("nd1"))
    began = time.monotonic()
    assert len(views.of([1], 5.0)) == 1
    assert time.monotonic() - began < 1.0


def test_two_hosts_that_claim_one_node_rank_both_keep_their_view(tmp_path: Path) -> None:
    views = Views(str(tmp_path), 10)
    for host in ("nd0", "nd5", "nd0", "nd5"):
        assert views.write(0, view(host)) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node0.json", "node0.nd5.json"]


def test_a_folder_that_went_away_is_told_and_costs_nothing_else(tmp_path: Path) -> None:
    views = Views(str(tmp_path / "gone"), 10)
    assert "gone/node0.json: No such file" in views.write(0, view("nd0"))
    assert views.of([1], 0.0) == []


def test_without_a_folder_nothing_is_written_or_read() -> None:
    views = Views(None, 10)
    assert views.write(0, view("nd0")) == ""
    assert views.of([0], 5.0) == []
