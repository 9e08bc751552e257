"""Queueing disciplines that hold packets back, and links that are slow by them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nccl_doctor.api import ALONE, Cluster
from nccl_doctor.toolkit.net.shapers import read_part, shapers
from tests.support.clusters import outcome, reread
from tests.support.exchanges import CHECK, World, both, only
from tests.support.findings import judge

ROOT = Path(__file__).resolve().parents[2]
NETWORK = """set -e
ip link add one type veth peer name two
ip link set one up; ip link set two up
tc qdisc add dev one root tbf rate 20mbit burst 32kbit latency 50ms
exec "$0" -c 'from nccl_doctor.toolkit.net.shapers import shapers; print(shapers())'
"""


def test_a_shaper_is_read_from_the_kernel() -> None:
    may = shutil.which("unshare") and shutil.which("tc") and shutil.which("ip")
    if not may:
        pytest.skip("no unshare, or no tc")
    command = ["unshare", "--net", "sh", "-c", NETWORK, sys.executable]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        pytest.skip(f"no network namespace, or no tbf: {done.stderr}")
    assert done.stdout == "{'one': 'tbf'}\n"


def test_odd_answers_are_no_shapers() -> None:
    for answer in (b"", b"x", bytes(16), bytes(64), b"\xff" * 64):
        found: dict[str, str] = {}
        read_part(found, answer)
        assert found == {}
    assert isinstance(shapers(), dict)


def shaped(cluster: Cluster, name: str, **held: object) -> Cluster:
    hosts = {
        host.id: replace(
            host,
            facts=reread({**host.facts, "interfaces": {ALONE: outcome(dict(held))}})
            if host.name == name
            else host.facts,
        )
        for host in cluster.hosts
    }
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    return replace(cluster, hosts=tuple(hosts.values()), ranks=ranks)


def test_a_slow_link_whose_end_has_one_names_it_with_the_command() -> None:
    made = World(4).slow(both("nd0", "nd2")).cluster()
    found = only(judge(CHECK, shaped(made, "nd2", shapers={"eth0": "tbf"})), "link-slow")
    assert found.message.endswith("; tc holds packets back: tbf on eth0")
    shown, step = found.fix.steps
    assert (shown.on, shown.shows) == (("nd2",), True)
    assert (step.on, step.command) == (("nd2",), "tc qdisc del dev eth0 root")
    assert found.fix.alternatives[0].startswith("on nd0: ip route get")


def test_one_of_another_host_or_interface_is_left_alone() -> None:
    made = World(4).slow(both("nd0", "nd2")).cluster()
    for name, held in (("nd1", {"eth0": "tbf"}), ("nd2", {"docker0": "htb"})):
        found = only(judge(CHECK, shaped(made, name, shapers=held)), "link-slow")
        assert "tc holds" not in found.message
    healthy = World(4).cluster()
    assert judge(CHECK, shaped(healthy, "nd2", shapers={"eth0": "htb"})) == []
