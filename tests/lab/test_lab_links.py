"""Links that work, badly: a rate limit, a loss, less than in the runs before; and machines that are
only busy.

All of it happens on the switch, where no host can see it. What is measured runs before whatever
else the machine does.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.checks.links import Links
from nccl_doctor.cli.earlier_reports import read_past
from tests.lab import sshd
from tests.lab.faults import lossy_host, lossy_pair, slow_pair, slow_port
from tests.lab.lab import HEALTHY_S, PATIENT, Lab, Run
from tests.lab.reading import check_clean, loud
from tests.lab.sshd import Ssh
from tests.support.priority import FIRST
from tests.support.rows import also

THREE = ("nd0", "nd1", "nd2")


def examine(lab: Lab, *options: str) -> Run:
    """Run the doctor; again where it says that it was kept from measuring by a busy machine."""
    for _ in range(3):
        run = lab.plain_doctor("--join-timeout", "20", *options, env=FIRST)
        assert run.report is not None, str(run)
        if all("CPU of one end" not in found["message"] for found in run.report["findings"]):
            break
    return run


def check_warned(
    run: Run, code: str, *, hosts: Sequence[str] = (), edges: Sequence[set[str]] = ()
) -> Mapping[str, Any]:
    """Nothing else above info, and exactly this place; `edges` are links in whatever direction."""
    check_clean(run)
    assert run.report is not None, str(run)
    roots = [each for each in loud(run.report) if each["explained_by"] is None]
    assert [each["code"] for each in roots] == [code], str(run)
    (found,) = roots
    assert found["where"]["hosts"] == list(hosts), str(run)
    links = found["where"]["links"]
    assert {frozenset(link) for link in links} == set(map(frozenset, edges)), str(run)
    assert (run.report["verdict"], run.codes) == ("warn", [0] * len(run.codes)), str(run)
    return found


def exchange(run: Run) -> float:
    """Seconds of the slowest host's first round."""
    assert run.report is not None, str(run)
    return max(host["facts"]["links"]["exchange"]["duration_s"] for host in run.report["hosts"])


def test_one_slow_port_is_one_slow_host(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(*THREE)
    slow_port(lab, lab["nd2"])
    found = check_warned(examine(lab), "host-slow", hosts=["nd2"])
    assert "receiving" in found["message"]


def test_collectives_are_slow_at_a_slow_port(make_lab: Callable[..., Lab]) -> None:
    # By itself: together with the links it is explained by what is slow there.
    lab = make_lab(*THREE)
    slow_port(lab, lab["nd2"])
    for _ in range(10):  # until the other tests leave the CPU to it, and to the fast pair, too
        run = lab.plain_doctor("--join-timeout", "20", "--select", "group_speed", env=FIRST)
        assert run.report is not None, str(run)
        if loud(run.report):
            break
    found = check_warned(run, "bandwidth-low", hosts=["nd2"])
    assert "MB/s bus bandwidth, measured twice" in found["message"]


@pytest.mark.wide
def test_one_slow_pair_is_one_slow_link(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(*THREE)
    slow_pair(lab, lab["nd0"], lab["nd2"])
    check_warned(examine(lab), "link-slow", edges=[{"nd0", "nd2"}])


def test_one_lossy_pair(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(*THREE)
    lossy_pair(lab, lab["nd0"], lab["nd1"], 5)
    # By itself: the other checks take their time on a lossy link, and prove nothing more.
    run = examine(lab, "--select", "loss")
    check_warned(run, "link-lossy", edges=[{"nd0", "nd1"}])


@pytest.mark.wide
def test_a_lossy_pair_is_the_one_cause_whatever_it_breaks(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(*THREE)
    lossy_pair(lab, lab["nd0"], lab["nd1"], 5)
    check_cause(loses(lab), links=[["nd0", "nd1"], ["nd1", "nd0"]])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("way", "percent", "seconds"), [("in", 1, 20), ("in", 12, 60), ("in", 25, 60), ("out", 25, 60)]
)
def test_a_lossy_host_is_named_soon(
    make_lab: Callable[..., Lab], way: str, percent: int, seconds: float
) -> None:
    lab = make_lab(*THREE)
    lossy_host(lab, lab["nd2"], way, percent)
    started = time.monotonic()
    run = loses(lab)
    # Twice as long on a machine that does something else besides.
    assert time.monotonic() - started < 2 * seconds, str(run)
    root = check_cause(run, hosts=["nd2"])
    assert root["severity"] == "warn", str(run)  # plain torchrun's job runs, slowly
    assert set(run.codes) <= {0, 3}, str(run)
    assert {"in": "into the host", "out": "out of the host"}[way] in root["message"], str(run)


def loses(lab: Lab) -> Run:
    limits = ("--join-timeout", "20", "--collective-timeout", "20", "--timeout", "60")
    return lab.plain_doctor(*limits, timeout_s=90, env=FIRST)


def check_cause(run: Run, **where: Sequence[Any]) -> Mapping[str, Any]:
    """Losses are the only root cause, at this place, and explain everything else."""
    assert run.report is not None, str(run)
    (root,) = run.report["root_causes"]
    assert root["code"] == "link-lossy", str(run)
    places = {"hosts": [], "links": [], **where}
    assert {name: root["where"][name] for name in places} == places, str(run)
    others = [each for each in loud(run.report) if each != root]
    assert {each["explained_by"] for each in others} <= {"link-lossy"}, str(run)
    return root


@pytest.mark.wide  # it takes all cores for long; `make test` has the rules on made-up clusters
@pytest.mark.parametrize("turn", range(3))
def test_busy_machines_are_not_slow(make_lab: Callable[..., Lab], turn: int) -> None:
    lab = make_lab(*THREE)
    for host in lab.hosts:
        host.python("while True: pass")
    patient = ("--join-timeout", "30", "--collective-timeout", "15", "--timeout", "90")
    run = lab.plain_doctor(*patient, timeout_s=120)
    assert run.report is not None, str(run)
    assert loud(run.report) == [], str(run)
    status = {check["name"]: check["status"] for check in run.report["checks"]}
    assert status["links"] == "pass", str(run)


@pytest.mark.parametrize(("hosts", "seconds"), [(2, 1.5), (4, 3.0)])
def test_the_exchange_is_short(make_lab: Callable[..., Lab], hosts: int, seconds: float) -> None:
    lab = make_lab(*(f"nd{i}" for i in range(hosts)))
    run = lab.plain_doctor("--join-timeout", "20", "--select", "links", env=FIRST)
    check_clean(run)
    assert run.report is not None
    assert loud(run.report) == [], str(run)
    # Twice as long on a machine that does something else besides.
    assert exchange(run) < 2 * seconds, str(run)


# --- against one's own earlier runs ---

RATE = 100
"""Mbit/s of each road, as it was: the switch holds them to it, so that they are steady as cables,
and little CPU is needed.
"""
LEFT = 0.82
CLOSE = 0.04
CALM_US = 300.0
"""A round trip on these roads takes some 80 µs."""
EARLIER = 6
CHECKS = ("--select", "links,software")


def road(lab: Lab, name: str, rate: float) -> None:
    """What the switch sends to a host, in Mbit/s."""
    limit = ("rate", f"{rate:g}mbit", "burst", "64k", "latency", "50ms")
    lab.in_switch("tc", "qdisc", "replace", "dev", f"p{lab[name].index}", "root", "tbf", *limit)


def steady(start: Callable[[], Run], *rates: float) -> Run:
    """Run it until both bandwidths were measured on an idle machine and are what the switch lets
    through, in Mbit/s, and no answer had to wait: what else the machine does shows in a tenth of a
    second, and would be noise in which nothing stands out.
    """
    for _ in range(20):
        run = start()
        assert run.report is not None
        (one,) = read_past(str(run.folder / "report.json"), [Links()]).runs
        counted = [f for f in one.sheet.numbers.values() if f.counts]
        seen = sorted(1000 * float(f.value or 0) for f in counted if f.name == "bandwidth")
        trips = [float(f.value or 0) for f in counted if f.name == "round-trip time"]
        if max(trips, default=0.0) > CALM_US:
            continue
        if len(seen) == len(rates) and all(
            abs(value / rate - 1) < CLOSE for value, rate in zip(seen, sorted(rates), strict=True)
        ):
            return run
    pytest.skip("the machine is too busy to measure anything")


def test_less_than_in_the_runs_before(lab: Lab, tmp_path: Path) -> None:
    """−18 % on one road, by the ranks' own report and by that of `--hostfile`."""
    past = tmp_path / "past"
    past.mkdir()
    for name in lab.names:
        road(lab, name, RATE)
    for number in range(EARLIER):
        run = steady(partial(lab.plain_doctor, *CHECKS, env=FIRST), RATE, RATE)
        shutil.copy(run.folder / "report.json", past / f"{number}.json")
    beside = (*CHECKS, "--baseline", str(past))
    ways = [partial(lab.plain_doctor, *beside, env=FIRST)]
    if not (reason := sshd.impossible() or sshd.missing()):
        ssh = Ssh(lab)
        ssh.serve(*lab.names, env=FIRST)
        ways.append(partial(ssh.run, *beside))
    elif os.environ.get("CI", "").lower() == "true":
        pytest.fail(f"CI=true, so ssh must run: {reason}", pytrace=False)
    for way in ways:
        run = steady(way, RATE, RATE)
        assert run.report is not None
        told = run.report["run"]["baseline"]["text"]
        assert re.match(rf"{EARLIER} earlier runs in {past}; [234] of 4 speeds judged", told), told
        assert loud(run.report) == [], str(run)
    road(lab, "nd1", LEFT * RATE)
    for way in ways:
        found = check_warned(
            steady(way, LEFT * RATE, RATE), "slower-than-before", edges=[{"nd0", "nd1"}]
        )
        assert found["where"]["links"] == [["nd0", "nd1"]], "in one direction"
        assert found["confidence"] == "possible", f"{EARLIER} runs are few"
        change = re.match(r"bandwidth −(\d+) %: .* Mbit/s, the median of 6 e", found["message"])
        assert change, found
        assert 10 <= int(change[1]) <= 26, found


def test_a_hostfile_with_a_baseline_that_cannot_be_read(lab: Lab, tmp_path: Path) -> None:
    """It ends before anything is started anywhere: nobody serves ssh here."""
    if reason := sshd.impossible() or sshd.missing():
        pytest.skip(reason)
    run = Ssh(lab).run(*CHECKS, "--baseline", str(tmp_path / "no.json"))
    assert (run.codes, run.report) == ([2], None)
    line, _ = run.done[0].stderr.splitlines()
    assert line.startswith("nccl-doctor: error: --baseline: cannot read "), line


LINKS = {"1gbit": 80, "100mbit": 20, "10mbit": 10, "2mbit": 10}
"""Rate of the links → most MB that a host sends in a run, and as many that it receives: SECURITY.md
names them.
"""
BUSY = 1.5
"""A link that was slow for want of a CPU is measured again."""


@pytest.mark.parametrize("rate", ["1gbit", "10mbit", also("100mbit"), also("2mbit")])
def test_the_volume_follows_the_link(lab: Lab, rate: str) -> None:
    """By the counters of the kernel. A slow link is filled for half a second at a time, and is no
    fault: the job would run.
    """

    def moved() -> list[int]:
        ways = [f"/sys/class/net/eth0/statistics/{way}_bytes" for way in ("tx", "rx")]
        return [int(count) for host in lab.hosts for count in host.call("cat", *ways).split()]

    for host in lab.hosts:
        host.call(*f"tc qdisc add dev eth0 root tbf rate {rate} burst 64kb latency 50ms".split())
    before = moved()
    run = lab.own_doctor(*PATIENT, "--collective-timeout", "20")
    check_clean(run, HEALTHY_S)
    assert run.report is not None, str(run)
    fails = [found for found in run.report["findings"] if found["severity"] == "fail"]
    assert (run.codes, fails) == ([0, 0], []), str(run)
    most_mb = max(after - then for then, after in zip(before, moved(), strict=True)) / 1e6
    assert LINKS[rate] / 10 < most_mb < BUSY * LINKS[rate], f"{most_mb:.1f} MB"
