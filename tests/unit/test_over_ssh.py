"""From what every host answered over ssh to one report: who is blamed, and for what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nccl_doctor import registry
from nccl_doctor.gather.fleet import Fleet, combine, report_of
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.launch.ssh.connection import CommandEnd, Heard
from nccl_doctor.launch.ssh.hostfile import parse
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.options import Options
from nccl_doctor.model.report import Report
from nccl_doctor.report.formats import json as json_format
from tests.support.clusters import make_cluster, outcome
from tests.support.reports import RUN, through_json

CHECKS = registry.load(["ranks"])
REFUSED = "ssh: connect to host {} port 22: Connection refused\n"
COMMAND = "nccl-doctor run --hostfile hosts"
MINE = replace(RUN, id=None, command=COMMAND, launcher="nccl-doctor", extra={"hostfile": "hosts"})


def fleet(*hosts: str) -> Fleet:
    entries = parse("".join(f"{host} slots=2\n" for host in hosts), "hosts")
    return Fleet("hosts", entries, ("2",) * len(hosts), hosts[0], 29500, {})


def ended(
    code: int | None = 0, stdout: str = "", stderr: str = "", ready: bool = True
) -> CommandEnd:
    return CommandEnd(code, ready, stdout, stderr, 1.0)


def refused(host: str) -> CommandEnd:
    return ended(255, stderr=REFUSED.format(host), ready=False)


def facts(cluster: Cluster) -> Cluster:
    """With what `ranks` observes: nothing that its judge needs beyond the launch records."""
    ok = {"ranks": {"alone": outcome({})}}
    ranks = tuple(replace(r, facts=ok) if r.reported else r for r in cluster.ranks)
    return replace(cluster, ranks=ranks)


def answer(cluster: Cluster, **run: object) -> str:
    report = conclude(facts(cluster), CHECKS.checks, run=replace(RUN, **run), wanted=CHECKS.wanted)
    return json_format.render(report)


def of(
    *heard: CommandEnd, hosts: tuple[str, ...] = ("nd0", "nd1"), by: str | None = None
) -> Report:
    report = combine(fleet(*hosts), Options(), Heard(heard, by), CHECKS, MINE)
    return through_json(report)


def found(report: Report) -> dict[str, tuple[tuple[str, ...], str | None]]:
    return {f.code: (f.where.hosts, f.explained_by) for f in report.findings}


def test_the_report_of_the_coordinator_is_the_report():
    text = answer(make_cluster())
    report = of(ended(0, text), ended())
    assert (report.verdict, report.exit_code) == ("pass", 0)
    assert report.run.extra == {"hostfile": "hosts"}
    assert report.run.command == COMMAND
    assert report.run.id == RUN.id


def test_a_host_that_cannot_be_reached_explains_its_absence():
    text = answer(make_cluster(absent_nodes=[1]))
    report = of(ended(1, text), refused("nd1"))
    assert (report.verdict, report.exit_code) == ("fail", 1)
    assert [f.code for f in report.root_causes] == ["ssh-failed"]
    assert found(report) == {
        "ssh-failed": (("nd1",), None),
        "host-absent": (("nd1",), "ssh-failed"),
    }
    assert report.root_causes[0].message == "port 22: Connection refused"
    assert [host.name for host in report.cluster.hosts] == ["nd0", "nd1"]
    assert {check.name: check.status.value for check in report.checks} == {"ranks": "fail"}


def test_two_faults_are_both_named_and_silence_is_no_third():
    hosts = ("nd0", "nd1", "nd2", "nd3")
    text = answer(make_cluster(hosts, absent_nodes=[1, 2, 3]))
    gone = ended(127, stderr="env: 'python': No such file or directory\n", ready=False)
    report = of(ended(1, text), refused("nd1"), gone, ended(None), hosts=hosts)
    places = {f.code: f.where.hosts for f in report.root_causes}
    assert places.pop("ssh-failed") == ("nd1",)
    assert places.pop("remote-command-failed") == ("nd2",)
    assert set(places) <= {"host-absent"}
    assert [f.where.hosts for f in report.findings if f.code == "run-interrupted"] == [("nd3",)]


def test_where_the_coordinator_cannot_be_reached_the_own_views_are_the_report():
    view = facts(make_cluster())
    mine = replace(
        view,
        complete=False,
        hosts=(replace(view.hosts[1], id=0, joined=False),),
        ranks=tuple(
            replace(rank, host=replace(view.hosts[1], id=0, joined=False))
            for rank in view.ranks[2:3]
        ),
    )
    report = of(refused("nd0"), ended(3, answer(mine)))
    assert (report.verdict, report.exit_code) == ("fail", 1)
    assert [(f.code, f.where.hosts) for f in report.root_causes] == [("ssh-failed", ("nd0",))]
    assert {host.name: host.reported for host in report.cluster.hosts} == {
        "nd0": False,
        "nd1": True,
    }


def test_nobody_can_be_reached():
    report = of(refused("nd0"), refused("nd1"))
    assert (report.verdict, report.exit_code) == ("fail", 1)
    assert [(f.code, f.where.hosts) for f in report.root_causes] == [("ssh-failed", ("nd0", "nd1"))]
    assert not any(host.reported for host in report.cluster.hosts)
    assert not [check for check in report.checks if check.status.value == "pass"]


def test_a_host_that_took_part_is_not_blamed_for_how_it_left():
    text = answer(make_cluster())
    lost = ended(255, stderr="Timeout, server nd1 not responding.\n")
    assert of(ended(0, text), lost).verdict == "pass"


def test_interrupted_is_not_completed_and_nobody_is_blamed():
    report = of(ended(None), ended(255), by="SIGINT")
    assert (report.verdict, report.exit_code) == ("unknown", 3)
    assert [(f.code, f.message) for f in report.findings] == [
        ("run-interrupted", "stopped after 3.5 s by SIGINT")
    ]
    report = of(ended(None), refused("nd1"), by="SIGTERM")
    assert found(report)["ssh-failed"] == (("nd1",), None)


def test_silence_is_unknown():
    report = of(ended(None), ended(None))
    assert (report.verdict, report.exit_code) == ("unknown", 3)
    assert found(report) == {"run-interrupted": (("nd0", "nd1"), None)}


def test_what_is_ignored_is_left_out():
    checks = registry.load(["ranks"], ["ssh-failed"])
    heard = Heard((refused("nd0"), refused("nd1")))
    report = combine(fleet("nd0", "nd1"), Options(), heard, checks, MINE)
    assert report.findings == ()
    assert report.verdict == "unknown"


@pytest.mark.parametrize(
    "noise", ["", "Welcome to nd0\n", "{ not json\n", '{"motd": 1}\n', "[1]\n\n{\n"]
)
def test_the_report_is_found_in_the_noise_of_a_log_in(noise):
    text = answer(make_cluster())
    report = report_of(noise + text + "bye\n")
    assert report is not None
    assert report.verdict == "pass"


@pytest.mark.parametrize("text", ["", "hello", "{}", '{"schema_version": "3"}', "{" * 100_000])
def test_what_is_no_report(text):
    assert report_of(text) is None
