"""Folding of a report: its hosts and ranks with their facts, and what each check has tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from nccl_doctor.model.folding.fold import SAMPLE, Folder, Json
from nccl_doctor.model.folding.plain import plain
from nccl_doctor.model.folding.sample import some_of
from nccl_doctor.model.folding.unfold import Unfolder
from nccl_doctor.model.json_node import Node

T = TypeVar("T")

SHARED = "shared"
"""Key of the templates in a report: name → `value`, and the places that differ on each."""
CLEAR = {
    "hosts": ("id", "host", "node_rank", "reported", "joined"),
    "ranks": ("seat", "rank", "local_rank", "host", "host_id", "reported"),
    "checks": ("name", "layer", "scope", "status", "reason", "duration_s"),
}
"""Lists of the report that may be folded → keys of their records that stand in clear."""


class Records(Generic[T]):
    """Records of one list of a report, folded: iterate, then ask for what they share.

    They are made one by one, and twice those of the sample: all at once would need much memory.
    """

    def __init__(
        self, name: str, made: Sequence[T], to_json: Callable[[T], Json], *, expand: bool = False
    ) -> None:
        """`made`: what the records are made of, by `to_json`. With `expand` nothing is folded."""
        self._made, self._to_json = made, to_json
        sample = [] if expand else [plain(to_json(each)) for each in some_of(made, SAMPLE)]
        self._clear = CLEAR[name]
        self._folder = Folder([self._parted(record)[1] for record in sample])

    def __iter__(self) -> Iterator[Json]:
        for each in self._made:
            clear, rest = self._parted(plain(self._to_json(each)))
            yield {**clear, **self._folder.fold(rest)}

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
