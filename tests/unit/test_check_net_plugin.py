"""The rules of the check `net_plugin`, on made-up clusters and made-up libraries."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor import registry
from nccl_doctor.api import (
    ALONE,
    Cluster,
    Confidence,
    Context,
    Launch,
    Outcome,
    OutcomeStatus,
    Severity,
    Skip,
)
from nccl_doctor.tools.nccl.plugin import NET_PLUGIN, plugin_candidates
from tests import findings
from tests.clusters import make_cluster, outcome
from tests.libraries import compiled

CHECK = next(check for check in registry.load().checks if check.name == "net_plugin")
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)
GONE = "cannot open shared object file: No such file or directory"


def observed(**env: str) -> dict[str, Any]:
    facts = CHECK.observe(Context(launch=Launch(), env=env, backend="nccl"))
    return dict(json.loads(json.dumps(facts)))


def facts_of(*asked: str, plugin: str = "", net: str = "", loaded: str = "") -> dict[str, Any]:
    tried = [
        [name, "" if name == loaded else f"{name}: {GONE}"] for name in plugin_candidates(plugin)
    ]
    told = {"asked": list(asked), "plugin": plugin, "net": net, "tried": tried}
    return {**told, "loaded": loaded or None}


def cluster_of(*facts: Mapping[str, Any]) -> Cluster:
    hosts = [f"nd{node}" for node in range(len(facts))]
    by_host = dict(zip(hosts, facts, strict=True))
    return make_cluster(hosts, 1, check=CHECK.name, by_host=by_host, backend="nccl")


LOADING = ({"step": "load libnccl-net.so", "at_s": 1.0},)
PLAIN = facts_of()
OFI = facts_of("NCCL_NET_PLUGIN=ofi (by environment)", plugin="ofi", loaded="libnccl-net-ofi.so")


@pytest.mark.parametrize(
    ("plugin", "libraries"),
    [
        ("", [NET_PLUGIN]),
        ("ofi", ["ofi", "libnccl-net-ofi.so"]),
        ("libnccl-net-ofi.so", ["libnccl-net-ofi.so"]),
        ("/opt/lib/net.so", ["/opt/lib/net.so"]),
        ("libx", ["libx", "libnccl-net-libx.so"]),
        ("a,/b.so", ["a", "libnccl-net-a.so", "/b.so"]),
        ("none", []),
    ],
)
def test_where_nccl_looks(plugin: str, libraries: Sequence[str]) -> None:
    assert list(plugin_candidates(plugin)) == libraries


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(PLAIN, id="nothing asked, nothing there"),
        pytest.param(OFI, id="asked and there"),
        pytest.param(facts_of(loaded=NET_PLUGIN), id="there without being asked"),
        pytest.param(facts_of("NCCL_NET=Socket", net="Socket"), id="sockets"),
        pytest.param(facts_of("NCCL_NET=IB", "FI_PROVIDER=efa", net="IB"), id="InfiniBand"),
        pytest.param(facts_of("NCCL_NET_PLUGIN=none", plugin="none"), id="none wanted"),
        pytest.param(
            facts_of("NCCL_NET_PLUGIN=none", "FI_PROVIDER=efa", plugin="none"), id="none in spite"
        ),
    ],
)
def test_healthy(facts: Mapping[str, Any]) -> None:
    assert judge(cluster_of(facts, facts)) == []


class TestMissing:
    def test_a_plug_in_that_one_host_has_not(self) -> None:
        lacking = facts_of("NCCL_NET_PLUGIN=ofi (by environment)", plugin="ofi")
        finding = only(cluster_of(OFI, lacking, OFI), "net-plugin-missing", hosts=["nd1"])
        assert finding.level is Severity.WARN
        assert "libnccl-net-ofi.so: cannot open" in finding.message
        assert "unset NCCL_NET_PLUGIN" in finding.fix

    def test_variables_of_efa(self) -> None:
        lacking = facts_of("FI_PROVIDER=efa")
        found = judge(cluster_of(lacking, lacking))
        assert {(f.code, f.level) for f in found} == {("net-plugin-missing", Severity.WARN)}

    @pytest.mark.parametrize("plugin", ["", "ofi", "none"])
    def test_a_network_that_nccl_has_with_a_plug_in_only(self, plugin: str) -> None:
        lacking = facts_of("NCCL_NET=AWS Libfabric", net="AWS Libfabric", plugin=plugin)
        finding = only(cluster_of(lacking), "net-plugin-missing", hosts=["nd0"])
        assert finding.level is Severity.FAIL


class TestCrashes:
    @pytest.mark.parametrize(
        ("end", "words", "confidence"),
        [
            (
                Outcome(OutcomeStatus.DIED, signal="SIGSEGV", breadcrumbs=LOADING),
                "ended the process that loaded it, by SIGSEGV",
                Confidence.CERTAIN,
            ),
            (
                Outcome(OutcomeStatus.HUNG, state="S", duration_s=10.0, breadcrumbs=LOADING),
                "did not load within 10 s",
                Confidence.LIKELY,
            ),
        ],
    )
    def test_on_one_host(self, end: Outcome, words: str, confidence: Confidence) -> None:
        by_host = {"nd0": PLAIN, "nd1": end, "nd2": PLAIN}
        made = make_cluster(list(by_host), 1, check=CHECK.name, by_host=by_host, backend="nccl")
        finding = only(made, "net-plugin-crashes", hosts=["nd1"])
        assert finding.message == f"libnccl-net.so {words}"
        assert (finding.level, finding.confidence) == (Severity.FAIL, confidence)

    @pytest.mark.parametrize(
        "end",
        [
            Outcome(OutcomeStatus.DIED, signal="SIGKILL", breadcrumbs=LOADING),  # no memory?
            Outcome(OutcomeStatus.HUNG, state="T", breadcrumbs=LOADING),  # somebody stopped it
            Outcome(OutcomeStatus.HUNG),
        ],
    )
    def test_what_may_have_another_reason(self, end: Outcome) -> None:
        made = make_cluster(["nd0"], 1, check=CHECK.name, by_host={"nd0": end}, backend="nccl")
        assert judge(made) == []

    def test_a_library_that_really_does(self, tmp_path: Path) -> None:
        """In a process of its own, as this one has to live on."""
        source = """#include <stdlib.h>
        __attribute__((constructor)) static void start(void) { abort(); }
        int ncclNetPlugin_v9;"""
        library = compiled(tmp_path / "libnccl-net-bad.so", source)
        program = "from nccl_doctor.tools.nccl.plugin import load_plugin as load; "
        program += f"load({str(library)!r})"
        done = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
        assert done.returncode == -signal.SIGABRT


class TestDiffers:
    def test_the_odd_one_has_none(self) -> None:
        there = facts_of(loaded=NET_PLUGIN)
        finding = only(cluster_of(there, PLAIN, there), "net-plugin-differs", hosts=["nd1"])
        assert finding.level is Severity.WARN
        assert finding.message == "2 of 3 hosts load libnccl-net.so, 1 load none"

    def test_the_odd_one_has_one(self) -> None:
        there = facts_of(loaded=NET_PLUGIN)
        only(cluster_of(PLAIN, PLAIN, there), "net-plugin-differs", hosts=["nd2"])

    def test_with_efa_the_plug_in_does_not_give_way(self) -> None:
        there = facts_of(loaded=NET_PLUGIN)
        made = cluster_of(there, PLAIN, there)
        hosts = tuple(
            replace(each, facts={**each.facts, "rdma": {ALONE: outcome({"road": "efa"})}})
            for each in made.hosts
        )
        ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
        efa = replace(made, hosts=hosts, ranks=ranks)
        finding = only(efa, "net-plugin-differs", hosts=["nd1"])
        assert finding.level is Severity.FAIL

    def test_a_tie(self) -> None:
        cluster = cluster_of(PLAIN, facts_of(loaded=NET_PLUGIN))
        finding = only(cluster, "net-plugin-differs", hosts=["nd0", "nd1"])
        assert finding.confidence is Confidence.POSSIBLE


class TestObserve:
    def test_nothing_asked(self) -> None:
        facts = observed()
        assert facts["asked"] == []
        assert judge(cluster_of(facts, facts)) == []

    def test_missing(self) -> None:
        facts = observed(NCCL_NET_PLUGIN="no-such", FI_PROVIDER="efa")
        assert facts["asked"] == ["NCCL_NET_PLUGIN=no-such (by environment)", "FI_PROVIDER=efa"]
        assert [name for name, _ in facts["tried"]] == ["no-such", "libnccl-net-no-such.so"]
        only(cluster_of(facts), "net-plugin-missing", hosts=["nd0"])

    def test_it_loads(self, tmp_path: Path) -> None:
        library = str(compiled(tmp_path / "libnccl-net-x.so", "int ncclNetPlugin_v8;"))
        assert observed(NCCL_NET_PLUGIN=library)["loaded"] == library

    def test_a_library_that_is_no_plug_in(self, tmp_path: Path) -> None:
        library = str(compiled(tmp_path / "libnccl-net-x.so", "int other;"))
        facts = observed(NCCL_NET_PLUGIN=library)
        assert facts["loaded"] is None
        finding = only(cluster_of(facts), "net-plugin-missing", hosts=["nd0"])
        assert "exports no ncclNetPlugin_v*" in finding.message

    def test_it_cannot_be_loaded(self, tmp_path: Path) -> None:
        library = tmp_path / "libnccl-net-x.so"
        library.write_text("not a library")
        facts = observed(NCCL_NET_PLUGIN=str(library))
        assert facts["loaded"] is None
        finding = only(cluster_of(facts), "net-plugin-missing", hosts=["nd0"])
        assert "invalid ELF header" in finding.message or "file too short" in finding.message

    def test_a_configuration_file_counts(self, tmp_path: Path) -> None:
        conf = tmp_path / "nccl.conf"
        conf.write_text("NCCL_NET=AWS Libfabric\n")
        facts = observed(NCCL_CONF_FILE=str(conf))
        assert facts["net"] == "AWS Libfabric"
        assert facts["asked"] == [f"NCCL_NET=AWS Libfabric (by {conf})"]

    def test_gloo(self) -> None:
        with pytest.raises(Skip):
            CHECK.observe(Context(launch=Launch(), env={"NCCL_NET_PLUGIN": "x"}))
