"""Letters of a speaker, as rank 0 reads them: several sign-ins, or several answers, in one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.model.json_node import Node

MOST_SPOKEN = 32
"""Most ranks for which one speaker speaks; with more on a host, each speaks for itself."""
LETTER_MAX = 16 << 20
"""Largest letter with the answers of some ranks, in bytes of JSON."""
_SIGN_INS, _ANSWERS = "sign_ins", "answers"


def letter_of_sign_ins(sign_ins: Sequence[Any]) -> dict[str, Any]:
    """Letter with the sign-ins of participants whose seats follow each other."""
    return {_SIGN_INS: list(sign_ins)}


def is_of_speaker(letter: Any) -> bool:
    """Whether a sign-in is a letter of a speaker, be it for one rank alone."""
    return isinstance(letter, Mapping) and _SIGN_INS in letter


def sign_ins_in(seat: int, letter: Any) -> list[tuple[int, Any]]:
    """The sign-ins in a letter at this seat, each with its seat; one that stands alone, too.

    Raises:
        ValueError: more than a speaker speaks for.
    """
    if not is_of_speaker(letter):
        return [(seat, letter)]
    sign_ins = Node(f"seat {seat}: sign-ins", letter).get(_SIGN_INS, list)
    if not 0 < len(sign_ins) <= MOST_SPOKEN:
        raise ValueError(f"seat {seat}: {len(sign_ins)} sign-ins in one, not 1 to {MOST_SPOKEN}")
    return list(enumerate(sign_ins, seat))


def refused_in(seat: int, error: BadMessage) -> list[tuple[int, BadMessage]]:
    """Each sign-in of a letter that cannot be taken, if it can be read, with the reason."""
    try:
        return [
            (each, type(error)(str(error), data)) for each, data in sign_ins_in(seat, error.value)
        ]
    except ValueError:
        return [(seat, error)]


def answers_key(number: int, first: int) -> str:
    """Key of the letter with the answers in a round of a run, by the first seat of a speaker."""
    return f"evidence/{number}/of/{first}"


def letter_of_answers(answers: Mapping[int, Any]) -> dict[str, Any]:
    """Letter with the answers of some seats in one round."""
    return {_ANSWERS: {str(seat): answer for seat, answer in answers.items()}}


def answers_in(letter: Any, first: int, seats: Collection[int]) -> dict[int, Any]:
    """The answers in a letter, of those of these seats that it has.

    Raises:
        ValueError: it is no such letter.
    """
    node = Node(f"seat {first}: answers", Node(f"seat {first}", letter).get(_ANSWERS, dict))
    return {seat: node.data[str(seat)] for seat in seats if str(seat) in node.data}


class Voices:
    """The seats that speakers speak for, as rank 0 knows them from the sign-ins."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._mute: set[int] = set()

    def note(self, first: int, seats: Collection[int]) -> None:
        """Take it from their sign-in that a speaker, by its `first` seat, speaks for these."""
        self._first.update(dict.fromkeys(seats, first))

    def mute(self, first: int) -> None:
        """Wait for no letter of this speaker any more: its ranks speak for themselves."""
        self._mute.add(first)

    def of(self, seat: int) -> int | None:
        """First seat of the speaker of a seat; None for one that speaks for itself."""
        first = self._first.get(seat)
        return None if first in self._mute else first
