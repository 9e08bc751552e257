"""What the kernel itself says of packets, in a network namespace with rules by source address."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nccl_doctor.toolkit.net import rtnetlink
from nccl_doctor.toolkit.net.rtnetlink import leads_back, neighbours, vrf_of, way_in, way_to

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
ip addr add fd00::2/128 dev one nodad
ip link add three type veth peer name threep
ip link add bridge0 type bridge
ip link set three master bridge0
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
ip neigh add 10.0.0.9 lladdr 02:00:00:00:00:99 dev one nud permanent
"""
RULES = "ip rule add from 10.0.0.2 lookup 7; ip route add 10.0.0.0/24 dev two table 7"
LOOK = """
import json, subprocess, sys
from nccl_doctor.api import Context, Launch
from nccl_doctor.checks.rp_filter import RpFilter
from nccl_doctor.toolkit.net.rtnetlink import _master_of, leads_back, neighbours, vrf_of
from nccl_doctor.toolkit.net.rtnetlink import fixed_neighbours
from nccl_doctor.toolkit.net.rtnetlink import way_in, way_to
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
seen["leads"] = [
    leads_back("fd00::1", "fd00::7", "two"),
    leads_back("fd00::2", "fd00::7", "one"),
    leads_back("10.0.0.2", "10.0.0.77", "two"),
    leads_back("fd00::2", "fe80::7", "one"),
    leads_back("fd00::2", "fd99::1", "one"),
]
master = _master_of("three")
seen["master"] = [master[0], master[1].decode(), _master_of("one"), vrf_of("three"), vrf_of("no")]
seen["within"] = [way_to("10.0.0.77", "", nic) for nic in ("one", "two")]
entry = {"address": "10.0.0.7", "interface": "eth0", "roles": [], "port": 9}
entries = [
    (seat, {**entry, "token": "t", "answer": "a", "mac": f"02:00:00:00:00:0{seat}"})
    for seat in (7, 8)
]
seen["called"] = call_others(entries, 5.0)
subprocess.run(["sh", "-ec", sys.argv[1]], check=True)
seen["fixed"] = fixed_neighbours()
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
    (net, entries), *others = said["plain"]["shared"].items()
    assert (net, others) == ("10.0.0.0/24", [])
    assert [entry[:4] for entry in entries] == [
        ["one", "10.0.0.1", 1, True],
        ["two", "10.0.0.2", 1, False],
    ]


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


def test_whether_answers_leave_by_the_interface_on_which_packets_come(said: Any) -> None:
    assert said["leads"] == [True, False, False, True, False]


def test_what_an_interface_is_a_part_of(said: Any) -> None:
    """A bridge stands for a VRF, which few kernels have: the kernel says the kind of both alike."""
    assert said["master"] == ["bridge0", "bridge", None, "", ""]


def test_a_way_within_an_interface_is_one_of_its_own_tables(said: Any) -> None:
    assert [way[0] for way in said["within"]] == ["one", "two"]


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
    assert {each["route"] for each in (right, wrong)} == {"unreachable 10.0.0.7"}


def test_entries_that_somebody_made_are_no_answers(said: Any) -> None:
    assert said["fixed"] == {"10.0.0.9": ["02:00:00:00:00:99", "one"]}


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


HEADS = {24: rtnetlink._ROUTE, 16: rtnetlink._LINK}
FIELDS = {24: (0,) * 8, 16: (0, 1, 0, 0)}
NUMBERS = st.integers(1, 10) | st.just(rtnetlink._LINK_INFO)
PARTS = st.lists(st.tuples(NUMBERS, st.binary(max_size=20))).map(
    lambda parts: b"".join(rtnetlink._part(kind, data) for kind, data in parts)
)
ANSWERS = st.binary(max_size=60) | st.builds(
    lambda size, kind, family, parts: (
        rtnetlink._HEADER.pack(size % 200, kind, 0, 1, 0)
        + HEADS.get(kind, rtnetlink._NEIGHBOUR).pack(family, *FIELDS.get(kind, (1, 2, 0, 0)))
        + parts
    ),
    st.integers(0, 199), st.sampled_from([2, 3, 16, 24, 28]), st.sampled_from([2, 10, 77]), PARTS,
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
    assert isinstance(vrf_of("lo"), str)
    assert leads_back("10.0.0.1", "10.0.0.7", "lo") in (True, False, None)


def test_a_part_of_a_vrf(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel says it (`rtnl_link_slave_info_fill`); a VRF has no type in sysfs."""
    part = rtnetlink._part
    info = part(1, b"veth\0") + part(rtnetlink._SLAVE_KIND, b"vrf\0")
    (lo,) = (index for index, name in socket.if_nameindex() if name == "lo")
    answer = rtnetlink._LINK.pack(0, 1, 7, 0, 0) + part(3, b"eth0\0")
    answer += part(rtnetlink._MASTER, struct.pack("=I", lo)) + part(rtnetlink._LINK_INFO, info)
    head = rtnetlink._HEADER.pack(rtnetlink._HEADER.size + len(answer), 16, 0, 1, 0)
    monkeypatch.setattr(rtnetlink.socket, "socket", lambda *_: Kernel(head + answer))
    assert vrf_of("lo") == "lo"


VRF = """
ip link add vrf0 type vrf table 10
ip link set vrf0 up
ip link add one type veth peer name onep
ip link set onep up
ip link set one master vrf0
ip link set one up
ip addr add 10.0.0.1/24 dev one
"""
IN_VRF = """
import json
from nccl_doctor.toolkit.net.rtnetlink import leads_back, vrf_of, way_to

vrf = vrf_of("one")
within, outside = way_to("10.0.0.77", "10.0.0.1", vrf), way_to("10.0.0.77")
print(json.dumps([vrf, within[0], outside[0], leads_back("10.0.0.1", "10.0.0.77", "one")]))
"""


def test_a_real_vrf() -> None:
    """Its tables are asked, and not those of the rest of the host, which have no route."""
    unshare = ["unshare", "--net", "sh", "-c"]
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("network namespaces cannot be made")
    made = subprocess.run(
        [*unshare, VRF.splitlines()[1]], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        said = made.stderr.strip() or "no reason"
        pytest.skip(f"no VRF can be made, so only the kernel's texts are judged here: {said}")
    script = f'set -e\n{VRF}\nexec "$0" -c "$1"'
    done = subprocess.run(
        [*unshare, script, sys.executable, IN_VRF],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["vrf0", "one", "", True]
