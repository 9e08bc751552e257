"""What check `master_addr` observes on this machine."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from nccl_doctor.api import Context, Launch, Skip, Untested
from nccl_doctor.checks.master_addr import MasterAddr
from tests.support.clusters import make_cluster
from tests.support.findings import judge

CHECK = MasterAddr()


def observed(master: str) -> Any:
    started = time.monotonic()
    launch = Launch("env", master_addr=master, master_port=29500, rank=0, world_size=1)
    found = CHECK.observe(Context(launch=launch, env={}))
    assert time.monotonic() - started < 5.0
    return json.loads(json.dumps(found))


def test_the_facts_of_this_host():
    found = observed("localhost")
    assert "127.0.0.1" in found["master"]["answers"]
    assert found["reverse"][0]["query"] in found["master"]["answers"]
    assert all(nic != "lo" for nic, _ in found["interfaces"])
    cluster = make_cluster(("nd0",), 1, check="master_addr", by_host={"nd0": found})
    assert [f for f in judge(CHECK, cluster) if f.code != "dns-slow"] == []


def test_a_name_that_is_none_is_seen_for_real():
    found = observed("bad..label")
    assert found["master"]["answers"] == []
    assert len(found["master"]["took_s"]) > 1
    cluster = make_cluster(("nd0",), 1, check="master_addr", by_host={"nd0": found})
    finding = next(f for f in judge(CHECK, cluster) if f.code != "dns-slow")
    assert (finding.code, finding.where.hosts) == ("addr-unresolvable", ("nd0",))


def test_without_a_master_there_is_nothing_to_test():
    with pytest.raises(Untested, match="MASTER_ADDR is not set"):
        CHECK.observe(Context(launch=Launch("env"), env={}))


def test_outside_a_job_there_is_no_master():
    with pytest.raises(Skip, match="no launcher started this process"):
        CHECK.observe(Context(launch=Launch(), env={}))
