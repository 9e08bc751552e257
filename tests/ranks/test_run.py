"""Whole runs on this machine: real ranks, real gloo groups, real kills."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.ranks import (
    BASE,
    Ranks,
    children,
    descendants,
    free_port,
    gone,
    handles,
    probe_child,
    rank_env,
    signed_in,
    supervisor,
)
from tests.support.forkserver import Forked, quick_python_path

JOIN_S = 5.0
COLLECTIVE_S = 3.0
TIMEOUT_S = 45.0
START_S = 12.0  # importing torch in every rank on a loaded machine of two cores
OPTIONS = (
    f"--join-timeout={JOIN_S}",
    f"--collective-timeout={COLLECTIVE_S}",
    f"--timeout={TIMEOUT_S}",
)
FEW = (*OPTIONS, "--select=launch_record,ranks,collectives")
"""Where somebody is lost in a collective: what the other checks then say, one test shows."""


def above_info(report: dict[str, Any]) -> list[str]:
    return [f["code"] for f in report["findings"] if f["severity"] != "info"]


def finding(report: dict[str, Any], code: str) -> dict[str, Any]:
    (found,) = [f for f in report["findings"] if f["code"] == code]
    return dict(found)


def assert_nobody_else(report: dict[str, Any], rank: int) -> None:
    for f in report["root_causes"]:
        assert f["where"]["ranks"] == [rank], f


@pytest.mark.parametrize("fresh", [(), pytest.param((0,), marks=pytest.mark.wide)])
def test_healthy_ranks_pass_and_leave_together(tmp_path: Path, fresh: tuple[int, ...]) -> None:
    """One that is started afresh imports torch: it comes seconds later."""
    ranks = Ranks(tmp_path, 4, (*OPTIONS, "--join-timeout=20"), fresh=fresh)
    ended = ranks.wait(START_S + 10)
    assert {e.code for e in ended.values()} == {0}
    report = ranks.report()
    assert report["verdict"] == "pass"
    assert above_info(report) == []
    assert [r["rank"] for r in report["ranks"]] == [0, 1, 2, 3] or len(report["ranks"]) == 4
    assert all(r["reported"] for r in report["ranks"])
    assert "PASS" in ended[0].stdout
    assert all(ended[i].stdout == "" for i in (1, 2, 3))


def test_own_launcher_on_one_host(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    env = rank_env(0, 1, 0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del env[name]
    del env["MASTER_PORT"]
    command = [quick_python_path(), "-m", "nccl_doctor", "run", "--nproc-per-node=3"]
    done = subprocess.run(
        [*command, f"--master-port={free_port()}", f"--json={path}", *OPTIONS],
        env=env,
        capture_output=True,
        text=True,
        timeout=START_S + 10,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "3 ranks on 1 host" in done.stdout


def test_runs_of_one_host_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    runs = []
    for name in ("one", "two", "three"):
        report, out = tmp_path / f"{name}.json", tmp_path / name
        words = ["run", "--nproc-per-node=2", "--select=ranks", f"--json={report}"]
        env = {key: value for key, value in os.environ.items() if key != "MASTER_PORT"}
        runs.append((report, Forked(words, env, folder=tmp_path, out=out, err=out)))
    codes = [process.wait(START_S + 10) for _, process in runs]
    assert codes == [0, 0, 0], [path.read_text() for path in tmp_path.glob("t*")]
    launches = [json.loads(report.read_text())["ranks"][0]["launch"] for report, _ in runs]
    assert len({launch["master_port"] for launch in launches}) == 3


def test_rank_that_lacks_a_check_is_neither_silent_nor_passed_over(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, FEW, extra={1: ["--ignore=collectives"]})
    ended = ranks.wait(START_S + COLLECTIVE_S + 15)
    assert {e.code for e in ended.values()} == {3}
    report = ranks.report()
    assert above_info(report) == []
    collectives = next(c for c in report["checks"] if c["name"] == "collectives")
    assert collectives["status"] == "unknown"
    assert "no check collectives here" in collectives["reason"]


def test_absent_rank_is_named_after_the_join_timeout(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, OPTIONS, start=[0, 2])
    ended = ranks.wait(START_S + JOIN_S + 10)
    assert {e.code for e in ended.values()} == {1}
    report = ranks.report()
    assert finding(report, "rank-absent")["where"]["ranks"] == [1]
    assert_nobody_else(report, 1)
    collectives = next(c for c in report["checks"] if c["name"] == "collectives")
    assert collectives["status"] == "blocked"


@pytest.mark.parametrize(
    ("number", "code", "options"),
    [(signal.SIGKILL, "rank-crashed", OPTIONS), (signal.SIGSTOP, "rank-frozen", FEW)],
)
def test_rank_lost_in_a_collective_is_the_only_one_blamed(
    tmp_path: Path, number: signal.Signals, code: str, options: tuple[str, ...]
) -> None:
    ranks = Ranks(tmp_path, 4, options)
    os.kill(probe_child(ranks.processes[2].pid, "collectives"), number)
    ended = ranks.wait(START_S + 4 * COLLECTIVE_S + 15)
    assert {e.code for e in ended.values()} == {1}
    report = ranks.report()
    assert finding(report, code)["where"]["ranks"] == [2]
    assert_nobody_else(report, 2)
    if number is signal.SIGKILL:  # the others do not wait for it until their time is over
        others = [rank for rank in report["ranks"] if rank["rank"] != 2]
        ends = [rank["facts"]["collectives"]["world"] for rank in others]
        # Whichever comes first: the word of rank 0, or the error of gloo.
        early = "ended early: another member of the group died"
        assert all(end["reason"] == early or end["status"] == "raised" for end in ends), ends
        assert max(end["duration_s"] for end in ends) < COLLECTIVE_S, ends


def test_supervisor_killed_in_mid_run_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 4, OPTIONS)
    probe_child(ranks.processes[3].pid, "collectives")
    ranks.processes[3].kill()
    ended = ranks.wait(START_S + 4 * COLLECTIVE_S + 25)
    report = ranks.report()
    assert finding(report, "rank-silent")["where"]["ranks"] == [3]
    assert_nobody_else(report, 3)
    assert report["verdict"] == "unknown"
    assert {ended[i].code for i in (0, 1, 2)} == {3}


def test_frozen_supervisor_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 4, FEW)
    probe_child(ranks.processes[1].pid, "collectives")
    os.kill(supervisor(ranks.processes[1].pid), signal.SIGSTOP)
    try:
        ended = {}
        for i in (0, 2, 3):
            ended[i] = ranks.processes[i].wait(START_S + 4 * COLLECTIVE_S + 25)
        report = ranks.report()
    finally:
        ranks.kill()
    assert finding(report, "rank-silent")["where"]["ranks"] == [1]
    assert_nobody_else(report, 1)
    assert set(ended.values()) == {3}


def test_who_is_killed_is_named_at_once_by_the_process_above_it(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 4, (*FEW, "--collective-timeout=20"))
    probe_child(ranks.processes[3].pid, "collectives")
    os.kill(supervisor(ranks.processes[3].pid), signal.SIGKILL)
    killed = time.monotonic()
    ended = ranks.wait(TIMEOUT_S)
    assert time.monotonic() - killed < 15  # not the 20 s of the collective
    report = ranks.report()
    found = finding(report, "rank-killed")
    assert found["where"]["ranks"] == [3]
    assert found["message"].startswith("killed by SIGKILL (")
    assert_nobody_else(report, 3)
    assert {e.code for e in ended.values()} == {3}
    assert "was killed by SIGKILL before its answer" in ended[3].stderr


def test_a_local_rank_that_is_killed_is_named_at_once_by_the_launcher(tmp_path: Path) -> None:
    path, out = tmp_path / "report.json", tmp_path / "out"
    options = [
        "--select=launch_record,ranks,collectives",
        "--backend=gloo",
        "--timeout=60",
        f"--master-port={free_port()}",
        f"--json={path}",
    ]
    process = Forked(
        ["run", "--nproc-per-node=3", *options],
        {**os.environ, **BASE},
        folder=tmp_path,
        out=out,
        err=tmp_path / "err",
    )
    try:
        probe_child(process.pid, "collectives")
        ranks = children(supervisor(process.pid))  # the first one coordinates
        assert len(ranks) == 3
        os.kill(ranks[-1], signal.SIGKILL)
        killed = time.monotonic()
        assert process.wait(40) == 3
    finally:
        process.kill()
    assert time.monotonic() - killed < 15
    report = json.loads(path.read_text())
    found = finding(report, "rank-killed")
    assert found["evidence"]["pid"] == ranks[-1]
    assert len(found["where"]["ranks"]) == 1
    assert_nobody_else(report, found["where"]["ranks"][0])


def test_lost_coordinator_leaves_nobody_behind(tmp_path: Path) -> None:
    """Rank 0 is killed: the store goes with it, and each rank leaves with its own view."""
    ranks = Ranks(tmp_path, 3, FEW)
    probe_child(ranks.processes[1].pid, "collectives")
    killed = time.monotonic()
    ranks.processes[0].kill()
    ended = ranks.wait(START_S + 4 * COLLECTIVE_S + 25)
    assert time.monotonic() - killed < COLLECTIVE_S + 15
    assert not ranks.report_path.exists()
    for i in (1, 2):
        assert ended[i].code == 3
        assert "store" in ended[i].stderr


@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGTERM, OPTIONS), (signal.SIGINT, FEW), (signal.SIGHUP, FEW)],
)
def test_a_signal_ends_the_run_with_what_is_known(
    tmp_path: Path, number: signal.Signals, options: tuple[str, ...]
) -> None:
    ranks = Ranks(tmp_path, 3, options, start=[0, 1])
    signed_in(ranks.port, 0, 1)
    assert handles(supervisor(ranks.processes[1].pid), number)
    below = [p for process in ranks.processes.values() for p in descendants(process.pid)]
    assert below, "the store at least"
    signalled = time.monotonic()
    for process in ranks.processes.values():
        process.send_signal(number)
    ended = ranks.wait(TIMEOUT_S)
    assert time.monotonic() - signalled < 6.0
    report = ranks.report()
    # Whom the signal reaches before the coordinator's word leaves with a verdict of its own.
    assert ended[0].code == {"fail": 1, "unknown": 3}[report["verdict"]]
    assert ended[1].code in (1, 3)
    assert number.name in finding(report, "run-interrupted")["message"]
    assert gone(below)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", ranks.port))  # the port is free again


def test_the_deadline_holds_whatever_is_awaited(tmp_path: Path) -> None:
    options = ("--join-timeout=8", "--timeout=8", "--collective-timeout=3")
    ranks = Ranks(tmp_path, 2, options, start=[0])
    ended = ranks.wait(8 + 6)
    assert ended[0].code == {"fail": 1, "unknown": 3}[ranks.report()["verdict"]]


@pytest.mark.parametrize("launched", [True, False])
def test_torch_on_a_file_system_that_hangs(tmp_path: Path, launched: bool) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time; time.sleep(1000)")
    # What is said last must get out in either case, though the process leaves without a farewell.
    unbuffered = "" if launched else "1"
    env = rank_env(0, 2, free_port(), PYTHONPATH=str(tmp_path), PYTHONUNBUFFERED=unbuffered)
    for name in () if launched else ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del env[name]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "nccl_doctor", "run", "--timeout=4"],
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=tmp_path,
    )
    assert time.monotonic() - started < 4 + 3
    assert done.returncode == 3
    assert "importing torch" in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr


def test_shared_memory_and_temp_folder_are_left_as_they_were(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    temp = tmp_path / "tmp"
    temp.mkdir()
    ranks = Ranks(tmp_path, 2, OPTIONS, changes={0: {"TMPDIR": str(temp)}})
    ranks.wait(START_S + 10)
    assert os.listdir(temp) == []
    assert set(os.listdir("/dev/shm")) <= before


def test_own_views_number_the_participants_as_the_report_does(tmp_path: Path) -> None:
    # Else a host takes another's seat for its own, and blames itself for what the other did.
    views = tmp_path / "views"
    views.mkdir()
    options = ["--select", "ranks,firewall", "--output-dir", str(views)]
    nodes = {
        rank: {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(rank), "NNODES": "2"}
        for rank in (0, 1)
    }
    ranks = Ranks(tmp_path, 2, options, changes=nodes, start=[0])
    signed_in(ranks.port, 0)
    ranks.start([1])
    ranks.wait(60)
    seats = {rank["rank"]: rank["seat"] for rank in ranks.report()["ranks"]}
    assert seats == {0: 0, 1: 1}
    view = json.loads((views / "node1.json").read_text())
    assert {rank["rank"]: rank["seat"] for rank in view["ranks"]} == {1: 1}


def test_redacted_views_say_no_name_and_go_with_the_report(tmp_path: Path) -> None:
    views = tmp_path / "views"
    views.mkdir()
    options = ["--select", "own_address", "--redact", "--output-dir", str(views)]
    nodes = {
        rank: {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(rank), "NNODES": "2"}
        for rank in (0, 1)
    }
    ranks = Ranks(tmp_path, 2, options, changes=nodes)
    ranks.wait(START_S + 30)
    report = ranks.report()
    seen = [json.loads((views / f"node{node}.json").read_text()) for node in (0, 1)]
    assert [view["redacted"] for view in (report, *seen)] == [True] * 3
    assert {view["run"]["redacted_with"] for view in (report, *seen)} == {
        report["run"]["redacted_with"]
    }
    name = socket.gethostname().lower()
    for text in (json.dumps(report), *map(json.dumps, seen)):
        assert f'"{name}"' not in text
    assert {path.name for path in (views / ".private").iterdir()} == {
        "key",
        "node0.json.map.json",
        "node1.json.map.json",
    }
