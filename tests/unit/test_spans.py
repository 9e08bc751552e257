"""Members of groups as spans."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.toolkit.groups.spans import from_span, to_span


@given(st.lists(st.integers(0, 40), unique=True))
def test_the_same_members_come_back(members: list[int]) -> None:
    assert from_span(json.loads(json.dumps(to_span(members)))) == members


@pytest.mark.parametrize("members", [range(9), range(1, 2048, 2), range(30, 0, -3)])
def test_what_lies_at_equal_distances_is_a_span(members: range) -> None:
    span = to_span(members)
    assert isinstance(span, dict)
    assert from_span(span) == list(members)
