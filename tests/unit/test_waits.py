"""How long each layer waits, by the settings of one host."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from nccl_doctor.checks.timeouts.gather import gather_timeouts
from nccl_doctor.model.job import Job, Rendezvous
from nccl_doctor.toolkit.timeouts.waits import CLOCKS, COLUMNS, Wait, waiters, waits, waits_table
from tests.support.rows import each_row

LAYERS = [
    "rendezvous",
    "store",
    "process group",
    "new groups",
    "watchdog",
    "heartbeat",
    "NCCL",
    "DeepSpeed",
    "W&B",
]


def facts(torch: str = "2.13.0+cu130", launcher: str = "torchrun", **more: Any) -> dict[str, Any]:
    old = torch.startswith("2.1.")
    return {
        "torch": torch,
        "defaults": {"nccl": None if old else 600.0, "other": 1800.0},
        "deepspeed": None,
        "wandb": None,
        "launcher": launcher,
        "rdzv": {"backend": "", "conf": {}},
        "variables": {},
        **more,
    }


def found(backend: str = "nccl", *, uses: bool = False, **more: Any) -> dict[str, Wait]:
    everything = waits(facts(**more), backend, deepspeed=uses)
    assert [each.name for each in everything] == LAYERS
    json.dumps([each.to_json() for each in everything])
    return {each.name: each for each in everything}


def seconds(backend: str = "nccl", *, uses: bool = False, **more: Any) -> list[float | None]:
    """Those of all layers but of new groups, which no setting changes."""
    layers = found(backend, uses=uses, **more)
    assert layers.pop("new groups").seconds in ((600, 1800) if backend == "nccl" else (1800,))
    return [each.seconds for each in layers.values()]


def variables(**values: str) -> dict[str, Any]:
    return {"variables": values}


def of_deepspeed(version: str, minutes: int | None, *, reads: bool = True) -> dict[str, Any]:
    return {"version": version, "minutes": minutes, "reads_variable": reads}


# --- the table of layers ---


def test_every_layer_says_everything() -> None:
    rows = waiters()
    assert [row.name for row in rows] == LAYERS
    for row in rows:
        assert row.clock in CLOCKS
        assert all((row.starts, row.ends, row.misses)), row
        # A layer without a clock has nothing to lengthen.
        assert bool(row.fix) == (row.clock != "never")
        row.fix.format(seconds=60, minutes=1, conf="timeout=60")


def test_the_fact_that_reports_show() -> None:
    table = waits_table(tuple(found().values()))
    assert table["columns"] == list(COLUMNS)
    assert [row[:2] for row in table["rows"]][:3] == [
        ["rendezvous", 900.0],
        ["store", 600.0],
        ["process group", 600.0],
    ]
    assert table["rows"][3][:2] == ["new groups", 600.0]
    assert table["rows"][6][3:] == ["a communicator connects", "nothing: it waits forever"]
    assert table["rows"][8] == ["W&B", None, "not used", None, None]


# --- seconds ---

EXPECTED: list[tuple[str, dict[str, Any], list[float | None]]] = [
    ("nccl", {}, [900, 600, 600, 600, 480, None, None, None]),
    ("gloo", {}, [900, 1800, 1800, None, None, None, None, None]),
    ("nccl", {"torch": "2.1.2"}, [900, 1800, 1800, 1800, None, None, None, None]),
    ("nccl", {"torch": "2.2.0"}, [900, 600, 600, 600, None, None, None, None]),
    ("nccl", {"torch": "2.4.1"}, [900, 600, 600, 600, 600, None, None, None]),
    ("nccl", {"torch": "2.15.0"}, [900, 600, 600, 600, None, None, None, None]),
    (
        "nccl",
        {"torch": "2.15.0", **variables(TORCH_DIST_USE_NCCL2="0")},
        [900, 600, 600, 600, 480, None, None, None],
    ),
    (
        "nccl",
        variables(TORCH_NCCL_BLOCKING_WAIT="1"),
        [900, 600, 600, None, None, None, None, None],
    ),
    (
        "nccl",
        variables(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"),
        [900, 600, None, None, 480, None, None, None],
    ),
    (
        "gloo",
        variables(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_BLOCKING_WAIT="1"),
        [900, 1800, 1800, None, None, None, None, None],
    ),
    ("nccl", {"launcher": "srun"}, [None, 600, 600, 600, 480, None, None, None]),
    (
        "nccl",
        {"rdzv": {"backend": "c10d", "conf": {}}},
        [600, 600, 600, 600, 480, None, None, None],
    ),
    (
        "nccl",
        {"rdzv": {"backend": "c10d", "conf": {"join_timeout": "3600", "timeout": "5"}}},
        [3600, 600, 600, 600, 480, None, None, None],
    ),
    ("nccl", {"rdzv": {"backend": "etcd", "conf": {}}}, [None, 600, 600, 600, 480] + [None] * 3),
    (
        "nccl",
        {"deepspeed": of_deepspeed("0.16.0", 30), "launcher": "deepspeed"},
        [None, 1800, 1800, 1800, 480, None, 1800, None],
    ),
    (
        "gloo",
        {"deepspeed": of_deepspeed("0.19.8", 10), **variables(DEEPSPEED_TIMEOUT="45")},
        [900, 2700, 2700, None, None, None, 2700, None],
    ),
    # Installed, and nothing says that the job uses it.
    (
        "nccl",
        {"deepspeed": of_deepspeed("0.16.0", 30)},
        [900, 600, 600, 600, 480, None, 1800, None],
    ),
    ("nccl", {"wandb": "0.19.1"}, [900, 600, 600, 600, 480, None, None, 30]),
    (
        "nccl",
        variables(WANDB__SERVICE_WAIT="2.5", TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="1800"),
        [900, 600, 600, 600, 1800, None, None, 2.5],
    ),
    (
        "nccl",
        variables(TORCH_NCCL_ENABLE_MONITORING="no"),
        [900, 600, 600, 600, None, None, None, None],
    ),
]


@each_row(("backend", "more", "expected"), EXPECTED)
def test_seconds(backend: str, more: dict[str, Any], expected: list[float | None]) -> None:
    assert seconds(backend, **more) == expected


@each_row(
    ("backend", "more", "expected"),
    [
        ("nccl", {}, 600), ("gloo", {}, 1800), ("nccl", {"torch": "2.1.2"}, 1800),
        ("nccl", {"deepspeed": of_deepspeed("0.19.8", 10), "launcher": "deepspeed",
                  **variables(DEEPSPEED_TIMEOUT="45")}, 600),
    ],
)  # fmt: skip
def test_other_groups_have_the_default_of_torch(
    backend: str, more: dict[str, Any], expected: float
) -> None:
    """new_group, DeviceMesh and monitored_barrier: measured with torch 2.13, 77 s given."""
    assert found(backend, **more)["new groups"].seconds == expected


def test_deepspeed_that_the_user_names_decides_for_all_it_opens() -> None:
    of_old = of_deepspeed("0.9.5", 30, reads=False)
    ignored = waits(
        facts(deepspeed=of_old, variables={"DEEPSPEED_TIMEOUT": "5"}), "nccl", deepspeed=True
    )
    assert {each.name: each.seconds for each in ignored}["store"] == 1800
    unknown = waits(facts(), "nccl", deepspeed=True)
    named = {each.name: each for each in unknown}
    assert named["store"].seconds is named["DeepSpeed"].seconds is None
    assert named["store"].value.source == "unknown: it is not installed here"
    for version, minutes in (("0.19.5", 1800), ("0.19.8", 600), ("0.19.7", None)):
        guessed = waits(facts(deepspeed=of_deepspeed(version, None)), "nccl", deepspeed=True)
        assert {each.name: each.seconds for each in guessed}["process group"] == minutes


BAD = ["", "abc", "-3", "1h", "9" * 400, "1e3", "nan", "inf"]


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:8])
def test_what_is_no_number_leaves_the_default_and_says_so(text: str) -> None:
    told = {"deepspeed": of_deepspeed("0.19.8", 10)}
    got = found(**told, **variables(DEEPSPEED_TIMEOUT=text, WANDB__SERVICE_WAIT=text))
    assert got["store"].seconds == 600
    assert "unknown: DEEPSPEED_TIMEOUT=" in got["store"].value.source
    assert got["W&B"].value.seconds in (30, 1000)
    for each in got.values():
        assert each.seconds is None or math.isfinite(each.seconds)
        assert len(each.value.source) < 120
        assert each.value.variable == "" or each.value.source.startswith(each.value.variable)


def test_torch_reads_the_number_that_a_value_begins_with() -> None:
    got = found(**variables(TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="90s"))
    assert got["heartbeat"].seconds == 90
    assert found(**variables(TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="soon"))["heartbeat"].seconds == 480


def test_the_new_name_wins_and_an_old_torch_knows_only_the_old_one() -> None:
    both = variables(NCCL_BLOCKING_WAIT="1", TORCH_NCCL_BLOCKING_WAIT="0")
    assert found(**both)["watchdog"].seconds == 600
    assert found(torch="2.1.0", **both)["watchdog"].seconds is None


def test_what_to_type_is_long_enough() -> None:
    got = found()
    assert (
        got["store"]
        .fix(601)
        .startswith(
            "in the job's code: init_process_group(timeout=timedelta(minutes=11)) (groups of"
        )
    )
    assert got["heartbeat"].fix(601) == "`export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=660`"
    assert got["rendezvous"].fix(1000) == "`# --rdzv-conf timeout=1020` (in the line of torchrun)"
    elastic = found(rdzv={"backend": "c10d", "conf": {}})["rendezvous"]
    conf = "join_timeout=1020,read_timeout=1020"  # an endpoint that refuses knows the last alone
    assert elastic.fix(1000) == f"`# --rdzv-conf {conf}` (in the line of torchrun)"
    assert "DEEPSPEED_TIMEOUT=1`" in got["DeepSpeed"].fix(0.5)


# --- this host ---


@pytest.mark.xdist_group("torch")
def test_gather_here() -> None:
    env = {
        "PET_RDZV_BACKEND": "C10d",
        "PET_RDZV_CONF": "is_host=true, join_timeout=77,token=x",
        "DEEPSPEED_TIMEOUT": "3",
        "HOME": "/root",
    }
    steps: list[str] = []
    got = json.loads(json.dumps(gather_timeouts(env, "torchrun", steps.append)))
    assert steps[0] == "import torch"
    assert got["variables"] == {"DEEPSPEED_TIMEOUT": "3"}
    conf = {"join_timeout": "77"}
    assert got["rdzv"] == {"backend": "c10d", "conf": conf, "conf_from": "PET_RDZV_CONF"}
    assert got["defaults"]["other"] == 1800
    if got["deepspeed"]:
        assert got["deepspeed"]["minutes"] in (10, 30)
    assert {each.name: each.seconds for each in waits(got, "gloo", deepspeed=False)}[
        "rendezvous"
    ] == 77


@pytest.mark.xdist_group("torch")
def test_the_options_of_the_command_come_before_those_of_the_environment() -> None:
    given = Rendezvous("c10d", "head", "join_timeout=1200", "--rdzv-conf")
    job = Job(launcher="torchrun", rendezvous=given)
    env = {"PET_RDZV_CONF": "timeout=5"}
    got = gather_timeouts(env, job.launcher, lambda step: None, job)
    (value,) = (each.value for each in waits(got, "gloo", deepspeed=False) if each.value.key)
    assert (value.seconds, value.source) == (1200, "--rdzv-conf join_timeout=1200")
    assert not value.variable, "no variable sets it"
