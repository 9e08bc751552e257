"""Read reports of schema version 2, in which what many ranks have in common stands once.

A template holds what most of some values have in common, under a name made from its content. A
folded value names its template and says what it has of its own:

    {"$same": NAME, "$each": [...], "$but": {POINTER: ...}, "$not": [POINTER, ...]}
    {"$rows": NAME, "$each": {KEY: [...], ...}, "$but": {KEY: ...}}

`$each` are its values at the places that differ on each, in the order in which the template lists
these places; `$but` what it has elsewhere in place of the template's; `$not` what it lacks. A
POINTER is one of JSON (RFC 6901). Within a value of its own, another folded value may stand; within
a template none. `{"$literal": VALUE}` is a value that must not be taken for a folded one.

The second form is an object whose entries are like one template, for example the calls of a host to
healthy peers: `$each` are their own values by key, `$but` the entries that are unlike, as they are.
Of a list, `$each` is a list, and there is no `$but`.

Each value is given in full, and shares with the others what it has in common. A report may come
from anybody. What is read is bounded: by the values that are copied, which cost memory, and by
those that the full form would have, which cost time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nccl_doctor.model.codec import Node

SAME, ROWS, LITERAL = "$same", "$rows", "$literal"
EACH, BUT, NOT = "$each", "$but", "$not"
FORMS = frozenset({SAME, ROWS, LITERAL, EACH, BUT, NOT})
"""Keys of a folded value. A record of the report that has one may have others, in clear."""
SHARED = "shared"
"""Key of the templates in a report: name → `value`, and the places that differ on each."""
_LISTS = ("hosts", "ranks", "checks")
"""Lists of a report whose records may be folded."""
_DEEPEST = 40
"""Most folded values within each other, with the lists and objects between them."""
_COPIED_FOR_ANY = 1 << 20
_COPIED_FOR_RECORD = 4096
_COPIED_FOR_VALUE = 16
"""Entries of lists and objects that may be copied: in any case, and more for each host or rank, and
for each value of its own. What is written here needs a tenth of that.
"""
_IN_FULL_FOR_ANY = 1 << 21
_IN_FULL_FOR_RECORD = 50_000
_MOST_IN_FULL = 1 << 28
"""Values that the full form may have: in any case, more for each host or rank, and at most."""


_TOO_MANY = "report: its folded facts are too many in full"
_NOTHING = object()


class _Template:
    """One template: its value, and the open places as a tree of keys that ends in their numbers."""

    def __init__(self, node: Node) -> None:
        if "value" not in node.data:
            raise ValueError(f'{node.path} has no "value"')
        self.value = node.data["value"]
        self.size = _size(self.value, node.path)
        pointers = node.get("each", tuple[str, ...], ())
        self.number = len(pointers)
        self.tree: dict[Any, Any] = {}
        for number, where in enumerate(pointers):
            place, tree = self.value, self.tree
            *way, last = _steps(where, node.path)
            for step in way:
                key = _key(place, step, where, node.path)
                place, tree = place[key], tree.setdefault(key, {})
                if not isinstance(tree, dict):
                    break
            key = _key(place, last, where, node.path)
            if not isinstance(tree, dict) or key in tree:
                raise ValueError(
                    f"{node.path} names {_quoted(where)} within another place, or twice"
                )
            tree[key] = number


def _size(value: Any, path: str) -> int:
    """Number of values in a value; ValueError if it refers to others."""
    number, left = 0, [value]
    while left:
        each = left.pop()
        number += 1
        if isinstance(each, dict):
            if name := each.get(SAME) or each.get(ROWS):
                raise ValueError(f"{path} refers to {_quoted(name)}: templates cannot")
            left += each.values()
        elif isinstance(each, list):
            left += each
    return number


class Unfolder:
    """Gives the values of one report in full.

    Raises:
        ValueError: a folded value is not what it should be; says where, and what is wrong.
    """

    def __init__(self, shared: Node, records: int) -> None:
        """`shared`: the templates by name. `records`: hosts and ranks of the report."""
        self._templates = {
            name: _Template(Node(f"{shared.path}.{name}", each))
            for name, each in shared.data.items()
        }
        self._copied = _COPIED_FOR_ANY + _COPIED_FOR_RECORD * records
        self._in_full = min(_IN_FULL_FOR_ANY + _IN_FULL_FOR_RECORD * records, _MOST_IN_FULL)

    def record(self, record: Any, path: str) -> Any:
        """A record in full: what stands in clear, and what is folded; one without, as it is."""
        if not isinstance(record, dict) or not FORMS & record.keys():
            return record
        form = {key: value for key, value in record.items() if key in FORMS}
        rest = form[LITERAL] if LITERAL in form else self._like_template(Node(path, form), 0)
        if not isinstance(rest, dict):
            raise ValueError(f"{path} is like a value that is not an object")
        self._copied -= len(rest)
        return {**rest, **{key: value for key, value in record.items() if key not in FORMS}}

    def _own(self, value: Any, path: str, depth: int) -> Any:
        """A value of its own, in which folded ones may stand."""
        self._copied += _COPIED_FOR_VALUE
        if not isinstance(value, (dict, list)):
            return value
        if depth > _DEEPEST:
            raise ValueError(f"{path} is nested too deeply")
        if isinstance(value, list):
            return [self._own(each, path, depth + 1) for each in value]
        if LITERAL in value:
            return value[LITERAL]
        if SAME in value:
            return self._like_template(Node(path, value), depth)
        if ROWS in value:
            return self._table(Node(path, value), depth)
        return {key: self._own(each, path, depth + 1) for key, each in value.items()}

    def _like_template(self, node: Node, depth: int) -> Any:
        template = self._templates.get(node.get(SAME, str))
        if template is None:
            raise ValueError(f"{node.path} is like {_quoted(node.data[SAME])}, which is not shared")
        own = node.get(EACH, list, [])
        if len(own) != template.number:
            raise ValueError(
                f"{node.path} has {len(own)} values of its own, for {template.number} places"
            )
        self._copied += _COPIED_FOR_VALUE
        self._in_full -= template.size
        if self._in_full < 0:
            raise ValueError(_TOO_MANY)
        made = template.value
        if own:
            each = [self._own(one, node.path, depth + 1) for one in own]
            made = self._filled(made, template.tree, each)
        for where, value in node.get(BUT, dict, {}).items():
            made = self._changed(made, where, node.path, self._own(value, node.path, depth + 1))
        for where in node.get(NOT, tuple[str, ...], ()):
            made = self._changed(made, where, node.path, _NOTHING)
        return made

    def _table(self, node: Node, depth: int) -> Any:
        """A table or list whose rows are like one template."""
        name, each = node.get(ROWS, str), node.data.get(EACH)

        def row(own: Any) -> Any:
            return self._like_template(Node(node.path, {SAME: name, EACH: own}), depth + 1)

        if isinstance(each, list):
            return [row(own) for own in each]
        rows = {key: row(own) for key, own in node.get(EACH, dict).items()}
        others = node.get(BUT, dict, {})
        return rows | {key: self._own(own, node.path, depth + 1) for key, own in others.items()}

    def _filled(self, value: Any, tree: Mapping[Any, Any], each: Sequence[Any]) -> Any:
        """The value of a template, with the own values at its open places."""
        made = self._copy(value)
        for key, below in tree.items():
            made[key] = (
                each[below] if isinstance(below, int) else self._filled(value[key], below, each)
            )
        return made

    def _changed(self, value: Any, where: str, path: str, own: Any) -> Any:
        """The value with another one at a place, or with nothing there; "" is the whole value."""
        if not where:
            return own
        *way, last = _steps(where, path)
        made = place = self._copy(value)
        for step in way:
            key = _key(place, step, where, path)
            place[key] = place = self._copy(place[key])
        if own is _NOTHING:
            del place[_key(place, last, where, path)]
        elif isinstance(place, dict):
            place[last] = own
        else:
            place[_key(place, last, where, path)] = own
        return made

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, (dict, list)):
            raise ValueError("report: a folded value has a place in what holds nothing")
        self._copied -= len(value) + 1
        if self._copied < 0:
            raise ValueError(_TOO_MANY)
        return value.copy()


def _steps(where: str, path: str) -> list[str]:
    """Steps of a JSON pointer."""
    steps = [step.replace("~1", "/").replace("~0", "~") for step in where.split("/")]
    if steps[0] or not 1 < len(steps) <= _DEEPEST:
        raise ValueError(f"{path} names {_quoted(where)}, which is not a JSON pointer to a place")
    return steps[1:]


def _key(value: Any, step: str, where: str, path: str) -> Any:
    """Key of a list or an object that a step of a pointer names."""
    if isinstance(value, dict) and step in value:
        return step
    is_number = step.isascii() and step.isdecimal() and len(step) < 10
    if isinstance(value, list) and is_number and int(step) < len(value):
        return int(step)
    raise ValueError(f"{path} names {_quoted(where)}, where nothing is")


def _quoted(value: Any) -> str:
    return f'"{str(value)[:60]}"'


def unfolded(report: Node) -> Node:
    """The report in full. Hosts and ranks share what they have in common: it must not be changed.

    Raises:
        ValueError: a folded value is not what it should be; says where, and what is wrong.
    """
    if SHARED not in report.data:
        return report
    lists = {name: report.get(name, list, []) for name in _LISTS}
    unfolder = Unfolder(
        Node(f"{report.path}.{SHARED}", report.get(SHARED, dict)), sum(map(len, lists.values()))
    )
    full = {
        name: [
            unfolder.record(each, f"{report.path}.{name}[{i}]") for i, each in enumerate(records)
        ]
        for name, records in lists.items()
    }
    rest = {name: value for name, value in report.data.items() if name != SHARED}
    return Node(report.path, {**rest, **full})
