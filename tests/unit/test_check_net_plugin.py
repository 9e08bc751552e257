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
from nccl_doctor.toolkit.nccl.plugin import NET_PLUGIN, plugin_candidates
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster, outcome
from tests.support.fixes import in_full
from tests.support.libraries import compiled
from tests.support.rows import each_row

CHECK = CHECKS["net_plugin"]
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
            facts_of("NCCL_NET_PLUGIN=STATIC_PLUGIN", plugin="STATIC_PLUGIN"), id="linked in"
        ),
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
        assert "unset NCCL_NET_PLUGIN" in in_full(finding.fix)

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
                "crashed the process that loaded it (SIGSEGV)",
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
        program = "from nccl_doctor.toolkit.nccl.plugin import load_plugin as load; "
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

    def test_with_efa_a_plug_in_that_was_asked_for_is_needed_as_well(self) -> None:
        there = facts_of("FI_PROVIDER=efa", loaded=NET_PLUGIN)
        made = cluster_of(there, facts_of("FI_PROVIDER=efa"), there)
        roads = ("efa", "sockets", "efa")
        hosts = tuple(
            replace(each, facts={**each.facts, "rdma": {ALONE: outcome({"road": road})}})
            for each, road in zip(made.hosts, roads, strict=True)
        )
        ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
        finding = only(replace(made, hosts=hosts, ranks=ranks), "net-plugin-missing", hosts=["nd1"])
        assert finding.level is Severity.FAIL

    def test_a_tie(self) -> None:
        cluster = cluster_of(PLAIN, facts_of(loaded=NET_PLUGIN))
        finding = only(cluster, "net-plugin-differs", hosts=["nd0", "nd1"])
        assert finding.confidence is Confidence.POSSIBLE


def build_of(*versions: int, file: str = "libnccl-net-ofi.so", mark: str = "aa") -> dict[str, Any]:
    """A plug-in that loads, and what can be seen of its file."""
    build = {"path": f"/opt/{file}", "versions": list(versions), "fingerprint": mark}
    return {**facts_of(loaded=NET_PLUGIN), "build": build}


def with_nccl(made: Cluster, *versions: str | None) -> Cluster:
    """Every rank of a host with this NCCL; one per host."""
    ranks = []
    for rank, version in zip(made.ranks, versions, strict=True):
        loaded = {"path": "/x/libnccl.so.2", "version": version, "fingerprint": "x"}
        facts = {"nccl_library": {ALONE: outcome({"loaded": loaded, "cuda": "13.0"})}}
        ranks.append(replace(rank, facts=facts if version else {}))
    return replace(made, ranks=tuple(ranks))


class TestInterface:
    @each_row(
        ("nccl", "versions", "said"),
        [
            ("2.30.7", [4], "v6 to v12"),
            ("2.30.7", [5], "v6 to v12"),
            ("2.30.7", [13], "v6 to v12"),
            ("2.29.7", [12], "v6 to v11"),
            ("2.28.9", [12], "v6 to v11"),
            ("2.32.3", [13], "v6 to v12"),
            ("2.33.0", [4, 5], "v6 or newer"),
            ("2.26.2", [3, 4, 5], "v6 to v10"),
            ("2.22.3", [4], "v5 to v8"),
            ("2.18.1", [9, 10], "v4 to v6"),
        ],
    )
    def test_a_plug_in_that_nccl_does_not_take(
        self, nccl: str, versions: list[int], said: str
    ) -> None:
        asked = ["NCCL_NET_PLUGIN=x (by environment)"]
        told = {**build_of(*versions), "asked": asked, "plugin": "x"}
        made = with_nccl(cluster_of(told, told), nccl, nccl)
        found = judge(made)
        assert [(each.code, each.where.hosts) for each in found] == [
            ("net-plugin-missing", ("nd0",)),
            ("net-plugin-missing", ("nd1",)),
        ]
        assert f"; NCCL {nccl} accepts {said}" in found[0].message
        assert found[0].level is Severity.WARN
        assert f"ncclNetPlugin_v{versions[0]}" in found[0].message

    @each_row(
        ("nccl", "versions"),
        [
            ("2.30.7", [6]),
            ("2.30.7", [12]),
            ("2.33.0", [13]),
            ("2.28.3", [11]),
            ("2.24.3", [5]),  # nobody looked: the doubt is for the plug-in
            ("2.19.3", [4, 7]),
            ("2.18.1", [4]),
            ("2.10.3", [4]),
            (None, [4]),
            ("strange", [4]),
        ],
    )
    def test_one_that_it_takes_and_doubt(self, nccl: str | None, versions: list[int]) -> None:
        made = with_nccl(cluster_of(build_of(*versions)), nccl)
        assert judge(made) == []

    def test_nobody_asked_for_it(self) -> None:
        """An image may bring an old one; NCCL leaves it, and uses what it has itself."""
        made = with_nccl(cluster_of(build_of(4)), "2.30.7")
        assert only(made, "net-plugin-missing", hosts=["nd0"]).level is Severity.INFO

    def test_the_network_is_named(self) -> None:
        told = {**build_of(4), "asked": ["NCCL_NET=AWS Libfabric"], "net": "AWS Libfabric"}
        made = with_nccl(cluster_of(told), "2.30.7")
        assert only(made, "net-plugin-missing", hosts=["nd0"]).level is Severity.FAIL

    @pytest.mark.parametrize(
        "changes", [{"net": "IB", "asked": ["NCCL_NET=IB"]}, {"plugin": "none"}]
    )
    def test_nccl_does_not_look_at_it(self, changes: dict[str, Any]) -> None:
        made = with_nccl(cluster_of({**build_of(4), **changes}), "2.30.7")
        assert judge(made) == []

    def test_one_host_has_another_nccl(self) -> None:
        """Only there the plug-in is left; that hosts have another NCCL, others say."""
        made = with_nccl(cluster_of(*[build_of(4)] * 3), "2.18.1", "2.30.7", "2.18.1")
        only(made, "net-plugin-missing", hosts=["nd1"])


class TestBuilds:
    def test_the_same_everywhere(self) -> None:
        assert judge(cluster_of(*[build_of(8, 9)] * 3)) == []

    def test_another_plug_in_on_one_host(self) -> None:
        ucx = build_of(8, 9, file="libnccl-net-ucx.so", mark="bb")
        finding = only(
            cluster_of(build_of(8, 9), ucx, build_of(8, 9)), "net-plugin-differs", hosts=["nd1"]
        )
        assert finding.level is Severity.WARN
        assert "/opt/libnccl-net-ucx.so" in finding.message
        assert "2 hosts have /opt/libnccl-net-ofi.so" in finding.message

    def test_another_release_on_one_host(self) -> None:
        old = build_of(6, 7, mark="bb")
        finding = only(
            cluster_of(build_of(8, 9), build_of(8, 9), old), "net-plugin-differs", hosts=["nd2"]
        )
        assert finding.level is Severity.WARN
        assert "v6, v7" in finding.message

    def test_another_build_is_worth_knowing(self) -> None:
        """As of hosts that each compiled it for themselves."""
        finding = only(
            cluster_of(build_of(8), build_of(8), build_of(8, mark="bb")),
            "net-plugin-differs",
            hosts=["nd2"],
        )
        assert finding.level is Severity.INFO

    def test_a_tie(self) -> None:
        finding = only(
            cluster_of(build_of(8), build_of(8, 9, mark="bb")),
            "net-plugin-differs",
            hosts=["nd0", "nd1"],
        )
        assert finding.confidence is Confidence.POSSIBLE

    def test_reports_that_do_not_know_the_file(self) -> None:
        old = facts_of(loaded=NET_PLUGIN)
        assert judge(cluster_of(old, build_of(8), build_of(8))) == []
        assert judge(with_nccl(cluster_of(old), "2.30.7")) == []
        unread = {**build_of(8), "build": {"path": None, "versions": [8], "fingerprint": None}}
        assert judge(cluster_of(unread, build_of(8), build_of(8))) == []


ENABLED, ALGO = "NCCL_COLLNET_ENABLE=1 (by environment)", "NCCL_ALGO=x (by environment)"


def asking(*asked: str, has: Sequence[int] | None = None, **more: Any) -> dict[str, Any]:
    """A host that asks for CollNet; `has`: what its plug-in exports, None: it has no plug-in."""
    facts = facts_of() if has is None else build_of(8, 9)
    if has is not None:
        facts["build"] = {**facts["build"], "collnet": list(has)}
    return {**facts, "collnet": list(asked), **more}


class TestCollNet:
    def test_a_plug_in_that_has_it(self) -> None:
        made = cluster_of(asking(ENABLED, ALGO, has=[8]), asking(ENABLED, ALGO, has=[8]))
        assert judge(made) == []
        assert judge(with_nccl(made, "2.28.9", "2.28.9")) == []

    @pytest.mark.parametrize(
        ("has", "said"),
        [(None, "no network plug-in is loaded"), ([], "exports no ncclCollNetPlugin_v*")],
    )
    def test_asked_for_and_not_there(self, has: list[int] | None, said: str) -> None:
        made = with_nccl(cluster_of(asking(ENABLED, has=has), asking(has=has)), "2.28.9", "2.28.9")
        finding = only(made, "collnet-missing", hosts=["nd0"])
        assert finding.level is Severity.WARN
        assert finding.message.startswith(f"{ENABLED}; ")
        assert finding.message.endswith(said)
        assert "nccl-rdma-sharp-plugins" in finding.kind.fix

    def test_an_interface_that_this_nccl_does_not_take(self) -> None:
        made = with_nccl(cluster_of(*[asking(ENABLED, has=[4])] * 2), "2.30.7", "2.30.7")
        assert [each.code for each in judge(made)] == ["collnet-missing"] * 2
        assert judge(made)[0].message.endswith("exports ncclCollNetPlugin_v4")

    def test_an_algorithm_that_needs_it_fails(self) -> None:
        made = with_nccl(cluster_of(asking(ALGO), PLAIN, PLAIN), "2.27.5", "2.27.5", "2.27.5")
        finding = only(made, "collnet-only", hosts=["nd0"])
        assert finding.level is Severity.FAIL
        assert finding.message == f"{ALGO}; no network plug-in is loaded"

    @pytest.mark.parametrize("nccl", ["2.22.3", None])
    def test_an_older_nccl_ignores_it(self, nccl: str | None) -> None:
        made = with_nccl(cluster_of(asking(ALGO), PLAIN), nccl, nccl)
        assert only(made, "collnet-missing", hosts=["nd0"]).level is Severity.WARN

    def test_one_host_alone_does_not_use_it(self) -> None:
        assert judge(with_nccl(cluster_of(asking(ENABLED)), "2.27.5")) == []

    def test_the_plug_in_that_does_not_load_is_the_cause(self) -> None:
        lacking = facts_of("NCCL_NET_PLUGIN=ofi (by environment)", plugin="ofi")
        made = cluster_of({**lacking, "collnet": [ENABLED]}, OFI)
        only(made, "net-plugin-missing", hosts=["nd0"])
        assert {each.explained_by for each in judge(made)} == {None, "net-plugin-missing"}

    @pytest.mark.parametrize("plugin", ["a,b", "STATIC_PLUGIN"])
    def test_plug_ins_of_which_not_all_are_seen(self, plugin: str) -> None:
        facts = asking(ENABLED, has=[], plugin=plugin)
        assert judge(cluster_of(facts, facts)) == []

    @each_row(
        ("env", "asked"),
        [
            ({}, []),
            ({"NCCL_COLLNET_ENABLE": "0", "NCCL_ALGO": "Ring"}, []),
            ({"NCCL_COLLNET_ENABLE": "1"}, [ENABLED]),
            ({"NCCL_ALGO": "collnetdirect,CollNetChain"}, ["NCCL_ALGO"]),
            ({"NCCL_ALGO": "Ring,CollNetDirect"}, []),
            ({"NCCL_ALGO": "^CollNetDirect"}, []),
            ({"NCCL_ALGO": "ring;allreduce:collnetchain"}, ["NCCL_ALGO"]),
            ({"NCCL_ALGO": "collnetchain;allreduce:tree"}, []),
            ({"NCCL_ALGO": "allgather:collnetdirect"}, []),
            ({"NCCL_ALGO": "^tree,ring,nvls,nvlstree,pat"}, ["NCCL_ALGO"]),
            ({"NCCL_ALGO": "collnet"}, []),
            ({"NCCL_ALGO": ""}, []),
        ],
    )
    def test_who_asks(self, env: dict[str, str], asked: list[str]) -> None:
        seen = observed(**env)["collnet"]
        assert len(seen) == len(asked)
        assert all(one.startswith(other) for one, other in zip(seen, asked, strict=True))

    def test_what_a_real_plug_in_exports(self, tmp_path: Path) -> None:
        source = "int ncclNetPlugin_v8 = 1; int ncclCollNetPlugin_v8 = 1;"
        library = compiled(tmp_path / "libnccl-net-sharp.so", source)
        assert observed(NCCL_NET_PLUGIN=str(library))["build"]["collnet"] == [8]
        plain = compiled(tmp_path / "libnccl-net-plain.so", "int ncclNetPlugin_v8 = 1;")
        assert observed(NCCL_NET_PLUGIN=str(plain))["build"]["collnet"] == []


class TestObserve:
    def test_the_file_behind_a_link(self, tmp_path: Path) -> None:
        source = "int ncclNetPlugin_v6 = 1; int ncclNetPlugin_v10 = 1;"
        real = compiled(tmp_path / "libnccl-net-x.so.1", source)
        (tmp_path / "libnccl-net-y.so").symlink_to(real)
        seen = observed(NCCL_NET_PLUGIN=str(tmp_path / "libnccl-net-y.so"))["build"]
        assert (seen["path"], seen["versions"]) == (str(real.resolve()), [6, 10])
        assert len(seen["fingerprint"]) == 16
        other = compiled(tmp_path / "libnccl-net-z.so", source.replace("= 1", "= 2"))
        assert observed(NCCL_NET_PLUGIN=str(other))["build"]["fingerprint"] != seen["fingerprint"]

    def test_none_loads(self) -> None:
        assert observed()["build"] is None

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
