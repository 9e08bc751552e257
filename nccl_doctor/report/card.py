"""The card of a run without a failure: what was measured, one line for each area. Pure.

It is made of what the checks show of a report (`Check.sections`, `Check.figures`): no check is
known by name here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from nccl_doctor.model.findings import Figure
from nccl_doctor.model.report import Report
from nccl_doctor.model.sections import HostLink, Section, Setup
from nccl_doctor.report.sections import Checks, sections_of

MOST_RANKS = 16_384
"""Ranks up to which a card is made: for more, the checks would be asked for too long."""
_SOFTWARE = ("torch", "cuda", "rocm", "nccl", "nccl loaded", "driver", "python", "deepspeed")
_MOST_WORDS = 3
_GBIT = 8e-9


def card(report: Report, checks: Checks) -> list[tuple[str, str]]:
    """Areas of the card, each with what was seen there; what is not known is left out."""
    if len(report.cluster.ranks) > MOST_RANKS:
        return []
    sections = sections_of(report, checks)
    setups: dict[str, list[Setup]] = defaultdict(list)
    for each in sections:
        if isinstance(each, Setup):
            setups[each.name].append(each)
    areas = (
        ("software", _software(setups)),
        ("GPUs", _texts(each for each in setups["gpus"] if each.value != "none")),
        ("network", [*_interfaces(setups["interface"], report.cluster.backend), *_links(sections)]),
        ("results", _texts(setups["results"])),
        ("speed", _texts(setups["speed"])),
    )
    return [(area, " · ".join(words)) for area, words in areas if words]


def values(report: Report, checks: Checks) -> list[tuple[str, str]]:
    """Name and value of all that the checks measured or list; of many places, the range."""
    found: dict[tuple[str, str, str], list[Figure]] = defaultdict(list)
    if len(report.cluster.ranks) > MOST_RANKS:
        return []
    for check in checks():
        with suppress(Exception):  # of a plug-in, or on the facts of another version
            for figure in check.figures(report.cluster):
                if figure.value is not None:
                    found[check.name, figure.name, figure.unit].append(figure)
    return [(name, _value(figures, unit)) for (_, name, unit), figures in found.items()]


def _value(figures: Sequence[Figure], unit: str) -> str:
    numbers = [f.value for f in figures if isinstance(f.value, (int, float))]
    if len(numbers) == len(figures):
        text = _range(numbers, lambda number: f"{number:.4g}")
        many = f" ({len(figures)} places)" if len(figures) > 1 else ""
        return f"{text} {unit}".rstrip() + many
    return _some(str(figure.value) for figure in figures)


def _software(setups: dict[str, list[Setup]]) -> Iterator[str]:
    """Versions; of the NCCL that is built in, only if no other one is known to be loaded."""
    for name in _SOFTWARE:
        said = setups.get(name)
        if said and not (name == "nccl" and setups.get("nccl loaded")):
            yield f"{'nccl' if name == 'nccl loaded' else name} {_some(_words(said))}"


def _texts(said: Iterable[Setup]) -> list[str]:
    words = list(_words(said))
    return [_some(words)] if words else []


def _words(said: Iterable[Setup]) -> Iterator[str]:
    return (each.value for each in said if isinstance(each.value, str))


def _interfaces(said: Sequence[Setup], backend: str) -> Iterator[str]:
    """Names and MTUs of the interfaces that the backend of the job uses."""
    tables = [each.value for each in said if not isinstance(each.value, str)]
    used = [one for one in tables if any(str(r).startswith(backend) for r in one.get("roles", ()))]
    names = [f"{one.get('interface')} MTU {one.get('mtu')}" for one in used]
    if names:
        yield _some(names)


def _links(sections: Iterable[Section]) -> Iterator[str]:
    """Round trips and bandwidths between hosts, the best of each link."""
    times: dict[tuple[int, int], float] = {}
    rates: dict[tuple[int, int], float] = {}
    for each in sections:
        if isinstance(each, HostLink):
            key = (each.start, each.end)
            if each.rtt_us is not None:
                times[key] = min(each.rtt_us, times.get(key, each.rtt_us))
            if each.rate is not None:
                rates[key] = max(each.rate, rates.get(key, 0.0))
    if times:
        yield f"round trip {_range(times.values(), lambda us: f'{us:.0f}')} µs"
    if rates:
        text = _range(rates.values(), lambda rate: f"{rate * _GBIT:.3g}")
        yield f"{text} Gbit/s over {len(rates)} link{'s' if len(rates) > 1 else ''}"


def _range(numbers: Iterable[float], say: Callable[[float], str]) -> str:
    ordered = sorted(numbers)
    low, high = say(ordered[0]), say(ordered[-1])
    return low if low == high else f"{low}–{high}"


def _some(texts: Iterable[str]) -> str:
    """The texts, each once, the most frequent first; of many, the number of the others."""
    ordered = [text for text, _ in Counter(texts).most_common()]
    more = len(ordered) - _MOST_WORDS
    return ", ".join(ordered[:_MOST_WORDS]) + (f" and {more} more" if more > 0 else "")
