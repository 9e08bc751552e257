"""The links between a few hosts as a small matrix for a terminal, where a finding names links."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nccl_doctor.model.findings import Severity
from nccl_doctor.model.report import Report
from nccl_doctor.report.network import Network, Pair, network_of
from nccl_doctor.report.sections import Checks, no_checks

_LEAST, _MOST = 3, 16
"""Hosts; of two, the finding itself says it all."""
_LABEL = (8, 24)
"""Columns of a label: at least, and at most."""
_INDENT = "  "


def lay_out(
    report: Report, width: int, safe: Callable[[str], str], checks: Checks = no_checks
) -> list[str]:
    """Lines of at most `width` columns; none where no link is blamed, or where it does not fit.

    Args:
        report: whose unexplained failures and warnings may name links.
        width: columns of the terminal.
        safe: what makes text from elsewhere fit for a terminal.
        checks: asked what they measured, where there is a matrix.
    """
    open_codes = {
        finding.code: finding.level
        for finding in sorted(report.findings, key=lambda each: -each.level.order)
        if finding.where.links and not finding.explained_by and finding.level is not Severity.INFO
    }
    if not open_codes:
        return []
    network = network_of(report, checks)
    count = len(network.hosts)
    if not _LEAST <= count <= _MOST:
        return []
    labels = [safe(name) for name in network.hosts]
    heads = labels
    column = max(map(len, heads))
    room = width - len(_INDENT) - column
    if (column + 1) * count > room:  # numbers instead
        labels = [f"{i + 1:>2} {label}" for i, label in enumerate(labels)]
        heads = [str(i + 1) for i in range(count)]
        room = width - len(_INDENT) - 3 * count
        if room < _LABEL[0]:
            return []
        limit = min(room, _LABEL[1])
        labels = [name if len(name) <= limit else f"{name[: limit - 1]}…" for name in labels]
        column = 2
    left = max(map(len, labels))
    cells = [
        [_mark(network, (a, b), open_codes).center(column) for b in range(count)]
        for a in range(count)
    ]
    top = " ".join(head.center(column) for head in heads)
    lines = [f"{_INDENT}{' ' * left} {top}"]
    for label, row in zip(labels, cells, strict=True):
        lines.append(f"{_INDENT}{label:<{left}} {' '.join(row)}")
    return [line.rstrip() for line in lines]


LEGEND = "from row to column: ✗ fails, ! slow or at risk, ✓ good, ? not known"
"""What the marks say."""


def _mark(network: Network, pair: Pair, codes: Mapping[str, Severity]) -> str:
    if pair[0] == pair[1]:
        return "·"
    link = network.at(pair)
    levels = {codes[code] for code in link.blame if code in codes}
    if levels:
        return "✗" if Severity.FAIL in levels else "!"
    return "✓" if link.is_known and link.reach != "failed" and not link.blame else "?"
