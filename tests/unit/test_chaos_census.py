"""Roles of the processes of a host, by their tree and names."""

from __future__ import annotations

from tests.lab.chaos.census import Seen, below, chain, of_role, supervisors


def seen(pid: int, parent: int, name: str = "python", state: str = "S", *, client: bool = False):
    return Seen("nd0", pid, parent, name, state, 100 + pid, client)


OWN = [
    seen(10, 0),
    seen(11, 10),
    seen(12, 11),
    seen(13, 11),
    seen(14, 12, "ncd:store_serve"),
    seen(15, 13, "ncd:links"),
    seen(16, 11, "ncd:memory"),
]
PLAIN = [seen(10, 0), seen(11, 0), seen(12, 10), seen(13, 11), seen(14, 13, "ncd:links")]
TORCHRUN = [
    seen(9, 0, client=True),
    seen(10, 0, "pt_elastic"),
    seen(11, 10, client=True),
    seen(12, 0),
    seen(13, 12),
    seen(14, 13, "ncd:links"),
]


def pids(launcher: str, role: str, table: list[Seen]) -> list[int]:
    return [each.pid for each in of_role(launcher, role, table)]


def test_roles_of_the_own_launcher():
    assert pids("own", "launcher", OWN) == [10]
    assert pids("own", "supervisor", OWN) == [11]
    assert pids("own", "rank", OWN) == [12, 13]
    assert pids("own", "child", OWN) == [14, 15, 16]


def test_roles_of_ranks_with_plain_variables():
    assert pids("plain", "supervisor", PLAIN) == [10, 11]
    assert pids("plain", "rank", PLAIN) == [12, 13]
    assert pids("plain", "child", PLAIN) == [14]


def test_roles_of_torchrun_whose_agent_is_no_supervisor():
    assert pids("torchrun", "launcher", TORCHRUN) == [10]
    assert pids("torchrun", "supervisor", TORCHRUN) == [12]
    assert pids("torchrun", "rank", TORCHRUN) == [13]
    assert [each.pid for each in supervisors("torchrun", TORCHRUN)] == [12]


def test_who_waits_to_be_reaped_plays_no_role():
    dead = [seen(10, 0, state="Z"), *PLAIN[1:]]
    assert pids("plain", "supervisor", dead) == [11]


def test_families():
    assert [each.pid for each in below(OWN[2], OWN)] == [12, 14]
    assert [each.pid for each in chain(OWN[5], OWN)] == [10, 11, 13, 15]
