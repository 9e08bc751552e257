"""What messages are wrapped in: whatever comes is a value or a `BadMessage`."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor import __version__
from nccl_doctor.gather.envelope import (
    CLAIM_MAX,
    DEEPEST,
    OPEN,
    PROTOCOL,
    BadMessage,
    Budget,
    NotAuthentic,
    OtherVersion,
    Seal,
    unwrap,
    wrap,
)
from nccl_doctor.gather.store import PIECE_BYTES
from tests.support.big_reports import recorded

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)
SEALS = st.builds(Seal, st.none() | st.binary(min_size=1, max_size=64), st.text(max_size=20))
HEAD = f'nccl-doctor {{"protocol": {PROTOCOL}, "version": "{__version__}"}}\n'.encode()


@given(JSON, SEALS, st.text(max_size=20))
def test_what_was_wrapped_is_read_again(value: Any, seal: Seal, key: str) -> None:
    assert unwrap(key, wrap(key, value, seal), seal) == (value, __version__)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_bad_message(data: bytes) -> None:
    for message in (data, b"nccl-doctor " + data, HEAD + data, HEAD + zlib.compress(data)):
        try:
            unwrap("key", message)
        except BadMessage:
            continue
        json.loads(data)


@given(JSON)
def test_any_header_is_another_version_or_bad(header: Any) -> None:
    head = b"nccl-doctor " + json.dumps(header).encode() + b"\n"
    with pytest.raises(BadMessage) as caught:
        unwrap("key", head + zlib.compress(b"1"))
    assert len(str(caught.value)) < 200


@given(JSON, st.data())
def test_no_bit_of_a_sealed_message_can_be_changed(value: Any, data: st.DataObject) -> None:
    seal = Seal(b"a key that nobody guesses", "run 1")
    message = bytearray(wrap("key", value, seal))
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert unwrap("key", bytes(message), seal)[0] == value
    except BadMessage:
        return


def test_versions_are_told() -> None:
    head = b'nccl-doctor {"protocol": 99, "version": "9.1"}\n'
    with pytest.raises(OtherVersion, match=f"of nccl-doctor 9.1, here is {__version__}"):
        unwrap("key", head + zlib.compress(b'{"host": 1}'))
    with pytest.raises(OtherVersion):
        unwrap("key", head + b"whatever it may be")


@pytest.mark.parametrize(
    ("seal", "other", "words"),
    [
        (Seal(b"one"), Seal(b"two"), "another key"),
        (Seal(b"one", "run"), Seal(b"one", "other run"), "another key"),
        (Seal(b"one"), Seal(), "with a key"),
        (Seal(), Seal(b"one"), "without the key"),
    ],
)
def test_another_key_is_told(seal: Seal, other: Seal, words: str) -> None:
    with pytest.raises(NotAuthentic, match=words) as caught:
        unwrap("key", wrap("key", {"host": "nd1"}, seal), other)
    assert caught.value.value == {"host": "nd1"}


def test_a_message_belongs_to_its_place() -> None:
    seal = Seal(b"one")
    with pytest.raises(NotAuthentic):
        unwrap("order/2", wrap("order/1", {"finish": 0}, seal), seal)


def test_what_is_too_large_or_too_deep_is_neither_sent_nor_read() -> None:
    with pytest.raises(ValueError, match="key: 1002 bytes is more than 1000"):
        wrap("key", "x" * 1000, largest=1000)
    with pytest.raises(BadMessage, match="larger than 1000 bytes"):
        unwrap("key", wrap("key", "x" * 1000), largest=1000)
    bomb = HEAD + zlib.compress(b"[" * 100_000_000, 9)
    assert len(bomb) < 200_000
    with pytest.raises(BadMessage, match="larger than"):
        unwrap("key", bomb)
    for depth in (DEEPEST + 1, 100_000):
        text = b"[" * depth + b"]" * depth
        with pytest.raises(BadMessage, match="too deep"):
            unwrap("key", HEAD + zlib.compress(text))
    text = b"[" * (DEEPEST - 1) + b"]" * (DEEPEST - 1)
    unwrap("key", HEAD + zlib.compress(text))


def test_of_what_is_not_sealed_a_small_claim_is_read_and_no_more() -> None:
    seal = Seal(b"one")
    big = {"host": "x" * CLAIM_MAX}
    for other in (OPEN, Seal(b"two")):
        with pytest.raises(NotAuthentic) as caught:
            unwrap("key", wrap("key", big, other), seal)
        assert caught.value.value is None
    newer = HEAD.replace(str(PROTOCOL).encode(), b"99") + zlib.compress(json.dumps(big).encode())
    with pytest.raises(OtherVersion) as caught:
        unwrap("key", newer, seal)
    assert caught.value.value is None
    odd = HEAD[:-2] + b', "mac": "' + b"[" * 64 + b'"}\n'
    with pytest.raises(BadMessage, match="no message"):  # the header is not parsed either
        unwrap("key", odd + zlib.compress(b"1"), seal)


def test_messages_together_take_no_more_than_their_budget() -> None:
    budget = Budget(4 << 20)
    large = wrap("key", "x" * (1 << 20))
    unwrap("key", large, budget=budget)
    for _ in range(40):
        with pytest.raises(BadMessage, match="the most that is left for one without a key"):
            unwrap("key", large, budget=budget)
    assert budget.left < 100
    assert unwrap("key", wrap("key", 1), budget=budget)[0] == 1, "who says little is heard"
    seal = Seal(b"one")
    assert unwrap("key", wrap("key", big := "x" * (1 << 20), seal), seal, budget=budget)[0] == big


def test_a_healthy_rank_signs_in_with_two_small_packets_and_answers_with_one() -> None:
    report = recorded()
    for rank in report["ranks"]:
        alone = {check: each for check, each in rank["facts"].items() if "alone" in each}
        sign_in = {**rank, "facts": alone}
        assert len(wrap("run/seat/16383", sign_in)) <= 2 * PIECE_BYTES
    for place in (*report["hosts"], *report["ranks"]):
        for outcomes in place["facts"].values():
            for outcome in outcomes.values():
                assert len(wrap("run/evidence/31/16383", outcome)) <= PIECE_BYTES
