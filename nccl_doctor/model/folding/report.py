"""Folding of a report: its hosts and ranks with their facts, and what each check has tested."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from nccl_doctor.model.cluster import Facts
from nccl_doctor.model.codec import Node
from nccl_doctor.model.folding import BUT, EACH, SAME
from nccl_doctor.model.folding.fold import SAMPLE, Folder, Json
from nccl_doctor.model.folding.plain import compact, plain
from nccl_doctor.model.folding.sample import some_of
from nccl_doctor.model.folding.texts import Texts
from nccl_doctor.model.folding.unfold import Unfolder

T = TypeVar("T")

_FACTS = '"facts":0'
"""Place of the facts in the JSON of a record: in no text it would stand without a backslash."""
_OWN = "own"
_OWN_TEXT = compact(_OWN)
"""Place of the own values in a line: the only list there that begins so."""

SHARED = "shared"
"""Key of the templates in a report: name → `value`, and the places that differ on each."""
CLEAR = {
    "hosts": ("id", "host", "node_rank", "reported", "joined"),
    "ranks": ("seat", "rank", "local_rank", "host", "host_id", "reported"),
    "checks": ("name", "layer", "scope", "status", "reason", "duration_s"),
}
"""Lists of the report that may be folded → keys of their records that stand in clear."""


class Records(Generic[T]):
    """Records of one list of a report, folded: ask for their lines, then for what they share.

    They are made one by one, and twice those of the sample: all at once would need much memory.
    """

    def __init__(
        self,
        name: str,
        made: Sequence[T],
        to_json: Callable[..., Json],
        *,
        facts_of: Callable[[T], Facts] | None = None,
        expand: bool = False,
    ) -> None:
        """`made`: what the records are made of, by `to_json`. Those with facts (`facts_of`) it
        makes with another value in their place, too. With `expand` nothing is folded.
        """
        self._made, self._to_json, self._facts_of = made, to_json, facts_of
        self._texts = Texts()
        sample = [] if expand else [plain(to_json(each)) for each in some_of(made, SAMPLE)]
        self._clear = CLEAR[name]
        self._folder = Folder([self._parted(record)[1] for record in sample])

    def lines(self) -> Iterator[str]:
        """Each record as JSON on one line."""
        for each in self._made:
            if not (line := self._like_others(each)):
                clear, rest = self._parted(plain(self._to_json(each)))
                line = compact({**clear, **self._folder.fold(rest)})
            yield line

    def _like_others(self, each: T) -> str:
        """The line of a record that is like others, as nearly all are; else empty."""
        try:
            if self._facts_of is None:
                clear, rest = self._parted(self._to_json(each))
                text = compact(rest)
            else:
                clear, rest = self._parted(self._to_json(each, lambda _: 0))
                text = compact(rest)
                if text.count(_FACTS) != 1:  # another version may have such a key elsewhere
                    return ""
                facts = self._texts.of_facts(self._facts_of(each))
                text = text.replace(_FACTS, f'"facts":{facts}')
            found = self._folder.alike(text)
            if found is None:
                return ""
            name, own = found
            made: Json = {**clear, SAME: name}
            if own.each:
                made[EACH] = [_OWN]
            if own.but:
                made[BUT] = {where: json.loads(value) for where, value in own.but.items()}
            line = compact(made)
        except (TypeError, ValueError):  # no plain data, as a plug-in's facts may be
            return ""
        return line.replace(f"[{_OWN_TEXT}]", f"[{','.join(own.each)}]", 1)

    def shared(self) -> Json:
        """Name → template, of all that may have been used."""
        return {template.name: template.content for template in self._folder.templates()}

    def _parted(self, record: Json) -> tuple[Json, Json]:
        """The part of a record that stands in clear, and the rest."""
        rest = dict(record)
        return {key: rest.pop(key) for key in self._clear if key in rest}, rest


def unfolded(report: Node) -> Node:
    """The report in full. Hosts and ranks share what they have in common: it must not be changed.

    Raises:
        ValueError: a folded value is not what it should be; says where, and what is wrong.
    """
    if SHARED not in report.data:
        return report
    lists = {name: report.get(name, list, []) for name in CLEAR}
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
