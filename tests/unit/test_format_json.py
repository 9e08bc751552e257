"""The report as JSON, in the form that the encoder of Python gives it."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any

from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.report.formats import json as json_format
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, made_check


class Level(IntEnum):
    LOW = 1


def rendered(value: Any) -> tuple[str, Any]:
    """The text of a report in which a host has this value for a fact, and what is read of it."""
    cluster = make_cluster(("nd0",), 1, check="shm", by_host={"nd0": {"value": value}})
    text = json_format.render(conclude(cluster, [made_check("shm")], run=RUN))
    (host,) = json.loads(text)["hosts"]
    return text, host["facts"]["shm"]["alone"]["facts"]["value"]


def test_it_is_what_the_encoder_of_python_writes() -> None:
    value = {
        "": [[], {}, "", [[{}], {"a": []}]],
        'a"\\\n\x00\x7f': ["é", "\ud800", "𝄞", "/", "\u2028"],
        "Z": [0, -1, 10**30, True, False, None],
        "numbers": [0.0, -0.0, 1e-7, 1e16, 1.5, 5e-324, 1.7976931348623157e308],
        "deep": [[[[[[{"x": [1, {"y": [2]}]}]]]]]],
    }
    text, read = rendered(value)
    assert read == value
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"


def test_foreign_values_are_texts_in_the_same_form() -> None:
    value = {
        1: {"b", "a", "a!"},
        "numbers": [float("nan"), float("inf"), float("-inf"), Level.LOW, 10**30],
        "more": ((), {}, b"x", object),
    }
    text, read = rendered(value)
    assert read == {
        "1": ["a", "a!", "b"],
        "numbers": ["NaN", "Infinity", "-Infinity", 1, 10**30],
        "more": [[], {}, "b'x'", "<class 'object'>"],
    }
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"
