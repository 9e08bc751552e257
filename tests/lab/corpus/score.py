"""Whether an answer is right: the causes that it names against the injected ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab.corpus import Case, Cause
from tests.lab.corpus.screens import Printed

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """One run of one case.

    `reported` are the findings above info that nothing explains. `missed` are injected causes that
    have a place named by none of them; `wrong` are those with a place that was not injected;
    `blamed` are healthy hosts that some report of the run blames. `untrue` says what stands on the
    screen of a host and contradicts the answer; `fails` are the codes of the reported failures.
    """

    reported: tuple[Cause, ...]
    missed: tuple[Cause, ...]
    wrong: tuple[Cause, ...]
    blamed: tuple[str, ...]
    untrue: tuple[str, ...] = ()
    fails: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Every cause at its place, and nothing else."""
        return not (self.missed or self.wrong or self.blamed)

    @property
    def is_right_everywhere(self) -> bool:
        """And no screen of a host says anything else."""
        return self.is_right and not self.untrue


def score(
    case: Case,
    answer: Report | None,
    others: Sequence[Report] = (),
    screens: Sequence[Printed] = (),
) -> Score:
    """Compare the answer of a run with what was injected.

    Args:
        case: the record.
        answer: the one report that a reader ends up with: of the hosts that met, merged with the
            own views of those that did not. None where there was none.
        others: every other report that the run left: none of them may blame a host either that
            nothing was done to.
        screens: what each host printed.
    """
    found = causes_of(answer)
    missed = [cause for cause in case.expect if not _all_named(cause, found)]
    wrong = [cause for cause in found if not _all_named(cause, case.expect)]
    sick = {host for cause in case.expect for host in cause.hosts}
    blamed = {host for one in found for host in one.hosts} - sick
    for report in others:
        # One host alone cannot tell the ends of a link apart, nor that all have the same mistake.
        blamed |= {host for one in causes_of(report) for host in one.hosts} - case.touched
    untrue = {str(each) for each in screens if _contradicts(each.cause, case, answer)}
    return Score(
        *(found, tuple(missed), tuple(wrong), tuple(sorted(blamed)), tuple(sorted(untrue))),
        fails=tuple(sorted({one["code"] for one in _loud(answer) if one["severity"] == "fail"})),
    )


def _contradicts(said: Cause, case: Case, answer: Report | None) -> bool:
    """Whether what a host prints is neither injected nor in the answer, be it explained there, or
    names a host that nothing was done to. One host alone may know less, and no more.
    """
    known = {code for cause in case.expect for code in cause.codes}
    known |= {finding["code"] for finding in (answer or {}).get("findings", ())}
    return not said.codes <= known or not said.hosts <= case.touched


def causes_of(report: Report | None) -> tuple[Cause, ...]:
    """Findings above info of a report that no other one explains; of one code and place once.

    Root causes, and, beside a failure, warnings: a second fault may be no more than one.
    """
    found = []
    for finding in _loud(report):
        where = finding["where"]
        cause = Cause(
            codes=frozenset([finding["code"]]),
            hosts=frozenset(where["hosts"]),
            links=frozenset((a, b) for a, b in where["links"]),
            nodes=frozenset(where["nodes"]),
        )
        if cause not in found:
            found.append(cause)
    return tuple(found)


def _loud(report: Report | None) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = (report or {}).get("findings", [])
    return [each for each in found if each["severity"] != "info" and not each["explained_by"]]


def _all_named(cause: Cause, others: Iterable[Cause]) -> bool:
    """Whether the others name each place of a cause, under one of its codes.

    Hosts that suffer the same may stand in one finding or in several.
    """
    same = [other for other in others if other.codes & cause.codes]
    named = {place for other in same for place in (*places(other), *other.or_links)}
    return set(places(cause)) <= named or (bool(cause.or_links) and cause.or_links <= named)


def places(cause: Cause) -> list[object]:
    """Where a cause is. Where hosts are to blame, the links that it costs are no other place."""
    return list(cause.hosts or cause.links or cause.nodes or ("everywhere",))
