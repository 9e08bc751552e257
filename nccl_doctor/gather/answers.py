"""Answers of a round, as they come to the coordinator: one letter of each participant, or of each
host that has a speaker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any

from nccl_doctor.gather.control_store import ControlStore, StoreTimeout
from nccl_doctor.gather.deaths import Deaths
from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.quiet import Quiet
from nccl_doctor.gather.refusals import kind_of
from nccl_doctor.gather.rows import rows_of_round
from nccl_doctor.gather.run_state import Run
from nccl_doctor.gather.sign_in import Claimant
from nccl_doctor.gather.voice.letters import LETTER_MAX, Voices, answers_in, answers_key
from nccl_doctor.launch import identity
from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.model.cluster_json import outcome_from_json
from nccl_doctor.model.json_node import Node

ANSWER_MAX = 4 << 20
"""Largest answer of one participant in one round, in bytes of JSON."""
STRANGERS_S = 5.0
"""Time in all to wait for answers in whose place a stranger has put what has no seal."""
_ASK_S = 1.0
"""Time after which it is looked whether those of a late speaker speak for themselves."""
_MANY, _READ_S = 256, 0.3
"""Late speakers from which on letters are read while others are still to come, and the time between
two such looks: to read them takes as long as to wait for them.
"""
_FEW = 8
"""Most late speakers of which that is asked before the end of the round: it is a look for each of
their ranks."""


class _Round:
    """Answers of one round: which are awaited, by which keys, and which have come."""

    def __init__(self, number: int, seats: Collection[int], voices: Voices) -> None:
        self.number, self.seats = number, seats
        self.own = {seat: f"evidence/{number}/{seat}" for seat in seats}
        """Key of an answer that stands alone."""
        self.spoken: dict[int, list[int]] = {}
        """First seat of a speaker → those here that it speaks for."""
        for seat in seats:
            if (first := voices.of(seat)) is not None:
                self.spoken.setdefault(first, []).append(seat)
        self.late = set(self.spoken)
        """Speakers whose letter has not come, by their first seats."""
        self._by_letter = {seat for members in self.spoken.values() for seat in members}
        self.here: dict[int, Outcome] = {}
        self.alone: set[int] = set()
        """Seats whose own answer is there, to be read in the end."""

    def has(self, seat: int) -> bool:
        """Whether a seat has answered."""
        return seat in self.here or seat in self.alone

    def keys(self, is_gone: Callable[[int], bool]) -> set[str]:
        """Keys of what is still to come, without those who will say nothing more."""
        left = [seat for seat in self.seats if not self.has(seat) and not is_gone(seat)]
        alone = {self.own[seat] for seat in left if seat not in self._by_letter}
        here = set(left)
        return alone | {
            answers_key(self.number, first)
            for first in self.late
            if not here.isdisjoint(self.spoken[first])
        }

    def singles(self, firsts: Iterable[int]) -> set[str]:
        """Keys of those of some speakers, if they speak for themselves."""
        return {self.own[seat] for first in firsts for seat in self.spoken[first]}

    def note(self, there: Set[str]) -> set[int]:
        """Take keys that have come. Returns: the speakers with a letter among them."""
        self.alone |= {seat for seat, key in self.own.items() if key in there}
        come = {first for first in self.late if answers_key(self.number, first) in there}
        self.late -= come
        return come

    def enter(self, first: int, outcomes: Mapping[int, Outcome]) -> None:
        """Take what a letter holds; a seat that it leaves out speaks for itself."""
        self.here.update(outcomes)
        self._by_letter -= {seat for seat in self.spoken[first] if seat not in outcomes}


class Answers:
    """Waits for the answers of others, without those who were killed or are quiet."""

    def __init__(
        self,
        run: Run,
        box: ControlStore,
        evidence: EvidenceLog,
        deaths: Deaths,
        quiet: Quiet,
    ) -> None:
        self._run, self._box, self._evidence = run, box, evidence
        self._deaths, self._quiet = deaths, quiet
        self.voices = Voices()
        self._met: Mapping[int, int] = {}
        self._strangers_s = 0.0
        self._is_near = identity.is_this_host(box.host)

    def of(
        self,
        number: int,
        seats: Collection[int],
        patience_s: float,
        look: Callable[[], bool],
        met: Mapping[int, int],
    ) -> dict[int, Outcome]:
        """Outcomes of these seats in a round, of those that answer in time.

        `look` is asked several times a second whether there is news of somebody's end. `met` is the
        lowest seat of the group of each: it stands in their outcomes, whatever these say of it.
        """
        self._met = met
        until = time.monotonic() + patience_s
        progress, named = self._run.progress, not self._run.options.redact
        round_ = _Round(number, seats, self.voices)
        progress.people(
            lambda: rows_of_round(
                self._evidence, {seat: round_.has(seat) for seat in seats}, named=named
            )
        )

        def is_gone(seat: int) -> bool:
            return seat in self._quiet.seats or self._deaths.of(seat) is not None

        while (keys := round_.keys(is_gone)) and (left_s := until - time.monotonic()) > 0:
            ask_s = _ASK_S if len(round_.late) < _MANY else _READ_S
            patience_s = min(left_s, ask_s) if round_.late else left_s
            self._take(round_, self._box.wait(keys, patience_s, progress.tick, look))
            if 0 < len(round_.late) <= _FEW:
                self._take(round_, self._box.wait(round_.singles(round_.late), 0.0))
        if rest := {key for seat, key in round_.own.items() if not round_.has(seat)}:
            self._take(round_, self._box.wait(rest, 0.0))
        for first in round_.late:
            self.voices.mute(first)
        return round_.here | self._read(round_.own, round_.alone - round_.here.keys())

    def _take(self, round_: _Round, there: Set[str]) -> None:
        """Take what has come: letters are opened, of single answers it is only noted."""
        keys = {answers_key(round_.number, first): first for first in round_.note(there)}
        many = self._box.many(keys) if keys and self._is_near else {}
        for key, first in keys.items():
            seats = round_.spoken[first]
            try:
                letter = self._letter(key, many.get(key), LETTER_MAX)
                answers = answers_in(letter, first, seats, self.voices.known)
            except (ValueError, StoreTimeout) as error:
                round_.enter(first, self._refused(key, error, seats))
            else:
                found = {seat: self._outcome(key, seat, data) for seat, data in answers.items()}
                round_.enter(first, found)

    def _read(self, own: dict[int, str], seats: Iterable[int]) -> dict[int, Outcome]:
        """Outcomes of those that have answered by themselves."""
        keys = {own[seat]: seat for seat in seats}
        many = self._box.many(keys) if keys and self._is_near else {}
        found: dict[int, Outcome] = {}
        for key, seat in keys.items():
            try:
                data = self._letter(key, many.get(key), ANSWER_MAX)
            except (ValueError, StoreTimeout) as error:
                found.update(self._refused(key, error, [seat]))
            else:
                found[seat] = self._outcome(key, seat, data)
        return found

    def _letter(self, key: str, data: bytes | None, largest: int) -> Any:
        """A letter; `data` is what was read of it already. With a key, that of a stranger may be
        replaced soon.
        """
        began, is_sealed = time.monotonic(), self._run.config.key is not None
        try:
            if data is None:
                return self._box.get(key, 0.0, largest=largest)
            return self._box.opened(key, data, largest)
        except BadMessage:
            if not is_sealed or self._strangers_s > STRANGERS_S:
                raise
        try:
            return self._box.get(key, STRANGERS_S / 2, largest=largest)
        finally:
            self._strangers_s += time.monotonic() - began

    def _outcome(self, key: str, seat: int, data: Any) -> Outcome:
        try:
            if isinstance(data, dict):
                data["group"] = self._met.get(seat)
            return outcome_from_json(Node(f"seat {seat}: evidence", data))
        except ValueError as error:
            return self._refused(key, error, [seat])[seat]

    def _refused(self, key: str, error: Exception, seats: Iterable[int]) -> dict[int, Outcome]:
        """Outcomes where a letter cannot be taken: untested; or silent, if it was taken away."""
        if isinstance(error, StoreTimeout):
            silent = Outcome(OutcomeStatus.SILENT, reason="its answer is gone from the store")
            return dict.fromkeys(seats, silent)
        assert isinstance(error, ValueError)
        found = {}
        for seat in seats:
            if self._run.config.key and isinstance(error, BadMessage):  # it is nobody's of the run
                self._evidence.refusals.unsealed(key, kind_of(error), str(error), Claimant())
            else:
                self._evidence.refusals.answer(key, error, self._evidence.place(seat))
            found[seat] = Outcome(OutcomeStatus.UNTESTED, reason="its answer was refused")
        return found
