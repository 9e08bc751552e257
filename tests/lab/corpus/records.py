"""Results of runs as JSON lines, so that a long measurement can go on where it was cut off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.lab.corpus import Cause
from tests.lab.corpus.runs import Result
from tests.lab.corpus.score import Score


class Records:
    """Results by key (a part of the measurement, a case, and how often it was run before)."""

    def __init__(self, file: Path | None) -> None:
        """Without a file nothing is kept."""
        self._file = file
        self._known: dict[str, Result] = {}
        if file is not None and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                data = json.loads(line)
                self._known[data.pop("key")] = _result(data)

    def get(self, key: str) -> Result | None:
        """The last result of a key."""
        return self._known.get(key)

    def add(self, key: str, result: Result) -> None:
        """Keep a result."""
        self._known[key] = result
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **_plain(result)}) + "\n")


def _plain(result: Result) -> dict[str, Any]:
    """All but the report and the text."""
    score = result.score
    return {
        "seconds": result.seconds,
        "codes": result.codes,
        "leftovers": result.leftovers,
        "unstruck": result.unstruck,
        "blamed": score.blamed,
        "untrue": score.untrue,
        "fails": score.fails,
        **{
            name: [_cause_to_json(cause) for cause in getattr(score, name)]
            for name in ("reported", "missed", "wrong")
        },
    }


def _result(data: Mapping[str, Any]) -> Result:
    causes = {
        name: tuple(_cause_of(each) for each in data[name])
        for name in ("reported", "missed", "wrong")
    }
    return Result(
        Score(
            **causes,
            **{name: tuple(data.get(name, ())) for name in ("blamed", "untrue", "fails")},
        ),
        data["seconds"],
        tuple(data["codes"]),
        None,
        tuple(data["leftovers"]),
        "",
        tuple(data.get("unstruck", ())),
    )


def _cause_to_json(cause: Cause) -> dict[str, Any]:
    return {name: sorted(getattr(cause, name)) for name in Cause.__dataclass_fields__}


def _cause_of(data: Mapping[str, Any]) -> Cause:
    links = {name: frozenset((a, b) for a, b in data[name]) for name in ("links", "or_links")}
    rest = {name: frozenset(data[name]) for name in ("codes", "hosts", "nodes")}
    return Cause(**rest, **links)
