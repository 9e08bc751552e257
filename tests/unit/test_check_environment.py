"""Rules on environment variables, on made-up clusters."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Context, Fix, Launch, Severity
from nccl_doctor.checks.environment.tried import try_values
from tests.support import findings
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.environments import CHECK, READERS, Env, both, cluster_of, judge, only, told
from tests.support.rows import each_row

# --- one environment ---

LOUD = [
    # names
    ({"NCCL_IB_DISABEL": "1"}, "env-unknown-variable", "warn", "did you mean NCCL_IB_DISABLE?"),
    ({"NCCL_SOCKET_IFNAMES": "eth0"}, "env-unknown-variable", "warn", "NCCL_SOCKET_IFNAME?"),
    ({"NCLL_DEBUG": "INFO"}, "env-unknown-variable", "warn", "did you mean NCCL_DEBUG?"),
    ({"nccl_algo": "Ring"}, "env-unknown-variable", "warn", "did you mean NCCL_ALGO?"),
    ({"NCCL_IB_ROCE_VERSION": "2"}, "env-unknown-variable", "warn", "not a variable of NCCL"),
    ({"NCCL_WHATEVER": "1"}, "env-unknown-variable", "warn", "not a variable of NCCL"),
    ({"NCCL_TIMEOUT": "600"}, "env-unknown-variable", "warn", "not a variable of NCCL"),
    ({"TORCH_DISTRBUTED_DEBUG": "OFF"}, "env-unknown-variable", "warn", "TORCH_DISTRIBUTED_DEBUG?"),
    ({"GLOO_SOCKET_INTERFACE": "x"}, "env-unknown-variable", "warn", "not a variable of gloo"),
    ({"UCX_NET_DEVICE": "x"}, "env-unknown-variable", "warn", "did you mean UCX_NET_DEVICES?"),
    # values
    ({"NCCL_IB_DISABLE": "true"}, "env-bad-value", "warn", "NCCL_IB_DISABLE=true is read as 0"),
    ({"NCCL_BUFFSIZE": "4M"}, "env-bad-value", "warn", "is read as 4"),
    ({"NCCL_P2P_LEVEL": "nvl"}, "env-bad-value", "warn", "is not one of LOC, NVL"),
    ({"NCCL_ALGO": "Rings"}, "env-bad-value", "fail", "'Rings', which is not one of Tree, Ring"),
    ({"TORCH_DISTRIBUTED_DEBUG": "ON"}, "env-bad-value", "fail", "is not one of OFF, INFO, DETAIL"),
    ({"TORCH_NCCL_BLOCKING_WAIT": "on"}, "env-bad-value", "fail", "is not a yes-or-no value"),
    ({"TORCH_FR_BUFFER_SIZE": "many"}, "env-bad-value", "fail", "is not a whole number"),
    ({"DEEPSPEED_TIMEOUT": "30m"}, "env-bad-value", "fail", "is not a whole number"),
    ({"GLOO_SOCKET_IFNAME": "^lo"}, "env-bad-value", "warn", "accepts only whole interface names"),
    ({"NCCL_SOCKET_IFNAME": "^docker0"}, "env-bad-value", "warn", "allows lo"),
    ({"NCCL_IB_TIMEOUT": "60"}, "env-bad-value", "warn", "only 1 to 31 are valid"),
    ({"NCCL_IB_RETRY_CNT": "20"}, "env-bad-value", "warn", "holds 0 to 7"),
    ({"DEEPSPEED_TIMEOUT": "1800"}, "env-bad-value", "warn", "in minutes, not seconds"),
    ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600000"}, "env-bad-value", "warn", "600000 s"),
    # time-outs
    ({"DEEPSPEED_TIMEOUT": "1"}, "timeout-too-short", "warn", "in minutes"),
    ({"DEEPSPEED_TIMEOUT": "0"}, "timeout-too-short", "warn", "in minutes"),
    ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5"}, "timeout-too-short", "warn", "5 s: "),
    ({"TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC": "60"}, "timeout-too-short", "warn", "60 ms: "),
    ({"NCCL_IB_TIMEOUT": "0"}, "timeout-too-short", "warn", "only 1 to 31 are valid"),
    ({"NCCL_IB_TIMEOUT": "5"}, "timeout-too-short", "warn", "4.096 us"),
    ({"NCCL_SOCKET_RETRY_CNT": "3"}, "timeout-too-short", "warn", "0.6 s"),
    ({"NCCL_SOCKET_RETRY_SLEEP_MSEC": "1"}, "timeout-too-short", "warn", "0.6 s"),
    # old names
    ({"NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
     "env-deprecated", "warn", "overridden by TORCH_NCCL_ASYNC_ERROR_HANDLING=1, which torchrun"),
    ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_FR_BUFFER_SIZE": "20000"},
     "env-deprecated", "warn", "TORCH_NCCL_TRACE_BUFFER_SIZE=0 is overridden by"),
    # conflicts
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"},
     "env-conflict", "warn", "the level is ignored"),
    ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "0"},
     "env-conflict", "warn", "nothing is recorded"),
    ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_ON_TIMEOUT": "0"},
     "env-conflict", "warn", "two names of one setting"),
    ({"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"},
     "env-conflict", "warn", "16 x 8 is more than 64"),
    ({"NCCL_NET": "IB", "NCCL_IB_DISABLE": "1"}, "env-conflict", "fail", "finds none"),
    ({"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}, "env-conflict", "warn", "needs cuMem"),
    ({"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "4"}, "env-conflict", "warn", "the minimum"),
    ({"NCCL_INSPECTOR_ENABLE": "1", "NCCL_PROFILER_PLUGIN": "none"},
     "env-conflict", "warn", "nothing is recorded"),
    ({"NCCL_INSPECTOR_ENABLE": "true", "NCCL_PROFILER_PLUGIN": "inspector"},
     "env-bad-value", "warn", "0"),
    # leftovers
    ({"NCCL_DEBUG": "trace"}, "env-debug-leftover", "warn", "logs every call"),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, "env-debug-leftover", "warn", "several communicators"),
    ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "env-debug-leftover", "warn", "over gloo first"),
    ({"NCCL_BLOCKING_WAIT": "1"}, "env-debug-leftover", "warn", "turns the watchdog off"),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "env-debug-leftover", "warn", "wait for it"),
    ({"NCCL_CHECK_POINTERS": "1"}, "env-debug-leftover", "warn", "every buffer"),
    ({"FI_LOG_LEVEL": "debug"}, "env-debug-leftover", "warn", "logs"),
]  # fmt: skip


@each_row(("env", "code", "level", "words"), LOUD)
def test_what_is_wrong_on_all_hosts(env: Env, code: str, level: str, words: str) -> None:
    found = only(judge([env, env]), code)
    assert found.level.value == level
    assert words in found.message
    assert found.where.hosts == ("nd0", "nd1")
    assert found.where.ranks == ()
    assert found.fix


@each_row(("env", "code", "level", "words"), LOUD)
def test_what_is_wrong_on_one_host_is_told_of_that_one(
    env: Env, code: str, level: str, words: str
) -> None:
    found = judge([{}, env, {}])
    assert {each.where.hosts for each in found} == {("nd1",)}
    assert code in {each.code for each in found}


FINE = [
    {},
    {"NCCL_DEBUG": "WARN"},
    {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"},
    {"NCCL_SOCKET_IFNAME": "^lo,docker"},
    {"NCCL_IB_DISABLE": "1"},  # there is no device to miss
    {"NCCL_IB_DISABLE": "false"},
    {"NCCL_P2P_DISABLE": "1"},  # one rank on a host has nobody to copy to
    {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"},
    {"NCCL_SOCKET_RETRY_CNT": "100"},
    {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
    {"NCCL_VERSION": "2.28.9-1", "NCCL_HOME": "/opt/nccl", "NCCL_TESTS_SPLIT": "0x7"},
    {"NCCL_NET_PLUGIN": "ofi", "NCCL_OFI_X": "1", "FI_PROVIDER": "efa"},
    {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCHELASTIC_RUN_ID": "none"},
    {"TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"},
    {"TORCH_HOME": "/cache", "TORCH_LOGS": "+dynamo", "TORCH_CUDA_ARCH_LIST": "9.0"},
    {"DEEPSPEED_TIMEOUT": "120", "WANDB__SERVICE_WAIT": "300"},
    {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "8"},
    {"http_proxy": "http://proxy", "HTTPS_PROXY": "http://other", "no_proxy": "localhost"},
    {
        "NCCL_PROFILER_PLUGIN": "inspector",
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_DEBUG": "WARN",
        "NCCL_INSPECTOR_PROM_DUMP": "1",
        "NCCL_INSPECTOR_DUMP_DIR": "/var/lib/node_exporter",
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "30000000",
    },
    {"NCCL_INSPECTOR_ENABLE": "0", "NCCL_PROFILER_PLUGIN": "none"},
    {"UCX_TLS": "rc", "UCX_SOME_THING": "1", "OMP_PROC_BIND": "true"},
]


@each_row("env", FINE)
def test_a_good_environment(env: Env) -> None:
    assert judge([env, env]) == []


INSPECTOR = {"NCCL_PROFILER_PLUGIN": "inspector", "NCCL_INSPECTOR_ENABLE": "1"}
INFO = [
    ({"NCCL_DEBUG": "INFO"}, "env-debug-leftover"),
    ({"HYDRA_FULL_ERROR": "1"}, "env-debug-leftover"),
    ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, "env-debug-leftover"),
    ({"NCCL_PROTO": "Simple"}, "env-debug-leftover"),
    ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "env-deprecated"),
    ({"NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "env-deprecated"),
    ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "20000"}, "env-deprecated"),
    ({"NCCL_LL_THRESHOLD": "0"}, "env-deprecated"),
    ({"NCCL_RINGS": "0 1"}, "env-deprecated"),
    ({"WANDB__SERVICE_WAIT": "5"}, "timeout-too-short"),
    ({"NCCL_ENV_PLUGIN": "corp"}, "env-conflict"),
    ({"NCCL_SYM_THING": "1", "NCCL_NET_PLUGIN": "corp"}, "env-unknown-variable"),
    ({"NCCL_INSPECTOR_ENABLE": "1"}, "env-conflict"),
    ({"NCCL_PROFILER_PLUGIN": "/opt/libnccl-profiler-inspector.so"}, "env-conflict"),
    (
        {
            **INSPECTOR,
            "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500",
            "NCCL_INSPECTOR_PROM_DUMP": "1",
        },
        "env-conflict",
    ),
    (
        {
            **INSPECTOR,
            "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500",
            "NCCL_INSPECTOR_DUMP_THREAD_ENABLE": "0",
        },
        "env-conflict",
    ),
    ({**INSPECTOR, "NCCL_INSPECTOR_DUMP_VERBOSE": "1"}, "env-debug-leftover"),
    ({**INSPECTOR, "NCCL_INSPECTOR_ENABLED": "1"}, "env-unknown-variable"),
    ({**INSPECTOR, "NCCL_INSPECTOR_OF_TOMORROW": "1"}, "env-unknown-variable"),
]


@each_row(("env", "code"), INFO)
def test_what_is_worth_knowing_and_no_more(env: Env, code: str) -> None:
    assert told(judge([env, env])) == {(code, "info")}


# --- proxies ---

MASTER = "node-0.Cluster.example"


@each_row(
    ("exceptions", "master"),
    [
        ("", MASTER), ("localhost,127.0.0.1", MASTER), ("example.com", MASTER),
        ("ode-0.cluster.example", MASTER), ("10.1.0.0/16", "10.0.0.4"), ("10.0.0", "10.0.0.4"),
        ("a/b,10.0.0.400/8,::1", "10.0.0.4"), (" , ,.", MASTER),
    ],
)  # fmt: skip
def test_a_proxy_that_stands_before_the_master(exceptions: str, master: str) -> None:
    env = {"HTTPS_PROXY": "http://p:3128", "no_proxy": exceptions, "MASTER_ADDR": master}
    found = only(judge(both(**env)), "proxy-covers-master")
    assert (found.level, found.where.hosts) == (Severity.INFO, ("nd0", "nd1"))
    assert "HTTPS_PROXY set" in found.message
    assert "no_proxy=" in found.fix
    assert judge([env]) == []  # one host speaks to nobody


@each_row(
    "env",
    [
        {"no_proxy": "*"}, {"NO_PROXY": "x, .cluster.example"}, {"no_proxy": "cluster.example"},
        {"no_proxy": "*.example"}, {"no_proxy": "node-0.cluster.example:29500"},
        {"MASTER_ADDR": "10.0.0.4", "no_proxy": "10.0.0.0/8"}, {"MASTER_ADDR": "localhost"},
        {"MASTER_ADDR": "127.0.1.1"}, {"MASTER_ADDR": ""}, {"https_proxy": ""},
        {"MASTER_ADDR": "fd00::1", "no_proxy": "fd00::/8"},
        {"MASTER_ADDR": "fd00::1", "no_proxy": "fd00::1"},
    ],
)  # fmt: skip
def test_a_proxy_that_the_master_is_excepted_from(env: Env) -> None:
    base = {"https_proxy": "http://p:3128", "MASTER_ADDR": MASTER}
    assert judge(both(**{**base, **env})) == []


def test_a_report_of_an_earlier_version_knows_nothing_of_proxies() -> None:
    made = judge(both(https_proxy="http://p:3128", MASTER_ADDR=MASTER), proxied=None)
    assert made == []


# --- advice ---


def fix_of(env: Env, code: str, **how: Any) -> str:
    return next(each for each in judge([env, env], **how) if each.code == code).fix


def test_old_advice_is_not_repeated() -> None:
    handling = fix_of({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "env-deprecated")
    assert handling.startswith("unset NCCL_ASYNC_ERROR_HANDLING: by default (3)")
    blocking = fix_of({"NCCL_BLOCKING_WAIT": "1"}, "env-deprecated")
    assert "export" not in blocking
    assert (
        "does not limit the start of a communicator"
        in judge(both(NCCL_BLOCKING_WAIT="1"))[-1].message
    )
    assert fix_of({"NCCL_SOCKET_IFNAME": "^docker0"}, "env-bad-value").endswith("'^docker0,lo'")
    assert "init_process_group(timeout=...)" in fix_of(
        {"NCCL_TIMEOUT": "60"}, "env-unknown-variable"
    )
    assert (
        "work only in NCCL_SOCKET_IFNAME" in judge(both(GLOO_SOCKET_IFNAME="^docker0"))[0].message
    )


def test_a_value_that_torch_refuses_is_refused_under_an_old_name_that_loses() -> None:
    env = {"NCCL_BLOCKING_WAIT": "on", "TORCH_NCCL_BLOCKING_WAIT": "0"}
    assert ("env-bad-value", "fail") in told(judge([env, env]))
    env = {"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"}
    assert told(judge([env, env])) == {("env-deprecated", "warn")}


def test_the_fix_is_what_to_type() -> None:
    assert fix_of({"NCCL_IB_DISABLE": "true"}, "env-bad-value") == "export NCCL_IB_DISABLE=1"
    assert fix_of({"DEEPSPEED_TIMEOUT": "1800"}, "env-bad-value") == "export DEEPSPEED_TIMEOUT=30"
    renamed = fix_of({"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}, "env-deprecated")
    assert renamed == "unset TORCH_NCCL_TRACE_BUFFER_SIZE; export TORCH_FR_BUFFER_SIZE=9"


def typed(fix: Fix) -> list[str]:
    return [step.command for step in fix.steps]


def test_the_right_name_gets_the_value_of_the_misspelt_one() -> None:
    env = {"NCCL_SOKET_IFNAME": "=eth0"}
    cluster = cluster_of([env, {}, {}])
    given = change_rank(cluster, 0, env=env)
    (found,) = findings.judge(CHECK, given)
    assert found.where.hosts == ("nd0",)
    assert typed(found.fix) == ["export NCCL_SOCKET_IFNAME='=eth0'", "unset NCCL_SOKET_IFNAME"]
    undo = [step.undo for step in found.fix.steps]
    assert undo == ["unset NCCL_SOCKET_IFNAME", "export NCCL_SOKET_IFNAME='=eth0'"]
    # Where the value may not be recorded, the shell has it.
    for hidden in ({}, {"NCCL_SOKET_IFNAME": "***"}):
        (found,) = findings.judge(CHECK, change_rank(cluster, 0, env=hidden))
        assert typed(found.fix)[0] == 'export NCCL_SOCKET_IFNAME="$NCCL_SOKET_IFNAME"'


def test_what_is_left_out_of_a_list_is_written_after_a_caret() -> None:
    """A leading ^ of NCCL_IB_HCA: src/transport/net_ib/init.cc. NCCL never had the other name."""
    env = {"NCCL_EXCLUDE_IB_HCA": "mlx5_3,mlx5_4"}
    found = only(judge([env, env]), "env-unknown-variable")
    assert (found.level, found.where.hosts) == (Severity.WARN, ("nd0", "nd1"))
    lines = "; ".join(typed(found.fix))
    shell = subprocess.run(
        ["bash", "-c", f'{lines}; echo "$NCCL_IB_HCA ${{NCCL_EXCLUDE_IB_HCA-unset}}"'],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stdout == "^mlx5_3,mlx5_4 unset\n"
    both_set = {**env, "NCCL_IB_HCA": "mlx5"}
    found = only(judge([both_set]), "env-unknown-variable")
    assert "leave the same out in NCCL_IB_HCA=mlx5" in found.fix


def test_a_line_of_a_file_is_corrected_where_it_is(conf: Path) -> None:
    found = judge([{}], root={0: conf.parent.parent})
    (fix,) = (each.fix for each in found if each.fix.startswith("write NCCL_IB_DISABLE=1 "))
    before = conf.read_text()
    subprocess.run(["bash", "-c", fix.steps[0].command], check=True)
    assert conf.read_text() == before.replace("NCCL_IB_DISABLE=true", "NCCL_IB_DISABLE=1")
    subprocess.run(["bash", "-c", fix.steps[0].undo], check=True)
    assert conf.read_text() == before


def test_a_blocked_watchdog_is_not_blamed_on_what_torchrun_sets_by_itself() -> None:
    env = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert told(judge([env, env])) == {("env-debug-leftover", "warn")}
    assert ("env-conflict", "warn") in told(judge([env, env], launcher="srun"))
    desync = {"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_DESYNC_DEBUG": "1"}
    (conflict,) = (each for each in judge([desync, desync]) if each.code == "env-conflict")
    assert "starts no watchdog, so TORCH_NCCL_DESYNC_DEBUG=1 has no effect" in conflict.message
    wish = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_DESYNC_DEBUG": "1"}
    (conflict,) = (each for each in judge([wish, wish]) if each.code == "env-conflict")
    assert "torch uses 3 instead of 0" in conflict.message


# --- who reads it ---


@each_row("text", ["UV", "IBVERBS", "", "tcp"])
def test_a_transport_that_the_gloo_of_this_torch_refuses(text: str) -> None:
    tried = {"GLOO_DEVICE_TRANSPORT": {"text": text, "error": "unsupported gloo device"}}
    env = {"GLOO_DEVICE_TRANSPORT": text}
    found = only(judge([env], backend="gloo", tried=tried), "env-bad-value")
    assert (found.level, found.where.hosts) == (Severity.FAIL, ("nd0",))
    assert f"GLOO_DEVICE_TRANSPORT={text} is refused" in found.message
    assert typed(found.fix) == ["unset GLOO_DEVICE_TRANSPORT"]
    # A build of one's own may have it.
    taken = {"GLOO_DEVICE_TRANSPORT": {"text": text, "error": ""}}
    assert judge([env], backend="gloo", tried=taken) == []


@pytest.mark.xdist_group("torch")
def test_gloo_itself_is_asked_for_its_transports() -> None:
    answers = {}
    for text in ("TCP", "UV", ""):  # each in a process of its own: gloo reads it once
        ends = os.pipe()
        if os.fork() == 0:
            os.environ["GLOO_DEVICE_TRANSPORT"] = text
            os.write(ends[1], json.dumps(try_values(os.environ)).encode())
            os._exit(0)
        os.close(ends[1])
        with open(ends[0], "rb") as told:
            answers[text] = json.loads(told.read())["GLOO_DEVICE_TRANSPORT"]["error"]
        os.wait()
    assert answers == {
        "TCP": "",
        "UV": "unsupported gloo device",
        "": "unsupported gloo device",
    }
    assert try_values({}) == {}


@each_row(
    ("ranks", "backend", "code"),
    [
        (3, "gloo", "env-debug-misleads"), (4, "cpu:gloo,cuda:nccl", "env-debug-misleads"),
        (2, "gloo", "env-debug-leftover"), (3, "nccl", "env-debug-leftover"),
    ],
)  # fmt: skip
def test_checks_of_torch_that_take_a_monitored_barrier_for_a_mismatch(
    ranks: int, backend: str, code: str
) -> None:
    env = {"TORCH_DISTRIBUTED_DEBUG": "detail"}
    found = only(judge([env] * ranks, backend=backend), code)
    assert found.level is Severity.WARN
    assert found.where.hosts == tuple(f"nd{node}" for node in range(ranks))
    assert ("monitored_barrier" in found.message) == (code == "env-debug-misleads")
    assert typed(found.fix) == ["unset TORCH_DISTRIBUTED_DEBUG"]


def test_what_the_backend_does_not_read_is_no_failure() -> None:
    for env in ({"NCCL_ALGO": "Rings"}, {"TORCH_NCCL_BLOCKING_WAIT": "on"}):
        assert only(judge([env, env], backend="gloo"), "env-bad-value").level is Severity.WARN
    device = {"GLOO_DEVICE_TRANSPORT": "UV"}  # not in torch's wheels
    assert only(judge([device, device]), "env-bad-value").level is Severity.WARN
    assert only(judge([device, device], backend="gloo"), "env-bad-value").level is Severity.FAIL
    recorder = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "many"}  # read at the import of every process group
    assert only(judge([recorder, recorder], backend="gloo"), "env-bad-value").level is Severity.FAIL
    minutes = {"DEEPSPEED_TIMEOUT": "ten"}
    assert only(judge([minutes, minutes], deepspeed=False), "env-bad-value").level is Severity.WARN


def test_a_variable_that_this_nccl_does_not_know_yet() -> None:
    env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    found = only(judge([env, env], nccl="2.28.9"), "env-unknown-variable")
    assert found.level is Severity.WARN
    assert "is read since NCCL 2.30.3; this is NCCL 2.28.9" in found.message
    default = {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}
    assert told(judge([default, default], nccl="2.28.9")) == {("env-unknown-variable", "info")}
    assert judge([env, env], nccl=None) == []
    assert judge([env, env]) == []


@pytest.mark.parametrize(
    ("loaded", "built", "is_old"),
    [("2.28.9", "2.30.7", True), ("2.30.7", "2.28.9", False), (None, "2.28.9", True)],
)
def test_the_nccl_that_is_loaded_counts(loaded: str | None, built: str, is_old: bool) -> None:
    env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    made = cluster_of([env, env], nccl=built)
    library = {"built": built, "loaded": loaded and {"version": loaded}}
    for rank in made.ranks:
        facts = {**rank.facts, "nccl_library": {ALONE: outcome(library)}}
        made = change_rank(made, rank.seat, facts=facts)
    found = findings.judge(CHECK, made)
    assert [f.code for f in found] == ["env-unknown-variable"] * is_old
    assert all("this is NCCL 2.28.9" in f.message for f in found)


def test_a_name_that_this_torch_does_not_know_yet() -> None:
    old = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}
    assert judge([old, old], torch="2.6.0") == []
    new = {"TORCH_DIST_USE_NCCL2": "0"}
    assert "this is torch 2.13.0" in only(judge([new, new]), "env-unknown-variable").message
    assert judge([new, new], torch="2.14.0+cu130") == []
    assert judge([new, new], torch="2.15.0+cu132") == []


def test_of_newer_versions_an_unknown_name_is_only_worth_knowing() -> None:
    env = {"NCCL_FUTURE": "1"}
    assert told(judge([env, env], nccl="2.33.0")) == {("env-unknown-variable", "info")}
    typo = {"NCCL_IB_DISABEL": "1"}
    assert told(judge([typo, typo], nccl="2.33.0")) == {("env-unknown-variable", "warn")}


def test_a_name_that_nccl_itself_lists_is_known() -> None:
    env = {"NCCL_FUTURE": "1", "NCCL_IB_DISABEL": "1"}
    made = cluster_of([env, env])
    names = {"asked": {"names": ["NCCL_DEBUG", "NCCL_FUTURE"]}}
    for rank, facts in zip(made.ranks, [names, {"asked": None}], strict=True):
        facts_there = {**rank.facts, "interfaces": {ALONE: outcome(facts)}}
        made = change_rank(made, rank.seat, facts=facts_there)
    found = findings.judge(CHECK, made)
    places = {(each.message.split()[0], each.where.hosts) for each in found}
    assert places == {("NCCL_FUTURE", ("nd1",)), ("NCCL_IB_DISABEL", ("nd0", "nd1"))}


READ_BY_NCCL = [
    # text, as NCCL prints it, whether it took the text, and what is said
    ("NCCL_SET_THREAD_NAME", "true", "TRUE", True, ""),
    ("NCCL_SET_THREAD_NAME", "no", "FALSE", False, ""),
    ("NCCL_SET_THREAD_NAME", "yes", "FALSE", False, "NCCL_SET_THREAD_NAME=yes is read as 0"),
    ("NCCL_SET_THREAD_NAME", "2", "FALSE", False, "NCCL_SET_THREAD_NAME=2 is not accepted: NCCL "
     "itself takes its default, FALSE"),
    ("NCCL_BUFFSIZE", "4M", "4", True, "is read as 4"),
    ("NCCL_BUFFSIZE", "4M", "4194304", True, ""),
    ("NCCL_BUFFSIZE", "4096", "8192", True, "NCCL_BUFFSIZE=4096 is read as 8192"),
    ("NCCL_CUMEM_ENABLE", "1", "ON", True, ""),
    ("NCCL_CUMEM_ENABLE", "7", "7", True, "is not one of -2, 0, 1"),
    ("NCCL_CUMEM_ENABLE", "1", "AUTO", False, "is not accepted: NCCL itself takes its default, "
     "AUTO"),
    ("NCCL_DEBUG", "WARN ", "WARN", True, ""),
    ("NCCL_DEBUG", "ATTN", "<unknown>", False, "NCCL_DEBUG=ATTN is not accepted: NCCL itself takes "
     "its default"),
    ("NCCL_DEBUG_SUBSYS", "INIT,FOO", "INIT,ENV", False, "takes its default, INIT,ENV"),
]  # fmt: skip


@each_row("name, text, value, taken, words", READ_BY_NCCL)
def test_what_nccl_itself_reads_counts(
    name: str, text: str, value: str, taken: bool, words: str
) -> None:
    made = cluster_of([{name: text}] * 2)
    asked = {"readings": {name: {"text": text, "value": value, "taken": taken}}}
    for rank in made.ranks:
        facts = {**rank.facts, "interfaces": {ALONE: outcome({"asked": asked})}}
        made = change_rank(made, rank.seat, facts=facts)
    found = findings.judge(CHECK, made)
    if not words:
        assert found == []
        return
    bad = only(found, "env-bad-value")
    assert (bad.level, bad.where.hosts) == (Severity.WARN, ("nd0", "nd1"))
    assert words in bad.message
    assert text not in bad.fix.partition("one of")[2].split(", ")


def test_what_nccl_reads_is_known_of_its_own_text_and_host_alone() -> None:
    env = {"NCCL_SET_THREAD_NAME": "true"}
    made = cluster_of([env] * 3)
    reading = {"value": "TRUE", "taken": True}
    told = ({"text": "true", **reading}, {"text": "1", **reading}, None)
    for rank, mine in zip(made.ranks, told, strict=True):
        asked = {"readings": {"NCCL_SET_THREAD_NAME": mine} if mine else {}}
        facts = {**rank.facts, "interfaces": {ALONE: outcome({"asked": asked})}}
        made = change_rank(made, rank.seat, facts=facts)
    assert only(findings.judge(CHECK, made), "env-bad-value").where.hosts == ("nd1", "nd2")


def test_ways_that_are_off_matter_where_they_would_be_used() -> None:
    p2p: Env = {"NCCL_P2P_DISABLE": "1"}
    assert judge([p2p, p2p]) == []
    assert told(judge([p2p, p2p], nproc=2)) == {("env-debug-leftover", "warn")}
    ib: Env = {"NCCL_IB_DISABLE": "1"}
    assert told(judge([ib, ib], infiniband=True)) == {("env-debug-leftover", "warn")}


def test_the_two_checks_of_interfaces_find_one_cause() -> None:
    gloo = judge(both(GLOO_SOCKET_IFNAME="=eth0"), backend="gloo")
    assert [(each.code, each.explained_by) for each in gloo] == [
        ("env-bad-value", "interface-missing")
    ]
    lo = judge(both(NCCL_SOCKET_IFNAME="^docker0"))
    assert [(each.code, each.explained_by) for each in lo] == [
        ("env-bad-value", "interface-loopback")
    ]
    assert judge([{"NCCL_SOCKET_IFNAME": "^docker0"}]) == []  # one host may use lo


# --- files ---


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "etc/nccl.conf"
    path.parent.mkdir()
    path.write_text("NCCL_IB_DISABLE=true\nNCCL_ALGO = Ring\nTORCH_NCCL_NAN_CHECK=1\nwhat\n")
    return path


def test_a_value_in_a_file_is_found_by_its_line(conf: Path) -> None:
    found = judge([{}, {}, {}], root={2: conf.parent.parent})
    assert {each.where.hosts for each in found} == {("nd2",)}
    assert told(found) == {("env-bad-value", "warn")}
    by_line = {
        each.message.split(" line ")[-1][0]: each for each in found if " line " in each.message
    }
    assert f"NCCL_IB_DISABLE=true ({conf} line 1) is read as 0" in [each.message for each in found]
    assert by_line["1"].fix == f"remove line 1 (NCCL_IB_DISABLE) from {conf}"  # as elsewhere
    messages = " | ".join(each.message for each in found)
    assert f"line 2 of {conf} (NCCL_ALGO) has blanks or words around the name" in messages
    assert f"line 3 of {conf} (TORCH_NCCL_NAN_CHECK) has no effect" in messages
    assert f"line 4 of {conf} is not NAME=VALUE" in messages
    fixes = [each.fix for each in found]
    assert f"in line 2 of {conf} write NCCL_ALGO=VALUE, with nothing around it" in fixes
    said = f"sed -n '3s/^[^=]*=//p' {conf}"
    assert f'export TORCH_NCCL_NAN_CHECK="$({said})" in the environment of the job' in fixes


def test_a_file_that_is_not_there() -> None:
    found = only(judge(both(NCCL_CONF_FILE="/etc/none.conf")), "env-bad-value")
    assert found.message.startswith("NCCL_CONF_FILE=/etc/none.conf cannot be read")


def test_a_stale_file_on_one_host(tmp_path: Path) -> None:
    stale = tmp_path / "etc/nccl.conf"
    stale.parent.mkdir()
    stale.write_text("# tuning of last year\nNCCL_PROTO=LL\n")
    found = only(judge([{}, {}, {}], root={1: tmp_path}), "env-differs")
    assert (found.level, found.where.hosts) == (Severity.FAIL, ("nd1",))
    assert found.message == f"NCCL_PROTO=LL ({stale} line 2); elsewhere NCCL_PROTO not set"
    assert found.fix == f"remove line 2 (NCCL_PROTO) from {stale}"


# --- this machine ---


@pytest.mark.xdist_group("torch")
def test_observe_on_this_machine(tmp_path: Path) -> None:
    conf = tmp_path / "nccl.conf"
    conf.write_text("NCCL_IB_TC=106\n")
    env = {"NCCL_CONF_FILE": str(conf), "NCCL_DEBUG": "WARN", "HF_TOKEN": "hunter2"}
    seen = json.loads(json.dumps(CHECK.observe(Context(launch=Launch(), env=env))))
    assert "hunter2" not in json.dumps(seen)
    assert seen["variables"]["NCCL_IB_TC"] == {"value": "106", "origin": str(conf), "line": 1}
    assert seen["torch"]
    assert set(seen) == {*READERS, "variables", "unknown", "faults", "proxied", "tried", "files"}
    cluster = make_cluster(["nd0"], 1, check=CHECK.name, by_rank={0: seen})
    assert findings.judge(CHECK, cluster) == []
