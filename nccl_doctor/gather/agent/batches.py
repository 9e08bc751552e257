"""Batches of an agent, as rank 0 reads them: several sign-ins, or several answers, in one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from nccl_doctor.gather.agent.sharing import Known, Shared
from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.model.codec import Node

AGENT_RANKS_MAX = 32
"""Most ranks of one agent; with more on a host, each answers by itself."""
BATCH_MAX = 16 << 20
"""Largest batch with the answers of some ranks, in bytes of JSON."""
_SIGN_INS, _ANSWERS, _TEXTS = "sign_ins", "answers", "texts"
_ALL, _SAME = 1, 2
"""Outcomes with the same facts from which on these are a text: of what hosts say before they sign
in, most is the same on all; of what ranks say in a round, what some have in common."""


def batch_of_sign_ins(sign_ins: Sequence[Any]) -> dict[str, Any]:
    """Batch with the sign-ins of participants whose seats follow each other."""
    shared = Shared()
    return {
        _SIGN_INS: [_packed(shared, each) for each in sign_ins],
        _TEXTS: shared.texts,
    }


def _packed(shared: Shared, sign_in: Any) -> Any:
    if not isinstance(sign_in, dict) or not isinstance(sign_in.get("facts"), dict):
        return sign_in
    facts = {}
    for check, rounds in sign_in["facts"].items():
        packed = shared.pack_all(list(rounds.values()), least=_ALL)
        facts[check] = dict(zip(rounds, packed, strict=True))
    return {**sign_in, "facts": facts}


def _outcomes_of(sign_in: Any) -> Iterator[Any]:
    facts = sign_in.get("facts") if isinstance(sign_in, dict) else None
    for rounds in facts.values() if isinstance(facts, dict) else ():
        if isinstance(rounds, dict):
            yield from rounds.values()


def is_of_agent(batch: Any) -> bool:
    """True if a sign-in is a batch of an agent, be it for one rank alone."""
    return isinstance(batch, Mapping) and _SIGN_INS in batch


def sign_ins_in(seat: int, batch: Any, known: Known) -> list[tuple[int, Any]]:
    """The sign-ins in a batch at this seat, each with its seat; one that stands alone, too. What
    they share is put into them, as `known`.

    Raises:
        ValueError: more than an agent has.
    """
    if not is_of_agent(batch):
        return [(seat, batch)]
    sign_ins = _sign_ins(seat, batch)
    known.unpack(chain.from_iterable(map(_outcomes_of, sign_ins)), batch.get(_TEXTS))
    return list(enumerate(sign_ins, seat))


def _sign_ins(seat: int, batch: Any) -> list[Any]:
    sign_ins = Node(f"seat {seat}: sign-ins", batch).get(_SIGN_INS, list)
    if not 0 < len(sign_ins) <= AGENT_RANKS_MAX:
        raise ValueError(
            f"seat {seat}: {len(sign_ins)} sign-ins in one, not 1 to {AGENT_RANKS_MAX}"
        )
    return sign_ins


def refused_in(seat: int, error: BadMessage) -> list[tuple[int, BadMessage]]:
    """Each sign-in of a batch that cannot be taken, if it can be read, with the reason."""
    if not is_of_agent(error.value):
        return [(seat, error)]
    try:
        claims = _sign_ins(seat, error.value)
    except ValueError:
        return [(seat, error)]
    return [(each, type(error)(str(error), data)) for each, data in enumerate(claims, seat)]


def answers_key(number: int, first: int) -> str:
    """Key of the batch with the answers in a round of a run, by the first seat of an agent."""
    return f"evidence/{number}/of/{first}"


def batch_of_answers(answers: Mapping[int, Any]) -> dict[str, Any]:
    """Batch with the answers of some seats in one round."""
    shared = Shared()
    packed = shared.pack_all(list(answers.values()), least=_SAME)
    return {_ANSWERS: dict(zip(map(str, answers), packed, strict=True)), _TEXTS: shared.texts}


def answers_in(batch: Any, first: int, seats: Collection[int], known: Known) -> dict[int, Any]:
    """The answers in a batch, of those of these seats that it has. What they share is put into
    them, as `known`.

    Raises:
        ValueError: it is no such batch.
    """
    node = Node(f"seat {first}: answers", Node(f"seat {first}", batch).get(_ANSWERS, dict))
    answers = {seat: node.data[str(seat)] for seat in seats if str(seat) in node.data}
    known.unpack(answers.values(), batch.get(_TEXTS))
    return answers


class Agents:
    """Seats that have an agent, as rank 0 knows them from the sign-ins."""

    def __init__(self) -> None:
        self.known = Known()
        """Texts of their batches so far."""
        self._first: dict[int, int] = {}
        self._removed: set[int] = set()

    def add(self, first: int, seats: Collection[int]) -> None:
        """Add an agent, by its `first` seat, with the seats in its batch of sign-ins."""
        self._first.update(dict.fromkeys(seats, first))

    def remove(self, first: int) -> None:
        """Wait for no batch of this agent any more: its ranks answer by themselves."""
        self._removed.add(first)

    def of(self, seat: int) -> int | None:
        """First seat of the agent of a seat; None for one that answers by itself."""
        first = self._first.get(seat)
        return None if first in self._removed else first
