"""Plans of chaos runs are pure, and strike everything."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.lab.chaos import LAUNCHERS, ROLES, SEED, SIGNALS, STRIKES, WORDS, plan

ROOT = Path(__file__).resolve().parents[2]
PLANS = [plan(SEED, number) for number in range(400)]


def test_a_plan_depends_on_seed_and_number_alone():
    assert [plan(SEED, number) for number in (7, 399, 0)] == [PLANS[7], PLANS[399], PLANS[0]]
    assert plan(SEED + 1, 7) != PLANS[7]
    code = f"from tests.lab.chaos import plan; print(plan({SEED}, 7))"
    said = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert said.stdout.strip() == str(PLANS[7])


def test_every_block_has_every_strike():
    size = len(STRIKES)
    for first in range(0, len(PLANS), size):
        block = [each.strike for each in PLANS[first : first + size]]
        assert sorted(block) == sorted(STRIKES)


def test_all_launchers_sizes_roles_and_victims_have_their_share():
    assert set(STRIKES) == set(WORDS)
    assert min(Counter(each.launcher for each in PLANS).values()) > len(PLANS) / 5
    assert {each.launcher for each in PLANS} == set(LAUNCHERS)
    assert {(each.hosts, each.nproc) for each in PLANS} == {(2, 1), (2, 2), (3, 1), (3, 2), (4, 1)}
    for each in PLANS:
        assert each.victim in each.names
        assert each.other != each.victim
        assert (each.role in ROLES[each.launcher]) == (each.strike in SIGNALS)
    roles = {(each.launcher, each.role) for each in PLANS if each.role}
    assert roles == {(name, role) for name, every in ROLES.items() for role in every}
    assert {each.shared for each in PLANS} == {True, False}


def test_ranks_are_counted_through_the_hosts():
    each = next(each for each in PLANS if (each.hosts, each.nproc) == (3, 2))
    assert each.ranks_of("nd1") == (2, 3)
    assert [each.host_of(rank) for rank in (0, 3, 5, 6)] == ["nd0", "nd1", "nd2", ""]


def test_a_strike_comes_as_far_into_a_run_of_another_level():
    for each in PLANS:
        assert each.births_at(each.level) == each.births
    found = [each.births_at("quick") for each in PLANS if each.level == "standard"]
    assert min(found) == 0
    assert 38 <= max(found) <= 44
