"""Connections that a firewall forgets."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccl_doctor.api import Context, Launch, Severity, Skip
from nccl_doctor.checks.idle_connections import IdleConnections
from tests.support.clusters import make_cluster
from tests.support.findings import judge

NAME = "proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established"


def cluster_of(*seconds: int):
    names = [f"nd{i}" for i in range(len(seconds))]
    by_host = {name: {"established_s": each} for name, each in zip(names, seconds, strict=True)}
    return make_cluster(names, 1, check="idle_connections", by_host=by_host)


def test_a_short_memory_is_a_risk_on_that_host() -> None:
    (found,) = judge(IdleConnections(), cluster_of(432_000, 300, 7200))
    assert (found.code, found.level) == ("idle-connections-forgotten", Severity.WARN)
    assert found.where.hosts == ("nd1",)
    assert "forgotten after 5 min" in found.message


def test_the_kernels_default_and_one_host_alone_are_fine() -> None:
    assert judge(IdleConnections(), cluster_of(432_000, 3600)) == []
    assert judge(IdleConnections(), cluster_of(60)) == []


def test_what_the_kernel_says(tmp_path: Path) -> None:
    file = tmp_path / NAME
    file.parent.mkdir(parents=True)
    file.write_text("600\n")
    facts = IdleConnections().observe(Context(Launch(), {}, root=tmp_path))
    assert facts == {"established_s": 600}


@pytest.mark.parametrize("text", [None, "", "soon\n"])
def test_without_connection_tracking_it_does_not_apply(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        file = tmp_path / NAME
        file.parent.mkdir(parents=True)
        file.write_text(text)
    with pytest.raises(Skip):
        IdleConnections().observe(Context(Launch(), {}, root=tmp_path))
