"""The healthy summary, the values of -v, and how the text fits its stream."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Figure, Finding, HostLink, Layer, Setup, Severity, Where
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.check import Check
from nccl_doctor.model.options import Options
from nccl_doctor.model.report import Report
from nccl_doctor.report import story, text
from nccl_doctor.report.output import Printer
from nccl_doctor.system.terminal import wants_color
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, kind, made_check
from tests.support.rows import each_row

SHM = kind("shm-small", Layer.HOST)
ABSENT = kind("is-absent", Layer.RANKS)
RISK = kind("a-risk", Layer.ROUTE, Severity.WARN)


class Shows(Check):
    """A check that shows something, and one that breaks."""

    name = "shows"
    layer = Layer.SPEED
    kinds = ()

    def sections(self, cluster: Cluster) -> Iterator[Any]:
        for host in cluster.present_hosts:
            yield Setup("torch", "2.8.0", host.id)
            yield Setup("nccl", "2.27.3", host.id)
            yield Setup("nccl loaded", "2.27.5", host.id)
            yield Setup("gpus", "8 x NVIDIA H100" if host.id else "none", host.id)
            for nic, role in (("eth0", "gloo"), ("ib0", "nccl-sockets")):
                entry = {"interface": nic, "mtu": 1500, "roles": [role]}
                yield Setup("interface", entry, host.id)
        yield HostLink(0, 1, "ok", rtt_us=60.0, rate=1.25e9)
        yield HostLink(0, 1, "ok", rtt_us=50.0, rate=1.0e9)  # the best try counts
        yield HostLink(1, 0, "ok", rtt_us=70.4, rate=1.2e9)
        yield Setup("results", "bit-exact in all groups tested, of up to 4 ranks", 0)
        raise KeyError("facts of another version")

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        yield Figure("bandwidth", 10.0, Where(links=(("a", "b"),)), "Gbit/s", "higher")
        yield Figure("bandwidth", 9.5, Where(links=(("b", "a"),)), "Gbit/s", "higher")
        for number in range(6):
            yield Figure("kernel", f"6.{number}", Where(hosts=(f"nd{number}",)))
        yield Figure("torch", None)
        raise KeyError("facts of another version")


def report_of(*findings: Finding, **more: Any) -> Report:
    cluster = make_cluster(check="shm", by_host={"nd0": {}, "nd1": {}}, **more)
    return conclude(cluster, [made_check("shm", finds=findings)], run=RUN)


def lines(report: Report, **how: Any) -> list[str]:
    return text.render(report, checks=lambda: [Shows()], **how).splitlines()


def test_the_healthy_summary_has_one_line_for_each_area() -> None:
    assert lines(report_of())[1:8] == [
        "",
        "  software  torch 2.8.0 · nccl 2.27.5",
        "  GPUs      8 x NVIDIA H100",
        "  network   eth0 MTU 1500 · round trip 50–70 µs · 9.6–10 Gbit/s over 2 links",
        "  results   bit-exact in all groups tested, of up to 4 ranks",
        "",
        "checks: 1 passed · 2 hosts · 4 ranks · 3.5 s · exit code 0",
    ]
    assert any("software" in line for line in lines(report_of(Finding(RISK, "m"))))


def test_no_healthy_summary_of_a_failure_of_one_host_alone_or_where_quiet() -> None:
    failed = report_of(Finding(SHM, "m", Where(hosts=("nd0",))))
    alone = replace(report_of(), run=replace(RUN, alone=True))
    for report, quiet in ((failed, False), (alone, False), (report_of(), True)):
        assert not any("software" in line for line in lines(report, quiet=quiet))


def test_verbose_adds_values_and_twice_the_table_of_checks() -> None:
    once, twice = lines(report_of(), verbose=1), lines(report_of(), verbose=2)
    for out in (once, twice):
        assert "  bandwidth: 9.5–10 Gbit/s (2 places)" in out
        assert "  kernel: 6.0, 6.1, 6.2 and 3 more" in out
        assert not any(line.startswith("  torch:") for line in out)
    ticks = [[line for line in out if line.startswith("✓ ")] for out in (once, twice)]
    assert [len(each) for each in ticks] == [0, 1]


def test_no_check_is_asked_about_a_very_large_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "MOST_RANKS", 3)
    assert story.healthy_summary(report_of(), lambda: [Shows()]) == []
    assert story.values(report_of(), lambda: [Shows()]) == []


def test_an_absent_host_is_one_line() -> None:
    found = Finding(ABSENT, "m", Where(ranks=(2, 3), nodes=(1,)))
    out = lines(report_of(found, absent_nodes=[1]))
    at = out.index("Not verified")
    words = "  ? 1 of 2 hosts examined, nothing wrong found on them; node 1: nothing known"
    assert out[at + 1 : at + 3] == [words, ""]
    both = report_of(found, Finding(RISK, "m", Where(hosts=("nd0",))), absent_nodes=[1])
    assert "  ? 1 of 2 hosts examined; node 1: nothing known" in lines(both)


def test_a_double_counts_as_the_host_that_is_missing() -> None:
    made = make_cluster(("nd0", "nd1", "nd2", "-"), check="shm", absent_nodes=[3])
    nodes = dict(enumerate((0, 1, 0, 2)))
    hosts = {host.id: replace(host, node_rank=nodes[host.id]) for host in made.hosts}
    ranks = [
        replace(
            rank, host=hosts[rank.host.id], rank=2 * nodes[rank.host.id] + (rank.local_rank or 0)
        )
        for rank in made.ranks
    ]
    cluster = replace(made, hosts=tuple(hosts.values()), ranks=tuple(ranks), nnodes=3, world_size=6)
    found = Finding(SHM, "m", Where(hosts=("nd0", "nd2")))
    out = lines(conclude(cluster, [made_check("shm", finds=[found])], run=RUN))
    assert out[0].endswith("Title of shm-small (nd0, nd2)")
    assert "  ? 3 hosts examined; no host is node 2" in out
    assert "3 hosts · 6 ranks" in out[-2]


def test_many_hosts_are_written_as_a_range() -> None:
    names = tuple(f"gpu{number:03d}" for number in range(1, 65))
    cluster = make_cluster(names, 1, check="shm", by_host={name: {} for name in names})
    found = Finding(SHM, "m", Where(hosts=names[:40]))
    report = conclude(cluster, [made_check("shm", finds=[found])], run=RUN)
    assert "  where gpu[001-040]" in lines(report)
    assert report.to_json()["root_causes"][0]["where"]["hosts"] == list(names[:40])


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@each_row(
    ("env", "there", "here"),
    [
        ({"TERM": "xterm"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({}, False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"TERM": "xterm", "FORCE_COLOR": "0"}, False, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_colours(env: dict[str, str], there: bool, here: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        for name, value in env.items():
            patch.setenv(name, value)
        assert (wants_color(Terminal()), wants_color(io.StringIO())) == (there, here)


@each_row(
    ("columns", "widest"),
    [("60", 60), ("200", 200), ("", 100), ("x", 100), ("0", 100), ("9" * 30, 100)],
)
def test_the_width_is_that_of_columns(columns: str, widest: int) -> None:
    words = "word " * 100
    report = report_of(Finding(SHM, words, Where(hosts=("nd0",))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", columns)
        stream = Terminal()
        Printer(Options(), stream).begin(report)
    out = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert widest - 6 <= max(map(len, out)) <= widest
