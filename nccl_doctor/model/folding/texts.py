"""JSON of outcomes on one line; what many of them share is written once, and then copied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nccl_doctor.model.cluster import Facts, Outcome, Trail
from nccl_doctor.model.folding.plain import compact

_TIME = '"at_s":0'


class Texts:
    """JSON of the facts of one report, which keeps all of them meanwhile.

    Each text is what `compact` makes of the same as plain data; it raises the same errors.
    """

    def __init__(self) -> None:
        self._met: set[int] = set()
        self._of_values: dict[int, str] = {}
        self._of_steps: dict[int, list[str]] = {}
        self._of_words: dict[str, str] = {}

    def of_facts(self, facts: Facts) -> str:
        """JSON of the facts of a host or rank, as of `facts_to_json`."""
        return self._table(
            {
                check: self._table({name: self.of_outcome(each) for name, each in rounds.items()})
                for check, rounds in facts.items()
            }
        )

    def of_outcome(self, outcome: Outcome) -> str:
        """One outcome, as in `Outcome.to_json`; nearly all have no other keys than these."""
        if (
            outcome.extra
            or outcome.witness
            or outcome.stack
            or outcome.state
            or outcome.wchan
            or outcome.log_tail
            or outcome.exit_code is not None
            or outcome.signal is not None
            or not math.isfinite(outcome.duration_s)
        ):
            return compact(outcome.to_json())
        parts = [f'"duration_s":{round(outcome.duration_s, 4)!r}']
        if outcome.breadcrumbs:
            parts.insert(0, f'"breadcrumbs":{self._trail(outcome.breadcrumbs)}')
        if outcome.facts:
            parts.append(f'"facts":{self._value(outcome.facts)}')
        if outcome.group is not None:
            parts.append(f'"group":{outcome.group}')
        if outcome.reason:
            parts.append(f'"reason":{self._word(outcome.reason)}')
        parts.append(f'"status":{self._word(outcome.status.value)}')
        return "{" + ",".join(parts) + "}"

    def _table(self, texts: Mapping[str, str]) -> str:
        parts = [f"{self._word(key)}:{texts[key]}" for key in sorted(texts)]
        return "{" + ",".join(parts) + "}"

    def _word(self, word: str) -> str:
        if word not in self._of_words:
            self._of_words[word] = compact(word)
        return self._of_words[word]

    def _value(self, value: Mapping[str, Any]) -> str:
        """Facts of an outcome. Only what comes again is kept: each rank has some of its own."""
        key = id(value)
        if (text := self._of_values.get(key)) is None:
            text = compact(dict(value))
            if key in self._met:
                self._of_values[key] = text
            self._met.add(key)
        return text

    def _trail(self, crumbs: Sequence[Mapping[str, Any]]) -> str:
        if type(crumbs) is not Trail:
            return compact([dict(crumb) for crumb in crumbs])
        key = id(crumbs.steps)
        if key not in self._of_steps:
            self._of_steps[key] = compact([{**step, "at_s": 0} for step in crumbs.steps]).split(
                _TIME
            )
        parts = self._of_steps[key]
        times = list(crumbs.times)
        if len(parts) != len(times) + 1 or not all(map(math.isfinite, times)):
            return compact([dict(crumb) for crumb in crumbs])
        made = [f'{part}"at_s":{at_s!r}' for part, at_s in zip(parts, times, strict=False)]
        return "".join(made) + parts[-1]
