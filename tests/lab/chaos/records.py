"""Records of runs, one JSON line each, so that many runs can be made in several parts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tests.lab.chaos import Plan
from tests.lab.chaos.judging import Judgement


@dataclass(frozen=True)
class Record:
    """One run: its plan, what was seen, and what was wrong with it.

    `what` is what the strike hit, or why it could not be done; `births`, `lag_s` and `seconds` are
    figures of the run; `patience` is the factor of its time-outs; `versions` are those of
    nccl-doctor and of what it stands on.
    """

    plan: Plan
    judgement: Judgement
    struck: bool
    what: str
    seconds: float
    codes: tuple[int | None, ...]
    verdicts: Mapping[str, str]
    causes: tuple[str, ...]
    births: int
    lag_s: float
    patience: float
    day: str
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Inverse of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Read a record.

        Raises:
            ValueError: it is none.
        """
        try:
            judged = {
                name: value if isinstance(value, bool) else tuple(value)
                for name, value in data["judgement"].items()
            }
            values = {each.name: data[each.name] for each in fields(cls)}
            values |= {"plan": Plan(**data["plan"]), "judgement": Judgement(**judged)}
            values |= {name: tuple(data[name]) for name in ("codes", "causes")}
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no record of a run: {error}") from error


class Records:
    """The records of one seed in a file, which is appended to; the last one of a number counts."""

    def __init__(self, file: Path, seed: int) -> None:
        """Read what is there.

        Raises:
            OSError: the file cannot be read.
            ValueError: a line is no record. A last line that was cut off is not there.
        """
        self._file = file
        self._lock = threading.Lock()
        self._known: dict[int, Record] = {}
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            if line.endswith("\n"):
                try:
                    record = Record.from_json(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"{file}, line {number}: {error}") from error
                if record.plan.seed == seed:
                    self._known[record.plan.number] = record
        if text and not text.endswith("\n"):
            file.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")

    def add(self, record: Record) -> None:
        """Keep a record; from any thread."""
        with self._lock:
            self._known[record.plan.number] = record
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record.to_json()) + "\n")

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Those of the numbers that have no record."""
        return [number for number in numbers if number not in self._known]

    @property
    def all(self) -> list[Record]:
        """All records, in the order of their numbers."""
        return [self._known[number] for number in sorted(self._known)]
