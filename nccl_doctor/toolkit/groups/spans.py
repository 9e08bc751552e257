"""Members of process groups as parameters of a round, which every rank reads: most are spans.

The even ranks of 1,024 take 2 KB as a list, and the same to each of 1,024 readers. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

Span = list[int] | dict[str, int]
"""Members, or `start`, `stop` and `step` as of `range`."""
_SHORT = 8


def to_span(members: Sequence[int]) -> Span:
    """Members in the shorter form: a span if they are more than a few at equal distances."""
    if len(members) > _SHORT:
        first, second, *_, last = members
        step = second - first
        if step and list(range(first, last + step, step)) == list(members):
            return {"start": first, "stop": last + step, "step": step}
    return list(members)


def from_span(span: Span) -> list[int]:
    """Inverse of `to_span`."""
    if isinstance(span, dict):
        return list(range(span["start"], span["stop"], span["step"]))
    return list(span)
