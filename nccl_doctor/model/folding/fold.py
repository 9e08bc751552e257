"""Fold values that have most in common: a template of the majority, and what each has of its own.

What is in common is learned from a sample, and each value is then folded on its own, so that the
values need never be there all at once. Nothing is lost: what does not fit stands in full.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.model.folding import BUT, EACH, FORMS, LITERAL, NOT, ROWS, SAME, pointer
from nccl_doctor.model.folding.pattern import Likeness, Pattern
from nccl_doctor.model.folding.plain import compact
from nccl_doctor.model.folding.plan import (
    HOLE,
    POINTER_COST,
    Branch,
    Constant,
    Hole,
    Path,
    Plan,
    constants,
    holes,
    learned,
    parts_of,
    shown,
)
from nccl_doctor.model.folding.sample import DEEPEST, by_shape, some_of

Json = dict[str, Any]

SAMPLE = 64
"""Values from which is learned what they have in common."""
_LEARN_FROM = 16
"""Values of one template that are looked at in detail."""
_MOST_TEMPLATES = 16
"""Templates of one kind of value: clusters have few kinds of hosts."""
_REFERENCE_COST = 32
"""Bytes of a folded value that has nothing of its own."""
_TABLE_ROW = 60
"""Bytes of an entry of a table from which on it is worth a template."""
_STRANGE = 1.3
"""Times as much of its own as others have, beyond which a value has another template."""
_NEAR = 2
"""Places that are not as in a template, up to which no other template is tried."""
_PAYS = 0.6
"""Share of a value's bytes that it may have of its own, or else it stands in full."""

_FORM = re.compile("|".join(f'"{re.escape(key)}":' for key in sorted(FORMS)))
"""A key of a folded value, in JSON on one line."""

# -- one template -------------------------------------------------------------------------------


@dataclass
class _Own:
    """A value without what its template says of it."""

    each: list[Any] = field(default_factory=list)
    but: Json = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)

    @property
    def is_near(self) -> bool:
        """True if the value is hardly unlike its template."""
        return len(self.but) + len(self.lacks) <= _NEAR

    @property
    def size(self) -> int:
        """About its bytes."""
        return len(compact([self.each, self.but, self.lacks]))


class _Template:
    """One template, and how each of its open places is written: tables there have their own."""

    def __init__(self, plan: Plan, sample: Sequence[Any]) -> None:
        self._plan = plan
        open_places = list(holes(plan))
        value = shown(plan)
        self.content = {"value": value, "each": [pointer(path) for path in open_places]}
        self.name = hashlib.sha256(compact(self.content).encode()).hexdigest()[:10]
        self.size = len(compact(value))
        self.saves = self.size - _REFERENCE_COST - 5 * len(open_places)
        self.constants = compact(list(constants(plan)))
        columns = [self.own(value).each for value in sample]
        tables = {index for each in columns for index, value in enumerate(each) if _rows(value)}
        self._pattern = Pattern(parts_of(plan), tables)
        self._tables = [
            Folder([row for each in columns for row in _rows(each[index])], rows=True)
            for index in range(len(open_places))
        ]

    def exactly(self, value: Any) -> list[Any] | None:
        """The own values of one that is like the template in all else."""
        each: list[Any] = []
        rest: list[Any] = []
        is_like = _take(self._plan, value, each, rest) and compact(rest) == self.constants
        return each if is_like else None

    def own(self, value: Any) -> _Own:
        """A value without what this template says of it."""
        each = self.exactly(value)
        return self.unlike(value) if each is None else _Own(each)

    def unlike(self, value: Any) -> _Own:
        """The same of a value that is not exactly like it."""
        own = _Own()
        _compare(self._plan, value, (), own)
        return own

    def like(self, text: str) -> Likeness | None:
        """The own values of one by its JSON, if that shows at a glance that it is like this."""
        return self._pattern.like(text)

    def each_of(self, own: Likeness) -> list[str]:
        """JSON of what stands at the open places of a folded value."""
        each = list(own.each)
        for index, value in own.tables.items():
            each[index] = compact(self._tables[index].of_table(value))
        return each

    def folded(self, own: _Own) -> Json:
        """The folded form of a value."""
        made: Json = {SAME: self.name}
        if own.each:
            made[EACH] = [
                table.of_table(each) for table, each in zip(self._tables, own.each, strict=True)
            ]
        if own.but:
            made[BUT] = {where: literal(each) for where, each in own.but.items()}
        if own.lacks:
            made[NOT] = own.lacks
        return made

    def all(self) -> Iterator[_Template]:
        """Templates: itself, and those of the tables in it."""
        yield self
        for table in self._tables:
            yield from table.templates()


def _take(plan: Plan, value: Any, each: list[Any], rest: list[Any]) -> bool:
    """Part a value by the plan, into its own values and the rest; False if it has another shape."""
    if type(plan) is not Branch:
        (each if plan is HOLE else rest).append(value)
        return True
    if type(value) is not plan.kind or len(value) != len(plan.keys):
        return False
    is_list = plan.kind is list
    for key, inner in plan.inside:
        if not (is_list or key in value):
            return False
        if type(inner) is Branch:
            if not _take(inner, value[key], each, rest):
                return False
        else:  # here, as a call for each of hundreds took most of the time
            (each if inner is HOLE else rest).append(value[key])
    return True


def _compare(plan: Plan, value: Any, path: Path, own: _Own) -> None:
    """Note what a value has of its own."""
    if isinstance(plan, Hole):
        own.each.append(value)
    elif isinstance(plan, Constant):
        _compare_constant(plan.value, plan.text, value, path, own)
    elif type(value) is not plan.kind or (plan.kind is list and len(value) != len(plan.keys)):
        own.each += [None for _ in holes(plan)]
        own.but[pointer(path)] = value
    else:
        for key, inner in plan.inside:
            if plan.kind is list or key in value:
                if inner is HOLE:
                    own.each.append(value[key])
                elif type(inner) is Branch or not _is_text(inner, value[key]):
                    _compare(inner, value[key], (*path, key), own)
            else:
                own.each += [None for _ in holes(inner)]
                own.lacks.append(pointer((*path, key)))
        if plan.kind is dict:
            for key in sorted(value.keys() - set(plan.keys)):
                own.but[pointer((*path, key))] = value[key]


def _is_text(constant: Constant, value: Any) -> bool:
    """True if a value is the same text, which needs no JSON to be seen."""
    return type(value) is str and type(constant.value) is str and value == constant.value


def _compare_constant(here: Any, text: str, value: Any, path: Path, own: _Own) -> None:
    if text == compact(value):
        return
    if type(here) is not dict or type(value) is not dict or len(path) > DEEPEST:
        own.but[pointer(path)] = value
        return
    for key in here:
        if key in value:
            _compare_constant(here[key], compact(here[key]), value[key], (*path, key), own)
        else:
            own.lacks.append(pointer((*path, key)))
    for key in sorted(value.keys() - here.keys()):
        own.but[pointer((*path, key))] = value[key]


def literal(value: Any) -> Any:
    """A value that will not be taken for a folded one, nor anything in it."""
    is_flat = not isinstance(value, (dict, list))
    return {LITERAL: value} if not is_flat and _FORM.search(compact(value)) else value


def _rows(value: Any) -> Sequence[Any]:
    """Entries of a table."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


# -- values of one kind -------------------------------------------------------------------------


class Folder:
    """Folds values of one kind, with templates learned from some of them."""

    def __init__(self, sample: Sequence[Any], *, rows: bool = False) -> None:
        """`sample`: values as JSON gives them. `rows`: they are entries of tables."""
        self._templates: list[_Template] = []
        left = [each for each in some_of(sample, SAMPLE) if _may_be_shared(each)]
        if rows and sum(len(compact(each)) for each in left) < _TABLE_ROW * len(left):
            return
        kinds = by_shape(left)
        while sum(map(len, kinds)) > 1 and len(self._templates) < _MOST_TEMPLATES:
            most = max(kinds, key=len)
            alike = most if len(most) > 1 else [each for kind in kinds for each in kind]
            some = some_of(alike, _LEARN_FROM)
            plan, _ = learned(some)
            template = _Template(plan, some)
            if isinstance(plan, Hole) or template.saves <= 0:
                break
            self._templates.append(template)
            size = _STRANGE * sum(template.own(each).size for each in some) / len(some)
            kinds = [
                kind
                for kind in kinds
                if kind is not most and template.own(kind[0]).size > size + POINTER_COST
            ]

    def fold(self, value: Any) -> Any:
        """The value, folded where that pays."""
        found = [(made.exactly(value), made) for made in self._templates]
        owns = [(_Own(each), made) for each, made in found if each is not None]
        if len(owns) == 1:
            return owns[0][1].folded(owns[0][0])
        for made in self._templates if not owns else ():
            own = made.unlike(value)
            if own.is_near and own.size < _PAYS * made.size:
                return made.folded(own)  # the others are hardly nearer
            owns.append((own, made))
        if owns and isinstance(value, (dict, list)):
            own, template = min(owns, key=lambda each: each[0].size)
            if own.size < _PAYS * len(compact(value)):
                return template.folded(own)
        return literal(value)

    def alike(self, text: str) -> tuple[str, Likeness] | None:
        """Name of the template that a value is like, by its JSON, and what it has of its own, with
        its tables folded; None where that takes a closer look (`fold`).
        """
        near: tuple[_Template, Likeness] | None = None
        for made in self._templates:
            own = made.like(text)
            if own is not None and (not own.but or (near is None and len(own.but) <= _NEAR)):
                near = made, own
                if not own.but:
                    break
        if near is None:
            return None
        template, own = near
        return template.name, Likeness(template.each_of(own), own.but)

    def of_table(self, value: Any) -> Any:
        """A table with its entries folded; what is none, as it is."""
        if not self._templates or not _rows(value):
            return literal(value)
        if isinstance(value, dict):
            if FORMS & value.keys():
                return {LITERAL: value}
            return _table({key: self.fold(each) for key, each in value.items()})
        return _list([self.fold(each) for each in value])

    def templates(self) -> Iterator[_Template]:
        """All templates, those of tables included."""
        for template in self._templates:
            yield from template.all()


def _table(rows: Json) -> Json:
    """A table of folded rows; those of the most common template without its name on each."""
    names = Counter(name for row in rows.values() if (name := _only_template(row)))
    name, number = names.most_common(1)[0] if names else ("", 0)
    if number <= 1:
        return rows
    alike = {key: row.get(EACH, []) for key, row in rows.items() if _only_template(row) == name}
    others = {key: row for key, row in rows.items() if key not in alike}
    return {ROWS: name, EACH: alike, **({BUT: others} if others else {})}


def _list(rows: list[Any]) -> Any:
    """The same of a list, if all rows have one template."""
    names = {_only_template(row) for row in rows}
    if len(rows) <= 1 or len(names) > 1 or "" in names:
        return rows
    return {ROWS: names.pop(), EACH: [row.get(EACH, []) for row in rows]}


def _only_template(row: Any) -> str:
    """Name of the template of a row that is like it but for its open places; or empty."""
    is_like = isinstance(row, dict) and SAME in row and row.keys() <= {SAME, EACH}
    return str(row[SAME]) if is_like else ""


def _may_be_shared(value: Any) -> bool:
    """A template has no key that looks like one of a folded value: readers take it for a cycle."""
    return isinstance(value, (dict, list)) and bool(value) and not _FORM.search(compact(value))
