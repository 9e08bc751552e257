"""Words that several ranks have in common: once in a batch, and once in the memory of rank 0.

An outcome in a batch may have, in place of its `facts`, the number of a text of the batch, and in
place of its `breadcrumbs` the number of one with their steps, and the time of each.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from nccl_doctor.gather.envelope import BadMessage, parsed
from nccl_doctor.model.cluster import Trail
from nccl_doctor.model.codec import MAX_SECONDS

_FACTS, _CRUMBS = "facts", "breadcrumbs"
_STEPS, _AT = "steps", "at_s"
_DIGEST = 16


class Shared:
    """Texts of a batch, as its writer collects them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        """The texts, by their numbers."""
        return list(self._numbers)

    def pack_all(self, outcomes: Sequence[Any], *, least: int) -> list[Any]:
        """The outcomes as they stand in the batch, with facts as a text where so many or more of
        them have the same.
        """
        facts = [json.dumps(each.get(_FACTS)) if _is_packable(each) else "" for each in outcomes]
        counts = Counter(facts)
        return [
            self._packed(each, text if text and counts[text] >= least else None)
            for each, text in zip(outcomes, facts, strict=True)
        ]

    def _packed(self, outcome: Any, facts: str | None) -> Any:
        if not isinstance(outcome, dict):
            return outcome
        packed = dict(outcome)
        if facts is not None:
            packed[_FACTS] = self._number(facts)
        crumbs = outcome.get(_CRUMBS)
        if isinstance(crumbs, list) and all(_is_timed(each) for each in crumbs):
            steps = [{key: value for key, value in c.items() if key != _AT} for c in crumbs]
            number = self._number(json.dumps(steps))
            packed[_CRUMBS] = {_STEPS: number, _AT: [c[_AT] for c in crumbs]}
        return packed

    def _number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))


def _is_packable(outcome: Any) -> bool:
    return isinstance(outcome, dict) and isinstance(outcome.get(_FACTS), dict)


def _is_timed(crumb: Any) -> bool:
    return isinstance(crumb, dict) and type(crumb.get(_AT)) in (int, float)


class Known:
    """All texts that rank 0 has read, each once."""

    def __init__(self) -> None:
        self._values: dict[bytes, Any] = {}

    def value(self, text: Any) -> Any:
        """Value of a text, the same object for the same text; None if it cannot be read."""
        if not isinstance(text, str):
            return None
        data = text.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(data, digest_size=_DIGEST).digest()
        if digest not in self._values:
            try:
                self._values[digest] = parsed(data)
            except BadMessage:
                self._values[digest] = None
        return self._values[digest]

    def unpack(self, outcomes: Iterable[Any], texts: Any) -> None:
        """Put what the texts of a batch say into its outcomes. What does not fit stays as it is,
        and is refused where the outcome is read.
        """
        values = [self.value(text) for text in texts] if isinstance(texts, list) else []

        def said(number: Any, kind: type) -> Any:
            known = type(number) is int and 0 <= number < len(values)
            return values[number] if known and type(values[number]) is kind else None

        for outcome in outcomes:
            if not isinstance(outcome, dict):
                continue
            if (facts := said(outcome.get(_FACTS), dict)) is not None:
                outcome[_FACTS] = facts
            packed = outcome.get(_CRUMBS)
            if isinstance(packed, dict):
                steps, times = said(packed.get(_STEPS), list), packed.get(_AT)
                if _are_steps(steps) and isinstance(times, list) and _fit(times, len(steps)):
                    outcome[_CRUMBS] = Trail(steps, times)


def _are_steps(steps: Any) -> bool:
    return steps is not None and all(type(each) is dict for each in steps)


def _fit(times: Sequence[Any], count: int) -> bool:
    return len(times) == count and all(
        type(each) in (int, float) and 0 <= each <= MAX_SECONDS for each in times
    )
