from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nccl_doctor.toolkit.slurm import address_of, first_address, host_ranges, slurm_hosts
from tests.support.findings import calls
from tests.support.rows import each_row


@each_row(
    ("hosts", "text"),
    [
        ("gpu3", "gpu3"),
        ("login", "login"),
        ("gpu001 gpu002 gpu003 gpu007", "gpu[001-003,007]"),
        ("n098 n099 n100 n101", "n[098-101]"),
        ("n8 n9 n10 n11", "n[8-11]"),
        ("n1 n01", "n[1,01]"),
        ("b2 a1 b1 login", "b[1-2],a1,login"),
        ("gpu01.example.org gpu02.example.org", "gpu[01-02].example.org"),
        ("rack1node01 rack1node02 rack2node01", "rack1node[01-02],rack2node01"),
        ("", ""),
    ],
)
def test_host_names_are_folded_and_spelt_out_again(hosts: str, text: str) -> None:
    assert host_ranges(hosts.split()) == text
    assert set(slurm_hosts(text)) == set(hosts.split())


@each_row(
    ("text", "hosts"),
    [
        ("gpu3", "gpu3"),
        ("node[01-04,07],gpu3", "node01 node02 node03 node04 node07 gpu3"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("rack[1-2]node[01-02]-ib", "rack1node01-ib rack1node02-ib rack2node01-ib rack2node02-ib"),
        ("a-b.example.org,c", "a-b.example.org c"),
        ("[1-2]", "1 2"),
        (" nd[0-1]\n", "nd0 nd1"),
    ],
)
def test_a_list_is_spelt_out_in_its_order(text: str, hosts: str) -> None:
    assert slurm_hosts(text) == tuple(hosts.split())


@each_row(
    "text",
    ["", ",", "a,,b", "a,", "n[1-3", "n1-3]", "n[]", "n[3-1]", "n[a-b]", "n[1-]", "n[[1-2]]"],
)
def test_what_is_no_list_has_no_hosts(text: str) -> None:
    assert slurm_hosts(text) == ()


@pytest.mark.parametrize("text", ["n[0-999999999]", "n[0-9999]m[0-9999]o[0-9999]"])
def test_a_list_longer_than_any_cluster_is_not_spelt_out(text: str) -> None:
    assert slurm_hosts(text) == ()
    assert calls(lambda: slurm_hosts(text)) < 1_000_000


SCONTROL = """#!/bin/sh
case "$2" in
hostnames) printf 'nd0\\nnd1\\n' ;;
node) printf 'NodeName=nd Arch=x\\n   NodeAddr=10.0.0.%s NodeHostName=x Port=0\\n' "${3#nd}" ;;
esac
"""


@each_row(("line", "address"), [(address_of("nd1"), "10.0.0.1"), (first_address(), "10.0.0.0")])
def test_the_address_that_slurm_uses(line: str, address: str, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(
        ["sh", "-c", f"printf %s {line}"],
        env={"PATH": path, "SLURM_JOB_NODELIST": "nd[0-1]"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == address
