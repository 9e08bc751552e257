"""What checks show beside their findings: any check, also one that breaks."""

from __future__ import annotations

from nccl_doctor.api import HostLink, Setup
from nccl_doctor.report.issue import fill, form_of
from nccl_doctor.report.network import network_of
from nccl_doctor.report.story import sections_of
from tests.support.clusters import make_cluster
from tests.support.pages import report_of
from tests.support.reports import made_check

REPORT = report_of(make_cluster(("nd0", "nd1")))


def shows(*sections, error: Exception | None = None):
    """A function that finds one check, which has these to show."""

    def hook(cluster):
        yield from sections
        if error is not None:
            raise error

    check = made_check("radio")
    check.sections = hook
    return lambda: (check,)


def test_the_map_draws_what_any_check_measured():
    good, bad = HostLink(0, 1, "ok", rtt_us=80.0), HostLink(1, 0, "failed", "no answer")
    links = network_of(REPORT, shows(good, bad)).links
    assert links[0, 1].in_words() == "reachable, 80 µs"
    assert links[1, 0].in_words() == "no answer"
    assert not network_of(REPORT).links


def test_of_several_the_worst_reach_and_the_best_numbers_count():
    same = [
        HostLink(0, 1, "ok", rtt_us=90.0, rate=1e9, segments=10, lost=1),
        HostLink(0, 1, "impaired", "large packets are lost", rtt_us=80.0, rate=0.0, segments=5),
    ]
    for order in (same, same[::-1]):
        link = network_of(REPORT, shows(*order)).links[0, 1]
        assert (link.reach, link.words) == ("failed", "large packets are lost")
        assert (link.rtt_us, link.rate, link.segments, link.lost) == (80.0, 1e9, 15, 1)


def test_a_link_of_a_host_that_is_not_in_the_report_is_not_drawn():
    assert not network_of(REPORT, shows(HostLink(0, 7, "ok"))).links


def test_a_form_has_what_any_check_says():
    said = [Setup("torch", version, i) for i, version in enumerate(("2.9", "2.8", "2.8"))]
    port = {"device": "mlx5_0", "rate": "400 Gb/sec", "link": "", "up": True}
    words = fill(form_of("nccl"), REPORT, shows(*said, Setup("RDMA port", port, 0)))
    assert "torch 2.8" in words
    assert "torch 2.9" not in words
    assert "device mlx5_0, rate 400 Gb/sec, up True" in words


def test_a_check_that_breaks_keeps_what_it_showed_and_costs_nobody_else_anything():
    link = HostLink(0, 1, "ok")
    broken, fine = shows(link, error=RuntimeError("no")), shows(Setup("torch", "2.9", 0))
    found = sections_of(REPORT, lambda: (*broken(), *fine()))
    assert found == [link, Setup("torch", "2.9", 0)]
