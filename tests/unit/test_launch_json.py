"""Launch records from elsewhere: as they were, or a ValueError that says what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.launch.detect import detect
from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.model.launch import Launch
from tests.support.rows import each_row

ENVIRON = {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "nd0", "MASTER_PORT": "29500"}
RECORD = json.loads(json.dumps(encode(detect(ENVIRON))))


def test_a_record_is_the_same_after_its_way_through_json() -> None:
    launch = detect(ENVIRON)
    assert launch.problems
    assert decode(Launch, Node("launch", RECORD)) == launch
    assert decode(Launch, Node("launch", {**RECORD, "newer": 1})) == launch
    assert decode(Launch, Node("launch", {})) == Launch()


@each_row(
    ("field", "value", "words"),
    [
        ("rank", "0", "launch.rank is a text, not a whole number"),
        ("rank", -1, "launch.rank is -1, outside 0–131072"),
        ("rank", True, "launch.rank is true or false"),
        ("local_world_size", 10**9, "launch.local_world_size is 1000000000, outside"),
        ("local_world_size", 65_000, "launch.local_world_size is 65000, outside 0–4096"),
        ("local_rank", 4096, "launch.local_rank is 4096, outside 0–4095"),
        ("master_port", 10**6, "launch.master_port is 1000000, outside 0–65535"),
        ("master_addr", ["nd0"], "launch.master_addr is a list, not a text"),
        ("sources", {"rank": 7}, "launch.sources.rank is a whole number"),
        ("problems", [{"code": 7}], r"launch.problems\[0\].code is a whole number"),
        ("problems", [{"code": "a", "message": "b", "variables": []}], "variables is a list"),
        ("agent_store", "yes", "launch.agent_store is a text"),
    ],
)
def test_what_is_of_another_type_or_larger_than_any_job_is_named(
    field: str, value: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        decode(Launch, Node("launch", {**RECORD, field: value}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(RECORD)), JSON)
def test_whatever_comes_is_a_record_or_a_value_error(field: str, value: Any) -> None:
    try:
        launch = decode(Launch, Node("launch", {**RECORD, field: value}))
    except ValueError:
        return
    assert (launch.world_size or 0) <= 131_072
