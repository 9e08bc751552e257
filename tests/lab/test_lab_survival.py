"""The doctor's own processes are lost or frozen: it still ends in time and never says pass."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.lab.hosts import Host
from tests.lab.lab import HEALTHY_S, MEET, PATIENT, Lab
from tests.lab.reading import ROUND_S, SIGN_IN_S, START_S, check_clean, loud


@contextmanager
def slowed(host: Host, comm: str, stopped_s: float, runs_s: float) -> Iterator[list[int]]:
    """A process of a host is stopped again and again; yields its process id for each time."""
    over, stops = threading.Event(), list[int]()

    def stop() -> None:
        while not over.wait(runs_s):
            for pid in host.pids():
                with suppress(OSError):
                    if Path(f"/proc/{pid}/comm").read_text().strip() == comm:
                        os.kill(pid, signal.SIGSTOP)
                        over.wait(stopped_s)
                        os.kill(pid, signal.SIGCONT)
                        stops.append(pid)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield stops
    finally:
        over.set()
        thread.join(10)


def test_a_store_that_answers_slowly_costs_time_and_nothing_else(lab: Lab) -> None:
    with slowed(lab["nd0"], "ncd:store_serve", 0.6, 0.05) as stops:
        run = lab.plain_doctor(*MEET, *PATIENT)
    assert stops, str(run)
    check_clean(run, HEALTHY_S)
    assert run.codes == [0, 0], str(run)
    assert run.report is not None
    assert run.report["verdict"] == "pass", str(run)
    assert loud(run.report) == [], str(run)
    assert [rank["reported"] for rank in run.report["ranks"]] == [True, True]
    assert run.partial == {}, str(run)


def test_a_supervisor_is_killed(lab: Lab) -> None:
    with lab.strike(1, signal.SIGKILL, parent=True) as strike:
        run = lab.plain_doctor()
    assert strike.pid, str(run)
    check_clean(run, SIGN_IN_S + 2 * ROUND_S)
    report = run.report
    assert report is not None, str(run)
    assert report["verdict"] in ("fail", "unknown"), str(run)
    assert run.codes == [report["exit_code"], 3], str(run)
    assert "was killed by SIGKILL before its answer" in run.done[1].stderr, str(run)
    assert report["exit_code"] == {"fail": 1, "unknown": 3}[report["verdict"]], str(run)
    named = [found["where"] for found in loud(report)]
    assert {rank for where in named for rank in where["ranks"]} == {1}, str(run)
    assert {host for where in named for host in where["hosts"]} <= {"nd1"}, str(run)


def test_the_coordinator_is_frozen(lab: Lab) -> None:
    limit_s = 20.0
    with lab.strike(0, signal.SIGSTOP, parent=True) as strike:
        run = lab.plain_doctor("--timeout", f"{limit_s:g}")
    assert strike.pid, str(run)
    frozen, other = run.done
    assert [frozen.code, other.code] == [3, 3], str(run)
    assert max(frozen.seconds, other.seconds) < START_S + limit_s, str(run)
    assert "is stopped (state T), and there is no report" in frozen.stderr, str(run)
    assert run.report is None
    report = run.partial[1]
    assert report["verdict"] == "unknown", str(run)
    assert [root["code"] for root in report["root_causes"]] == ["coordinator-lost"], str(run)
    assert report["root_causes"][0]["where"]["ranks"] == [0], str(run)
    assert run.leftovers == [], str(run)


def test_a_run_is_interrupted(lab: Lab) -> None:
    with lab.strike(0, signal.SIGTERM, parent=True) as strike:
        run = lab.plain_doctor()
    assert strike.pid, str(run)
    check_clean(run, SIGN_IN_S + 4 * ROUND_S)
    assert run.report is not None, str(run)
    assert run.report["verdict"] != "pass", str(run)
    assert "run-interrupted" in {found["code"] for found in loud(run.report)}, str(run)
    assert not {0, None} & set(run.codes), str(run)


def test_a_check_that_hangs_does_not_make_its_host_absent(lab: Lab) -> None:
    select = (*MEET[:-1], f"{MEET[-1]},interfaces")
    with lab.strike(None, signal.SIGSTOP, "ncd:interfaces", hosts=["nd1"]) as strike:
        # --quiet: nobody is told anything at once, so this check is observed once only.
        run = lab.own_doctor(*select, "--quiet", "--join-timeout", "10", nproc=1)
    assert strike.pid, str(run)
    check_clean(run)
    assert run.report is not None, str(run)
    assert [rank["reported"] for rank in run.report["ranks"]] == [True, True], str(run)
    assert loud(run.report) == [], str(run)
    status = {check["name"]: check["status"] for check in run.report["checks"]}
    assert {name for name, each in status.items() if each != "pass"} == {"interfaces"}, str(run)
    assert run.codes == [3, 3], str(run)
