"""Hosts that never met: their reports, merged, name the cause as if they had."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lab import faults
from tests.lab.lab import MASTER_PORT, Lab
from tests.lab.reading import SIGN_IN_S, check_cause, check_clean, validate
from tests.lab.run import Run
from tests.support.forkserver import quick_python_path

ROOT = Path(__file__).resolve().parents[2]


def merge(run: Run, files: Sequence[Path] = ()) -> Mapping[str, Any]:
    """The merged report of all that a run left behind, by the command that a user would type."""
    merged = run.folder / "merged.json"
    found = files or sorted(run.folder.glob("report*.json"))
    argv = [quick_python_path(), "-m", "nccl_doctor", "report", "merge", *map(str, found)]
    done = subprocess.run(
        [*argv, "--json", str(merged)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert merged.exists(), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(merged.read_text())
    validate(report)
    assert done.returncode == report["exit_code"]
    for cause in report["root_causes"]:
        assert f"[{cause['code']}]" in done.stdout, done.stdout
    run.partial["merged"] = report  # shown when a test fails
    return report


def check_merged(
    run: Run, code: str | set[str], files: Sequence[Path] = (), **where: Any
) -> Mapping[str, Any]:
    """One root cause at the right place; every host is there, and nothing passed untested."""
    report = merge(run, files)
    root = check_cause(run, report, code, **where)
    assert all(host["reported"] for host in report["hosts"]), str(run)
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert statuses["collectives"] != "pass", str(run)
    return root


@pytest.mark.wide
def test_name_unresolvable_on_one_host(lab: Lab) -> None:
    lab["nd1"].set_hosts(lab.names_text(nd0=""))
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_merged(run, "addr-unresolvable", hosts=["nd1"])
    assert lab["nd0"].address in root["fix"]  # which only nd0 knew


@pytest.mark.wide
def test_stale_address_of_the_master(lab: Lab) -> None:
    lab["nd1"].set_hosts(lab.names_text(nd0="192.168.77.99"))
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_merged(run, "addr-differs", hosts=["nd1"])
    assert "192.168.77.99" in root["message"]
    assert lab["nd0"].address in root["message"]


@pytest.mark.wide
def test_stale_address_that_is_another_hosts(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    lab["nd1"].set_hosts(lab.names_text(nd0=lab["nd2"].address))
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    check_merged(run, "addr-differs", hosts=["nd1"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("how", "code"), [("drop", "port-blocked"), ("tcp reset", {"port-blocked", "port-refused"})]
)
def test_master_port_is_behind_the_firewall_of_rank_0(
    lab: Lab, how: str, code: str | set[str]
) -> None:
    # nd1 says that nd0 does not answer, and the rules of nd0 say why: one cause.
    if how == "drop":
        faults.drop_master_port(lab["nd0"])
    else:
        faults.reject_master_port(lab["nd0"], how)
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_merged(run, code, hosts=["nd0"])
    assert str(MASTER_PORT) in root["message"]


@pytest.mark.wide
def test_something_on_the_path_drops_one_host(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    faults.on_the_path(
        lab, f"ip saddr {lab['nd2'].address} tcp dport {MASTER_PORT} tcp flags syn drop"
    )
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    check_merged(run, "port-blocked", links=[("nd2", "nd0")])


@pytest.mark.wide
def test_master_port_is_taken(lab: Lab) -> None:
    taker = faults.foreign_server(lab["nd0"], MASTER_PORT, "http")
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_merged(run, "port-in-use", hosts=["nd0"])
    assert str(faults.pid_inside(taker)) in root["message"]


@pytest.mark.wide
def test_one_host_has_another_master_port(lab: Lab) -> None:
    run = lab.plain_doctor(per_host={"nd1": {"MASTER_PORT": "29511"}})
    check_clean(run, SIGN_IN_S)
    root = check_merged(run, "master-port-differs", hosts=["nd1"])
    assert "29511" in root["message"]
    assert str(MASTER_PORT) in root["message"] + root["fix"]


@pytest.mark.wide
def test_rank_0_has_another_master_port_than_all(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    run = lab.plain_doctor(per_host={"nd0": {"MASTER_PORT": "29511"}})
    check_clean(run, SIGN_IN_S)
    check_merged(run, "master-port-differs", hosts=["nd0"])


@pytest.mark.wide
def test_two_hosts_are_sick_in_their_own_ways(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    lab["nd1"].set_hosts(lab.names_text(nd0=""))
    run = lab.plain_doctor(per_host={"nd2": {"MASTER_PORT": "29511"}})
    check_clean(run, SIGN_IN_S)
    report = merge(run)
    roots = {root["code"]: root["where"]["hosts"] for root in report["root_causes"]}
    assert roots == {"addr-unresolvable": ["nd1"], "master-port-differs": ["nd2"]}, str(run)


def test_both_sides_are_sick(lab: Lab) -> None:
    faults.drop_master_port(lab["nd0"])
    run = lab.plain_doctor(per_host={"nd1": {"MASTER_PORT": "29511"}})
    check_clean(run, SIGN_IN_S)
    report = merge(run)
    roots = {root["code"]: root["where"]["hosts"] for root in report["root_causes"]}
    assert roots == {"port-blocked": ["nd0"], "master-port-differs": ["nd1"]}, str(run)


@pytest.mark.wide
def test_without_the_coordinators_report_only_what_is_known(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    lab["nd1"].set_hosts(lab.names_text(nd0=""))
    run = lab.plain_doctor()
    report = merge(run, [run.folder / "report.node1.json"])
    check_cause(run, report, "addr-unresolvable", hosts=["nd1"])
    assert [host["reported"] for host in report["hosts"]] == [True, False, False], str(run)


def test_two_hosts_that_each_took_themselves_for_rank_0(lab: Lab) -> None:
    folders = [lab.new_folder() for _ in lab.hosts]
    processes = []
    for host, folder in zip(lab.hosts, folders, strict=True):
        command = ["-m", "nccl_doctor", "run", "--json", str(folder / "report.json")]
        command += ["--backend", "gloo", "--join-timeout", "4", "--timeout", "30"]
        mine = {"MASTER_ADDR": host.name, "RANK": "0", "NODE_RANK": "0"}
        env = {"TMPDIR": str(folder / "tmp")}
        started = lab.plain(
            command, hosts=[host.name], per_host={host.name: mine}, env=env, folder=folder
        )
        processes += list(started.values())
    assert lab.wait(processes, 40.0)
    run = Run(folders[0])
    report = merge(run, [folder / "report.json" for folder in folders])
    roots = {root["code"]: root["where"]["hosts"] for root in report["root_causes"]}
    assert roots["node-rank-duplicate"] == ["nd0", "nd1"], str(run)
    assert set(roots) <= {"node-rank-duplicate", "addr-differs"}, str(run)


def test_the_merged_report_can_be_judged_and_merged_again(lab: Lab) -> None:
    lab["nd1"].set_hosts(lab.names_text(nd0=""))
    run = lab.plain_doctor()
    first = merge(run)
    again = merge(run, [run.folder / "merged.json", *sorted(run.folder.glob("report*.json"))])
    assert again["root_causes"] == first["root_causes"]
    assert [host["host"] for host in again["hosts"]] == ["nd0", "nd1"]
