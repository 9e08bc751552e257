"""The rules of the check `nccl_plugins`, on made-up clusters and made-up libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Context, Launch, Severity, Skip, Untested
from nccl_doctor.toolkit.nccl.plugin import ENV, PROFILER, TUNER, PluginType, plugin_candidates
from nccl_doctor.toolkit.nccl.plugin_versions import plugin_range
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster
from tests.support.fixes import in_full
from tests.support.libraries import compiled
from tests.support.rows import each_row
from tests.unit.test_check_net_plugin import with_nccl

CHECK = CHECKS["nccl_plugins"]
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)
TYPES = {"tuner": TUNER, "profiler": PROFILER, "env": ENV}
CRASH = "__attribute__((constructor)) static void start(void) { __builtin_trap(); }"


def observed(**env: str) -> dict[str, Any]:
    facts = CHECK.observe(Context(launch=Launch(), env=env, backend="nccl"))
    return dict(json.loads(json.dumps(facts)))["plugins"]


def plugin(asked: str = "", loaded: str = "", *versions: int, mark: str = "aa") -> dict[str, Any]:
    build = {"path": f"/opt/{loaded}", "versions": list(versions), "fingerprint": mark}
    return {
        "asked": asked,
        "tried": [[loaded or "x", "" if loaded else "x: no such file"]],
        "loaded": loaded or None,
        "build": build if loaded else None,
        "fault": "",
        "instead": None,
    }


def ended(fault: str, words: str) -> dict[str, Any]:
    return {**plugin(), "tried": [["libnccl-tuner.so", words]], "fault": fault}


def cluster_of(*plugins: Mapping[str, Any], nccl: str | None = "2.30.7") -> Cluster:
    """One host for each: type → facts."""
    hosts = {f"nd{node}": {"plugins": dict(each)} for node, each in enumerate(plugins)}
    made = make_cluster(list(hosts), 1, check=CHECK.name, by_host=hosts, backend="nccl")
    return with_nccl(made, *[nccl] * len(hosts))


NOTHING = {name: plugin() for name in TYPES}
TUNED = {**NOTHING, "tuner": plugin("NCCL_TUNER_PLUGIN=x (by environment)", "libx.so", 4, 5)}


@pytest.mark.parametrize(
    ("value", "of", "libraries"),
    [
        ("", TUNER, ["libnccl-tuner.so"]),
        ("google", TUNER, ["google", "libnccl-tuner-google.so"]),
        ("inspector", PROFILER, ["inspector", "libnccl-profiler-inspector.so"]),
        ("/opt/p.so", PROFILER, ["/opt/p.so"]),
        ("a,b", ENV, ["a,b", "libnccl-env-a,b.so"]),  # only networks may be several
        ("None", ENV, []),
    ],
)
def test_where_nccl_looks(value: str, of: PluginType, libraries: list[str]) -> None:
    assert list(plugin_candidates(value, of)) == libraries


@each_row(
    ("nccl", "of", "span"),
    [
        ("2.20.5", TUNER, (1, 1)),
        ("2.23.4", TUNER, (2, 3)),
        ("2.26.2", TUNER, (2, 4)),
        ("2.28.9", TUNER, (2, 5)),
        ("2.30.7", TUNER, (2, 6)),
        ("2.23.4", PROFILER, (1, 1)),
        ("2.29.7", PROFILER, (1, 6)),
        ("2.32.3", PROFILER, (1, 7)),
        ("2.29.7", ENV, (1, 1)),
        ("2.30.7", ENV, (1, 2)),
        ("2.99.0", ENV, (1, None)),
    ],
)
def test_what_releases_accept(nccl: str, of: PluginType, span: tuple[int, int | None]) -> None:
    assert plugin_range(nccl, of) == span


@pytest.mark.parametrize(
    "plugins",
    [
        pytest.param([NOTHING, NOTHING], id="nothing asked, nothing there"),
        pytest.param([TUNED, TUNED, TUNED], id="asked and there"),
        pytest.param([{}, {}], id="all turned off"),
        pytest.param(
            [{**NOTHING, "tuner": plugin("", "libnccl-tuner.so", 4)}] * 2, id="of the image"
        ),
        pytest.param(
            [NOTHING, {**NOTHING, "profiler": plugin("x", "libp.so", 4)}, NOTHING],
            id="one host takes a profile",
        ),
    ],
)
def test_healthy(plugins: list[Mapping[str, Any]]) -> None:
    assert judge(cluster_of(*plugins)) == []


class TestMissing:
    @pytest.mark.parametrize(
        ("name", "level"),
        [("tuner", Severity.WARN), ("env", Severity.WARN), ("profiler", Severity.INFO)],
    )
    def test_asked_for_and_not_found(self, name: str, level: Severity) -> None:
        there = {**NOTHING, name: plugin("ASKED=x (by environment)", "libx.so", 2)}
        lacking = {**NOTHING, name: plugin("ASKED=x (by environment)")}
        finding = only(cluster_of(there, lacking, there), "nccl-plugin-missing", hosts=["nd1"])
        assert finding.level is level
        assert finding.message == "ASKED=x (by environment); x: no such file"
        assert TYPES[name].variable in in_full(finding.fix)

    def test_nccl_finds_a_tuner_in_the_network_plug_in(self) -> None:
        instead = {"loaded": "libnccl-net.so"}
        lacking = {"tuner": {**plugin("NCCL_TUNER_PLUGIN=x"), "instead": instead}}
        finding = only(cluster_of(lacking), "nccl-plugin-missing", hosts=["nd0"])
        assert finding.level is Severity.INFO
        assert finding.message.endswith("; NCCL uses the tuner in libnccl-net.so")

    @pytest.mark.parametrize(
        ("asked", "level"),
        [("NCCL_TUNER_PLUGIN=x", Severity.WARN), ("", Severity.INFO)],
    )
    def test_an_interface_that_nccl_does_not_take(self, asked: str, level: Severity) -> None:
        old = {"tuner": plugin(asked, "libx.so", 1)}
        finding = only(cluster_of(old), "nccl-plugin-missing", hosts=["nd0"])
        assert finding.message == "libx.so exports ncclTunerPlugin_v1; NCCL 2.30.7 accepts v2 to v6"
        assert finding.level is level

    @pytest.mark.parametrize("nccl", ["2.18.1", "2.27.7"])
    def test_a_release_that_has_no_such_plug_ins(self, nccl: str) -> None:
        """NCCL 2.27 does not know NCCL_ENV_PLUGIN; check environment says so."""
        facts = {"env": {**plugin("NCCL_ENV_PLUGIN=x"), "fault": "crashed"}}
        assert judge(cluster_of(facts, nccl=nccl)) == []

    def test_nobody_knows_the_release(self) -> None:
        assert judge(cluster_of({"tuner": plugin("x", "libx.so", 1)}, nccl=None)) == []


class TestCrashes:
    @pytest.mark.parametrize(
        ("fault", "words", "confidence"),
        [
            ("crashed", "ended its process (SIGSEGV)", Confidence.CERTAIN),
            ("hung", "did not load: no answer within 10.0 s", Confidence.LIKELY),
        ],
    )
    def test_on_one_host(self, fault: str, words: str, confidence: Confidence) -> None:
        bad = {**NOTHING, "tuner": ended(fault, words)}
        finding = only(cluster_of(NOTHING, bad, NOTHING), "nccl-plugin-crashes", hosts=["nd1"])
        assert finding.message == f"libnccl-tuner.so {words}"
        assert (finding.level, finding.confidence) == (Severity.FAIL, confidence)
        assert finding.fix.startswith("on every host: export NCCL_TUNER_PLUGIN=none")

    def test_what_may_have_another_reason(self) -> None:
        killed = {**NOTHING, "tuner": ended("untried", "ended its process (SIGKILL)")}
        assert judge(cluster_of(killed, killed)) == []


class TestDiffers:
    @pytest.mark.parametrize("name", ["tuner", "env"])
    def test_one_host_has_none(self, name: str) -> None:
        there = {**NOTHING, name: plugin("", "libx.so", 2)}
        finding = only(cluster_of(there, NOTHING, there), "nccl-plugin-differs", hosts=["nd1"])
        assert finding.level is Severity.WARN
        assert finding.message == "2 of 3 hosts load libx.so, 1 load none"

    def test_another_release_on_one_host(self) -> None:
        old = {**TUNED, "tuner": plugin("", "libx.so", 2, 3, mark="bb")}
        finding = only(cluster_of(TUNED, TUNED, old), "nccl-plugin-differs", hosts=["nd2"])
        assert finding.level is Severity.WARN
        assert "v2, v3" in finding.message

    def test_another_build_is_worth_knowing(self) -> None:
        other = {**TUNED, "tuner": plugin("", "libx.so", 4, 5, mark="bb")}
        finding = only(cluster_of(TUNED, TUNED, other), "nccl-plugin-differs", hosts=["nd2"])
        assert finding.level is Severity.INFO


class TestObserve:
    def test_nothing_asked(self) -> None:
        facts = observed()
        assert {name: each["loaded"] for name, each in facts.items()} == dict.fromkeys(TYPES)
        assert [each["tried"][0][0] for each in facts.values()] == [
            "libnccl-tuner.so",
            "libnccl-profiler.so",
            "libnccl-env.so",
        ]
        assert judge(cluster_of(facts, facts)) == []

    @pytest.mark.parametrize("value", ["none", "None", "STATIC_PLUGIN", "static"])
    def test_what_nobody_looks_for(self, value: str) -> None:
        assert observed(**{of.variable: value for of in TYPES.values()}) == {}

    def test_a_library_of_each_type(self, tmp_path: Path) -> None:
        env = {}
        for of in TYPES.values():
            source = f"int {of.symbol}1 = 1; int {of.symbol}2 = 1;"
            env[of.variable] = str(compiled(tmp_path / f"{of.prefix}-x.so", source))
        facts = observed(**env)
        for name, of in TYPES.items():
            assert facts[name]["loaded"] == env[of.variable]
            assert facts[name]["build"]["versions"] == [1, 2]
            assert facts[name]["build"]["path"] == str(Path(env[of.variable]).resolve())
        assert judge(cluster_of(facts, facts)) == []

    def test_one_that_crashes_hides_no_other(self, tmp_path: Path) -> None:
        bad = compiled(tmp_path / "bad.so", CRASH)
        good = compiled(tmp_path / "good.so", "int ncclProfiler_v4 = 1;")
        facts = observed(NCCL_TUNER_PLUGIN=str(bad), NCCL_PROFILER_PLUGIN=str(good))
        assert facts["tuner"]["fault"] == "crashed"
        assert facts["profiler"]["build"]["versions"] == [4]
        finding = only(cluster_of(facts), "nccl-plugin-crashes", hosts=["nd0"])
        assert finding.message.startswith(f"{bad} ended its process (SIG")
        assert f"NCCL_TUNER_PLUGIN={bad} (by environment)" in finding.message

    def test_one_that_ends_its_process(self, tmp_path: Path) -> None:
        source = "#include <unistd.h>\n__attribute__((constructor)) static void s(void){_exit(0);}"
        facts = observed(NCCL_ENV_PLUGIN=str(compiled(tmp_path / "bad.so", source)))
        assert facts["env"]["tried"][-1][1] == "ended its process (exit code 0)"
        only(cluster_of(facts), "nccl-plugin-crashes", hosts=["nd0"])

    def test_one_that_somebody_killed(self, tmp_path: Path) -> None:
        source = "#include <signal.h>\n__attribute__((constructor)) static void s(void)"
        library = compiled(tmp_path / "bad.so", source + "{raise(SIGKILL);}")
        with pytest.raises(Untested, match="SIGKILL") as raised:
            observed(NCCL_TUNER_PLUGIN=str(library))
        assert judge(cluster_of(raised.value.facts["plugins"])) == []  # type: ignore[index]

    def test_a_library_that_is_no_plug_in(self, tmp_path: Path) -> None:
        library = compiled(tmp_path / "x.so", "int other;")
        facts = observed(NCCL_PROFILER_PLUGIN=str(library))
        finding = only(cluster_of(facts), "nccl-plugin-missing", hosts=["nd0"])
        assert "exports no ncclProfiler_v*" in finding.message

    def test_missing(self) -> None:
        facts = observed(NCCL_TUNER_PLUGIN="no-such")
        assert [name for name, _ in facts["tuner"]["tried"]] == [
            "no-such",
            "libnccl-tuner-no-such.so",
        ]
        only(cluster_of(facts), "nccl-plugin-missing", hosts=["nd0"])

    def test_a_tuner_in_the_network_plug_in(self, tmp_path: Path) -> None:
        both = compiled(tmp_path / "net.so", "int ncclNetPlugin_v8; int ncclTunerPlugin_v3;")
        facts = observed(NCCL_TUNER_PLUGIN="no-such", NCCL_NET_PLUGIN=str(both))
        assert facts["tuner"]["instead"]["loaded"] == str(both)
        finding = only(cluster_of(facts), "nccl-plugin-missing", hosts=["nd0"])
        assert finding.level is Severity.INFO

    def test_a_configuration_file_counts(self, tmp_path: Path) -> None:
        conf = tmp_path / "nccl.conf"
        conf.write_text("NCCL_PROFILER_PLUGIN=no-such\n")
        facts = observed(NCCL_CONF_FILE=str(conf))
        assert facts["profiler"]["asked"] == f"NCCL_PROFILER_PLUGIN=no-such (by {conf})"

    def test_gloo(self) -> None:
        with pytest.raises(Skip):
            CHECK.observe(Context(launch=Launch(), env={"NCCL_TUNER_PLUGIN": "x"}))
