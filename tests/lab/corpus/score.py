"""Whether an answer is right: the causes that it names against the injected ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab.corpus import Case, Cause

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """One run of one case.

    `reported` are the root causes above info. `missed` are injected causes that none of them names
    with code and place; `wrong` are root causes that were not injected; `blamed` are healthy hosts
    that some report of the run blames.
    """

    reported: tuple[Cause, ...]
    missed: tuple[Cause, ...]
    wrong: tuple[Cause, ...]
    blamed: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Every cause at its place, and nothing else."""
        return not (self.missed or self.wrong or self.blamed)

    @property
    def has_right_codes(self) -> bool:
        """The causes are right, whatever the place."""
        wanted = [cause.codes for cause in self.missed]
        return all(any(cause.codes & codes for cause in self.wrong) for codes in wanted)


def score(case: Case, answer: Report | None, others: Sequence[Report] = ()) -> Score:
    """Compare the answer of a run with what was injected.

    Args:
        case: the record.
        answer: the one report that a reader ends up with: of the hosts that met, merged with the
            own views of those that did not. None where there was none.
        others: every other report that the run left: none of them may blame a healthy host either.
    """
    found = causes_of(answer)
    missed = [cause for cause in case.expect if not any(_is(cause, one) for one in found)]
    wrong = [one for one in found if not any(_is(cause, one) for cause in case.expect)]
    sick = {host for cause in case.expect for host in cause.hosts}
    ends = {host for cause in case.expect for link in cause.links for host in link}
    blamed = {host for one in found for host in one.hosts} - sick
    for report in others:
        # From one end alone nobody can tell the ends of a link apart.
        blamed |= {host for one in causes_of(report) for host in one.hosts} - sick - ends
    return Score(found, tuple(missed), tuple(wrong), tuple(sorted(blamed)))


def causes_of(report: Report | None) -> tuple[Cause, ...]:
    """Root causes of a report, findings of one code and place once."""
    found = []
    for finding in (report or {}).get("root_causes", ()):
        where = finding["where"]
        cause = Cause(
            codes=frozenset([finding["code"]]),
            hosts=frozenset(where["hosts"]),
            links=frozenset((a, b) for a, b in where["links"]),
            nodes=frozenset(where["nodes"]),
            interfaces=frozenset(where["interfaces"]),
        )
        if cause not in found:
            found.append(cause)
    return tuple(found)


def _is(wanted: Cause, found: Cause) -> bool:
    """Whether a root cause is the one that was injected.

    Where a host is to blame, the links that its fault breaks are no other place, and an interface
    is compared only if the record names one.
    """
    return (
        bool(wanted.codes & found.codes)
        and wanted.hosts == found.hosts
        and (wanted.links == found.links or bool(wanted.hosts and not wanted.links))
        and (wanted.nodes == found.nodes or bool(wanted.hosts and not wanted.nodes))
        and (not wanted.interfaces or wanted.interfaces == found.interfaces)
    )
