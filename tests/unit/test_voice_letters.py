"""Letters of speakers, as rank 0 reads them; whatever is in them."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_doctor.gather.envelope import BadMessage, NotAuthentic
from nccl_doctor.gather.voice.letters import (
    MOST_SPOKEN,
    Voices,
    answers_in,
    is_of_speaker,
    letter_of_answers,
    letter_of_sign_ins,
    refused_in,
    sign_ins_in,
)


def test_a_letter_holds_the_sign_ins_of_seats_in_a_row() -> None:
    assert sign_ins_in(7, letter_of_sign_ins(["a", "b"])) == [(7, "a"), (8, "b")]


@pytest.mark.parametrize("letter", [{"token": "x"}, [], None, 3, "sign_ins"])
def test_what_is_no_letter_of_several_is_one_sign_in(letter: Any) -> None:
    assert sign_ins_in(7, letter) == [(7, letter)]


@pytest.mark.parametrize("sign_ins", [[], ["a"] * (MOST_SPOKEN + 1), {"0": "a"}, None])
def test_a_letter_of_nobody_or_of_too_many_is_refused(sign_ins: Any) -> None:
    with pytest.raises(ValueError, match="seat 7"):
        sign_ins_in(7, {"sign_ins": sign_ins})


def test_all_that_a_letter_claims_are_refused_with_it() -> None:
    error = NotAuthentic("no key", letter_of_sign_ins([{"rank": 1}, {"rank": 2}]))
    refused = refused_in(7, error)
    assert [(seat, type(each), each.value) for seat, each in refused] == [
        (7, NotAuthentic, {"rank": 1}),
        (8, NotAuthentic, {"rank": 2}),
    ]
    assert {str(each) for _, each in refused} == {"no key"}
    assert refused_in(7, BadMessage("damaged"))[0][0] == 7
    many = BadMessage("no", {"sign_ins": [{}] * 1000})
    assert refused_in(7, many) == [(7, many)]


def test_a_letter_answers_for_some_seats() -> None:
    letter = letter_of_answers({7: {"status": "ok"}, 9: {"status": "hung"}, 200: {}})
    assert answers_in(letter, 7, (7, 8, 9)) == {7: {"status": "ok"}, 9: {"status": "hung"}}


@pytest.mark.parametrize("letter", [None, [], {}, {"answers": []}, {"answers": None}, "answers"])
def test_what_is_no_letter_of_answers_is_refused(letter: Any) -> None:
    with pytest.raises(ValueError, match="seat 7"):
        answers_in(letter, 7, (7, 8))


def test_a_speaker_may_speak_for_one() -> None:
    assert is_of_speaker(letter_of_sign_ins(["a"]))
    assert not is_of_speaker({"token": "a"})
    assert not is_of_speaker(["sign_ins"])


def test_those_of_a_mute_speaker_speak_for_themselves() -> None:
    voices = Voices()
    voices.note(4, (4, 5, 6))
    voices.note(9, (9,))
    assert [voices.of(seat) for seat in (3, 4, 6, 9)] == [None, 4, 4, 9]
    voices.mute(4)
    assert [voices.of(seat) for seat in (4, 6)] == [None, None]
