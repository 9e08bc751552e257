"""Status of each check: passed, failed, blocked by a failure in a lower layer, or unknown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

from nccl_doctor.judge.account import Account, Gap, Roll, Units
from nccl_doctor.judge.causes import importance
from nccl_doctor.judge.place import Map, Place, is_of_a_group
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.findings import CheckResult, Finding, Layer, Severity, Status
from nccl_doctor.model.kinds import ENGINE_CODES

_NONE: Mapping[str, str] = {}


def check_results(
    cluster: Cluster,
    checks: Iterable[Check],
    findings: Sequence[Finding],
    *,
    skipped: Mapping[str, str] = _NONE,
    broken: Mapping[str, str] = _NONE,
) -> list[CheckResult]:
    """Result of each check.

    `findings` are as `explain` left them. Each mapping is by check name: `skipped` to why it does
    not apply, `broken` to what went wrong in its `judge`.
    """
    blockers, roll = _Blockers(cluster, findings), Roll(cluster)
    return [
        _result(
            Account(roll, check),
            [f for f in findings if f.check == check.name and f.code not in ENGINE_CODES],
            blockers,
            skipped=skipped.get(check.name),
            broken=broken.get(check.name),
        )
        for check in checks
    ]


def _result(
    account: Account,
    own: Sequence[Finding],
    reasons: _Blockers,
    *,
    skipped: str | None,
    broken: str | None,
) -> CheckResult:
    check = account.check
    gaps = [gap for gap in account.gaps if not (gap.missing and skipped)]
    open_gaps: list[Gap] = []
    blockers: list[str] = []
    if not skipped:
        absent = reasons.of_absent(account.units)
        open_gaps, blockers = list(absent[0]), list(absent[1])
    known: dict[tuple[int, str], str | None] = {}  # a whole group shares one place
    for gap in gaps:
        key = (id(gap.where), gap.text)
        if key not in known:
            known[key] = reasons.of(check, gap)
        code = known[key]
        if code is None:
            open_gaps.append(gap)
        elif code not in blockers:
            blockers.append(code)
    broken = broken or account.broken
    levels = {finding.level for finding in own}
    codes = ", ".join(dict.fromkeys(f.code for f in own if f.level is not Severity.INFO))
    missing = account.in_one_line(open_gaps)
    if Severity.FAIL in levels:
        status, reason = Status.FAIL, "; ".join(text for text in (codes, broken, missing) if text)
    elif broken or open_gaps:
        status, reason = Status.UNKNOWN, "; ".join(text for text in (broken, missing) if text)
    elif blockers:
        words = ", ".join(blockers)
        status = Status.BLOCKED
        reason = words if words.startswith("blocked by ") else f"blocked by {words}"
    elif Severity.WARN in levels:
        status, reason = Status.WARN, codes
    elif account.tested:
        status, reason = Status.PASS, ""
    elif skipped or account.skips:
        status = Status.SKIPPED
        reason = skipped or "; ".join(sorted({skip for skip in account.skips if skip}))
    elif check.together and account.labels:
        status, reason = Status.SKIPPED, "no group here to test"
    else:
        status, reason = Status.UNKNOWN, "no participant reported"
    return CheckResult(
        name=check.name,
        layer=check.layer,
        scope=check.scope,
        status=status,
        reason=reason,
        duration_s=account.duration_s,
        tested=account.units.labels_of(account.tested),
    )


class _Blockers:
    """The failures of one report, as reasons for what could not be observed."""

    def __init__(self, cluster: Cluster, findings: Sequence[Finding]) -> None:
        self._ground = Map(cluster)
        self._failures = [
            (finding, self._ground.place(finding.where), finding.kind.layer.order)
            for finding in sorted(findings, key=lambda f: (f.kind.layer.order, importance(f)))
            if finding.level is Severity.FAIL and not finding.kind.later
        ]
        self._codes = {finding.code for finding, _, _ in self._failures}
        self._absent: dict[int, tuple[Sequence[Gap], Sequence[str]]] = {}  # by units
        self._naming: dict[int, list[int]] = defaultdict(list)  # rank → failures that name it
        for number, (_, there, _) in enumerate(self._failures):
            for rank in there.ranks:
                self._naming[rank].append(number)
        self._kept: dict[Hashable, str | None] = {}

    def of_absent(self, units: Units) -> tuple[Sequence[Gap], Sequence[str]]:
        """Units that are not here and that no failure explains, and the codes of the
        failures that explain the others.
        """
        if id(units) not in self._absent:
            codes = {
                unit: self._keeper(self._ground.place(gap.where))
                for unit, gap in units.absent.items()
            }
            unexplained = [gap for unit, gap in units.absent.items() if codes[unit] is None]
            explained = dict.fromkeys(code for code in codes.values() if code is not None)
            self._absent[id(units)] = (unexplained, tuple(explained))
        return self._absent[id(units)]

    def of(self, check: Check, gap: Gap) -> str | None:
        """Code of the failure that is the reason for a gap: the lowest one that covers it.

        What the engine itself held back names its failure.
        """
        held_back = gap.text.rpartition("blocked by ")[2]
        if held_back in self._codes:
            return held_back
        place = self._ground.place(gap.where)
        reach = self._ground.meets if is_of_a_group(check.layer) else self._ground.covers
        for finding, there, order in self._failures:
            if order < check.layer.order and reach(there, place):
                return finding.code
        return None

    def _keeper(self, place: Place) -> str | None:
        """Code of a failure, on any layer, that names a place that never signed in: nothing at all
        could be observed there.
        """
        key = self._alike(place)
        if key not in self._kept:
            self._kept[key] = self._lowest_keeper(place)
        return self._kept[key]

    def _alike(self, place: Place) -> Hashable:
        """Ranks of one host that the same failures name are kept out by the same one."""
        if len(place.ranks) != 1 or place.whole or place.links or place.things:
            return place
        (rank,) = place.ranks
        return self._ground.hosts_of(rank), tuple(self._naming.get(rank, ()))

    def _lowest_keeper(self, place: Place) -> str | None:
        covering = [
            finding
            for finding, there, _ in self._failures
            if self._ground.covers(there, place) or self._ground.keeps_out(there, place)
        ]
        covering.sort(key=lambda finding: finding.kind.layer is not Layer.RANKS)
        return covering[0].code if covering else None
