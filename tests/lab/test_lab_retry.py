"""--retry across hosts: one that comes up after the others have left is waited for."""

from __future__ import annotations

import pytest

from tests.lab.lab import MEET, Lab

WAITS_S = 20.0
"""For all to sign in: longer than the gap between two attempts of a busy machine."""


@pytest.mark.wide
def test_a_host_that_comes_late_is_found_by_the_next_attempt(lab: Lab) -> None:
    late = {"nd1": [f"--pause={WAITS_S + 6}"]}
    run = lab.own_doctor(
        *MEET, "--retry", "100", f"--join-timeout={WAITS_S}", per_host=late, timeout_s=150
    )
    assert run.report is not None, str(run)
    assert run.report["verdict"] == "pass", str(run)
    assert [done.code for done in run.done] == [0, 0], str(run)
    assert "host-absent; examined again in " in run.done[0].stderr, str(run)
    assert run.leftovers == [], str(run)
