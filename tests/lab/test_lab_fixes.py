"""A broken job of two nodes, fixed with what stands on the screen; docs/tasks.md promises it.

Each fault is examined, its printed fix is typed, and then what takes it back. `make accuracy
ARGS="--fixes FILE"` does so for the whole corpus.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab.corpus import load
from tests.lab.corpus.typed import type_fixes
from tests.lab.lab import Lab

JOIN_S, PATIENCE_S = 8.0, 30.0
MOST = 3
"""Commands of a fix, on all hosts together. The same line on another host is one more."""

CASES = {case.id: case for case in load().faults}
QUICK = ("ephemeral-dropped-last", "interface-down")
TWO_NODES = (
    "firewall-drops-port",
    "localhost-on-one-host",
    "stale-address",
    "name-unresolvable-last",
    "own-name-loopback-last",
    "interface-missing-last",
    "env-word",
    "node-rank-0-twice",
    "port-busy-http",
    "port-differs-last",
    "shm-small",
    "no-route-to-master",
    "link-down-last",
    "loopback-down",
)
OTHERS = (
    "mtu-differs",
    "few-ports",
    "temp-dir",
    "env-typo",
    "env-differs",
    "firewall-rejects-port",
    "firewall-rejects-answers",
    "calls-out-dropped",
    "master-is-not-node-0",
    "digits-only",
    "interface-link-local",
    "interface-unroutable",
    "interface-syntax",
    "mtu-jumbo-over-small",
)
WIDE = [pytest.param(each, marks=pytest.mark.wide) for each in (*TWO_NODES, *OTHERS)]


@pytest.mark.parametrize("name", [*QUICK, *WIDE])
def test_a_broken_job_is_fixed_with_what_stands_on_the_screen(
    make_lab: Callable[..., Lab], name: str
) -> None:
    """And what takes it back leaves the cluster as broken as it was."""
    case = CASES[name]
    typed = type_fixes(case, JOIN_S if case.waits else PATIENCE_S)
    assert typed is not None, "no fix that can be typed"
    shown = [line.strip().removeprefix("fix").strip() for line in typed.screen.splitlines()]
    assert {line for _, line in typed.lines} <= {*shown}, typed.screen
    assert len(typed.lines) <= MOST, typed.lines
    assert typed.left == (), (typed.lines, typed.left)
    assert typed.undone is None or typed.undone.is_right, (typed.lines, typed.undone)


def test_they_are_ten_faults_of_two_nodes_at_the_least() -> None:
    alike = [CASES[name] for name in (*QUICK, *TWO_NODES)]
    assert all(case.hosts == 2 for case in alike)
    assert len(alike) >= 10
