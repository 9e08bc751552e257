"""The flight recorder's state in a few lines, as several versions of torch dump it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nccl_doctor.toolkit.groups.recorder import HOOKED, MOST_GROUPS, recorded, summary


def entry(number: int, name: str = "gloo:all_reduce", **fields: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number + 1,
        "profiling_name": name,
        "input_sizes": [[4]],
        "state": "scheduled",
        "retired": True,
        "is_p2p": False,
        "time_created_ns": 1795274344901686527 + number,
        **fields,
    }


def dump(entries: list[dict[str, Any]], **status: Any) -> dict[str, Any]:
    return {"version": "2.10", "entries": entries, "pg_status": {"0": status} if status else {}}


def test_gloo_counts_what_is_retired_as_completed() -> None:
    # torch 2.13, JSON: numbers as text, -1 for none; gloo has no events, so nothing is `started`.
    (group,) = summary(
        [
            dump(
                [entry(0), entry(1), entry(2, retired=False)],
                last_enqueued_collective="3",
                last_started_collective="-1",
                last_completed_collective="2",
            )
        ]
    )["groups"]
    assert (group["group"], group["description"]) == ("0", "default_pg")
    assert (group["enqueued"], group["started"], group["completed"]) == (3, None, 2)
    assert group["pending"] == {
        "collective": "gloo:all_reduce",
        "sequence": 3,
        "sizes": [[4]],
        "state": "scheduled",
    }
    assert group["last_completed"]["sequence"] == 2


def test_nccl_that_is_retired_and_not_completed_has_timed_out() -> None:
    entries = [
        entry(0, "nccl:all_reduce", state="completed"),
        entry(1, "nccl:broadcast", state="started"),
    ]
    (group,) = summary([dump(entries)])["groups"]
    assert group["last_enqueued"]["state"] == "timed out"
    assert (group["enqueued"], group["completed"], group["pending"]) == (2, 1, None)


@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_leaves_what_hangs_open(name: str) -> None:
    """torch 2.15: the backend says what has ended; what hangs, or failed, is never retired."""
    entries = [
        entry(0, f"{name}:all_reduce", state="completed"),
        entry(1, f"{name}:broadcast", state="completed"),
        entry(2, f"{name}:barrier", retired=False),
    ]
    # its status counts every operation of the group, point-to-point too
    (group,) = summary([dump(entries, last_enqueued_collective=9, last_completed_collective=8)])[
        "groups"
    ]
    assert (group["enqueued"], group["completed"]) == (3, 2)
    assert group["pending"]["sequence"] == 3
    assert group["last_completed"]["sequence"] == 2


def test_a_hook_that_hears_of_no_end_may_have_its_last_one_in_flight() -> None:
    """Retired as they are issued: none has timed out, and none is known to have ended."""
    entries = [entry(number, "nccl2:all_reduce") for number in range(3)]
    (group,) = summary([dump(entries)])["groups"]
    assert group["last_enqueued"]["state"] == "issued"
    assert (group["enqueued"], group["completed"]) == (3, None)
    assert group["pending"]["sequence"] == 3  # so it is not named as one that never entered it


class Instances:
    """The recorders of torch 2.15: one for each backend, gloo's where none is named."""

    def __init__(self, known: bool = True) -> None:
        self.known = known

    def _dump_fr_trace_json(
        self, collectives: bool = True, active: bool = False, backend: str = ""
    ) -> str:
        if backend and not self.known:
            raise TypeError("incompatible function arguments")
        name = backend or "gloo"
        number = {"gloo": 4, "nccl2": 7, "nccl-lazy": 1}[name]
        made = [entry(0, f"{name}:all_reduce", collective_seq_id=number)]
        return json.dumps(dump(made if name != "nccl-lazy" else []))


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize(
    ("backend", "known", "sequences"),
    [("nccl", True, [4, 7]), ("gloo", True, [4]), ("nccl", False, [4])],
)
def test_every_instance_of_nccl_is_asked(
    monkeypatch: pytest.MonkeyPatch, backend: str, known: bool, sequences: list[int]
) -> None:
    import torch

    monkeypatch.setattr(torch._C, "_distributed_c10d", Instances(known))
    groups = recorded(backend)["groups"]
    assert sorted(group["enqueued"] for group in groups) == sequences


def test_of_several_in_flight_the_oldest_is_the_one_that_hangs() -> None:
    entries = [entry(n, "nccl:all_reduce", state="started", retired=False) for n in (4, 2, 3)]
    (group,) = summary([dump(entries)])["groups"]
    assert group["pending"]["sequence"] == 3
    assert group["last_enqueued"]["sequence"] == 5


def test_the_first_recorder_had_one_number_and_no_status() -> None:
    old = {"record_id": 0, "pg_id": 0, "seq_id": 7, "profiling_name": "nccl:all_reduce",
           "input_sizes": [[3, 4]], "state": "scheduled", "retired": False}  # fmt: skip
    (group,) = summary([{"entries": [old]}])["groups"]
    assert (group["enqueued"], group["pending"]["sequence"]) == (7, 7)


def test_times_do_not_tell_two_ranks_apart() -> None:
    one, two = ([entry(0, time_created_ns=t, thread_id=str(t))] for t in (1, 2))
    assert summary([dump(one)]) == summary([dump(two)])


def test_many_groups_and_large_names_stay_small_and_the_stuck_one_is_kept() -> None:
    entries = [
        entry(n, "gloo:all_reduce" * 50, pg_id=n, process_group=[str(n) * 200, "x" * 500])
        for n in range(200)
    ]
    entries[150]["retired"] = False
    entries[150]["input_sizes"] = [[1] * 1000] * 1000
    found = summary([dump(entries)])
    assert len(found["groups"]) == MOST_GROUPS
    assert found["groups_left_out"] == 200 - MOST_GROUPS
    assert found["groups"][0]["pending"]
    assert len(json.dumps(found)) < 12_000


@pytest.mark.parametrize(
    ("bad", "entries"),
    [
        ({}, []),
        ({"entries": None, "pg_status": []}, []),
        ({"entries": [None, 1, "x", {}], "pg_status": {"0": None, "1": "x"}}, [0, 0, 1]),
        ({"entries": [{"record_id": "a", "input_sizes": 3, "process_group": []}]}, [1]),
        ({"entries": {"a": 1}, "pg_status": {"0": {"last_enqueued_collective": "many"}}}, [0]),
    ],
)
def test_a_dump_of_another_shape_says_nothing_of_its_groups(
    bad: dict[str, Any], entries: list[int]
) -> None:
    groups = json.loads(json.dumps(summary([bad])))["groups"]
    assert [group["entries"] for group in groups] == entries
    for group in groups:
        assert {group[name] for name in ("enqueued", "started", "completed", "pending")} == {None}
