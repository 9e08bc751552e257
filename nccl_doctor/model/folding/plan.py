"""Form that values have in common: places where all are the same, and those of each alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nccl_doctor.model.folding import pointer
from nccl_doctor.model.folding.pattern import Place
from nccl_doctor.model.folding.plain import compact
from nccl_doctor.model.folding.sample import DEEPEST

Path = tuple[str | int, ...]

POINTER_COST = 40
"""About the bytes of a pointer to a place that is not as in the template."""


class Hole:
    """Place where each value has its own."""


class Constant:
    """Place where all have the same value; `text` is that value as JSON, made once."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.text = compact(value)


@dataclass(frozen=True)
class Branch:
    """Object or list (`kind`) that holds such places; `keys` of a list are its indices."""

    keys: tuple[Any, ...]
    plans: tuple[Any, ...]
    kind: Any

    @cached_property
    def inside(self) -> tuple[tuple[Any, Any], ...]:
        """(key, plan) of each."""
        return tuple(zip(self.keys, self.plans, strict=True))


HOLE = Hole()
Plan = Hole | Constant | Branch


def learned(values: Sequence[Any], depth: int = 0) -> tuple[Plan, int]:
    """The form that most of the values have, and the bytes that all then need of their own."""
    texts = [compact(value) for value in values]
    counts = Counter(texts)
    most, number = counts.most_common(1)[0]
    if number == len(values):
        return Constant(values[0]), 0
    best: tuple[Plan, int] = HOLE, sum(map(len, texts)) + len(texts)
    if number * 2 > len(values):
        odd = sum(len(text) + POINTER_COST for text in texts if text != most)
        best = _cheaper(best, (Constant(values[texts.index(most)]), odd))
    if depth < DEEPEST:
        best = _cheaper(best, _branch(values, texts, depth))
    return best


def _cheaper(one: tuple[Plan, int], other: tuple[Plan, int] | None) -> tuple[Plan, int]:
    return one if other is None or one[1] <= other[1] else other


def _branch(values: Sequence[Any], texts: Sequence[str], depth: int) -> tuple[Plan, int] | None:
    kinds = Counter((type(v), len(v) if type(v) is list else 0) for v in values)
    (kind, length), _ = kinds.most_common(1)[0]
    if kind not in (dict, list):
        return None
    alike = [type(v) is kind and (kind is dict or len(v) == length) for v in values]
    members = [value for value, fits in zip(values, alike, strict=True) if fits]
    cost = sum(
        len(text) + POINTER_COST for text, fits in zip(texts, alike, strict=True) if not fits
    )
    if len(members) * 2 <= len(values):
        return None
    keys: Sequence[Any] = range(length)
    if kind is dict:
        there = Counter(key for member in members for key in member)
        keys = sorted(key for key, number in there.items() if number * 2 > len(members))
        known = set(keys)
        for member in members:
            cost += sum(
                len(compact(member[key])) + POINTER_COST for key in member if key not in known
            )
            cost += POINTER_COST * sum(key not in member for key in keys)
    if not keys:
        return None
    plans = []
    for key in keys:
        column = [member[key] for member in members if kind is list or key in member]
        plan, more = learned(column, depth + 1)
        plans.append(plan)
        cost += more
    return Branch(tuple(keys), tuple(plans), kind), cost


def shown(plan: Plan) -> Any:
    """The value of a template; null where each has its own."""
    if isinstance(plan, Constant):
        return plan.value
    if isinstance(plan, Branch):
        pairs = zip(plan.keys, map(shown, plan.plans), strict=True)
        return dict(pairs) if plan.kind is dict else [value for _, value in pairs]
    return None


def holes(plan: Plan, path: Path = ()) -> Iterator[Path]:
    """Places where each has its own, in their order."""
    if isinstance(plan, Hole):
        yield path
    elif isinstance(plan, Branch):
        for key, inner in zip(plan.keys, plan.plans, strict=True):
            yield from holes(inner, (*path, key))


def parts_of(plan: Plan, path: Path = ()) -> Iterator[str | Place]:
    """JSON of a template in parts: texts, and places that differ, or may differ in a number."""
    if isinstance(plan, Constant):
        yield from _parts_of_constant(plan.value, path)
    elif isinstance(plan, Branch):
        yield "{" if plan.kind is dict else "["
        for number, (key, inner) in enumerate(plan.inside):
            yield "," if number else ""
            yield f"{compact(key)}:" if plan.kind is dict else ""
            yield from parts_of(inner, (*path, key))
        yield "}" if plan.kind is dict else "]"
    else:
        yield Place()


def _parts_of_constant(value: Any, path: Path) -> Iterator[str | Place]:
    if type(value) in (int, float):
        yield Place(compact(value), pointer(path))
    elif type(value) is dict and len(path) <= DEEPEST:
        yield "{"
        for number, key in enumerate(sorted(value)):
            yield f"{',' if number else ''}{compact(key)}:"
            yield from _parts_of_constant(value[key], (*path, key))
        yield "}"
    else:
        yield compact(value)


def constants(plan: Plan) -> Iterator[Any]:
    """Values of the places where all have the same, in their order."""
    if isinstance(plan, Constant):
        yield plan.value
    elif isinstance(plan, Branch):
        for inner in plan.plans:
            yield from constants(inner)
