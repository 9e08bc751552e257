"""Answers of a round, as they come to the coordinator: one letter of each participant, or of each
host that has a speaker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from nccl_doctor.gather.control_store import OPERATION_S, ControlStore, StoreTimeout
from nccl_doctor.gather.deaths import Deaths
from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.quiet import Quiet
from nccl_doctor.gather.rows import rows_of_round
from nccl_doctor.gather.run_state import Run
from nccl_doctor.gather.voice.letters import LETTER_MAX, Voices, answers_in, answers_key
from nccl_doctor.launch import identity
from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.model.cluster_json import outcome_from_json
from nccl_doctor.model.json_node import Node

ANSWER_MAX = 4 << 20
"""Largest answer of one participant in one round, in bytes of JSON."""
_ASK_S = 1.0
"""Time after which it is looked whether those of a late speaker speak for themselves."""
_FEW = 8
"""Most late speakers of which that is asked before the end of the round: it is a look for each of
their ranks."""


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
        self._is_near = identity.is_this_host(box.host)

    def of(
        self, number: int, seats: Collection[int], patience_s: float, look: Callable[[], bool]
    ) -> dict[int, Outcome]:
        """Outcomes of these seats in a round, of those that answer in time.

        `look` is asked several times a second whether there is news of somebody's end.
        """
        until = time.monotonic() + patience_s
        own = {seat: f"evidence/{number}/{seat}" for seat in seats}
        letters = {seat: f for seat in seats if (f := self.voices.of(seat)) is not None}
        opened: set[int] = set()
        here: dict[int, Outcome] = {}
        alone: set[int] = set()
        """Seats whose own answer is there."""
        named = not self._run.options.redact
        self._run.progress.people(
            lambda: rows_of_round(
                self._evidence, {seat: seat in here or seat in alone for seat in seats}, named=named
            )
        )

        def late() -> set[int]:
            return set(letters.values()) - opened

        def take(there: set[str]) -> None:
            """Take what has come: letters are opened, of single answers it is only noted."""
            alone.update(seat for seat, key in own.items() if key in there)
            come = {first for first in late() if answers_key(number, first) in there}
            opened.update(come)
            here.update(self._opened(number, come, letters))

        def look_for_singles() -> None:
            single = {own[seat] for seat, first in letters.items() if first in late()}
            take(self._box.wait(single, 0.0) if single else set())

        while True:
            keys = {
                own[seat]
                if (first := letters.get(seat)) is None or first in opened
                else answers_key(number, first)
                for seat in seats
                if seat not in here
                and seat not in alone
                and seat not in self._quiet.seats
                and self._deaths.of(seat) is None
            }
            left_s = until - time.monotonic()
            if not keys or left_s <= 0:
                break
            take(
                self._box.wait(
                    keys,
                    min(left_s, _ASK_S) if late() else left_s,
                    self._run.progress.tick,
                    look,
                )
            )
            if 0 < len(late()) <= _FEW:
                look_for_singles()
        rest = {own[s] for s in seats if s not in here and s not in alone}
        take(self._box.wait(rest, 0.0) if rest else set())
        for first in late():
            self.voices.mute(first)
        return here | self._read(own, alone - here.keys())

    def _opened(
        self, number: int, firsts: Collection[int], letters: dict[int, int]
    ) -> dict[int, Outcome]:
        """Outcomes in the letters of these speakers; a seat that a letter leaves out speaks for
        itself.
        """
        found: dict[int, Outcome] = {}
        keys = {answers_key(number, first): first for first in firsts}
        many = self._box.many(keys, LETTER_MAX) if keys and self._is_near else {}
        for key, first in keys.items():
            seats = [seat for seat, each in letters.items() if each == first]
            try:
                answers = answers_in(self._letter(key, many.get(key), LETTER_MAX), first, seats)
            except (ValueError, StoreTimeout) as error:
                found.update(self._refused(key, error, seats))
                continue
            for seat, data in answers.items():
                found[seat] = self._outcome(key, seat, data)
        return found

    def _read(self, own: dict[int, str], seats: Iterable[int]) -> dict[int, Outcome]:
        """Outcomes of those that have answered by themselves."""
        keys = {own[seat]: seat for seat in seats}
        many = self._box.many(keys, ANSWER_MAX) if keys and self._is_near else {}
        found: dict[int, Outcome] = {}
        for key, seat in keys.items():
            try:
                data = self._letter(key, many.get(key), ANSWER_MAX)
            except (ValueError, StoreTimeout) as error:
                found.update(self._refused(key, error, [seat]))
            else:
                found[seat] = self._outcome(key, seat, data)
        return found

    def _letter(self, key: str, data: Any, largest: int) -> Any:
        """A letter; `data` is what was read of it already, None for nothing."""
        if isinstance(data, BadMessage):
            raise data
        return self._box.get(key, OPERATION_S, largest=largest) if data is None else data

    def _outcome(self, key: str, seat: int, data: Any) -> Outcome:
        try:
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
            self._evidence.refusals.answer(key, error, self._evidence.place(seat))
            found[seat] = Outcome(OutcomeStatus.UNTESTED, reason="its answer was refused")
        return found
