"""Finding checks: the built-in ones, and plug-ins of every quality."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor import registry
from nccl_doctor.api import Check, Finding, Skip
from nccl_doctor.judge.checks import judge_all
from nccl_doctor.model.findings import Kind, Layer, Severity, Turn
from nccl_doctor.toolkit import foreign as foreign_code
from tests.support.clusters import make_cluster
from tests.support.rows import each_row

GOOD = '''
"""Is the moon up?

What it checks
"""
from nccl_doctor.api import Check, Finding, Kind, Layer, Scope

KIND = Kind("{code}", Layer.HOST, "title", "why", "fix")


class Moon(Check):
    name = "{name}"
    layer = Layer.HOST
    scope = Scope.HOST
    kinds = (KIND,)

    def observe(self, ctx):
        return {{}}

    def judge(self, cluster):
        return ()
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a distribution with one entry point, for this test only."""
    before = set(sys.modules)

    def install_one(
        source: str, module: str, *, dist: str = "acme", target: str | None = None
    ) -> str:
        site = tmp_path / dist
        info = site / f"{dist}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(
            f"[nccl_doctor.checks]\n{module} = {target or module}\n"
        )
        if source:
            (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        return module

    yield install_one
    for name in set(sys.modules) - before:
        if not name.startswith("nccl_doctor"):
            del sys.modules[name]


def foreign(found: registry.Registry) -> list[Finding]:
    return [p for p in found.problems if p.evidence["distribution"] != "nccl-doctor"]


def good(name: str = "moon", code: str = "moon-down") -> str:
    return GOOD.format(name=name, code=code)


def test_built_in_checks_are_found_in_order_of_layer():
    found = registry.load()
    assert not found.problems
    assert list(found.checks) == sorted(
        found.checks, key=lambda c: (c.layer.order, c.turn.order, c.name)
    )
    folder = Path(registry.importlib.import_module("nccl_doctor.checks").__path__[0])
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    names |= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert {check.name for check in found.checks} == names
    assert {found.origins[name] for name in names} == {"nccl-doctor"}


@pytest.mark.parametrize("turn", Turn)
def test_a_plug_in_has_its_turn_in_its_layer(install, turn):
    source = (
        good().replace("Layer.HOST", "Layer.SPEED").replace("import Check", "import Turn, Check")
    )
    install(source + f"    turn = Turn.{turn.name}\n", f"moon_{turn.value}")
    names = [check.name for check in registry.load().checks if check.layer is Layer.SPEED]
    first = ["links"]
    last = ["hardware_errors", "held_connections", "memory_kills", "rdma_errors"]
    last += ["retransmissions", "throttling"]
    where = {Turn.FIRST: 1, Turn.ANY: 2, Turn.LAST: 6}[turn]
    expected = [*first, "group_speed", "network_speed", *last]
    assert names == [*expected[:where], "moon", *expected[where:]]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_plug_ins_that_another_user_put_where_one_stands_are_left_out(install, monkeypatch):
    """`python -m` searches the working directory: that is Python's rule, and not ours."""
    install(good(), "moon_here")
    site = Path(sys.path[0])
    monkeypatch.chdir(site)
    assert foreign(registry.load()) == []
    os.chown(site, 65533, 65533)
    (problem,) = foreign(registry.load())
    words = f"{site}, the working directory, belongs to another user (uid 65533)"
    assert problem.message == f"acme 1.2 (moon_here = moon_here): {words}"
    monkeypatch.chdir("/")
    assert foreign(registry.load()) == [], "a folder of the user's own PYTHONPATH"


def test_every_kind_is_known_by_its_code():
    found = registry.load()
    for check in found.checks:
        for kind in check.kinds:
            known, first = found.kinds[kind.code]
            assert known == kind
            assert first is not None
            assert found.owners[kind.code][0] == first.name
            assert check.name in found.owners[kind.code]
    assert found.kinds["check-broke"][1] is None


@pytest.mark.parametrize("target", ["moon_mod", "moon_mod:Moon"])
def test_a_plug_in_is_a_module_or_a_class(install, target):
    install(good(), "moon_mod", target=target)
    found = registry.load()
    (moon,) = [check for check in found.checks if check.name == "moon"]
    assert found.origins["moon"] == "acme 1.2"
    assert registry.page(moon).startswith("Is the moon up?")
    assert not foreign(found)


BROKEN = {
    "not there": ("", "ModuleNotFoundError"),
    "syntax": ("def (", "SyntaxError"),
    "raises": ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
    "leaves": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "leaves well": ("import sys\nsys.exit(0)", "SystemExit: 0"),
    "ends us": ("import os\nos._exit(0)", "the import ended its process (exit code 0)"),
    "crashes": ("import os\nos.kill(os.getpid(), 11)", "ended its process (SIGSEGV)"),
    "ends us when made": (
        good() + "    def __init__(self):\n        import os; os._exit(0)\n",
        "the import ended its process (exit code 0)",
    ),
    "empty": ("x = 1", "the module defines 0 checks, not one"),
    "two": (good() + good("sun", "sun-down").replace("Moon", "Sun"), "defines 2 checks"),
    "imported only": ("from nccl_doctor.api import Check", "the module defines 0 checks"),
    "no name": (good().replace('name = "moon"', ""), "`name` is not a str"),
    "bad name": (good("Moon-Check"), "not snake_case"),
    "bad code": (good(code="Moon_Down"), "not kebab-case"),
    "bad layer": (good().replace("layer = Layer.HOST", 'layer = "host"'), "`layer` is not"),
    "no kinds": (good().replace("(KIND,)", "()"), "`kinds` is not a tuple"),
    "kind twice": (good().replace("(KIND,)", "(KIND, KIND)"), "is twice in"),
    "no judge": (good().replace("def judge", "def judges"), "`judge` is missing"),
    "no observe": (good().replace("def observe", "def look"), "`observe` is missing"),
    "no deadline": (good() + "    deadline_s = 0\n", "`deadline_s` is 0"),
    "bad needs": (good() + '    needs = ("port",)\n', "`needs` contains"),
    "bad turn": (good() + '    turn = "last"\n', "`turn` is 'last', not a Turn"),
    "bad reads": (good() + '    reads = "port"\n', "`reads` is 'port', not a tuple of names"),
    "reads no name": (good() + '    reads = ("a port",)\n', "not a tuple of names of checks"),
    "reads itself": (good() + '    reads = ("moon",)\n', "`reads` names the check itself"),
    "needs arguments": (good() + "    def __init__(self, x): ...\n", "TypeError"),
    "taken name": (good("ranks"), 'the check name "ranks" is used by nccl-doctor'),
    "taken code": (good(code="host-absent"), 'code "host-absent" is used by check ranks'),
    "engine's code": (good(code="check-broke"), '"check-broke" is used by the engine'),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_plug_in_that_cannot_be_used_is_reported_and_left_out(install, fault):
    source, words = BROKEN[fault]
    before = registry.load()
    install(source, "bad_mod" + re.sub(r"\W", "_", fault))
    found = registry.load()
    (problem,) = foreign(found)
    assert problem.code == "check-unusable"
    assert problem.level is Severity.WARN
    assert "acme 1.2" in problem.message
    assert words in problem.message
    assert "\n" not in problem.message
    assert [check.name for check in found.checks] == [check.name for check in before.checks]
    assert found.kinds.keys() == before.kinds.keys()


def test_an_import_that_blocks_is_given_up_once(install, monkeypatch):
    monkeypatch.setattr(foreign_code, "IMPORT_S", 0.5)
    install("import time; time.sleep(600)", "blocking_mod")
    began = time.monotonic()
    for _ in range(5):
        (problem,) = foreign(registry.load())
        assert "the import did not end: no answer within 0.5 s" in problem.message
    assert time.monotonic() - began < 0.5 + 10.0


RULES = {
    "raises": ("raise KeyError('lost')", "`judge` of check moon raised KeyError: 'lost'"),
    "leaves": ("raise SystemExit(0)", "`judge` of check moon raised SystemExit: 0"),
    "closes": ("raise GeneratorExit", "`judge` of check moon raised GeneratorExit"),
    "ends us": ("import os; os._exit(0)", "`judge` of check moon ended its process (exit code 0)"),
    "crashes": ("import os; os.kill(os.getpid(), 11)", "ended its process (SIGSEGV)"),
    "blocks": ("import time; time.sleep(600)", "did not end: no answer within 1.0 s"),
    "yields words": ("yield 'down'", "raised TypeError: `judge` yields a str, not a Finding"),
    "no text": ("yield Finding(KIND, 5)", "the message or fix of a moon-down is not a text"),
    "no place": ("yield Finding(KIND, 'x', 'nd0')", "the place of a moon-down is not a Where"),
    "no facts": ("yield Finding(KIND, 'x', evidence={'x': {1}})", "set is not JSON serializable"),
}


@pytest.mark.parametrize("fault", RULES)
def test_a_rule_that_misbehaves_costs_its_own_answer(install, monkeypatch, fault):
    monkeypatch.setattr(foreign_code, "RULE_S", 1.0)
    monkeypatch.setattr(foreign_code, "_blocked", set())
    body, words = RULES[fault]
    source = good().replace("return ()", f"yield Finding(KIND, 'seen')\n        {body}")
    install(source, "rule_mod" + re.sub(r"\W", "_", fault))
    (moon,) = (check for check in registry.load().checks if check.name == "moon")
    findings, broken = judge_all(make_cluster(["nd0"], 1), [moon])
    assert set(broken) == {"moon"}
    *found, broke = findings
    assert broke.code == "check-broke"
    assert words in broke.message
    if fault not in ("ends us", "crashes", "blocks"):
        assert [each.message for each in found] == ["seen"]
        assert broke.evidence["at"]


def test_a_rule_that_blocks_is_not_asked_again(install, monkeypatch):
    monkeypatch.setattr(foreign_code, "RULE_S", 0.5)
    monkeypatch.setattr(foreign_code, "_blocked", set())
    install(good().replace("return ()", "import time; time.sleep(600)"), "slow_mod")
    (moon,) = (check for check in registry.load().checks if check.name == "moon")
    began = time.monotonic()
    for _ in range(20):
        _, broken = judge_all(make_cluster(["nd0"], 1), [moon])
        assert "did not end" in broken["moon"]
    assert time.monotonic() - began < 0.5 + 8.0


def by_name(self: Enum, protocol: int) -> tuple[Any, ...]:
    """`Enum.__reduce_ex__` of Python 3.11.2."""
    return getattr, (type(self), self.name)


def test_the_rules_of_a_plug_in_answer_on_every_release_of_python(install, monkeypatch):
    monkeypatch.setattr(Enum, "__reduce_ex__", by_name)
    source = good().replace("return ()", "yield Finding(KIND, 'seen')")
    install(source, "with_enums")
    (moon,) = (check for check in registry.load().checks if check.name == "moon")
    assert [found.code for found in moon.judge(make_cluster(["nd0"], 1))] == ["moon-down"]


def test_the_rules_of_a_plug_in_answer_as_they_are(install):
    source = (
        good()
        .replace("import Check", "import Figure, Round, Skip, Check")
        .replace("return ()", "yield Finding(KIND, 'seen', evidence={'x': 1.5})")
    )
    source += """
    def deadline(self, ctx): return 7
    def plan(self, cluster): raise Skip("no moon here")
    def figures(self, cluster): yield Figure("height", 2.5, better="higher")
"""
    install(source, "fine_mod")
    (moon,) = (check for check in registry.load().checks if check.name == "moon")
    cluster = make_cluster(["nd0"], 1)
    (found,) = moon.judge(cluster)
    assert (found.code, found.evidence) == ("moon-down", {"x": 1.5})
    assert [figure.value for figure in moon.figures(cluster)] == [2.5]
    assert list(moon.sections(cluster)) == []
    assert type(moon).sections is Check.sections
    assert moon.deadline(None) == 7.0
    with pytest.raises(Skip, match="no moon here"):
        moon.plan(cluster)


def test_not_a_check_at_all(install):
    install("x = 1", "plain_mod", target="plain_mod:x")
    (problem,) = foreign(registry.load())
    assert "1 is neither a module with a check nor a Check class" in problem.message


def test_of_two_plug_ins_with_one_name_the_first_is_kept(install):
    install(good(), "moon_b", dist="beta")
    install(good(code="moon-late"), "moon_a", dist="alpha")
    found = registry.load()
    assert found.origins["moon"] == "alpha 1.2"
    (problem,) = foreign(found)
    assert problem.message.startswith("beta 1.2 ")
    assert 'the check name "moon" is used by alpha 1.2' in problem.message


def test_built_in_checks_share_a_code_only_by_the_very_same_kind():
    kind = Kind("moon-down", Layer.HOST, "title", "why", "fix")

    class Moon(Check):
        name = "moon"
        layer = Layer.HOST
        kinds = (kind,)

        def observe(self, ctx):
            return {}

        def judge(self, cluster):
            return ()

    class Sun(Moon):
        name = "sun"
        kinds = (replace(kind, fix="another"),)

    class Tide(Moon):
        name = "tide"

    named = registry._NamedChecks()
    for check in (Moon, Sun, Tide):
        named.add(check.name, "nccl-doctor", lambda check=check: check)
    assert list(named.checks) == ["moon", "tide"]
    assert named.owners == {"moon-down": ("moon", "tide")}
    assert named.kinds["moon-down"] == (kind, named.checks["moon"])
    (problem,) = named.problems
    assert 'code "moon-down" is used by check moon' in problem.message


def test_a_plug_in_may_not_find_what_built_in_checks_share(install):
    theirs = "from nccl_doctor.toolkit.shared_kinds import ADDR_LOOPBACK as KIND #"
    shared = good().replace("KIND = Kind(", theirs)
    install(shared, "moon_shared")
    (problem,) = foreign(registry.load())
    assert 'the finding code "addr-loopback" is used by check master_addr' in problem.message


# --- selection ---


def test_select_by_name_and_by_code():
    assert [c.name for c in registry.load(select=["ranks"]).checks] == ["ranks"]
    found = registry.load(select=["host-absent", "port"])
    assert [c.name for c in found.checks] == ["port", "ranks"]
    assert found.wanted("host-absent")
    assert not found.wanted("rank-absent")
    assert found.wanted("port-blocked")
    assert found.wanted("check-broke")


def test_a_shared_code_is_wanted_for_either_of_its_checks():
    both = registry.load()
    assert both.owners["addr-loopback"] == ("master_addr", "own_name")
    assert both.kinds["addr-loopback"][1] in both.checks
    by_code = registry.load(select=["addr-loopback"])
    assert [c.name for c in by_code.checks] == ["master_addr", "own_name"]
    for name in ("master_addr", "own_name"):
        alone = registry.load(select=[name])
        assert [c.name for c in alone.checks] == [name]
        assert alone.wanted("addr-loopback")
        rest = registry.load(ignore=[name])
        assert name not in {c.name for c in rest.checks}
        assert rest.wanted("addr-loopback")
    assert not registry.load(select=["own_name"]).wanted("addr-differs")
    assert not registry.load(ignore=["master_addr", "own_name"]).wanted("addr-loopback")
    without = registry.load(ignore=["addr-loopback"])
    assert not without.wanted("addr-loopback")
    assert {"master_addr", "own_name"} <= {c.name for c in without.checks}


def test_ignore_by_name_and_by_code():
    every = {c.name for c in registry.load().checks}
    assert {c.name for c in registry.load(ignore=["ranks"]).checks} == every - {"ranks"}
    found = registry.load(ignore=["host-absent", "check-unusable"])
    assert {c.name for c in found.checks} == every
    assert not found.wanted("host-absent")
    assert found.wanted("rank-absent")
    assert not found.wanted("check-unusable")


def test_a_check_of_which_every_code_is_ignored_does_not_run():
    codes = [kind.code for kind in registry.load(select=["port"]).checks[0].kinds]
    assert "port" not in {c.name for c in registry.load(ignore=codes).checks}


def test_ignored_problems_are_not_reported(install):
    install("raise RuntimeError", "bad_ignored")
    assert not registry.load(ignore=["check-unusable"]).problems


def test_what_did_not_load_does_not_spoil_a_run_that_did_not_ask_for_it(install):
    install("raise RuntimeError", "bad_unselected")
    (problem,) = foreign(registry.load(select=["ranks"]))
    assert problem.level is Severity.INFO


@each_row(
    ("option", "name", "words"),
    [
        ("select", "rank", 'no check or finding code is named "rank"; did you mean "ranks"?'),
        ("ignore", "host-absnt", 'did you mean "host-absent"?'),
        ("select", "zzz", "`nccl-doctor checks` lists them"),
        ("select", "", 'is named ""'),
        ("select", "check-broke", "is a code of the engine"),
    ],
)
def test_unknown_names(option, name, words):
    with pytest.raises(registry.UnknownName, match=re.escape(words)) as error:
        registry.load(**{option: [name]})
    assert str(error.value).startswith(f"--{option}: ")


def test_a_name_whose_plug_in_did_not_load_says_so(install):
    install("raise RuntimeError('no licence')", "bad_moon")
    with pytest.raises(registry.UnknownName, match="no licence"):
        registry.load(select=["moon"])


# --- frozen ---

CODES = """
    check-unusable check-broke rank-silent rank-killed run-interrupted coordinator-lost store-lost
    message-refused key-differs stranger-writes doctor-version-differs merge-doubtful
    hosts-not-examined
    master-port-differs
    slower-than-before setup-changed baseline-too-short
    ssh-failed remote-command-failed config-bad-value
    cause-not-told collective-mismatch collective-missing collective-order collective-unfinished
    gpu-out-of-memory gpu-xid job-stopped loader-stalled rank-ended-early rank-exited rank-raised
    storage-full
    launch-missing-variable launch-bad-value launch-sources-disagree rank-out-of-range
    local-rank-out-of-range launch-run-id-differs master-not-set backend-option-differs
    launch-runs-independent rank-not-set
    env-unknown-variable env-bad-value env-deprecated env-conflict env-debug-leftover env-differs
    env-debug-misleads env-file-unusable env-file-differs compile-cache-shared
    timeout-too-short proxy-covers-master
    addr-unresolvable addr-loopback addr-differs addr-not-on-master dns-slow addr-family-mixed
    addr-digits-only hostname-duplicate advertised-not-own advertised-same advertised-unreachable
    cuda-wheels-collide cuda-library-replaced library-loaded-twice library-differs
    torch-missing no-route addr-not-shared
    nccl-wheels-collide nccl-library-replaced nccl-backend-differs torch-known-hang
    nccl-known-bug cuda-intercepted
    net-plugin-missing net-plugin-differs net-plugin-crashes collnet-missing collnet-only
    nccl-plugin-missing nccl-plugin-differs nccl-plugin-crashes
    deepspeed-needs-mpi4py deepspeed-ssh-failed
    numa-calls-blocked numa-node-empty address-space-limit-low stack-limit-unsafe
    shm-too-small shm-stale shm-filled ipc-namespace-split open-files-limit-low memlock-limit-low
    out-of-memory-kill process-limit-low memory-limit-low cpu-limit-low temp-dir-unwritable
    pcie-errors memory-errors memory-failing shm-removed-at-logout
    clock-skew cpu-differs libcuda-differs cpu-clock-held-low cpu-governor-differs process-stuck
    libcuda-compat mps-active mps-other-user mps-not-reached
    listen-backlog-low ports-exhausted
    port-in-use port-refused port-blocked port-privileged port-not-the-store port-ephemeral
    own-address-blocked
    interface-missing interface-down interface-loopback interface-differs interface-unroutable
    nccl-answer-differs
    rdzv-endpoint-unhosted rdzv-endpoint-ambiguous agent-name-unresolvable
    agent-name-misleads hosts-fewer-than-most elastic-without-restarts master-outside-allocation
    nnodes-beyond-allocation
    rdma-device-missing rdma-fabric-differs rdma-rate-differs rdma-mtu-differs rdma-pci-slow
    pkey-index-empty pkey-differs pkey-limited
    rdma-firmware-differs rdma-errors-rising roce-gid-index-empty roce-gid-missing roce-gid-differs
    ib-hca-unmatched ib-hca-port-down ib-hca-overmatch
    gpudirect-rdma-missing iommu-translates acs-redirects acs-not-read rdma-counter-full
    rdma-unusable efa-maybe-blocked rail-order-differs rail-slots-differ rdma-names-differ
    rail-unreachable rail-mtu-blackhole rails-apart gdrcopy-missing
    rdma-mixed rdma-port-down rdma-port-unconfigured rp-filter-strict address-duplicate
    pairs-sampled peer-no-route mtu-differs mtu-blackhole peer-blocked peer-one-way peer-intercepted
    topology-lacks-host host-answers-late
    stranger-connects gloo-families-differ arp-flux env-contradicts-profile
    kernel-settings-differ
    host-cut-off link-flapped bond-member-down bond-split bond-speeds-differ
    neighbour-table-small arp-answered-by-other-nic address-answered-by-another
    host-absent rank-absent rank-late joining-slow node-rank-duplicate rank-duplicate nnodes-differs
    retransmissions-high
    world-size-differs nproc-differs local-rank-duplicate machine-id-duplicate host-shared-by-nodes
    backend-device-mismatch nccl-unavailable gpu-missing gpu-hidden gpu-shared-by-ranks
    gpu-unhealthy driver-mismatch arch-unsupported version-differs gpu-differs
    nvlink-domain-split imex-channel-unusable imex-not-running imex-nodes-differ imex-host-missing
    c2c-down
    gpu-lost gpu-busy gpu-throttled pcie-degraded nvlink-down nvlink-errors fabric-manager-down
    gpu-clocks-limited gpu-p2p-unavailable nvswitch-error gpu-virtual
    gpu-p2p-unsupported gpu-persistence-off gpu-state-unread
    local-rank-beyond-gpus gpu-guess-differs gpu-order-differs gpu-far-from-nic
    gpu-nic-pairs-differ gpu-p2p-broken gpu-p2p-untested
    group-init-failed group-init-hang mesh-does-not-divide mesh-crosses-hosts
    gpu-slow rank-far-from-gpu xgmi-down xgmi-errors dcgm-unhealthy
    device-id-multi-group-hang deepspeed-missing
    collective-hang collective-failed collective-wrong-result rank-frozen rank-crashed
    gpu-not-started group-start-slow
    nccl-feature-broken nccl-diagnostics-failed
    seed-differs batch-does-not-divide world-size-config-mismatch
    deepspeed-config-unknown-key deepspeed-config-deprecated-key deepspeed-config-bad-value
    deepspeed-config-conflict offload-path-unusable offload-memory-low
    offload-operator-unavailable
    cpu-throttled memory-throttled netlink-refused process-access-refused
    link-slow link-lossy host-slow latency-high bandwidth-low rank-slow idle-connections-forgotten
    idle-connection-lost
    nic-errors-rising packets-dropped path-mtu-low
    bandwidth-below-floor rail-slow
    path-missing path-not-readable path-not-writable path-read-only path-full path-stale path-hangs
    path-io-error path-slow path-not-shared path-not-visible
    endpoint-in-use endpoint-privileged endpoint-ephemeral endpoint-blocked endpoint-unreachable
    url-unreachable url-tls url-proxy
    init-method-not-served
    init-file-left-over init-file-not-shared init-file-no-lock
    """
"""Codes that users' configuration and tickets hold: they may be added to, never renamed or reused.
A new code is added here on purpose."""


def test_frozen_codes():
    assert set(registry.load().kinds) == set(CODES.split())


def test_codes_are_kebab_case_and_checks_have_a_page():
    found = registry.load()
    for check in found.checks:
        assert isinstance(check, Check)
        first, *_ = registry.page(check).splitlines()
        assert first.strip()
        for heading in (
            "What it checks",
            "Why it matters",
            "How to fix",
            "When it is wrong",
            "References",
        ):
            assert heading in registry.page(check), (check.name, heading)
    for kind, _ in found.kinds.values():
        for text in (kind.title, kind.why, kind.fix):
            assert text.strip()
            assert "\n" not in text
