"""Connections lost while they were silent: the hosts or links to blame, and messages. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nccl_doctor.api import Cause, Confidence, LinkBlame, Rank, blame_links

Pair = tuple[int, int]
"""Seats of (caller, listener)."""
Record = Mapping[str, Any]
"""A `talk.Held` as plain data, with the `address` and the `interface` that were called."""

_LOST = ("silent", "reset", "closed")
_WORDS = {"silent": "no answer", "reset": "reset", "closed": "closed by neither end"}
SURENESS = (Confidence.POSSIBLE, Confidence.LIKELY, Confidence.CERTAIN)


@dataclass(frozen=True)
class Loss:
    """Pairs of hosts that lose connections for one cause: a host (`seats`), or links.

    `lost` and `kept` are their connections, with the pair of each.
    """

    seats: tuple[int, ...]
    pairs: frozenset[Pair]
    confidence: Confidence
    lost: tuple[tuple[Pair, Record], ...]
    kept: tuple[tuple[Pair, Record], ...]

    @property
    def after_s(self) -> float:
        """The shortest silence that a connection did not survive."""
        return min(float(record["after_s"]) for _, record in self.lost)

    @property
    def words(self) -> str:
        """The loss as part of a message."""
        outcomes = Counter(str(record["outcome"]) for _, record in self.lost).most_common()
        said = " and ".join(_WORDS[outcome] for outcome, _ in outcomes)
        text = f"{said} on connections that were silent for {seconds(self.after_s)}, while a new "
        text += "connection between the same hosts works at once"
        speakers = {str(record["first"]) for _, record in self.lost}
        same = [float(r["idle_s"]) for _, r in self.kept if str(r["first"]) in speakers]
        survived = max((length for length in same if length < self.after_s), default=None)
        if survived is not None:
            text += f"; {seconds(survived)} of silence do no harm"
        kept = {str(r["first"]) for _, r in self.kept if float(r["idle_s"]) >= self.after_s}
        if len(speakers) == 1 and kept - speakers:
            who = "was called" if speakers == {"listener"} else "called"
            text += f"; only where the side that {who} speaks first"
        return text


def read_connections(
    reports: Iterable[tuple[Rank, Mapping[str, Any]]],
) -> dict[Pair, list[Record]]:
    """The connections between hosts that both reported, by pair; only those that tell something.

    A loss after which no new connection worked is none of the silence: the other end may be gone.
    """
    facts = {rank.seat: report for rank, report in reports}
    found: dict[Pair, list[Record]] = {}
    for caller, report in facts.items():
        for text, records in report.get("peers", {}).items():
            told = [each for each in records if each["outcome"] == "ok" or _is_lost(each)]
            if int(text) in facts and told:
                found[caller, int(text)] = told
    return found


def _is_lost(record: Record) -> bool:
    return record["outcome"] in _LOST and record.get("fresh") == "ok"


def losses(connections: Mapping[Pair, Sequence[Record]]) -> Iterator[Loss]:
    """One for each host to blame, and one for all links that no host explains."""
    bad = {pair for pair, records in connections.items() if any(map(_is_lost, records))}
    blame: LinkBlame[int] = blame_links(connections, bad)
    for cause in blame.causes:
        if cause.is_host:
            yield _loss(connections, cause.ends, [cause])
    links = [cause for cause in blame.causes if not cause.is_host]
    if links:
        yield _loss(connections, (), links)


def _loss(
    connections: Mapping[Pair, Sequence[Record]],
    seats: tuple[int, ...],
    causes: Sequence[Cause[int]],
) -> Loss:
    pairs = frozenset(pair for cause in causes for pair in cause.pairs)
    every = [(pair, record) for pair in sorted(pairs) for record in connections[pair]]
    return Loss(
        seats,
        pairs,
        min((cause.confidence for cause in causes), key=SURENESS.index),
        tuple(each for each in every if _is_lost(each[1])),
        tuple(each for each in every if not _is_lost(each[1])),
    )


def seconds(value: float) -> str:
    """A length of time, for a message."""
    return f"{value:.0f} s" if value >= 10 or value == int(value) else f"{value:.1f} s"
