"""Evidence about an attempt that did not end: what each member was doing. Pure.

Members with the same state share one entry: a thousand ranks that wait in one place are one entry.
Differences without meaning (addresses, process ids, ports, line numbers, times) do not make
separate entries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from nccl_doctor.model.cluster import Evidence, Outcome, OutcomeStatus
from nccl_doctor.model.findings import number_range
from nccl_doctor.toolkit.groups.attempts import Attempt, has_entered
from nccl_doctor.toolkit.groups.errors import meaning_of
from nccl_doctor.toolkit.groups.lagging import lagging
from nccl_doctor.toolkit.groups.stacks import main_stack, signature

MOST_ENTRIES = 20
_MOST_OF_A_KIND = 4
_LONGEST_RANKS = 160
_LONGEST_STACK = 1200
_LONGEST_LOG = 1500
_MOST_LINES = 8
_NCCL_LINE = re.compile(r"NCCL (WARN|ATTN|INFO|TRACE|CALL)\b.*")
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def what_they_did(attempt: Attempt) -> dict[str, Any]:
    """Members that entered, finished or never came, and what the unfinished ones were doing.

    Returns: `round`; `group`, `collective` and `sequence` (in the round, from 1) of those that did
    not finish, each one value, or value → ranks where members differ; `entered`, `finished`,
    `never_came` and `lagging` as ranges of ranks; `doing`, a list of `{"ranks", "count", "status",
    "step", ...}` of at most 20 entries, the largest first, and `left_out`, the number of ranks in
    further ones; and, where there is any: `recorder` (torch's flight recorder), `ras` (NCCL's view
    of the communicators), `log` and `errors` (with `means` and `ask` for a known text), each a list
    with `ranks`.
    """
    ranks = [(m.rank.rank or 0, m.outcome) for m in attempt.members]
    open_ = [(rank, outcome) for rank, outcome in ranks if outcome.status is not OutcomeStatus.OK]
    done = [rank for rank, outcome in ranks if outcome.status is OutcomeStatus.OK]
    started = [rank for rank, outcome in ranks if has_entered(outcome)]
    never = {rank for rank, _ in ranks} - {*started, *done}
    doing = _folded(open_, _doing_key)
    shown = doing[:MOST_ENTRIES]
    data: dict[str, Any] = {
        "round": attempt.name,
        "group": _by_value(open_, "group") or attempt.name,
        "collective": _by_value(open_, "step"),
        "sequence": _by_value(open_, "sequence"),
        "entered": _range(sorted({*started, *done})),
        "finished": _range(done),
        "never_came": _range(sorted(never)),
        "lagging": _range(_ranks(lagging(attempt.members))),
        "doing": [_doing(these) for these in shown],
        "left_out": sum(len(these) for these in doing[MOST_ENTRIES:]),
        "recorder": _said(open_, "recorder"),
        "ras": _said(open_, "ras"),
        "log": _logs(open_),
        "errors": _errors(open_),
    }
    always = ("round", "entered", "finished", "never_came", "doing")
    return {name: value for name, value in data.items() if name in always or value}


def step_of(outcome: Outcome) -> str:
    """The last step that a member announced."""
    return outcome.last_step or "start"


def error_of(outcome: Outcome) -> str:
    """The last line of an exception."""
    return last_line(outcome.reason)


def last_line(text: str) -> str:
    """The last line of the text of an exception."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no error text"


def error_text(outcome: Outcome) -> str:
    """Output and exception of a member, in which a meaning is searched."""
    return f"{outcome.log_tail}\n{outcome.reason}".strip()


RankOutcome = tuple[int, Outcome]
"""A rank and how it ended."""


def _folded(outcomes: Sequence[RankOutcome], key: Any) -> list[list[RankOutcome]]:
    """Members with the same key together: the most members first, then the lowest rank."""
    groups: dict[Hashable, list[RankOutcome]] = {}
    for rank, outcome in outcomes:
        groups.setdefault(key(outcome), []).append((rank, outcome))
    return sorted(groups.values(), key=lambda these: (-len(these), these[0][0]))


def _doing_key(outcome: Outcome) -> Hashable:
    return (
        outcome.status,
        outcome.last_step,
        _crumb(outcome, "group"),
        _crumb(outcome, "sequence"),
        outcome.state,
        outcome.wchan,
        outcome.signal,
        outcome.exit_code,
        signature(outcome.stack),
        _CHANGING.sub("#", error_of(outcome)),
    )


def _doing(these: Sequence[RankOutcome]) -> dict[str, Any]:
    outcome = these[0][1]
    entry = {
        **_who(these),
        "status": outcome.status.value,
        "step": outcome.last_step,
        "group": _crumb(outcome, "group"),
        "sequence": _crumb(outcome, "sequence"),
        "bytes": _crumb(outcome, "bytes"),
        "state": outcome.state,
        "wchan": outcome.wchan,
        "signal": outcome.signal,
        "exit_code": outcome.exit_code,
        "stack": main_stack(outcome.stack)[:_LONGEST_STACK],
        "error": error_of(outcome) if outcome.reason else "",
    }
    return {name: value for name, value in entry.items() if value not in ("", None)}


def _said(outcomes: Sequence[RankOutcome], name: str) -> list[dict[str, Any]]:
    """Entries of one kind that members left as witnesses."""
    found = [(rank, o) for rank, o in outcomes if isinstance(o.witness.get(name), Mapping)]
    same = _folded(found, lambda o: json.dumps(o.witness[name], sort_keys=True, default=str))
    return [{**_who(these), **these[0][1].witness[name]} for these in same[:_MOST_OF_A_KIND]]


def _logs(outcomes: Sequence[RankOutcome]) -> list[dict[str, Any]]:
    found = [(rank, outcome) for rank, outcome in outcomes if outcome.log_tail.strip()]
    same = _folded(found, lambda o: _CHANGING.sub("#", "\n".join(_log_lines(o.log_tail))))
    return [
        {**_who(these), "text": "\n".join(_log_lines(these[0][1].log_tail))[-_LONGEST_LOG:]}
        for these in same[:_MOST_OF_A_KIND]
    ]


def _log_lines(log: str) -> list[str]:
    """The last lines of the output of a member; if there are NCCL's, only these: warnings, the end.

    NCCL's lines begin with host, process and thread, which differ for every rank.
    """
    found = [match.group() for match in map(_NCCL_LINE.search, log.splitlines()) if match]
    if not found:
        return [line for line in log.splitlines() if line.strip()][-_MOST_LINES:]
    tail = max(0, len(found) - _MOST_LINES)
    warnings = [line for line in found[:tail] if line.startswith(("NCCL WARN", "NCCL ATTN"))]
    return [*warnings[-_MOST_LINES:], *found[tail:]]


def _errors(outcomes: Sequence[RankOutcome]) -> list[dict[str, Any]]:
    """Each error once, with its meaning; also one that a hung member only printed."""

    def key(outcome: Outcome) -> Hashable:
        error = _CHANGING.sub("#", error_of(outcome)) if outcome.reason else ""
        return (error, meaning_of(error_text(outcome)))

    entries: list[dict[str, Any]] = []
    for these in _folded(outcomes, key):
        outcome = these[0][1]
        if len(entries) == 2 * _MOST_OF_A_KIND or key(outcome) == ("", None):
            continue
        entry: dict[str, Any] = _who(these)
        if outcome.reason:
            entry["error"] = error_of(outcome)
        if meaning := meaning_of(error_text(outcome)):
            entry |= {"means": meaning.means, "ask": meaning.ask}
        entries.append(entry)
    return entries


def _by_value(outcomes: Sequence[RankOutcome], name: str) -> Any:
    """The one value that all last breadcrumbs have, or value → ranks."""
    values: dict[str, list[int]] = {}
    plain: dict[str, Any] = {}
    for rank, outcome in outcomes:
        value = _crumb(outcome, name)
        if value is not None:
            values.setdefault(str(value), []).append(rank)
            plain[str(value)] = value
    if len(values) == 1:
        return next(iter(plain.values()))
    by_size = sorted(values.items(), key=lambda item: -len(item[1]))[: 2 * _MOST_OF_A_KIND]
    return {value: _range(ranks) for value, ranks in by_size}


def _crumb(outcome: Outcome, name: str) -> Any:
    """A detail of the last breadcrumb; None for data of a damaged report."""
    value = outcome.breadcrumbs[-1].get(name) if outcome.breadcrumbs else None
    return value if isinstance(value, (str, int)) else None


def _who(these: Sequence[RankOutcome]) -> dict[str, Any]:
    ranks = [rank for rank, _ in these]
    return {"ranks": _range(ranks), "count": len(ranks)}


def _ranks(members: Sequence[Evidence]) -> list[int]:
    return [m.rank.rank or 0 for m in members]


def _range(ranks: Sequence[int]) -> str:
    """Ranks as text, `0–7, 12`; a long list is cut."""
    text = number_range(ranks)
    return text if len(text) <= _LONGEST_RANKS else f"{text[:_LONGEST_RANKS].rpartition(',')[0]}, …"
