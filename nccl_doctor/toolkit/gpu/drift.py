"""Differences between GPUs that should be alike, in words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nccl_doctor.model.findings import Severity
from nccl_doctor.toolkit.hosts import sides_in_words
from nccl_doctor.toolkit.versions import DifferingComponents


@dataclass(frozen=True)
class Drift:
    """A difference that the odd ones have in common.

    `places` are keys of what was compared, `sides`: trait → value → the places that have it; `tie`:
    whether no side is the majority.
    """

    places: tuple[int, ...]
    text: str
    severity: Severity
    sides: Mapping[str, Mapping[str, tuple[int, ...]]]
    tie: bool

    def in_words(self, names: Mapping[int, str]) -> dict[str, str]:
        """Trait → who has what, by the name of each place."""
        return {
            trait: sides_in_words(
                {value: [names[place] for place in places] for value, places in sides.items()}
            )
            for trait, sides in self.sides.items()
        }


def drifts(
    found: Sequence[DifferingComponents], severity: Severity, others: str
) -> Iterator[Drift]:
    """Each difference as a text; `others` is the clause before what the others have."""
    for odd in found:
        if odd.tie:
            sides = [f"{name} {' or '.join(sorted(values))}" for name, values in odd.sides.items()]
            text = f"{'; '.join(sides)}: equally many have each"
            yield Drift(odd.places, text, severity, odd.sides, odd.tie)
        else:
            text = f"{_words(odd.values)}; {others} {_words(odd.usual)}"
            yield Drift(odd.places, text, severity, odd.sides, odd.tie)


def known(traits: Mapping[str, Any]) -> dict[str, str]:
    """The traits that have a value."""
    return {name: value for name, value in traits.items() if value}


def common(stacks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Traits that all GPUs of a host have in common; differences are findings of the host."""
    first = stacks[0]
    others = [stack for stack in stacks if stack is not first]  # most are the same object
    return {
        name: value
        for name, value in first.items()
        if all(other.get(name) == value for other in others)
    }


def models_of(gpus: Sequence[Mapping[str, Any]]) -> str:
    """Models of GPUs, and how many there are of each."""
    models = sorted(Counter(gpu["name"] for gpu in gpus).items())
    return ", ".join(f"{number} x {name}" for name, number in models)


def _words(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
