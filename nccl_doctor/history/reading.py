"""Read earlier reports from a file or a folder: the one place here that touches the system."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from nccl_doctor.history.past import Past
from nccl_doctor.record import Report

NEWEST = 50
"""Files of a folder that are looked into, by the time of their last change."""
BUDGET_S = 5.0
BUDGET_BYTES = 64 << 20
"""Reading a folder ends after so much time or so many bytes, newest first: the run is waiting."""


def read_past(path: str) -> Past:
    """Reports of one file, or of a folder: its `*.json` files; others there are not looked at.

    Of a folder what is no report is counted, with the reason.

    Raises:
        OSError: the file or the folder cannot be read.
        ValueError: the file is not a report; says why.
    """
    place = Path(path)
    if not place.is_dir():
        return Past(path, ((path, _report(place)),))
    found: list[tuple[str, Report]] = []
    left_out: Counter[str] = Counter()
    end, size = time.monotonic() + BUDGET_S, 0
    for number, file in enumerate(_newest_first(place)):
        if number >= NEWEST or time.monotonic() > end:
            left_out["older, not read"] += 1
            continue
        try:
            length = file.stat().st_size
            if size + length > BUDGET_BYTES:
                left_out["too large"] += 1
                continue
            size += length
            found.append((str(file), _report(file)))
        except OSError:
            left_out["not readable"] += 1
        except ValueError:
            left_out["not a report"] += 1
    return Past(path, tuple(found), dict(left_out))


def _report(file: Path) -> Report:
    data = file.read_bytes()
    try:
        return Report.from_json(json.loads(data))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _newest_first(folder: Path) -> Iterator[Path]:
    files = [each for each in folder.iterdir() if each.suffix == ".json" and each.is_file()]
    yield from sorted(files, key=lambda file: (_changed(file), file.name), reverse=True)


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # gone meanwhile
        return 0.0
