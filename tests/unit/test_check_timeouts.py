"""Time-outs against the time that rank 0 works alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nccl_doctor import registry
from nccl_doctor.api import Cluster, Confidence, Context, Finding, Job, Launch, Severity
from nccl_doctor.checks.environment import Environment
from nccl_doctor.checks.timeouts import Timeouts
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.rows import each_row
from tests.unit.test_waits import facts, of_deepspeed, variables

CHECK = Timeouts()
BLOCKING = variables(TORCH_NCCL_BLOCKING_WAIT="1")
UNHANDLED = variables(TORCH_NCCL_ASYNC_ERROR_HANDLING="0")


def cluster(
    load_s: float | None,
    *hosts: dict[str, Any],
    backend: str = "nccl",
    deepspeed: bool = False,
    **more: Any,
) -> Cluster:
    """One host per set of facts, two of the same by default."""
    seen = hosts or (facts(), facts())
    names = [f"nd{i}" for i in range(len(seen))]
    return make_cluster(
        names,
        check="timeouts",
        by_host=dict(zip(names, seen, strict=True)),
        backend=backend,
        job=Job(expect_load_s=load_s, deepspeed=deepspeed),
        **more,
    )


def loud(made: Cluster) -> list[Finding]:
    return [finding for finding in judge(CHECK, made) if finding.level is not Severity.INFO]


def one(made: Cluster) -> Finding:
    """The only finding above info on a host of its own."""
    (found,) = loud(made)
    return found


# --- below, near, above ---


def test_without_an_expected_load_nothing_is_found() -> None:
    assert judge(CHECK, cluster(None)) == []
    assert judge(CHECK, cluster(None, facts(**variables(DEEPSPEED_TIMEOUT="0")))) == []


ALONE = [
    # backend, facts, the time-out that acts, layers that have it
    ("nccl", facts(), 600, "store, process group, watchdog"),
    ("gloo", facts(), 1800, "store, process group"),
    ("nccl", facts("2.1.2"), 1800, "store, process group, watchdog"),
    ("nccl", facts("2.15.0+cu132"), 600, "store, process group, watchdog"),
    ("nccl", facts(**BLOCKING), 600, "store, process group"),
    ("nccl", facts(**UNHANDLED), 600, "store"),
    ("nccl", facts(launcher="srun"), 600, "store, process group, watchdog"),
    (
        "nccl",
        facts(launcher="deepspeed", deepspeed=of_deepspeed("0.16.0", 30)),
        1800,
        "store, process group, watchdog",
    ),
    (
        "gloo",
        facts(deepspeed=of_deepspeed("0.16.0", 30), **variables(DEEPSPEED_TIMEOUT="5")),
        300,
        "store, process group",
    ),
]


@each_row(("backend", "seen", "seconds", "layers"), ALONE)
def test_below_near_and_above(
    backend: str, seen: dict[str, Any], seconds: int, layers: str
) -> None:
    for load_s in (seconds + 1, 100 * seconds):
        found = one(cluster(load_s, seen, backend=backend))
        assert (found.code, found.level) == ("timeout-too-short", Severity.FAIL)
        assert found.where.hosts == ("nd0",)
        assert f"alone for {load_s} s, and the others wait for it {seconds} s (" in found.message
        assert f"({layers}; " in found.message
        assert found.confidence is Confidence.LIKELY
        assert found.evidence["expect_load_s"] == load_s
        assert len(found.evidence["layers"]) == 9
    for load_s in (seconds, seconds / 1.15):
        found = one(cluster(load_s, seen, backend=backend))
        assert found.level is Severity.WARN
        assert f"wait {seconds} s, only {100 * (seconds / load_s - 1):.0f} % more" in found.message
    for load_s in (seconds / 1.2, 0.5):
        assert loud(cluster(load_s, seen, backend=backend)) == []


def test_a_group_that_connects_at_once_and_ends_nothing_waits_only_in_the_store() -> None:
    found = one(cluster(700, facts("2.15.0", **UNHANDLED)))
    assert "(store; " in found.message
    assert found.confidence is Confidence.POSSIBLE


# --- what to type ---


def test_the_fix_is_that_of_the_layer() -> None:
    minutes = "init_process_group(timeout=timedelta(minutes=50))"
    found = one(cluster(2000, facts()))
    left = "(groups of new_group and of a DeviceMesh, and monitored_barrier, keep torch's default)"
    assert found.fix.startswith(f"in the job's code: {minutes} {left}; or let rank 0 prepare")
    found = one(cluster(2000, facts(launcher="accelerate")))
    assert "kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=50))]" in found.fix
    found = one(cluster(2000, facts(deepspeed=of_deepspeed("0.19.8", 10)), deepspeed=True))
    assert found.fix.startswith("on every host: export DEEPSPEED_TIMEOUT=50 (in minutes")
    assert ".deepspeed_env" in found.fix
    assert "default of DeepSpeed 0.19.8" in found.message
    endless = one(cluster(1e5, facts(deepspeed=of_deepspeed("0.19.8", 10)), deepspeed=True))
    assert "DEEPSPEED_TIMEOUT" not in endless.fix


def test_what_was_typed_is_enough() -> None:
    told = facts(deepspeed=of_deepspeed("0.19.8", 10), **variables(DEEPSPEED_TIMEOUT="50"))
    assert loud(cluster(2000, told, deepspeed=True)) == []


# --- places ---


def test_all_hosts_with_the_same_are_one_finding_after_folding_and_odd_ones_stand_alone() -> None:
    findings = loud(cluster(700))
    assert [finding.where.hosts for finding in findings] == [("nd0",), ("nd1",)]
    assert len({(finding.message, finding.fix) for finding in findings}) == 1
    long = facts(deepspeed=of_deepspeed("0.19.8", 10), **variables(DEEPSPEED_TIMEOUT="60"))
    odd = facts(deepspeed=of_deepspeed("0.19.8", 10), **variables(DEEPSPEED_TIMEOUT="6"))
    only(CHECK, cluster(400, long, odd, long), "timeout-too-short", hosts=["nd1"])


def test_who_never_waits_is_not_warned() -> None:
    assert judge(CHECK, cluster(1e5, facts(), nproc=1)) == []
    # Rank 0 alone on its host waits for nobody: only the others' clocks run.
    findings = loud(cluster(700, facts(), facts(), nproc=1))
    assert [finding.where.hosts for finding in findings] == [("nd1",)]


def test_hosts_that_never_came_are_not_named() -> None:
    findings = loud(cluster(700, facts(), facts(), absent_nodes=[1]))
    assert [finding.where.hosts for finding in findings] == [("nd0",)]
    unnumbered = change_rank(cluster(700, facts()), 1, rank=None)
    assert len(loud(unnumbered)) == 1


def test_a_default_that_nobody_knows_is_no_finding() -> None:
    assert loud(cluster(1e5, facts(), deepspeed=True)) == []


# --- clocks that such a load starts only by the way ---


def test_shorter_clocks_that_do_not_run_meanwhile_are_only_told() -> None:
    told = [f for f in judge(CHECK, cluster(1000)) if f.level is Severity.INFO]
    assert [f.message.partition(":")[0] for f in told] == ["rendezvous", "heartbeat"] * 2
    assert all(f.confidence is Confidence.POSSIBLE for f in told)
    assert {f.kind.title for f in told} == {
        "A time-out is shorter than the time that rank 0 works alone"
    }
    assert "before torchrun starts" in told[0].message
    # One host needs no rendezvous, and what is not shorter is nothing to tell.
    (heartbeat,) = (f for f in judge(CHECK, cluster(1000, facts())) if f.level is Severity.INFO)
    assert heartbeat.fix == "on every host: export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1500"
    assert judge(CHECK, cluster(480)) == []


# --- together with the check of variables ---


def both(value: str, load_s: float | None, name: str = "DEEPSPEED_TIMEOUT") -> list[Finding]:
    """Findings of that code of both checks, where this variable is set on the second host."""
    told = facts(deepspeed=of_deepspeed("0.19.8", 10), **variables(**{name: value}))
    calm = facts(deepspeed=of_deepspeed("0.19.8", 10), **variables(DEEPSPEED_TIMEOUT="60"))
    made = cluster(load_s, calm, told)
    for seat in range(4):
        setting = {name: {"value": value, "origin": "environment", "line": 0}}
        environment = {
            "variables": setting if seat > 1 else {},
            "unknown": [],
            "faults": [],
            "torch": "2.13.0",
            "nccl": "2.27.3",
            "deepspeed": True,
            "infiniband": False,
        }
        made = change_rank(made, seat, facts={"environment": {"alone": outcome(environment)}})
    both = [*judge(CHECK, made), *judge(Environment(), made)]
    found = [f for f in both if f.code == "timeout-too-short" and name in f.message]
    assert all(f.where.hosts == ("nd1",) for f in found)
    return found


def test_one_variable_is_one_finding_of_two_checks() -> None:
    assert [f.level for f in both("1", None)] == [Severity.WARN]
    (found,) = both("1", 100)
    assert found.level is Severity.FAIL
    assert "DEEPSPEED_TIMEOUT=1 minutes" in found.message
    assert [f.level for f in both("1", 20)] == [Severity.WARN]
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    assert [f.level for f in both("5", 400, name)] == [Severity.WARN]
    assert [f.level for f in both("300", 400, name)] == [Severity.INFO]


def test_the_code_is_of_one_kind() -> None:
    found = registry.load()
    assert found.owners["timeout-too-short"] == ("environment", "timeouts")


# --- this host ---


@pytest.mark.xdist_group("torch")
def test_this_host_has_a_table() -> None:
    env = {"WANDB__SERVICE_WAIT": "300", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "900", "PATH": "x"}
    ctx = Context(launch=Launch(launcher="srun"), env=env, backend="gloo")
    seen = json.loads(json.dumps(CHECK.observe(ctx)))
    rows = {row[0]: row[1:3] for row in seen["waits"]["rows"]}
    assert rows["W&B"] == [300, "WANDB__SERVICE_WAIT=300"]
    assert rows["store"][0] == 1800
    assert rows["rendezvous"] == [None, "srun has none: ranks meet in the store"]
    assert "PATH" not in json.dumps(seen)
    made = cluster(2000, seen, backend="gloo")
    assert one(made).level is Severity.FAIL
