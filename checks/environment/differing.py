"""Differences between the variables of ranks or hosts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from nccl_doctor.api import Confidence, Fix, Severity, Step, Where, export, place_of, shell
from nccl_doctor.toolkit.hosts import sides_in_words
from nccl_doctor.toolkit.relaunch import PASS_ON
from nccl_doctor.toolkit.variables.table import Variable, table
from nccl_doctor.toolkit.variables.values import canonical
from nccl_doctor.toolkit.versions import DifferingComponents, differences

from .view import Placed, Problem, Seen, View, all_of, views_of

DIFFERS = "env-differs"
FORWARDED = ("NCCL", "PYTHON", "MLFLOW", "MV2", "UCX")
"""Prefixes of the variables that DeepSpeed's launcher passes to other hosts
(deepspeed/launcher/runner.py), besides the lines of .deepspeed_env."""

T = TypeVar("T")
_UNSET, _SET = "\0unset", "\0set"


def differing(seen: Seen) -> Iterator[Placed]:
    """Problems from comparing all ranks; each host counts once, and one problem is made for all
    variables that differ at the same places.

    A variable that is not set means its default. If only ranks of one host differ, the odd ranks
    are blamed; else the odd hosts, or both sides of a tie.
    """
    stacks: dict[tuple[Severity, bool], dict[int, dict[str, str]]] = defaultdict(dict)
    views = views_of(seen)
    for name in sorted({row.name for view in views.values() for row in view.rows}):
        row = table().variables[name]
        meanings = _meanings(seen, views, row)
        if len(set(meanings.values())) < 2:
            continue
        of_host: dict[int, set[str]] = defaultdict(set)
        for seat, meaning in meanings.items():
            of_host[seen[seat][0].host.id].add(meaning)
        whole = all(len(each) == 1 for each in of_host.values())
        level = _level(row, whole, set(meanings.values()), list(views.values()))
        for seat, meaning in meanings.items():
            place = seen[seat][0].host.id if whole else seat
            stacks[level, whole].setdefault(place, {})[name] = meaning
    for (level, whole), stack in stacks.items():
        for difference in differences(stack):
            yield _apart(seen, level, whole, difference)


def _meanings(seen: Seen, views: Mapping[int, View], row: Variable) -> dict[int, str]:
    """Seat → the effective value; empty if the variable cannot or need not be compared."""

    def of_ranks(said: Mapping[int, T]) -> dict[int, T]:
        if len(set(said.values())) < 2:
            return {}
        return {seat: said[id(view)] for seat, (_, view) in seen.items()}

    if row.kind == "url" or row.gone:
        return {}
    if row.differs == "free":
        # Each host may have its own value, but a launcher that drops it leaves hosts without one.
        forgets = row.kind == "names" and all(v.launcher == "deepspeed" for v in views.values())
        is_kept = row.name.startswith(FORWARDED)
        if not forgets or is_kept:
            return {}
        return of_ranks({at: _SET if v.is_set(row.name) else _UNSET for at, v in views.items()})
    if any(view.is_set(row.name) and view.text(row.name) is None for view in views.values()):
        return {}  # masked
    if row.rails:
        return _rails(of_ranks({at: _names(view, row.name) for at, view in views.items()}))
    return of_ranks({at: view.meaning(row.name) or _UNSET for at, view in views.items()})


def _names(view: View, name: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, (view.text(name) or "").split(","))))


def _rails(lists: Mapping[int, tuple[str, ...]]) -> dict[int, str]:
    """Seat → what must be alike of its cards, one for each rail: their number. Where hosts have
    names in common, the list too: one name at two places is two rails.
    """
    counts = Counter(lists.values())
    said = {}
    for mine in counts:
        related = [other for other in counts if {*mine} & {*other}]
        usual = max(related, key=lambda each: (counts[each], len(each), each), default=mine)
        said[mine] = str(len(mine)) if mine == usual else ",".join(mine)
    return {seat: said[mine] for seat, mine in lists.items()}


def _level(row: Variable, whole: bool, meanings: set[str], views: Sequence[View]) -> Severity:
    view = views[0]
    if row.mixed:  # one host on which it matters is enough
        view = next((each for each in views if each.has_several_models), view)
    level = row.differs if whole else row.inside
    severity = Severity.WARN if level == "free" else Severity(level)
    matters = {canonical(row, value) for value in row.only}
    if matters and not matters & meanings:
        return Severity.INFO
    return view.bounded(row, severity)


def _apart(seen: Seen, level: Severity, whole: bool, difference: DifferingComponents) -> Placed:
    at: dict[int, list[int]] = {}
    for seat, (rank, _) in seen.items():
        at.setdefault(rank.host.id if whole else seat, []).append(seat)
    names = tuple(difference.sides)
    odd = dict.fromkeys(seat for place in difference.places for seat in at.get(place, ()))
    where = place_of(seen[seat][0] for seat in odd)
    first = seen[next(iter(odd))][1]
    evidence = {name: _sides(seen, name, whole) for name in names}
    if difference.tie:
        message = "; ".join(sides_in_words(evidence[name]) for name in names)
        message += ": equally divided, so it is not known which is right"
        fix: str = f"decide which {_and(names)} is right, and set it on all of them"
    else:
        good = next(view for seat, (_, view) in seen.items() if seat not in odd)
        others = ", ".join(_phrase(good, name) for name in names)
        message = f"{', '.join(_phrase(first, name) for name in names)}; elsewhere {others}"
        fix = all_of(*(as_elsewhere(first, good, name) for name in names))
    hint = _not_forwarded(seen, names)
    return Placed(
        Problem(
            DIFFERS,
            message,
            hint or fix,
            level,
            confidence=Confidence.POSSIBLE if difference.tie else Confidence.CERTAIN,
        ),
        Where(hosts=where.hosts) if whole else where,
        {"values": evidence},
    )


def _phrase(view: View, name: str) -> str:
    return view.says(name) if view.is_set(name) else f"{name} not set"


def _sides(seen: Seen, name: str, whole: bool) -> dict[str, list[str]]:
    """Setting of a variable as text → hosts or ranks that have it."""
    phrases: dict[str, str] = {}
    sides: dict[str, dict[str, None]] = {}
    row = table().variables[name]
    meanings = _meanings(seen, views_of(seen), row)
    for seat, (rank, view) in seen.items():
        phrase = _phrase(view, name)
        if not row.rails:  # whose names may be others, and mean the same
            phrase = phrases.setdefault(meanings[seat], phrase)
        label = rank.host.label if whole else f"rank {rank.rank}"
        sides.setdefault(phrase, {})[label] = None
    return {phrase: list(labels) for phrase, labels in sides.items()}


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def as_elsewhere(odd: View, good: View, name: str) -> Fix:
    """The fix by which odd ranks get a variable as the others have it."""
    text = good.text(name)
    mine, other = {*_names(odd, name)}, {*_names(good, name)}
    if table().variables[name].rails and mine and other and not mine & other:
        return Fix(text=f"name as many cards in {name} on every host, rail by rail")
    return odd.put(name, text) if text is not None else odd.drop(name)


def _not_forwarded(seen: Seen, names: Sequence[str]) -> str:
    """The fix if variables are set on the first host only, and its launcher does not pass them on;
    else empty.
    """
    first = next((rank.host for rank, _ in seen.values() if rank.host.node_rank == 0), None)
    here = [view for rank, view in seen.values() if rank.host is first]
    there = [view for rank, view in seen.values() if rank.host is not first]
    launcher = here[0].launcher if here else ""
    if not there or launcher in PASS_ON:
        return ""
    if any(n.startswith(FORWARDED) or table().variables[n].is_aid for n in names):
        return ""  # it is passed on, or is better removed
    only_here = all(view.is_set(n) for view in here for n in names) and not any(
        view.is_set(n) for view in there for n in names
    )
    if not only_here:
        return ""
    values = {name: here[0].original(name) for name in names}
    if first is None or None in values.values():
        lines = ", ".join(here[0].says(name) for name in names)
        return f"set {lines} on every host, not on the first one only"
    note = "the deepspeed launcher passes on only NCCL*, PYTHON*, MLFLOW*, MV2* and UCX* by itself"
    kept = [
        Step(
            shell("echo {} >> ~/.deepspeed_env", f"{name}={value}"),
            (first.label,),
            undo=shell("sed -i '/^{:variable}=/d' ~/.deepspeed_env", name),
            note=note,
            persists=True,
        )
        for name, value in values.items()
    ]
    if launcher == "deepspeed":
        return Fix(*kept)
    given = {name: str(value) for name, value in values.items()}
    return Fix(export(**given), alternatives=[Fix(*kept)])
