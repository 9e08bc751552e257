"""A healthy cluster passes: nothing above info, whoever launched it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab.corpus import shapes
from tests.lab.corpus.inject import Scene
from tests.lab.lab import PATIENT, Lab
from tests.lab.reading import check_healthy


def test_two_hosts_under_torchrun(lab: Lab) -> None:
    run = lab.torchrun_doctor(*PATIENT, nproc=2)
    check_healthy(run, ranks=4)
    assert run.report is not None
    assert run.report["run"]["launcher"] == "torchrun"
    assert [host["host"] for host in run.report["hosts"]] == ["nd0", "nd1"]
    printed = {done.host: done.stdout for done in run.done}
    assert "pass" in printed["nd0"].lower(), str(run)
    assert printed["nd1"].strip() == "", "only rank 0 prints the report"


def test_four_hosts_from_plain_variables(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2", "nd3")
    run = lab.plain_doctor(*PATIENT, nproc=1)
    check_healthy(run, ranks=4)
    assert run.report is not None
    assert [host["host"] for host in run.report["hosts"]] == ["nd0", "nd1", "nd2", "nd3"]
    timed = run.report["ranks"][0]["facts"]["group_speed"]
    assert "world" in timed
    assert not any("pairs" in name for name in timed), "what gloo would do there, links has timed"


def test_two_runs_of_one_cluster_do_not_disturb_each_other(lab: Lab) -> None:
    for _ in range(2):
        check_healthy(lab.plain_doctor(*PATIENT, nproc=1), ranks=2)


@pytest.mark.wide
def test_two_hosts_as_a_user_starts_them(lab: Lab) -> None:
    lab.fresh = True  # torch is imported by each process; in other tests, by none
    check_healthy(lab.plain_doctor(*PATIENT, nproc=1), ranks=2)


def test_hosts_with_addresses_that_stand_alone(lab: Lab) -> None:
    """As in GCE or a pod of Calico: /32, and a gateway that is reached by the device."""
    shapes.stand_alone(Scene(lab))
    run = lab.plain_doctor(*PATIENT, nproc=1)
    check_healthy(run, ranks=2)
    assert run.report is not None
    shown = run.report["hosts"][0]["facts"]["interfaces"]
    assert "192.168.77.254" in str(shown), str(run)


@pytest.mark.wide
def test_hosts_with_ipv6_only(lab: Lab) -> None:
    """No IPv4 address but loopback's, and names that lead to IPv6 addresses."""
    shapes.ipv6_only(Scene(lab))
    run = lab.plain_doctor(*PATIENT, nproc=1)
    check_healthy(run, ranks=2)
