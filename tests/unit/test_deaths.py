"""Participants that were killed: what a stranger may have written about them is not believed."""

from __future__ import annotations

import json
import os

import pytest

from nccl_doctor.gather.ends import Death, death_of
from nccl_doctor.model.codec import Node, decode


def test_a_death_arrives_as_it_was_told() -> None:
    read = decode(Death, Node("death", json.loads(json.dumps(death_of(os.getpid(), 3, "SIGKILL")))))
    assert (read.pid, read.rank, read.signal) == (os.getpid(), 3, "SIGKILL")
    assert decode(Death, Node("death", death_of(7, None, "signal 40"))).rank is None


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": "7"}, {"pid": None}, {"rank": "x"}, {"host": 5}, {"signal": None},
        {"signal": "\x1b[2J"}, {"signal": "SIG" + "x" * 1000},
    ],
)  # fmt: skip
def test_what_is_no_record_of_ours_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"death|signal"):
        decode(Death, Node("death", {**death_of(7, 3, "SIGKILL"), **changes}))
    for text in ("x", [], None, 5):
        with pytest.raises(ValueError, match="death"):
            decode(Death, Node("death", text))
