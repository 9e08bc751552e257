"""What the kernel itself says of packets, in a network namespace with rules by source address."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nccl_doctor.toolkit.net import rtnetlink
from nccl_doctor.toolkit.net.rtnetlink import neighbours, way_in, way_to

ROOT = Path(__file__).resolve().parents[2]
NETWORK = """
for nic in one two; do
    ip link add $nic type veth peer name ${nic}p
    ip link set $nic up
    ip link set ${nic}p up
    echo 1 > /proc/sys/net/ipv4/conf/$nic/rp_filter
done
ip link set lo up
ip addr add 10.0.0.1/24 dev one
ip addr add 10.0.0.2/24 dev two
ip addr add fd00::1/64 dev two nodad
# No second interface of a network: an address that stands alone, and an alias.
ip addr add 10.5.5.5/32 dev one
ip addr add 10.5.5.5/32 dev two
ip addr add 10.6.0.1/24 dev one label one:1
ip addr add 10.6.0.2/24 dev one
ip route add default via 10.0.0.254 dev one
ip route add 10.8.0.0/16 via 10.0.0.253 dev two mtu 1400
ip route add unreachable 10.9.0.0/16
ip neigh add 10.0.0.7 lladdr 02:00:00:00:00:07 dev one nud reachable
ip neigh add fd00::7 lladdr 02:00:00:00:00:17 dev two nud stale
ip neigh add 10.0.0.8 dev one nud failed
ip route add unreachable 10.0.0.7
"""
RULES = "ip rule add from 10.0.0.2 lookup 7; ip route add 10.0.0.0/24 dev two table 7"
LOOK = """
import json, subprocess, sys
from nccl_doctor.api import Context, Launch
from nccl_doctor.checks.rp_filter import RpFilter
from nccl_doctor.toolkit.net.rtnetlink import neighbours, way_in, way_to
from nccl_doctor.toolkit.peers.calls import call_others

def look():
    return {
        "in": [way_in(f"10.0.0.{n}", "10.0.0.77", nic) for n, nic in ((1, "one"), (2, "two"))],
        "back": [way_to("10.0.0.77", f"10.0.0.{n}") for n in (1, 2)],
        "shared": RpFilter().observe(Context(launch=Launch(), env={}))["shared"],
    }

seen = {
    "plain": look(),
    "ways": [way_to(each) for each in ("10.7.7.7", "10.8.8.8", "10.9.9.9", "fd00::7", "fd99::1")],
}
entry = {"address": "10.0.0.7", "interface": "eth0", "roles": [], "port": 9}
entries = [
    (seat, {**entry, "token": "t", "answer": "a", "mac": f"02:00:00:00:00:0{seat}"})
    for seat in (7, 8)
]
seen["called"] = call_others(entries, 5.0)
subprocess.run(["sh", "-ec", sys.argv[1]], check=True)
print(json.dumps({**seen, "ruled": look(), "neighbours": neighbours()}))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    unshare = ["unshare", "--net"]
    may = shutil.which("unshare") and shutil.which("ip")
    if not may or subprocess.run([*unshare, "true"], check=False).returncode != 0:
        pytest.skip("network namespaces cannot be made")
    script = f'set -e\n{NETWORK}\nexec "$0" -c "$1" "$2"'
    command = [*unshare, "sh", "-c", script, sys.executable, LOOK, RULES]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_strict_filter_drops_what_would_be_answered_elsewhere(said: Any) -> None:
    first, second = said["plain"]["in"]
    assert (first[4], second[4] != 0) == (0, True)
    assert [way[0] for way in said["plain"]["back"]] == ["one", "one"]
    assert said["plain"]["shared"] == {
        "10.0.0.0/24": [["one", "10.0.0.1", 1, True], ["two", "10.0.0.2", 1, False]]
    }


def test_and_not_where_rules_by_source_address_lead_back(said: Any) -> None:
    assert [way[4] for way in said["ruled"]["in"]] == [0, 0]
    assert [way[0] for way in said["ruled"]["back"]] == ["one", "two"]
    assert [entry[3] for entry in said["ruled"]["shared"]["10.0.0.0/24"]] == [True, True]


def test_gateway_source_and_mtu_of_a_way(said: Any) -> None:
    by_default, by_route, refused, beside, nowhere = said["ways"]
    assert by_default == ["one", "10.0.0.254", "10.0.0.1", None, 0]
    assert by_route == ["two", "10.0.0.253", "10.0.0.2", 1400, 0]
    assert beside[:2] == ["two", ""]
    assert refused[4]
    assert nowhere[4]
    assert not refused[0]


def test_neighbours_are_those_that_answered_and_those_that_did_not(said: Any) -> None:
    assert said["neighbours"] == {
        "10.0.0.7": "02:00:00:00:00:07",
        "10.0.0.8": "",
        "fd00::7": "02:00:00:00:00:17",
    }


def test_who_answers_is_told_where_it_is_not_whom_was_called(said: Any) -> None:
    (right,), (wrong,) = said["called"]["7"], said["called"]["8"]
    assert "answers" not in right
    assert wrong["answers"] == "02:00:00:00:00:07"


def test_a_question_that_makes_no_sense_has_no_answer() -> None:
    assert way_to("a name") is None
    assert way_in("127.0.0.1", "127.0.0.2", "no-such-nic") is None


class Kernel:
    """In place of the socket of netlink: one answer, as often as it is asked for."""

    def __init__(self, answer: bytes) -> None:
        self.recv = lambda _size: answer
        self.settimeout = self.sendto = lambda *_: None

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        pass


PARTS = st.lists(st.tuples(st.integers(1, 9), st.binary(max_size=20))).map(
    lambda parts: b"".join(rtnetlink._part(kind, data) for kind, data in parts)
)
ANSWERS = st.binary(max_size=60) | st.builds(
    lambda size, kind, family, parts: (
        rtnetlink._HEADER.pack(size % 200, kind, 0, 1, 0)
        + (rtnetlink._ROUTE if kind == 24 else rtnetlink._NEIGHBOUR).pack(
            family, *((0,) * 8 if kind == 24 else (1, 2, 0, 0))
        )
        + parts
    ),
    st.integers(0, 199), st.sampled_from([2, 3, 24, 28]), st.sampled_from([2, 10, 77]), PARTS,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANSWERS)
@example(rtnetlink._HEADER.pack(16, 24, 0, 1, 0) + bytes(12) + rtnetlink._part(5, b"\n"))
@example(
    rtnetlink._HEADER.pack(40, 28, 0, 1, 0)
    + rtnetlink._NEIGHBOUR.pack(2, 1, 2, 0, 0)
    + rtnetlink._part(1, b"\n")
)
def test_any_answer_of_the_kernel(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    monkeypatch.setattr(rtnetlink.socket, "socket", lambda *_: Kernel(answer))
    for way in (way_to("10.0.0.7"), way_to("fd00::7")):
        assert way is None or isinstance(way.errno, int)
    assert isinstance(neighbours(), dict)
