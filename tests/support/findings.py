"""Findings of a check on a made-up cluster: code, place, no other place blamed; and its cost."""

from __future__ import annotations

import cProfile
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nccl_doctor.api import Check, Cluster, Finding, Where
from tests.support.clusters import change_rank
from tests.support.fixes import prose_with_commands, wrong_lines


def judge(check: Check, cluster: Cluster) -> list[Finding]:
    """Findings of one check; each can go into a report, and what its fix says can be typed."""
    findings = list(check.judge(cluster))
    for finding in findings:
        assert finding.code in {kind.code for kind in check.kinds}
        assert finding.message
        assert "\n" not in finding.message
        assert not wrong_lines(finding.fix), finding.fix
        assert not prose_with_commands(finding.fix), prose_with_commands(finding.fix)
        json.dumps(finding.to_json())
    return findings


def only(check: Check, cluster: Cluster, code: str, **where: Sequence[Any]) -> Finding:
    """The one unexplained finding, at exactly this place."""
    findings = judge(check, cluster)
    roots = [finding for finding in findings if finding.explained_by is None]
    assert [finding.code for finding in roots] == [code], findings
    expected = Where(**{name: tuple(places) for name, places in where.items()})
    assert roots[0].where == expected
    assert all(f.explained_by in (None, code) for f in findings)
    return roots[0]


def calls(work: Callable[[], object]) -> int:
    """Number of functions that a piece of work calls, the same on a busy and on an idle machine."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())


def everywhere(cluster: Cluster, seats: Iterable[int], **launch: Any) -> Cluster:
    """The same change to the launch record of several participants."""
    for seat in seats:
        cluster = change_rank(cluster, seat, launch=launch)
    return cluster
