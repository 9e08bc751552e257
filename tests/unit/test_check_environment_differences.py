"""Environment variables that differ between hosts: who is blamed, and how sure it is."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, On, Severity
from tests.support import findings
from tests.support.clusters import change_rank, outcome
from tests.support.environments import CHECK, Env, cluster_of, judge, only
from tests.support.rows import each_row


@each_row(
    ("name", "value", "level", "odd"),
    [
        (*row, odd)
        for row in [
            ("NCCL_ALGO", "Ring", "fail"),
            ("NCCL_IB_DISABLE", "1", "fail"),
            ("NCCL_NET", "Socket", "fail"),
            ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "fail"),
            ("TORCH_DIST_INIT_BARRIER", "1", "fail"),
            ("TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P", "1", "fail"),
            ("TORCH_SYMMMEM_IMPLICIT_POOL", "0", "warn"),
            ("NCCL_CROSS_NIC", "0", "warn"),
            ("NCCL_P2P_DISABLE", "1", "warn"),
            ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "900", "warn"),
            ("TORCH_DISTRIBUTED_DEBUG", "INFO", "info"),
            ("NCCL_DEBUG", "INFO", "info"),
            ("WANDB__SERVICE_WAIT", "300", "info"),
            ("OMP_NUM_THREADS", "4", "info"),
        ]
        for odd in [0, 1, 3]
    ],
)
def test_the_odd_host_of_four_is_blamed(name: str, value: str, level: str, odd: int) -> None:
    envs: list[Env] = [{name: value} if host == odd else {} for host in range(4)]
    (found,) = (each for each in judge(envs) if each.code == "env-differs")
    assert (found.level.value, found.where.hosts, found.where.ranks) == (level, (f"nd{odd}",), ())
    assert found.message == f"{name}={value}; elsewhere {name} not set"
    assert found.confidence is Confidence.CERTAIN
    (found,) = (
        each
        for each in judge([{} if host == odd else {name: value} for host in range(4)])
        if each.code == "env-differs"
    )
    assert (found.where.hosts, found.fix) == ((f"nd{odd}",), f"export {name}={value}")


@each_row(
    ("one", "other"),
    [
        ({"NCCL_IB_DISABLE": "0"}, {}),
        ({"NCCL_BUFFSIZE": "0x400000"}, {"NCCL_BUFFSIZE": "4194304"}),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "yes"}, {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
        ({"NCCL_SOCKET_IFNAME": "=ens1"}, {"NCCL_SOCKET_IFNAME": "=eth0"}),
        ({"NCCL_IB_HCA": "mlx5_0", "NCCL_IB_GID_INDEX": "3"}, {}),
        ({"NCCL_IB_PKEY": "1"}, {}),  # check partition_keys compares the keys
        ({"GLOO_SOCKET_IFNAME": "ens1"}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        ({"NCCL_DEBUG_FILE": "/tmp/a"}, {"NCCL_DEBUG_FILE": "/tmp/b"}),
        ({"TORCHELASTIC_ERROR_FILE": "/tmp/a"}, {"TORCHELASTIC_ERROR_FILE": "/tmp/b"}),
        ({"NCCL_HOSTID": "a"}, {"NCCL_HOSTID": "b"}),
        ({"http_proxy": "http://a"}, {"https_proxy": "http://b"}),
        ({"NCCL_VERSION": "2.28"}, {"NCCL_VERSION": "2.30"}),
    ],
)
def test_differences_that_are_none(one: Env, other: Env) -> None:
    assert judge([one, other, other]) == []


RAILS = ",".join(f"eth{number}" for number in range(1, 9))
OTHER_IMAGE = ",".join(f"enp{bus}s0" for bus in (6, 7, 13, 14, 134, 135, 141, 142))


@each_row(
    ("odd", "elsewhere", "fix"),
    [
        ("eth1,eth2", [RAILS, RAILS], f"export {{name}}={RAILS}"),
        ("eth2,eth1" + RAILS[9:], [RAILS, RAILS], f"export {{name}}={RAILS}"),  # other rails
        ("eth0," + RAILS[:-5], [RAILS, RAILS], f"export {{name}}={RAILS}"),
        ("eth1,eth2", [RAILS, OTHER_IMAGE], f"export {{name}}={RAILS}"),
        (
            "enp6s0,enp7s0",
            [RAILS, RAILS],
            "name as many cards in {name} on every host, rail by rail",
        ),
        (None, [RAILS, RAILS], f"export {{name}}={RAILS}"),
        ("eth1, eth2", ["eth1,eth2,eth3", "eth1,eth2,eth3"], "export {name}=eth1,eth2,eth3"),
    ],
)
def test_each_rail_of_googles_plug_ins_needs_a_card_on_every_host(
    odd: str | None, elsewhere: list[str], fix: str
) -> None:
    for name in ("NCCL_FASTRAK_IFNAME", "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"):
        envs: list[Env] = [{name: elsewhere[0]}, {} if odd is None else {name: odd}]
        envs.append({name: elsewhere[1]})
        found = only(judge(envs), "env-differs")
        assert (found.level, found.where.hosts) == (Severity.WARN, ("nd1",))
        here = f"{name} not set" if odd is None else f"{name}={odd}"
        assert found.message == f"{here}; elsewhere {name}={elsewhere[0]}"
        assert found.fix == fix.format(name=name)
        values = found.evidence["values"][name]
        assert values[here] == ["nd1"]
        assert values[f"{name}={elsewhere[1]}"][-1] == "nd2"


def test_cards_of_another_image_have_other_names() -> None:
    name = "NCCL_FASTRAK_IFNAME"
    assert judge([{name: RAILS}, {name: OTHER_IMAGE}, {name: RAILS}]) == []
    assert judge([{name: "eth1,eth2"}, {name: "eth1, eth2"}]) == []
    tie = only(judge([{name: RAILS}, {name: "eth1"}]), "env-differs")
    assert (tie.where.hosts, tie.confidence) == (("nd0", "nd1"), Confidence.POSSIBLE)


def test_a_tie_is_said_to_be_a_tie() -> None:
    found = only(judge([{"NCCL_NET": "IB"}, {"NCCL_NET": "Socket"}]), "env-differs")
    assert found.where.hosts == ("nd0", "nd1")
    assert found.confidence is Confidence.POSSIBLE
    assert "NCCL_NET=IB on nd0; NCCL_NET=Socket on nd1" in found.message
    assert found.evidence == {
        "values": {"NCCL_NET": {"NCCL_NET=IB": ["nd0"], "NCCL_NET=Socket": ["nd1"]}}
    }


def test_a_host_votes_once_and_its_ranks_are_not_named() -> None:
    odd: Env = {"NCCL_PROTO": "LL"}
    found = only(judge([{}, {}, {}, {}, odd, odd], nproc=2), "env-differs")
    assert (found.where.hosts, found.where.ranks) == (("nd2",), ())


def test_one_rank_of_a_host() -> None:
    envs: list[Env] = [{}, {}, {}, {"NCCL_P2P_DISABLE": "1"}]
    found = [each for each in judge(envs, nproc=2) if each.code == "env-differs"]
    assert [(f.level, f.where.hosts, f.where.ranks) for f in found] == [
        (Severity.FAIL, ("nd1",), (3,))
    ]
    (leftover,) = (e for e in judge(envs, nproc=2) if e.code == "env-debug-leftover")
    assert (leftover.where.hosts, leftover.where.ranks) == (("nd1",), (3,))


PROXY: Env = {"http_proxy": "http://me:hunter2@proxy:3128", "NO_PROXY": "10.0.0.0/8"}


def test_a_proxy_on_some_hosts_only() -> None:
    for envs, odd, words in (
        ([{}, PROXY, {}], "nd1", "is set; elsewhere no proxy"),
        ([PROXY, {}, PROXY], "nd1", "no proxy; elsewhere a proxy variable"),
    ):
        found = only(judge(envs), "env-differs")
        assert (found.level, found.where.hosts, found.where.ranks) == (Severity.INFO, (odd,), ())
        assert words in found.message
        assert "hunter2" not in str(found.to_json())
    tie = only(judge([{}, PROXY]), "env-differs")
    assert (tie.where.hosts, tie.confidence) == (("nd0", "nd1"), Confidence.POSSIBLE)
    assert tie.evidence == {"values": {"proxy": {"a proxy": ["nd1"], "no proxy": ["nd0"]}}}


def test_a_proxy_on_one_rank_of_a_host() -> None:
    found = only(judge([{}, {}, {}, {"HTTPS_PROXY": "x"}], nproc=2), "env-differs")
    assert (found.where.hosts, found.where.ranks) == (("nd1",), (3,))


def test_proxies_of_different_spelling_or_only_exceptions_are_no_difference() -> None:
    assert judge([{"HTTP_PROXY": "http://a"}, {"http_proxy": "http://b"}]) == []
    assert judge([{"no_proxy": "nd0"}, {}, {}]) == []


def test_what_differs_for_one_reason_is_one_finding() -> None:
    image: Env = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "NCCL_BUFFSIZE": "1048576"}
    (found,) = (each for each in judge([{}, {}, image]) if each.code == "env-differs")
    assert found.where.hosts == ("nd2",)
    assert found.fix == "unset NCCL_ALGO; unset NCCL_BUFFSIZE; unset NCCL_PROTO"


def test_two_odd_hosts_are_both_named() -> None:
    envs: list[Env] = [{}, {"NCCL_ALGO": "Ring"}, {}, {"NCCL_IB_DISABLE": "1"}, {}]
    found = {each.where.hosts for each in judge(envs) if each.code == "env-differs"}
    assert found == {("nd1",), ("nd3",)}


@each_row(("nccl", "differs"), [("2.30.7", True), ("2.31.2", False), ("2.32.3", False)])
def test_a_default_is_that_of_the_nccl_that_is_here(nccl: str, differs: bool) -> None:
    found = judge([{"NCCL_SYM_TMA_ENABLE": "1"}, {}], nccl=nccl)
    assert ("env-differs" in {each.code for each in found}) is differs


def test_a_masked_value_is_not_compared() -> None:
    assert judge([{"NCCL_IB_PKEY": "1"}, {"NCCL_IB_PKEY": "2"}, {}]) == []


def test_nccl_variables_that_differ_do_not_fail_a_gloo_job() -> None:
    envs: list[Env] = [{"NCCL_ALGO": "Ring"}, {}, {}]
    assert only(judge(envs, backend="gloo"), "env-differs").level is Severity.WARN


@pytest.mark.parametrize("name", ["TORCH_NCCL_HIGH_PRIORITY", "FI_PROVIDER", "GLOO_SOCKET_IFNAME"])
def test_what_the_deepspeed_launcher_leaves_behind(name: str) -> None:
    envs: list[Env] = [{name: "1"}, {}, {}]
    found = only(judge(envs, launcher="deepspeed"), "env-differs")
    assert found.where.hosts == ("nd0",)
    assert found.fix.startswith(f"on nd0: echo {name}=1 >> ~/.deepspeed_env ")
    assert found.level in (Severity.WARN, Severity.FAIL)


def test_what_other_launchers_leave_behind() -> None:
    envs: list[Env] = [{"FI_PROVIDER": "efa"}, {}, {}]
    assert ".deepspeed_env" in only(judge(envs, launcher="torchrun"), "env-differs").fix
    assert ".deepspeed_env" not in only(judge(envs, launcher="srun"), "env-differs").fix
    assert ".deepspeed_env" not in only(judge([{}, *envs[:1], {}]), "env-differs").fix
    taken: list[Env] = [{"NCCL_CROSS_NIC": "1"}, {}, {}]
    assert ".deepspeed_env" not in only(judge(taken, launcher="deepspeed"), "env-differs").fix
    assert judge([{"GLOO_SOCKET_IFNAME": "eth0"}, {}, {}], launcher="torchrun") == []


# The order in which CUDA numbers GPUs -------------------------------------------------------------


def with_models(*hosts: tuple[Env, tuple[str, ...]], nproc: int = 1) -> Cluster:
    """Ranks of hosts by their environment, and the models of the GPUs that their host has."""
    made = cluster_of([env for env, _ in hosts], nproc=nproc)
    for seat, (_, models) in enumerate(hosts):
        seen = outcome({"devices": [{"name": name} for name in models]})
        facts = {**made.ranks[seat].facts, "backend_device": {ALONE: seen}}
        made = change_rank(made, seat, facts=facts)
    return made


ONE, SEVERAL = ("NVIDIA A100-SXM4-80GB",) * 2, ("NVIDIA A100-SXM4-80GB", "NVIDIA T4")
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(("models", "level"), [(ONE, "info"), (SEVERAL, "warn")])
def test_another_order_of_gpus_matters_where_they_are_of_several_models(
    models: tuple[str, ...], level: str
) -> None:
    made = with_models((BY_BUS, models), ({}, models), ({}, models))
    (found,) = findings.judge(CHECK, made)
    assert (found.code, found.level.value) == ("env-differs", level)
    assert (found.where.hosts, found.where.ranks) == (("nd0",), ())
    assert found.message == "CUDA_DEVICE_ORDER=PCI_BUS_ID; elsewhere CUDA_DEVICE_ORDER not set"
    # One host of several models is enough.
    (found,) = findings.judge(CHECK, with_models((BY_BUS, ONE), ({}, ONE), ({}, models)))
    assert found.level.value == level


@pytest.mark.parametrize(("models", "level"), [(ONE, "info"), (SEVERAL, "warn")])
def test_another_order_on_one_rank_of_a_host(models: tuple[str, ...], level: str) -> None:
    made = with_models(*[(BY_BUS, models)] * 3, ({}, models), nproc=4)
    (found,) = findings.judge(CHECK, made)
    assert (found.code, found.level.value, found.where.ranks) == ("env-differs", level, (3,))


@pytest.mark.parametrize(("models", "level"), [(ONE, "info"), (SEVERAL, "warn")])
def test_an_order_that_cuda_does_not_know(models: tuple[str, ...], level: str) -> None:
    typo = {"CUDA_DEVICE_ORDER": "PCI_BUS"}
    (found,) = findings.judge(CHECK, with_models((typo, models), (typo, models)))
    assert (found.code, found.level.value) == ("env-bad-value", level)
    assert found.where.hosts == ("nd0", "nd1")
    assert found.message == "CUDA_DEVICE_ORDER=PCI_BUS is not one of FASTEST_FIRST, PCI_BUS_ID"
    assert found.fix.endswith("set it to one of FASTEST_FIRST, PCI_BUS_ID")


def test_the_order_that_is_the_default_is_none_of_these() -> None:
    same = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert findings.judge(CHECK, with_models((same, SEVERAL), ({}, SEVERAL))) == []
    assert findings.judge(CHECK, with_models((BY_BUS, SEVERAL), (BY_BUS, SEVERAL))) == []


def test_gpus_that_a_variable_hides_are_of_several_models_too() -> None:
    made = with_models((BY_BUS, ONE), ({}, ONE), ({}, ONE))
    seen = outcome({"gpus": [{"index": 0, "name": name} for name in SEVERAL] + [{"index": 2}]})
    hosts = tuple(replace(h, facts={**h.facts, "gpu_state": {ALONE: seen}}) for h in made.hosts)
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    (found,) = findings.judge(CHECK, replace(made, hosts=hosts, ranks=ranks))
    assert (found.code, found.level) == ("env-differs", Severity.WARN)


def test_workers_of_ray_have_the_environment_of_ray_start() -> None:
    envs: list[Env] = [{}, {"NCCL_ALGO": "Ring"}, {}]
    found = only(judge(envs, launcher="ray"), "env-differs")
    assert (found.where.hosts, found.fix) == (("nd1",), "unset NCCL_ALGO before Ray starts")
    envs = [{"NCCL_ALGO": "Ring"}, {}, {"NCCL_ALGO": "Ring"}]
    found = only(judge(envs, launcher="ray"), "env-differs")
    assert (found.where.hosts, found.fix) == (
        ("nd1",),
        "export NCCL_ALGO=Ring before Ray starts, or put it into env_vars of the job's runtime_env",
    )


def test_a_bad_value_on_one_host_gets_what_most_hosts_have() -> None:
    bad = {"NCCL_IB_DISABLE": "true"}
    cases: list[tuple[list[Env], str]] = [
        ([{}, bad, {}], "unset NCCL_IB_DISABLE"),
        ([{"NCCL_IB_DISABLE": "0"}, bad, {"NCCL_IB_DISABLE": "0"}], "export NCCL_IB_DISABLE=0"),
        ([{}, bad], "unset NCCL_IB_DISABLE"),
        ([bad, bad, {}], "export NCCL_IB_DISABLE=1"),
    ]
    for envs, command in cases:
        (found,) = (each for each in judge(envs) if each.code == "env-bad-value")
        assert [step.command for step in found.fix.steps] == [command]


LONG = {"NCCL_IB_TIMEOUT": "18"}


@each_row(
    ("code", "envs"),
    [
        ("env-bad-value", [{"NCCL_IB_DISABLE": "true"}, {}]),
        ("env-bad-value", [{"NCCL_IB_DISABLE": "true"}] * 3 + [{}]),
        ("env-bad-value", [{}, {"NCCL_BUFFSIZE": "4M"}, {}]),
        ("env-bad-value", [{"NCCL_P2P_LEVEL": "nvl"}, {"NCCL_P2P_LEVEL": "SYS"}]),
        ("env-bad-value", [{"TORCH_DIST_INIT_BARRIER": "yes"}, {}]),
        ("timeout-too-short", [{"NCCL_IB_TIMEOUT": "0"}, LONG, LONG]),
        ("timeout-too-short", [LONG, {"NCCL_IB_TIMEOUT": "0"}]),
        ("env-deprecated", [{"NCCL_BLOCKING_WAIT": "1"}, {}, {}]),
        ("env-unknown-variable", [{"NCCL_IB_DISABEL": "1"}, {}]),
        ("env-unknown-variable", [{"NCCL_IB_DISABEL": "1"}, {"NCCL_IB_DISABLE": "1"}]),
        ("env-debug-leftover", [{"NCCL_DEBUG": "TRACE"}, {"NCCL_DEBUG": "WARN"}]),
        ("env-conflict", [{"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"},
                          {"NCCL_P2P_LEVEL": "NVL"}]),
    ],
)  # fmt: skip
def test_the_fix_on_some_hosts_leaves_no_difference(code: str, envs: list[Env]) -> None:
    """Typed in a shell, on the hosts that it names."""
    found = next(each for each in judge(envs) if each.code == code)
    labels = [f"nd{node}" for node in range(len(envs))]
    bad = set(found.where.hosts)
    assert bad < set(labels)
    typed = [dict(env) for env in envs]
    for step in found.fix.steps:
        for node, label in enumerate(labels):
            if step.on is On.EVERY or label in bad:
                typed[node] = after(typed[node], step.command)
    left = {each.code for each in judge(typed)}
    assert left <= {"env-debug-leftover"} - {code}, (found.fix, left)


def after(env: Env, line: str) -> dict[str, str]:
    """The variables of a shell after it has run a line."""
    shell = subprocess.run(
        ["bash", "-c", f"{line}; env -0"], env=env, capture_output=True, text=True, check=True
    )
    pairs = (each.partition("=")[::2] for each in shell.stdout.split("\0") if each)
    return {name: value for name, value in pairs if name not in ("PWD", "SHLVL", "_")}
