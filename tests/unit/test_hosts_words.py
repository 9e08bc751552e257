"""A difference in words: who has what."""

from __future__ import annotations

from nccl_doctor.toolkit.hosts import sides_in_words


def test_each_value_is_said_with_those_who_have_it() -> None:
    assert sides_in_words({"1500": ["nd1"], "1400": ["nd0"]}) == "1400 on nd0; 1500 on nd1"
    assert sides_in_words({"1400": ["nd3"], "1500": ["nd0", "nd1", "nd2"]}) == (
        "1500 on nd0, nd1, nd2; 1400 on nd3"
    )


def test_of_many_a_few_are_named() -> None:
    many = [f"nd{number}" for number in range(64)]
    assert sides_in_words({"1500": many}) == "1500 on nd0, nd1, nd2 and 61 more"
